"""The check of AIPerf's requests against ours, as far as it goes without AIPerf: our half, and the notes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from tests.programs import loaded

from stateferry.bench.agentx.prompts import Prompts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return loaded(ROOT / "tools" / "aiperf_check.py")


def ours(tool: ModuleType) -> dict[str, Any]:
    recorded = tool.sessions(3, 5)
    with tool.NoteTaker() as notes:
        tool.run_ours(recorded, notes.url, 1)
        found: dict[str, Any] = tool.compared(recorded, notes, whole=False)
    return found


def test_our_replay_asks_what_was_recorded(tool: ModuleType) -> None:
    found = ours(tool)
    assert found["differences"] == {}
    assert found["requests"] > 10


def test_a_replay_of_other_prompts_is_noticed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: prompts that are a token short, and prompts that share nothing."""
    right = Prompts.tokens
    monkeypatch.setattr(Prompts, "tokens", lambda self, turn: right(self, turn)[:-1])
    assert "a prompt of" in str(ours(tool)["differences"])
    monkeypatch.setattr(Prompts, "tokens", lambda self, turn: [-turn.number, *right(self, turn)[1:]])
    assert "share 0 blocks" in str(ours(tool)["differences"])


def test_words_of_a_chat_are_its_tokens(tool: ModuleType) -> None:
    messages = [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    ]
    body = {"messages": messages, "max_completion_tokens": 3, "stream": True}
    with tool.NoteTaker() as notes:
        url = f"{notes.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers={"X-Correlation-ID": "a"}, trust_env=False)
        ((asked,),) = notes.conversations().values()
    assert (asked.prompt, asked.output_tokens) == (["one", "two", "three"], 3)
    assert asked.came < asked.ended
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert sum(len(event["choices"]) for event in events) == 3
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert answer.text.rstrip().endswith("data: [DONE]")
