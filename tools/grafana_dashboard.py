"""Print deploy/grafana/dashboard.json: what to look at, in the order in which one asks.

    python tools/grafana_dashboard.py > deploy/grafana/dashboard.json

A unit test compares the file with what this prints, and every query with the metrics that engines serve.
"""

import json
from dataclasses import dataclass
from typing import Any

SCOPE = 'job=~"$job",instance=~"$instance"'
RATE = "$__rate_interval"
WIDTH, HEIGHT = 8, 8
COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """One graph: its queries by legend, and a sentence for whoever wonders what it shows."""

    title: str
    text: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"


def rate(name: str, labels: str = "", by: str = "") -> str:
    """Of a counter, per second, summed over engines."""
    scope = f"{SCOPE},{labels}" if labels else SCOPE
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{{{scope}}}[{RATE}]))"


def share(part: str, whole: str) -> str:
    """One rate per another; 0 where nothing happens."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def quantile(name: str, part: float, labels: str) -> str:
    """Of a histogram, over engines."""
    return f"histogram_quantile({part}, sum by (le) (rate({name}_bucket{{{SCOPE},{labels}}}[{RATE}])))"


def gauge(name: str, labels: str = "", by: str = "instance") -> str:
    """Summed over what an instance's engines say."""
    scope = f"{SCOPE},{labels}" if labels else SCOPE
    return f"sum by ({by}) ({name}{{{scope}}})"


HANDOFFS = "stateferry_handoffs_total"
RECEIVED = 'outcome="received"'
OTHERS = 'outcome!="received"'
ROWS: dict[str, tuple[Panel, ...]] = {
    "Do hand-offs work?": (
        Panel(
            "Hand-offs by outcome",
            "received: the decode engine got the prompt's memory. failed and abandoned: it computed the "
            "prompt itself, or answered with an error (kv_load_failure_policy).",
            "ops",
            {"{{outcome}}": rate(HANDOFFS, by="outcome")},
        ),
        Panel(
            "Share that was not received",
            "What falls back to computing on the decode engine. The reason of each is in that engine's log.",
            "percentunit",
            {"not received": share(rate(HANDOFFS, OTHERS), rate(HANDOFFS))},
        ),
        Panel(
            "Time of a hand-off",
            "From vLLM's load order to the end, the slowest rank's, of those that were received.",
            "s",
            {
                f"{part:.0%}": quantile("stateferry_handoff_seconds", part, 'outcome="received"')
                for part in (0.5, 0.9, 0.99)
            },
        ),
    ),
    "What moves?": (
        Panel(
            "Bytes by kind",
            "Attention grows with the prompt, state does not. No state at all for a hybrid model: stop it.",
            "Bps",
            {"{{kind}}": rate("stateferry_received_bytes_total", by="kind")},
        ),
        Panel(
            "Pieces of a hand-off",
            "Descriptors posted after merging, per hand-off that was received.",
            "short",
            {"pieces": share(rate("stateferry_received_pieces_total"), rate(HANDOFFS, RECEIVED))},
        ),
        Panel(
            "Open hand-offs",
            "Offers that wait, blocks kept for others, reads under way. 0 on an idle engine.",
            "short",
            {"{{instance}} {{half}}": gauge("stateferry_open_handoffs", by="instance, half")},
        ),
    ),
    "Where does the time go, and why do some fail?": (
        Panel(
            "Stages of a hand-off, 90 %",
            "wait: until the producer is met and earlier work of the device is done. plan: laying the reads. "
            "post: the call that posts them. wire: from that call to the last byte.",
            "s",
            {
                "{{stage}}": "histogram_quantile(0.9, sum by (le, stage) "
                f"(rate(stateferry_stage_seconds_bucket{{{SCOPE}}}[{RATE}])))"
            },
        ),
        Panel(
            "Failures by cause",
            "peer: it cannot be met. refused: it does not hold the offer any more. "
            "lease, deadline: too late.",
            "ops",
            {"{{cause}}": rate("stateferry_failures_total", by="cause")},
        ),
        Panel(
            "Peers by state",
            "Producers that this engine knows. silent: it hangs, or its machine is cut off. failed: it is "
            "left alone for a while, then met again.",
            "short",
            {"{{instance}} {{state}}": gauge("stateferry_peers", by="instance, state")},
        ),
    ),
    "What goes wrong?": (
        Panel(
            "Reads in quarantine",
            "Reads that neither end nor can be stopped; their blocks are out of use. See operations.",
            "short",
            {"{{instance}}": gauge("stateferry_quarantined_transfers")},
        ),
        Panel(
            "Leases and claims",
            "released: as it should be. expired: nobody came for a finished prompt, or its decode engine "
            "died. refused: claims of what was used, expired or changed on its way.",
            "ops",
            {
                "{{end}}": rate("stateferry_grants_total", by="end"),
                "refused": rate("stateferry_refused_claims_total"),
            },
        ),
        Panel(
            "Retries and strangers",
            "Reads that were posted again, and connections that were turned away for another key or none.",
            "ops",
            {
                "retries": rate("stateferry_retries_total"),
                "refused peers": rate("stateferry_refused_peers_total"),
            },
        ),
    ),
    "Are both sides busy?": (
        Panel(
            "Requests that wait",
            "A queue on one side only: it has too few engines, or the router prefers the other.",
            "short",
            {"{{job}} {{instance}}": gauge("vllm:num_requests_waiting", by="job, instance")},
        ),
        Panel(
            "Requests that run",
            "Prompts on the prefill side, answers on the decode side.",
            "short",
            {"{{job}} {{instance}}": gauge("vllm:num_requests_running", by="job, instance")},
        ),
        Panel(
            "KV cache in use",
            "A full decode engine keeps its producers' blocks under lease meanwhile.",
            "percentunit",
            {"{{job}} {{instance}}": f"max by (job, instance) (vllm:kv_cache_usage_perc{{{SCOPE}}})"},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": place(0, top, COLUMNS, 1)}
        )
        panels += [drawn(panel, place(WIDTH * n, top + 1, WIDTH, HEIGHT)) for n, panel in enumerate(row)]
        top += 1 + HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "stateferry",
        "title": "StateFerry",
        "tags": ["vllm", "stateferry"],
        "description": "Hand-offs between prefill and decode engines. Made by tools/grafana_dashboard.py.",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [DATASOURCE, variable("job", ""), variable("instance", 'job=~"$job"')]},
        "panels": panels,
    }


DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
FROM = {"type": "prometheus", "uid": "${datasource}"}


def variable(label: str, scope: str) -> dict[str, Any]:
    """A choice at the top: which jobs, which instances."""
    query = f"label_values(stateferry_open_handoffs{{{scope}}}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": FROM,
        "query": {"query": query, "refId": label},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    """In Grafana's grid of 24 columns."""
    return {"x": x, "y": y, "w": width, "h": height}


def drawn(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    """One panel as Grafana wants it."""
    targets = [
        {"refId": chr(ord("A") + n), "datasource": FROM, "expr": query, "legendFormat": legend}
        for n, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": FROM,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
