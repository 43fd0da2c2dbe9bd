"""The examples that talk to engines, as their users run them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stateferry.models import recall_prompt
from stateferry.stack import AtOnce, Client, Router, Server, Stack, handoff_at_once

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


def test_both_legs_at_once_end_as_one_after_the_other(pair: Any, client: Client) -> None:
    """The decode leg comes while the prefill engine computes; a state that is withheld shows here, too."""
    way = AtOnce.between(client, pair.prefill.url, pair.decode.url)
    told = run(
        "both_legs_at_once.py",
        pair.prefill.url,
        way.place.partition("@")[2],
        pair.decode.url,
        QUESTION.text,
    )
    answer, _, received = told.partition("\n")
    assert answer.split()[0] == QUESTION.answer
    assert json.loads(received)["outcome"] == "received"
    for seed in range(100, 106):
        question = recall_prompt(seed, 60 + 40 * (seed % 3))
        both = handoff_at_once(client, way, question.text, 1)
        assert both.decode.text.split() == [question.answer]
        assert both.received["outcome"] == "received"
        assert both.received["bytes"]["state"] > 0
    client.reset_prefix_cache(pair.decode.url)
    lost = handoff_at_once(client, way, QUESTION.text, 1, tamper={"withhold": "state"})
    assert lost.decode.text.split() != [QUESTION.answer]


class Sidecar(Server):
    """The example, beside a decode engine."""

    def __init__(self, decode_url: str, log_path: Path) -> None:
        self._decode_url = decode_url
        super().__init__("sidecar", log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, str(EXAMPLES / "llmd_sidecar.py"), "--decode", self._decode_url]
        return [*command, "--port", str(port)], dict(os.environ)


@pytest.fixture
def sidecar(stack: Stack, pair: Any) -> Iterator[Sidecar]:
    server = Sidecar(pair.decode.url, stack.log_folder / "sidecar.log")
    stack.add(server)
    try:
        server.wait_ready(60.0)
        yield server
    finally:
        stack.stop(server)


def test_the_sidecar_does_both_legs_where_a_header_names_the_prefill_engine(
    pair: Any, sidecar: Sidecar
) -> None:
    body = {"model": "model", "prompt": QUESTION.text, "max_tokens": 2, "temperature": 0.0}
    named = {"x-prefiller-host-port": pair.prefill.url.removeprefix("http://")}

    def ask(headers: dict[str, str], **more: Any) -> httpx.Response:
        url = f"{sidecar.url}/v1/completions"
        return httpx.post(url, json=body | more, headers=headers, timeout=60.0, trust_env=False)

    answer = ask(named).json()
    assert answer["choices"][0]["text"].split()[0] == QUESTION.answer
    assert answer["kv_transfer_params"]["stateferry"]["received"]["outcome"] == "received"
    streamed = [line.removeprefix("data: ") for line in ask(named, stream=True).text.splitlines() if line]
    texts = [json.loads(line)["choices"][0]["text"] for line in streamed if line != "[DONE]"]
    assert "".join(texts).split()[0] == QUESTION.answer
    alone = ask({}).json()
    assert alone["choices"][0]["text"].split()[0] == QUESTION.answer
    assert not alone.get("kv_transfer_params")
