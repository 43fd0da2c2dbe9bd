"""The examples that talk to engines, as their users run them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stateferry.models import recall_prompt
from stateferry.stack import Router

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = recall_prompt(1, 60)


def run(name: str, *arguments: str) -> str:
    """Its output; it must end well."""
    result = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_asking_through_the_router_streams_the_right_answer(router: Router) -> None:
    answer = run("ask.py", router.url, QUESTION.text, "--max-tokens", "1")
    assert answer.split() == [QUESTION.answer]


def test_two_legs_by_hand_say_what_was_received(pair: Any) -> None:
    answer, _, received = run("two_legs.py", pair.prefill.url, pair.decode.url, QUESTION.text).partition("\n")
    assert answer.split()[0] == QUESTION.answer
    told = json.loads(received)
    assert told["outcome"] == "received"
    assert told["bytes"]["state"] > 0
    assert told["bytes"]["attention"] > 0
