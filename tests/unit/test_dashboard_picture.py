"""The picture of the dashboard shows its own queries over a real run, and nothing else."""

import json
import re
from copy import deepcopy
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.programs import loaded

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "dashboard.svg"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "dashboard_picture.py")


@pytest.fixture
def recorded(tool: ModuleType) -> Any:
    return tool.newest()


def test_the_picture_is_the_newest_record_drawn(tool: ModuleType, recorded: Any) -> None:
    assert PICTURE.read_text() == tool.picture(recorded, tool.panels())


def test_the_record_answers_the_dashboard_as_it_is(tool: ModuleType, recorded: Any) -> None:
    board = tool.panels()
    assert tool.stale(recorded, board) == []
    changed = deepcopy(board)
    panel = next(p for p in changed if p["type"] != "row")
    panel["targets"][0]["expr"] += " * 2"
    assert tool.stale(recorded, changed) == [panel["title"]]
    del changed[changed.index(panel)]
    assert tool.stale(recorded, changed) == [panel["title"]]


def test_the_run_was_right_and_moved_both_kinds_of_memory(recorded: Any) -> None:
    assert recorded["wrong"] == []
    assert recorded["requests"] > 0
    found = {
        panel["title"]: {s["name"]: s["points"] for s in panel["series"]} for panel in recorded["panels"]
    }
    for kind in ("attention", "state"):
        assert max(value for _, value in found["Bytes by kind"][kind]) > 0
    assert max(value for _, value in found["Hand-offs by outcome"]["received"]) > 0


def test_prometheus_took_every_alert_rule(recorded: Any) -> None:
    groups = yaml.safe_load((ROOT / "deploy/grafana/alerts.yaml").read_text())["groups"]
    assert recorded["rules"] == sorted(rule["alert"] for group in groups for rule in group["rules"])


def test_every_panel_is_in_the_picture_at_a_place_of_its_own(tool: ModuleType, recorded: Any) -> None:
    drawn = tool.picture(recorded, tool.panels())
    places = re.findall(r'<svg x="(\d+)" y="(\d+)"', drawn)
    shown = [panel for panel in recorded["panels"] if any(s["points"] for s in panel["series"])]
    assert len(set(places)) == len(places) == len(shown)
    for panel in shown:
        assert escape(panel["title"]) in drawn


def test_another_record_is_another_picture(tool: ModuleType, recorded: Any) -> None:
    board = tool.panels()
    before = tool.picture(recorded, board)
    panel = recorded["panels"][0]
    panel["series"][0]["points"][-1][1] += 1
    assert tool.picture(recorded, board) != before
    panel["series"] = []
    assert f"{panel['title']}: no data" in tool.picture(recorded, board)


def test_prometheus_is_given_the_documented_configuration(tool: ModuleType) -> None:
    made = tool.configuration({"stateferry-prefill": 1, "stateferry-decode": 2})
    written = yaml.safe_load((ROOT / "deploy/grafana/prometheus.yaml").read_text())
    assert [j["job_name"] for j in made["scrape_configs"]] == [
        j["job_name"] for j in written["scrape_configs"]
    ]
    targets = [j["static_configs"][0]["targets"] for j in made["scrape_configs"]]
    assert targets == [["127.0.0.1:1"], ["127.0.0.1:2"]]
    assert all(Path(name).is_file() for name in made["rule_files"])


def test_legends_are_filled_in_as_grafana_does(tool: ModuleType) -> None:
    labels = {"outcome": "received", "instance": "h:1"}
    assert tool.legend_of("{{outcome}}", labels) == "received"
    assert tool.legend_of("{{ instance }} {{half}}", labels) == "h:1 "
    assert tool.legend_of("99%", labels) == "99%"


def test_values_that_are_no_numbers_are_left_out(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"metric": {"kind": "state"}, "values": [[10.0, "NaN"], [12.0, "0.123456"]]}
    asked: list[str] = []

    def answer(url: str, parameters: Any) -> Any:
        asked.append(parameters["query"])
        return {"result": [found]}

    monkeypatch.setattr(tool, "_get", answer)
    panel = {
        "title": "t",
        "targets": [{"expr": 'rate(x{job=~"$job"}[$__rate_interval])', "legendFormat": "{{kind}}"}],
    }
    made = tool.answers("u", panel, 10.0, 14.0)
    assert asked == ['rate(x{job=~".*"}[10s])']
    assert made["series"] == [{"name": "state", "points": [[2.0, 0.1235]]}]
    assert json.dumps(made)
