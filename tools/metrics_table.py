"""Print docs/metrics.md: every metric of `stateferry.telemetry` with its labels and meaning.

A unit test compares the page with what this prints, and another one compares an engine's `/metrics` with it.
"""

from stateferry.telemetry import METRICS, Metric

HEAD = """# Metrics

An engine with StateFerry serves these on vLLM's own `/metrics`, under the same names whatever moves the
bytes. Made by `python tools/metrics_table.py > docs/metrics.md`.

| series | kind | label and its values | meaning |
| --- | --- | --- | --- |
"""
TAIL = """
Every series has vLLM's labels, too: `model_name`, and `engine`, the number of the data-parallel engine. A
series that never happened is there as 0. `stateferry top` shows the most telling ones.

`prometheus_client` adds a series `…_created` (the date of its birth) to every counter and histogram, vLLM's
like ours. The switch for that is one for the whole process, so StateFerry leaves it as it is: vLLM's own
series are not ours to take away. To read ours without them:

```sh
curl -s http://127.0.0.1:8200/metrics | grep '^stateferry_' | grep -v '_created{'
```

or start the engine with `PROMETHEUS_DISABLE_CREATED_SERIES=True`, and nobody has any.

## What is added up, and where

- **Tensor-parallel ranks** tell the engine's scheduler, which counts a hand-off once whatever their number:
  its outcome is the worst rank's and its times are the slowest rank's. Bytes, descriptors, retries, renewals
  and everything that a rank sees for itself (refusals, peers, leases) are sums over ranks.
- **Data-parallel engines** behind one API server are told apart by `engine`; add them up in the query. With
  several API servers vLLM's multi-process mode adds up counters and histograms, and keeps the last value of
  a gauge.
- **An idle engine takes no steps.** What a ferry sees meanwhile (a lease that ended, a peer that came or
  died) is told with the engine's next step: vLLM carries a connector's numbers with a step's output, and has
  no other way. `stateferry_told_timestamp_seconds` says as of when all of them are; `stateferry doctor` with
  URLs sends each engine a short prompt, after which they are new.

## Which request was that

Counters and histograms say how many, not which. `stateferry_failures_total` and `stateferry_handoff_seconds`
carry OpenMetrics exemplars for that: the request's id, and the start of the reason or the id of its trace
([tracing](tracing.md)). vLLM answers `/metrics` in the plain format, without them; it gives them at
`/metrics/`, with the slash, to those that ask for OpenMetrics:

```
curl -H 'Accept: application/openmetrics-text' http://127.0.0.1:8200/metrics/
```

So set `metrics_path: /metrics/` and `--enable-feature=exemplar-storage` in Prometheus to have them in
Grafana. Several API servers (`--api-server-count`) serve none: Prometheus' client keeps no exemplars there.

## Questions and the queries for them

| question | query |
| --- | --- |
| hand-offs a second | `sum(rate(stateferry_handoffs_total[1m])) by (outcome)` |
| why do they fail | `sum(rate(stateferry_failures_total[5m])) by (cause)` |
| how long | `histogram_quantile(0.95, sum(rate(stateferry_handoff_seconds_bucket[5m])) by (le, outcome))` |
| where does the time go | `sum(rate(stateferry_stage_seconds_sum[5m])) by (stage)` |
| bytes a second | `sum(rate(stateferry_received_bytes_total[1m])) by (kind)` |
| are leases too short | `sum(rate(stateferry_lease_losses_total[5m])) by (side)` |
| does an engine hang that it reads from | `max(stateferry_peers{state="silent"}) by (instance) > 0` |
| does it hang itself | `time() - stateferry_told_timestamp_seconds > 60 and vllm:num_requests_running > 0` |
| do two engines not fit | `sum(stateferry_refusals_total) by (field) > 0` |
"""


def row(metric: Metric) -> str:
    """One line of the table."""
    label = f"`{metric.label}`: " + ", ".join(f"`{v}`" for v in metric.values) if metric.label else ""
    return f"| `{metric.series}` | {metric.kind.value} | {label} | {metric.help} |\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(row(metric) for metric in METRICS.values()) + TAIL


if __name__ == "__main__":
    print(page(), end="")
