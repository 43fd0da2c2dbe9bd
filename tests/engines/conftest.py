"""Engines that all engine tests share. They start once: a pair takes half a minute or more."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stateferry.models import RECALL_GDN, write_random_checkpoint
from stateferry.stack import Client, Engine, EngineSpec, Role, Router, Stack
from stateferry.stack.ports import HeldPort
from stateferry.testing.collector import Collector

START_TIMEOUT_S = 280.0
PATIENT = {"testing": True, "lease_s": 100, "transfer_timeout_s": 100, "handshake_timeout_s": 60}
"""Four workers on two cores leave threads waiting for seconds: that is not what is tested here. Shorter than
a client's patience, so that a hand-off that hangs says what it waits for."""
LOG_LINES = 60
_STACK = pytest.StashKey[Stack]()


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine of the bundled model, with `testing` and prefix caching on. The first
    answers routers at its `bootstrap_port`."""

    prefill: Engine
    decode: Engine


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GDN checkpoint with seeded random weights; prompts are bytes."""
    return write_random_checkpoint("gdn", tmp_path_factory.mktemp("model") / "gdn")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Stack]:
    """Starts servers for the whole session; tests may add some and `stop` them."""
    with Stack(tmp_path_factory.mktemp("engines")) as stack:
        pytestconfig.stash[_STACK] = stack
        yield stack


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Talks to all of them."""
    with Client(timeout_s=120.0) as client:
        yield client


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the shared pair exports its traces."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def pair(stack: Stack, collector: Collector) -> Pair:
    """Two engines that hand off over the default transport, traced; other engines are not."""
    shared = EngineSpec(
        model=RECALL_GDN,
        extra_config={"testing": True},
        args=collector.arguments,
        env=collector.environment,
    )
    with HeldPort() as control, HeldPort() as asked:
        answers = {"port": control.number, "bootstrap_port": asked.number}
        spec = replace(shared, role=Role.PREFILL, extra_config={**shared.extra_config, **answers})
        prefill = stack.start(spec)
        decode = stack.start(replace(shared, role=Role.DECODE))
        for engine in (prefill, decode):
            engine.wait_ready(START_TIMEOUT_S)
    return Pair(prefill, decode)


@pytest.fixture(scope="session")
def router(stack: Stack, pair: Pair) -> Router:
    """vllm-router in front of the pair."""
    router = stack.start_router([pair.prefill], [pair.decode])
    router.wait_ready(60.0)
    return router


@pytest.fixture(autouse=True)
def _shared_engines_survive(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may take the shared engines down; each starts with empty prefix caches."""
    if "pair" not in request.fixturenames:
        yield
        return
    pair: Pair = request.getfixturevalue("pair")
    client: Client = request.getfixturevalue("client")
    for engine in (pair.prefill, pair.decode):
        client.reset_prefix_cache(engine.url)
    yield
    for engine in (pair.prefill, pair.decode):
        engine.check_alive()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    """Show the end of every running server's log under a failed test."""
    report = yield
    if report.failed and _STACK in item.config.stash:
        for server in item.config.stash[_STACK].servers:
            title = f"end of {server.log_path.name}"
            report.sections.append((title, server.log_tail(LOG_LINES)))
    return report
