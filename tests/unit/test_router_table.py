"""docs/routers.md has the table of the newest run, and a table says what was seen."""

import importlib
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.programs import loaded

from stateferry.stack import Client, Stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "router_table.py")


@pytest.fixture
def result(tool: ModuleType) -> Any:
    return json.loads(tool.newest().read_text())


def test_the_page_shows_the_newest_run(tool: ModuleType, result: Any) -> None:
    text = tool.PAGE.read_text()
    assert tool.section(result) in text
    assert tool.page(text, result) == text


def test_the_run_had_every_router_and_every_question(tool: ModuleType, result: Any) -> None:
    assert list(result["routers"]) == [
        "vllm-router, nixl",
        "vllm-router, moriio",
        "llm-d's sidecar protocol",
        "vllm-router, mooncake",
        "llm-d's, mooncake",
    ]
    shown = [line.split(" | ")[0].removeprefix("| ") for line in tool.table(result).splitlines()[2:]]
    left_out = tool.QUESTIONS if result["engines"] == "made-up" else ()
    assert shown == [words for row, words in tool.ROWS.items() if row not in left_out]
    assert tool.problems(result) == result["problems"] == []


@pytest.mark.parametrize(
    ("scenario", "change", "row"),
    [
        ("completion", {"right": False}, "**wrong**"),
        ("chat", {"handed_off": 0}, "computed by the decode engine"),
        ("chat, streamed", {"status": 503}, "HTTP 503"),
        ("chat, streamed", {"status": 0}, "no answer"),
        ("completion", {"answers": 2, "handed_off": 1, "right": True}, "1 of 2 handed off"),
        ("usage", {"told": [1, 2]}, "1 + 2 for "),
        ("usage", {"told_streamed": []}, "none"),
        ("log-probabilities", {"told": 5}, "5 for 4"),
        ("trace", {"prefill": False, "decode": True}, "decode only"),
        ("trace", {"prefill": False, "decode": False}, "none"),
        ("client leaves during the answer", {"stopped": False}, "goes on"),
        ("client leaves before the answer", {"decode_asked": True}, "all the same"),
        ("prefill engine is back", {"asks": 3}, "after 2 others"),
        ("prefill engine is back", {"asks": None}, "not found again"),
    ],
)
def test_another_run_is_another_table(
    tool: ModuleType, result: Any, scenario: str, change: dict[str, Any], row: str
) -> None:
    other = deepcopy(result)
    router = "llm-d's sidecar protocol"
    other["routers"][router][scenario] |= change
    column = 1 + list(other["routers"]).index(router)
    cells = [line.split(" | ")[column] for line in tool.table(other).splitlines()[2:]]
    assert any(row in cell for cell in cells)
    assert tool.page(tool.PAGE.read_text(), other) != tool.PAGE.read_text()


def test_what_must_never_be_is_a_problem(tool: ModuleType, result: Any) -> None:
    router = "vllm-router, nixl"
    result["routers"][router]["prefill engine is dead"] = {"status": 200, "right": False, "handed_off": 0}
    result["routers"][router]["completion"]["handed_off"] = 0
    result["held"] = ["decode: still holds KV blocks"]
    held, wrong, not_handed = tool.problems(result)
    assert "still held" in held
    assert "wrong answer with HTTP 200" in wrong
    assert "was not handed off" in not_handed


@pytest.fixture(scope="module")
def made_up() -> Iterator[Any]:
    """A made-up pair, our sidecar before it, and the conversation's module."""
    with pytest.MonkeyPatch.context() as patch, Stack() as stack, Client(timeout_s=30.0) as client:
        patch.syspath_prepend(ROOT / "tools")
        names = ("router_servers", "router_conversation", "router_made_up")
        servers, conversation, engines = (importlib.import_module(name) for name in names)
        patch.setattr(conversation, "LEAVES_S", 0.3)
        patch.setattr(conversation, "ASKS", 1)
        pair = engines.MadeUpPair(stack)
        try:
            front = servers.sidecar_front(pair)
            talk = conversation.Conversation(front, pair, client, pair.seen, 5000)
            yield SimpleNamespace(
                pair=pair, front=front, client=client, talk=talk, module=conversation, servers=servers
            )
        finally:
            pair.close()


def test_the_conversation_through_the_sidecar_is_what_its_tool_says(tool: ModuleType, made_up: Any) -> None:
    seen: dict[str, dict[str, Any]] = {}
    tool.hold(made_up.pair, [made_up.front], made_up.client, made_up.pair.seen, seen, tool.QUESTIONS)
    (router,) = seen
    cells = {row: tool.cell(row, seen[router]) for row in tool.ROWS if row not in tool.QUESTIONS}
    assert {cells[row] for row in ("completion", "completion, streamed", "chat", "chat, streamed")} == {
        "handed off, right"
    }
    assert cells["trace"] == "both engines"
    assert cells["client leaves during the answer"] == "the decode engine stops"
    assert cells["client leaves before the answer"] == "the decode engine is not asked"
    assert cells["prefill engine is dead"] == "HTTP 502"
    assert cells["prefill engine is back"] == "handed off at once"


def test_a_router_that_sends_both_legs_at_once_asks_the_decode_engine_for_a_client_that_left(
    tool: ModuleType, made_up: Any
) -> None:
    """Symptom: a table that said it is not asked, because vLLM counts no request that its client ended."""
    front = made_up.servers.mooncake_sidecar_front(made_up.pair)
    talk = made_up.module.Conversation(front, made_up.pair, made_up.client, made_up.pair.seen, 7000)
    seen = {name: run() for name, run in talk.scenarios().items() if name in ("completion", "chat, streamed")}
    assert {tool.cell(name, seen) for name in seen} == {"handed off, right"}
    left = talk.leaves_prompt()
    assert tool.cell("client leaves before the answer", {"client leaves before the answer": left}) == (
        "it is asked all the same"
    )
    made_up.pair.stack.stop(front.server)


def test_a_router_that_does_not_name_the_prefill_engine_hands_nothing_off(
    tool: ModuleType, made_up: Any
) -> None:
    """The mutant: the same questions without the header that makes two legs of them."""
    front = made_up.servers.Front("forgets", made_up.front.server, {})
    talk = made_up.module.Conversation(front, made_up.pair, made_up.client, made_up.pair.seen, 6000)
    seen = {name: run() for name, run in talk.scenarios().items() if name in ("completion", "chat", "trace")}
    assert tool.cell("completion", seen) == tool.cell("chat", seen) == "right; computed by the decode engine"
    assert tool.cell("trace", seen) == "none"
    assert talk.prefill_is_back()["asks"] is None


def test_an_engine_that_lost_its_memory_answers_wrongly_and_is_noticed(
    tool: ModuleType, made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: an engine that answers without having read the prompt."""
    monkeypatch.setattr("router_made_up.solve", lambda story: "nowhere")
    seen = {"completion": made_up.talk.scenarios()["completion"]()}
    assert tool.cell("completion", seen) == "**wrong**"
    (wrong,) = tool.problems({"held": [], "routers": {"r": seen}})
    assert "wrong answer with HTTP 200" in wrong
