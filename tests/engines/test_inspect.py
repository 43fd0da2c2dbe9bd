"""What `inspect` says of an engine that was never started is what a running one says of itself."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from tests.engines.conftest import START_TIMEOUT_S, Pair

from stateferry.doctor import EngineAnswer, ask_engine
from stateferry.errors import LayoutMismatch
from stateferry.layout.fingerprint import compare
from stateferry.layout.spec import CacheLayout
from stateferry.models import CPU_FAMILIES, write_random_checkpoint
from stateferry.stack import Client, Engine, EngineSpec, Stack

pytestmark = pytest.mark.timeout(900)
SERVER_ARGUMENTS = 3
"""Where vLLM's own arguments begin in an engine's command: behind `python -m module`."""


def offline(spec: EngineSpec, running: EngineAnswer, *more: str) -> tuple[CacheLayout, ...]:
    """The layouts of an engine with the very arguments and environment of `spec`, and as many blocks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
        from stateferry.vllm.offline import lay_out
    blocks = running.layouts[0].groups[0].layers[0].tensors[0].block_count
    with patch.dict(os.environ, spec.environment()):
        found = lay_out([*spec.command(1)[SERVER_ARGUMENTS:], *more], num_blocks=blocks).layouts
    return tuple(
        msgspec.structs.replace(ours, engine_id=theirs.engine_id, epoch=theirs.epoch)
        for ours, theirs in zip(found, running.layouts, strict=True)
    )


def check_inspect(engine: Engine) -> None:
    """Equal in every field, places and facts included; and an engine with other flags is not."""
    running = ask_engine(engine.url)
    assert offline(engine.spec, running) == running.layouts
    for more in (("--block-size", "256"), ("--no-enable-prefix-caching",)):
        other = offline(engine.spec, running, *more)
        with pytest.raises(LayoutMismatch):
            compare(other[0], running.layouts[0])


def test_the_shared_engines_are_as_inspect_says(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        check_inspect(engine)


@pytest.mark.parametrize("family", CPU_FAMILIES)
def test_an_engine_of_every_family_is_as_inspect_says(family: str, stack: Stack, tmp_path: Path) -> None:
    model = write_random_checkpoint(family, tmp_path / family)
    engine = stack.start(EngineSpec(model=model, name=f"inspect-{family}"))
    try:
        engine.wait_ready(START_TIMEOUT_S)
        check_inspect(engine)
    finally:
        stack.stop(engine)


def test_a_describe_request_keeps_no_block(pair: Pair, client: Client) -> None:
    before = ask_engine(pair.prefill.url)
    for engine in (pair.prefill, pair.decode):
        assert ask_engine(engine.url) == ask_engine(engine.url)
        client.reset_prefix_cache(engine.url)
        assert client.cache_usage(engine.url) == 0.0
    answer = client.handoff(pair.prefill.url, pair.decode.url, [1, 2, 3, 4], max_tokens=4)
    assert answer.received["outcome"] == "received"
    assert ask_engine(pair.prefill.url) == before


def test_doctor_finds_that_the_shared_engines_can_exchange(pair: Pair, client: Client) -> None:
    urls = ["--prefill-url", pair.prefill.url, "--decode-url", pair.decode.url]
    code = "from stateferry.cli.main import main; main()"
    command = [sys.executable, "-c", code, "doctor", *urls, "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["engines"]["can_exchange"] is True, result.stderr
    assert (result.returncode == 0) == value["passed"]
    prompt = "a b c d e f g h"
    answer = client.handoff(pair.prefill.url, pair.decode.url, prompt, max_tokens=2)
    lengths = {length["prompt_tokens"]: length for length in value["engines"]["lengths"]}
    assert answer.prefill.prompt_tokens < 128
    assert answer.received["bytes"] == {
        "state": lengths[128]["state_bytes"],
        "attention": lengths[128]["attention_bytes"],
    }
