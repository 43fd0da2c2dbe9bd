"""The demo and `serve` with real engines."""

import json
import os
import subprocess
from pathlib import Path

from tests.engines.command import STATEFERRY

from stateferry.stack import Client, Server, Stack


def test_the_demo_passes_and_says_what_it_saw() -> None:
    result = subprocess.run([*STATEFERRY, "demo", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    verdict = json.loads(result.stdout.splitlines()[-1])
    assert verdict["passed"] is True
    assert verdict["problems"] == []
    for asked in verdict["questions"]:
        assert asked["one_engine"]["text"] == asked["two_engines"]["text"] == asked["expected"]
        assert asked["withheld"]["text"] != asked["expected"]
        sizes = asked["two_engines"]["received"]["bytes"]
        assert sizes["state"] > 0
        assert sizes["attention"] > 0
        assert asked["withheld"]["received"]["bytes"]["state"] == 0
        assert asked["one_engine"]["first_token_s"] > 0
        assert asked["two_engines"]["first_token_s"] > 0
    assert "Passed." in result.stderr


class Served(Server):
    """`stateferry serve`, where vLLM loads no plugin: the connector comes by its module path."""

    def __init__(self, model: Path, log_path: Path) -> None:
        self._model = model
        super().__init__("serve", log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        command = [*STATEFERRY, "serve", "decode", str(self._model), "--kv-host", "127.0.0.1"]
        command += [
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--served-model-name",
            "model",
            "--enforce-eager",
        ]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return command, {**os.environ, **settings, "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""}


def test_serve_starts_an_engine_without_plugin_loading(
    stack: Stack, client: Client, random_model: Path, tmp_path: Path
) -> None:
    server = Served(random_model, tmp_path / "serve.log")
    stack.add(server)
    try:
        server.wait_ready(240)
        assert len(client.complete(server.url, "Hello", 4).token_ids) == 4
    finally:
        stack.stop(server)
    assert "what fails to arrive is recomputed" in (tmp_path / "serve.log").read_text()
