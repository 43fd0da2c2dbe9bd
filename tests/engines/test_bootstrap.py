"""Routers made for the in-tree Mooncake connector, before our engines: they ask, and hand off."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stateferry.models import recall_prompt
from stateferry.stack import Client, Router, Server, Stack

SIDECAR = Path(__file__).parents[2] / "examples" / "llmd_sidecar.py"


class Sidecar(Server):
    """The example, as llm-d starts its own for engines of that connector."""

    def __init__(self, pair: Any, log_path: Path) -> None:
        self._decode_url = pair.decode.url
        self._bootstrap_port = str(pair.prefill.spec.extra_config["bootstrap_port"])
        super().__init__("mooncake-sidecar", log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, str(SIDECAR), "--decode", self._decode_url, "--port", str(port)]
        command += ["--kv-connector", "mooncake", "--mooncake-bootstrap-port", self._bootstrap_port]
        return command, dict(os.environ)


@pytest.fixture(params=["vllm-router", "sidecar"])
def front(request: pytest.FixtureRequest, stack: Stack, pair: Any) -> Iterator[Server]:
    """The real vllm-router in its Mooncake mode; a proxy that follows llm-d's."""
    log = stack.log_folder / f"mooncake-{request.param}.log"
    if request.param == "sidecar":
        server: Server = Sidecar(pair, log)
    else:
        port = str(pair.prefill.spec.extra_config["bootstrap_port"])
        server = Router(
            [], [pair.decode.url], log, ["--prefill", pair.prefill.url, port], log.stem, "mooncake"
        )
    stack.add(server)
    try:
        server.wait_ready(60.0)
        yield server
    finally:
        stack.stop(server)


def test_every_kind_of_request_is_handed_off(pair: Any, client: Client, front: Server) -> None:
    named = {"x-prefiller-host-port": pair.prefill.url.removeprefix("http://")}

    def received() -> float:
        return client.metrics(pair.decode.url).total("stateferry_handoffs_total", outcome="received")

    for seed, stream in ((300, False), (301, True), (302, False)):
        question = recall_prompt(seed, 60 + 50 * (seed % 3))
        before = received()
        body = {
            "model": "model",
            "prompt": question.text,
            "max_tokens": 2,
            "temperature": 0.0,
            "stream": stream,
        }
        url = f"{front.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=named, timeout=60.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        texts = [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]
        assert "".join(texts).split()[0] == question.answer
        client.complete(pair.decode.url, [20, 21, 22], 1)  # an idle engine tells with its next step
        assert received() == before + 1
