"""What docs/compat.md says of MultiConnector is what the newest run of `tools/multi_connector.py` saw."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.programs import loaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "multi_connector.py")


@pytest.fixture
def result(tool: ModuleType) -> Any:
    path = max(tool.RESULTS.glob("multi-connector-*.json"))
    assert f"`{path.stem}`" in (ROOT / "docs" / "compat.md").read_text()
    return json.loads(path.read_text())


def test_the_run_held_and_the_page_quotes_the_refusal(tool: ModuleType, result: Any) -> None:
    assert [one["tokens"] for one in result["prompts"]] == list(tool.LENGTHS)
    assert tool.problems(result["prompts"]) == []
    assert result["as_shipped"].startswith(tool.REFUSAL)
    said = result["as_shipped"].partition("'")[0]
    assert said in " ".join((ROOT / "docs" / "compat.md").read_text().split())


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("fresh", {"outcome": "failed"}, "fresh: failed"),
        ("fresh", {"exact": False}, "not exact"),
        ("again", {"same_tokens": False}, "other tokens"),
        ("decode_alone", {"same_tokens": False}, "other tokens"),
    ],
)
def test_what_does_not_hold_is_a_problem(
    tool: ModuleType, result: Any, part: str, change: dict[str, Any], says: str
) -> None:
    result["prompts"][1][part] |= change
    (problem,) = tool.problems(result["prompts"])
    assert says in problem


def test_a_run_that_loaded_nothing_or_noticed_nothing_proves_nothing(tool: ModuleType, result: Any) -> None:
    for one in result["prompts"]:
        one["again"]["offloaded_bytes_loaded_by_prefill"] = 0
    result["prompts"][0]["withheld_state_noticed"] = False
    assert len(tool.problems(result["prompts"])) == 2


def test_both_connectors_stand_in_the_configuration_ours_first(tool: ModuleType) -> None:
    made = tool.spec(tool.Role.DECODE, {"spec_name": "X"}).kv_transfer_config()
    ours, theirs = made["kv_connector_extra_config"]["connectors"]
    assert (ours["kv_connector"], theirs["kv_connector"]) == ("StateFerryConnector", "OffloadingConnector")
    assert ours["kv_role"] == made["kv_role"] == "kv_consumer"
