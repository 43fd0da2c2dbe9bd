"""Dashboard and alert rules ask for metrics and labels that engines serve, and for nothing else."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stateferry.telemetry import METRICS, MetricKind

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
NAME = re.compile(r"\b(?:stateferry_|vllm:)\w+")
SELECTED = re.compile(r"((?:stateferry_|vllm:)\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"by \(([^)]*)\)")
SCRAPED = {"job", "instance"}
"""Labels that Prometheus itself adds."""
VLLM = {"engine", "model_name"}
"""Labels of all metrics that vLLM serves."""
SUFFIXES = {
    MetricKind.COUNTER: ("_total",),
    MetricKind.GAUGE: ("",),
    MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}


def served() -> dict[str, tuple[set[str], dict[str, tuple[str, ...]]]]:
    """Name on `/metrics` -> its labels, and the values of those that are known."""
    names = {}
    for metric in METRICS.values():
        for suffix in SUFFIXES[metric.kind]:
            own = {metric.label} - {""} | ({"le"} if suffix == "_bucket" else set())
            names[metric.name + suffix] = (own | SCRAPED | VLLM, {metric.label: metric.values})
    for name in of_vllm():
        names[name] = (SCRAPED | VLLM, {})
    return names


def of_vllm() -> set[str]:
    """Names of vLLM's own metrics, from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    counters = re.findall(r'counter_cls\(\s*name="(vllm:\w+?)(?:_total)?"', text)
    assert counters
    return set(re.findall(r'"(vllm:\w+)"', text)) | {f"{name}_total" for name in counters}


def problems(query: str) -> list[str]:
    """What of a query no engine serves."""
    known = served()
    found = [f"no metric {name}" for name in NAME.findall(query) if name not in known]
    labels: set[str] = set()
    for name in NAME.findall(query):
        labels |= known.get(name, (set(), {}))[0]
    for name, matchers in SELECTED.findall(query):
        own, values = known.get(name, (set(), {}))
        for label, value in MATCHER.findall(matchers):
            if label not in own:
                found.append(f"{name} has no label {label}")
            elif values.get(label) and value not in values[label]:
                found.append(f"{name} has no {label}={value}")
    for group in GROUPED.findall(query):
        found += [
            f"nothing has the label {one.strip()}" for one in group.split(",") if one.strip() not in labels
        ]
    return found


def dashboard() -> dict[str, Any]:
    return json.loads((GRAFANA / "dashboard.json").read_text())  # type: ignore[no-any-return]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every query with where it stands."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["definition"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def test_every_query_asks_for_what_engines_serve() -> None:
    asked = list(queries())
    assert len(asked) > 20
    assert {where: found for where, query in asked if (found := problems(query))} == {}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("rate(stateferry_handoffs[5m])", "no metric stateferry_handoffs"),
        ("rate(stateferry_hand_offs_total[5m])", "no metric stateferry_hand_offs_total"),
        ("stateferry_quarantined_transfers_total", "no metric"),
        ("vllm:num_requests_waiting_for_godot", "no metric"),
        ('stateferry_handoffs_total{result="received"}', "has no label result"),
        ('stateferry_handoffs_total{outcome="arrived"}', "has no outcome=arrived"),
        ("sum by (outcome) (rate(stateferry_retries_total[5m]))", "nothing has the label outcome"),
        ("sum by (le, kind) (rate(stateferry_handoff_seconds_bucket[5m]))", "nothing has the label kind"),
    ],
)
def test_a_query_for_what_nobody_serves_is_noticed(query: str, says: str) -> None:
    assert any(says in text for text in problems(query))


def test_the_dashboard_is_what_its_tool_prints() -> None:
    tool = ROOT / "tools" / "grafana_dashboard.py"
    made = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    assert (GRAFANA / "dashboard.json").read_text() == made.stdout


def test_every_panel_says_what_it_shows_and_has_a_place_of_its_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in own) < 24
        assert not own & cells
        cells |= own


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_alerts_speak_of_jobs_that_are_scraped() -> None:
    jobs = {
        job["job_name"] for job in yaml.safe_load((GRAFANA / "prometheus.yaml").read_text())["scrape_configs"]
    }
    for _, query in queries():
        assert set(re.findall(r'job="([^"]+)"', query)) <= jobs
