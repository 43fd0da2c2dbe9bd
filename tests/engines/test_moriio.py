"""A pair of engines configured for MoRIIO's connector, behind both kinds of router that its users have."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.engines.conftest import START_TIMEOUT_S, Pair
from tests.engines.continuation import TOP, random_prompt, same

from stateferry.models import RECALL_GDN, recall_prompt
from stateferry.stack import Client, Completion, Engine, EngineSpec, Role, Stack
from stateferry.stack.ports import HeldPort
from stateferry.stack.router import Router
from stateferry.testing.moriio_proxy import MoriioProxy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

TOKENS = 4
ANSWER_TOKENS = 12
LENGTH = 700
"""More than one block of the bundled model."""


class MoriioEngine(Engine):
    """Knows its own HTTP port, which it tells the router."""

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        self.spec = replace(self.spec, extra_config={**self.spec.extra_config, "http_port": str(port)})
        return super()._command(port)


@pytest.fixture(scope="module")
def ping_port() -> int:
    with HeldPort() as port:
        return port.number


@pytest.fixture(scope="module")
def moriio_pair(stack: Stack, ping_port: int) -> Iterator[Pair]:
    """Under the connector's own name; only `kv_connector_module_path` was added to its users' settings."""
    engines = []
    for role in (Role.PREFILL, Role.DECODE):
        with HeldPort() as control:
            extra = {
                "read_mode": "true",
                "host_ip": "127.0.0.1",
                "proxy_ip": "127.0.0.1",
                "proxy_ping_port": str(ping_port),
                "handshake_port": control.number,
                "backend": "rdma",
                "transfer_timeout": "120",
                "testing": True,
            }
        spec = EngineSpec(
            model=RECALL_GDN,
            role=role,
            name=f"moriio-{role.name.lower()}",
            connector="MoRIIOConnector",
            connector_module="stateferry.vllm.dropin",
            extra_config=extra,
        )
        engine = MoriioEngine(spec, stack.log_folder / f"{spec.name}.log")
        stack.add(engine)
        engines.append(engine)
    try:
        for engine in engines:
            engine.wait_ready(START_TIMEOUT_S)
        yield Pair(*engines)
    finally:
        stack.stop(*engines)


def wait_until_known(router: Router) -> None:
    """Until the router has heard of both engines, which say so every few seconds."""
    deadline = time.monotonic() + 60.0
    pause = threading.Event()
    while not all(words in router.log_path.read_text() for words in ("Add Decode", "Add Prefill")):
        assert time.monotonic() < deadline, router.log_tail()
        pause.wait(0.1)


def whole_answer(client: Client, pair: Pair, prompt: list[int]) -> Completion:
    """One engine's, and then both forget the prompt."""
    answer = client.complete(pair.prefill.url, prompt, TOKENS, logprobs=TOP)
    for engine in (pair.prefill, pair.decode):
        client.reset_prefix_cache(engine.url)
    return answer


def ask(client: Client, url: str, pair: Pair, whole: Completion, prompt: list[int]) -> Completion:
    client.reset_prefix_cache(pair.decode.url)
    return client.complete(url, [*prompt, whole.token_ids[0]], TOKENS - 1, logprobs=TOP)


def received(answer: Completion) -> dict[str, Any]:
    return dict((answer.kv_transfer_params or {}).get("stateferry", {}).get("received", {}))


@pytest.fixture
def proxy(ping_port: int, moriio_pair: Pair) -> Iterator[MoriioProxy]:
    with MoriioProxy(ping_port) as proxy:
        assert proxy.wait_registered(60.0), "the engines did not register"
        yield proxy


def test_behind_a_proxy_that_follows_the_protocol(
    client: Client, moriio_pair: Pair, proxy: MoriioProxy
) -> None:
    """Found by registration, addressed by request id, told three fields of the first answer."""
    prompt = random_prompt(LENGTH, seed=31)
    whole = whole_answer(client, moriio_pair, prompt)
    answer = ask(client, proxy.url, moriio_pair, whole, prompt)
    assert received(answer)["outcome"] == "received"
    assert received(answer)["bytes"]["state"] > 0
    assert same(whole, answer)
    legs = proxy.legs[-1]
    assert "stateferry" not in legs.decode_params
    tables = legs.prefill_answer["remote_block_ids"]
    assert len(tables[0]) > 1, "attention comes first"
    assert all(len(table) == 1 for table in tables[1:]), "one state of each recurrent group"

    proxy.carries_whole = True
    assert same(whole, ask(client, proxy.url, moriio_pair, whole, prompt))
    proxy.between = lambda p: {**p, "stateferry": {**p["stateferry"], "tamper": {"withhold": "state"}}}
    damaged = ask(client, proxy.url, moriio_pair, whole, prompt)
    assert not same(whole, damaged), "a withheld state went unnoticed"


def test_behind_vllm_router(client: Client, stack: Stack, moriio_pair: Pair, ping_port: int) -> None:
    """`vllm-router --kv-connector moriio` with its discovery, in READ mode as the engines registered."""
    prompt = list(recall_prompt(7, LENGTH).token_ids)
    whole = client.complete(moriio_pair.prefill.url, prompt, ANSWER_TOKENS)
    for engine in (moriio_pair.prefill, moriio_pair.decode):
        client.reset_prefix_cache(engine.url)
    arguments = ["--vllm-discovery-address", f"127.0.0.1:{ping_port}"]
    router = Router([], [], stack.log_folder / "moriio-router.log", arguments, "moriio-router", "moriio")
    stack.add(router)
    try:
        router.wait_ready(60.0)
        wait_until_known(router)
        # Without log-probabilities: this router puts both legs' together.
        answer = client.complete(router.url, prompt, ANSWER_TOKENS)
    finally:
        stack.stop(router)
    assert received(answer)["outcome"] == "received"
    assert received(answer)["tokens"] == len(prompt) - 1
    assert received(answer)["bytes"]["state"] > 0
    assert answer.token_ids == whole.token_ids
    log = (stack.log_folder / "moriio-prefill.log").read_text()
    assert log.count("without effect here: backend") == 1
