"""What somebody sees who watches the shared pair: `/metrics`, `stateferry top`, and one trace a request."""

import json
import re
import subprocess

import httpx
import pytest
from tests.engines.command import STATEFERRY
from tests.engines.conftest import Pair

from stateferry.stack import Client, Router
from stateferry.telemetry import METRICS, SPANS, MetricKind
from stateferry.testing.collector import Collector, Span
from stateferry.watch import discover

pytestmark = pytest.mark.engines

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
PATIENCE_S = 60.0


def series(page: str) -> dict[str, str]:
    """Our metrics of a page with their kinds, from its own TYPE lines."""
    return dict(re.findall(r"^# TYPE (stateferry_\w+) (\w+)$", page, re.MULTILINE))


def test_engines_serve_the_metrics_that_the_table_names_and_no_others(pair: Pair, client: Client) -> None:
    client.handoff(pair.prefill.url, pair.decode.url, PROMPT, max_tokens=2)
    for engine in (pair.prefill, pair.decode):
        page = httpx.get(f"{engine.url}/metrics", trust_env=False).text
        named = {m.series: m.kind.value for m in METRICS.values()}
        assert {n: k for n, k in series(page).items() if not n.endswith("_created")} == named
        for metric in METRICS.values():
            end = "_count" if metric.kind is MetricKind.HISTOGRAM else ""
            lines = [line for line in page.splitlines() if line.startswith(f"{metric.series}{end}{{")]
            labels = {m.group(1) for line in lines if (m := re.search(rf'\b{metric.label}="([^"]*)"', line))}
            assert labels == set(metric.values) if metric.label else len(lines) == 1
            assert all('model_name="' in line and 'engine="' in line for line in lines)
    page = client.metrics(pair.decode.url)
    assert page.total("stateferry_stage_seconds_count", stage="wire") >= 1
    assert page.total("stateferry_received_pieces_total", kind="state") >= 1
    assert page.total("stateferry_peers", state="ready") >= 1
    assert client.metrics(pair.prefill.url).total("stateferry_grants_total", end="released") >= 1


def test_top_finds_the_engines_by_their_router_and_names_the_slowest(
    pair: Pair, router: Router, client: Client
) -> None:
    client.complete(router.url, PROMPT, max_tokens=2)
    found = {engine.url: engine.role for engine in discover(router.url)}
    assert found == {pair.prefill.url: "prefill", pair.decode.url: "decode"}
    command = [*STATEFERRY, "top", "--once"]
    shown = subprocess.run([*command, "--router", router.url, "--json"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    look = json.loads(shown.stdout)
    assert look["silent"] == {}
    prefill, decode = look["engines"]
    assert (prefill["url"], decode["url"]) == (pair.prefill.url, pair.decode.url)
    assert prefill["grants"]["released"] >= 1
    assert decode["handoffs"]["received"] >= 1
    assert decode["received_bytes"]["state"] > 0
    assert decode["slowest"], "vLLM gave no examples"
    assert decode["slowest"][0]["value"] >= decode["slowest"][-1]["value"] > 0
    table = subprocess.run([*command, pair.decode.url], capture_output=True, text=True)
    assert table.returncode == 0, table.stderr
    assert "received" in table.stdout
    assert "Slowest hand-offs" in table.stdout


def ours(spans: list[Span]) -> list[str]:
    return sorted(span.name for span in spans if span.name.startswith("stateferry."))


@pytest.mark.parametrize("streams", [False, True], ids=["completion", "streamed"])
def test_one_trace_has_the_router_request_and_the_spans_of_both_engines(
    streams: bool, pair: Pair, router: Router, client: Client, collector: Collector
) -> None:
    trace_id, caller = ("a1" if streams else "b2") * 16, "c3" * 8
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 3, "temperature": 0.0, "stream": streams}
    answer = httpx.post(
        f"{router.url}/v1/completions",
        json=body,
        headers={"traceparent": f"00-{trace_id}-{caller}-01"},
        timeout=PATIENCE_S,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    # Each engine tells of it with its next step.
    client.complete(pair.prefill.url, [1, 2, 3], 1)
    client.complete(pair.decode.url, [1, 2, 3], 1)
    wanted = {"stateferry.offer", "stateferry.handoff", "stateferry.release", "stateferry.wire"}

    def enough(spans: list[Span]) -> bool:
        return wanted <= set(ours(spans)) and sum(s.name == "llm_request" for s in spans) == 2

    spans = collector.wait_for(trace_id, enough, PATIENCE_S)
    assert enough(spans), f"only {sorted(s.name for s in spans)}"
    assert set(ours(spans)) <= set(SPANS)
    (offer,) = [s for s in spans if s.name == "stateferry.offer"]
    (whole,) = [s for s in spans if s.name == "stateferry.handoff"]
    assert offer.parent_id == whole.parent_id == caller, "the router passed another trace on"
    assert offer.process_id != whole.process_id
    assert offer.attributes["stateferry.transfer_id"] == whole.attributes["stateferry.transfer_id"]
    assert offer.attributes["stateferry.end"] == "released"
    assert whole.attributes["stateferry.outcome"] == "received"
    for part in spans:
        if part.parent_id == whole.span_id:
            assert part.process_id == whole.process_id, "a second process of the engine exports"
            assert whole.start_ns - 2_000 <= part.start_ns <= part.end_ns <= whole.end_ns + 2_000
    # One machine, one clock: the offer is there before it is taken, and its blocks are free after the read.
    (wire,) = [s for s in spans if s.name == "stateferry.wire"]
    assert offer.start_ns < wire.end_ns
    assert offer.end_ns > wire.start_ns
