"""An engine, the router or the client dies or hangs: what is answered is right, and so are the next ten."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tests.engines.conftest import Pair
from tests.engines.leaving import asked
from tests.engines.test_storm import assert_settles, prompt_of

from stateferry.models import RECALL_GDN
from stateferry.stack import PREFILL_PARAMS, Client, Engine, EngineSpec, Handoff, Role, Stack
from stateferry.stack.ports import HeldPort

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LEASE_S = 8.0
TOKENS = 8
SLOW = {"faults": [{"kind": "delay", "polls": 3000}]}
"""The read begins after some seconds."""


@dataclass
class Victims:
    """A pair whose members may be killed. The prefill engine comes back on the same control port."""

    stack: Stack
    client: Client
    pair: Pair
    spec: EngineSpec
    expected: dict[int, tuple[int, ...]]

    def revive(self) -> None:
        """Start the prefill engine again."""
        self.stack.stop(self.pair.prefill)
        self.pair = Pair(_started(self.stack, self.spec), self.pair.decode)

    def hand_off(self, index: int, tokens: int = TOKENS, **more: Any) -> Handoff:
        urls = self.pair.prefill.url, self.pair.decode.url
        return self.client.handoff(*urls, prompt_of(index), tokens, timeout_s=100.0, **more)

    def count(self, metric: str, **labels: str) -> float:
        """Of the decode engine."""
        return self.client.metrics(self.pair.decode.url).total(metric, **labels)

    def assert_well(self) -> None:
        """Hand-offs come back, ten fresh requests are right, and nothing is held on either side."""
        when(lambda: self.hand_off(0).received["outcome"] == "received", "a hand-off that succeeds")
        answers = [self.hand_off(index) for index in range(10)]
        assert [a.decode.token_ids for a in answers] == [self.expected[i] for i in range(10)]
        outcomes = [a.received["outcome"] for a in answers]
        assert outcomes.count("received") >= 8, outcomes
        assert_settles(self.client, self.pair)


def _started(stack: Stack, spec: EngineSpec) -> Engine:
    engine = stack.start(spec)
    engine.wait_ready(280.0)
    return engine


@pytest.fixture(scope="module")
def engines(stack: Stack, client: Client) -> Iterator[Victims]:
    with HeldPort() as port:
        control_port = port.number
    extra = {"testing": True, "lease_s": LEASE_S, "handshake_timeout_s": 4, "transport": "faults"}
    common: dict[str, Any] = {"model": RECALL_GDN, "prefix_caching": False}
    spec = EngineSpec(
        role=Role.PREFILL, name="victim", extra_config={**extra, "port": control_port}, **common
    )
    few = ("--max-num-seqs", "2")  # so that a third request queues
    decode = stack.start(
        EngineSpec(role=Role.DECODE, name="survivor", extra_config=extra, args=few, **common)
    )
    victims = Victims(stack, client, Pair(_started(stack, spec), decode), spec, {})
    decode.wait_ready(280.0)
    for index in range(10):
        victims.expected[index] = client.complete(decode.url, prompt_of(index), TOKENS).token_ids
    yield victims
    stack.stop(victims.pair.prefill, decode)


@pytest.fixture
def victims(engines: Victims) -> Victims:
    """Both alive, whatever the test before did."""
    engines.pair.decode.child.thaw()
    if engines.pair.prefill.child.exit_code is not None:
        engines.revive()
    return engines


def when(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


def meanwhile(ask: Callable[[], Handoff]) -> "Future[Handoff]":
    """Ask in another thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(ask)
    pool.shutdown(wait=False)
    return future


def test_the_prefill_engine_dies_between_the_legs(victims: Victims) -> None:
    def killed(params: Any) -> Any:
        victims.pair.prefill.child.kill()
        return params

    answer = victims.hand_off(0, between=killed)
    assert answer.decode.token_ids == victims.expected[0]
    assert answer.received["outcome"] == "failed"
    victims.revive()
    victims.assert_well()


def test_the_prefill_engine_dies_during_the_read(victims: Victims) -> None:
    before = victims.count("stateferry_handoffs_total", outcome="received")
    answer = meanwhile(lambda: victims.hand_off(1, tamper=SLOW))
    when(lambda: victims.count("stateferry_open_handoffs") > 0, "the read")
    victims.pair.prefill.child.kill()
    assert answer.result(100).decode.token_ids == victims.expected[1]
    assert answer.result().received["outcome"] == "failed"
    assert "process is gone" in answer.result().received["reason"], answer.result().received["reason"]
    assert victims.count("stateferry_handoffs_total", outcome="received") == before
    victims.revive()
    victims.assert_well()


def test_the_prefill_engine_dies_after_the_read_and_comes_back_as_another(victims: Victims) -> None:
    old: dict[str, Any] = {}

    def kept(params: Any) -> Any:
        old.update(params)
        return params

    before = victims.count("stateferry_handoffs_total", outcome="received")
    answer = meanwhile(lambda: victims.hand_off(2, tokens=300))
    when(lambda: victims.count("stateferry_handoffs_total", outcome="received") > before, "the bytes")
    with pytest.raises(ConnectionAbortedError):
        victims.hand_off(3, between=lambda params: _abort(kept(params)))
    victims.pair.prefill.child.kill()
    assert answer.result(100).decode.token_ids[:TOKENS] == victims.expected[2]

    def ready() -> float:
        victims.client.complete(victims.pair.decode.url, prompt_of(4), 1)  # an idle engine tells nothing
        return victims.count("stateferry_peers", state="ready")

    when(lambda: not ready(), "the dead engine to be called ready no more")
    victims.revive()
    # An offer of the dead engine, at the address of the living one.
    late = victims.client.complete(
        victims.pair.decode.url, prompt_of(3), TOKENS, kv_transfer_params=old, timeout_s=100.0
    )
    assert late.token_ids == victims.expected[3]
    victims.assert_well()


def _abort(params: Any) -> Any:
    raise ConnectionAbortedError


def test_the_decode_engine_hangs_for_longer_than_the_lease(victims: Victims) -> None:
    """The producer gives its blocks to others; what the consumer read in its sleep must not count."""
    answer = meanwhile(lambda: victims.hand_off(4, tamper=SLOW))
    when(lambda: victims.count("stateferry_open_handoffs") > 0, "the read")
    victims.pair.decode.child.freeze()
    try:
        url = victims.pair.prefill.url
        when(
            lambda: victims.client.metrics(url).total("vllm:kv_cache_usage_perc") == 0.0,
            "the producer to free the blocks of a reader that hangs",
            LEASE_S + 30,
        )
        for index in range(5, 10):  # other requests' bytes now lie where they were
            victims.client.complete(url, prompt_of(index), TOKENS)
    finally:
        victims.pair.decode.child.thaw()
    assert answer.result(100).decode.token_ids == victims.expected[4]
    assert answer.result().received["outcome"] == "failed"
    # Which clock ran out first depends on whether the claim was answered before the freeze.
    reason = answer.result().received["reason"]
    assert "lease" in reason or "did not answer the claim" in reason, reason
    victims.assert_well()


def test_the_router_dies_between_the_legs(victims: Victims) -> None:
    router = victims.stack.start_router([victims.pair.prefill], [victims.pair.decode])
    router.wait_ready(60.0)
    victims.pair.decode.child.freeze()  # so that the second leg does not end before its sender does
    ended = threading.Event()

    def ask() -> None:
        try:
            victims.client.complete(router.url, prompt_of(5), TOKENS, timeout_s=60.0)
        except Exception:
            ended.set()

    asking = threading.Thread(target=ask)
    try:
        asking.start()
        url = victims.pair.prefill.url
        when(lambda: victims.client.metrics(url).total("vllm:kv_cache_usage_perc") > 0, "the first leg")
        router.child.kill()
    finally:
        victims.pair.decode.child.thaw()
        asking.join(60.0)
    victims.stack.stop(router)
    assert ended.is_set()
    victims.assert_well()


class Leaving:
    """A client that leaves at one of eight points of a hand-off."""

    def __init__(self, victims: Victims) -> None:
        self.victims = victims
        self.prefill, self.decode = victims.pair.prefill, victims.pair.decode
        self.prompt = prompt_of(6)

    def offer(self, **tamper: Any) -> dict[str, Any]:
        """The first leg, done."""
        answer = self.victims.client.complete(
            self.prefill.url, self.prompt, 1, kv_transfer_params=PREFILL_PARAMS
        )
        params = dict(answer.kv_transfer_params or {})
        return {**params, "stateferry": {**params["stateferry"], "tamper": tamper}} if tamper else params

    def before_the_prefill_engine_reads(self) -> None:
        self.prefill.child.freeze()
        try:
            with asked(self.prefill.url, self.prompt, 1, PREFILL_PARAMS):
                pass
        finally:
            self.prefill.child.thaw()

    def during_the_prefill(self) -> None:
        with asked(self.prefill.url, self.prompt, 1, PREFILL_PARAMS):
            pass

    def between_the_legs(self) -> None:
        self.offer()

    def before_the_decode_engine_reads(self) -> None:
        params = self.offer()
        self.decode.child.freeze()
        try:
            with asked(self.decode.url, self.prompt, TOKENS, params):
                pass
        finally:
            self.decode.child.thaw()

    def in_the_queue(self) -> None:
        url = self.decode.url
        metrics = self.victims.client.metrics
        offer = self.offer()  # first: the prefill engine may starve while the other is full, until it is not
        with asked(url, [7] * 20, 8000, None), asked(url, [8] * 20, 8000, None):
            when(lambda: metrics(url).total("vllm:num_requests_running") == 2, "a full engine")
            with asked(url, self.prompt, TOKENS, offer):
                when(lambda: metrics(url).total("vllm:num_requests_waiting") == 1, "the queue")

    def during_the_read(self) -> None:
        with asked(self.decode.url, self.prompt, TOKENS, self.offer(**SLOW)):
            when(lambda: self.victims.count("stateferry_open_handoffs", half="ferry") > 0, "the read")

    def once_the_bytes_are_in(self) -> None:
        before = self.victims.count("stateferry_handoffs_total", outcome="received")
        with asked(self.decode.url, self.prompt, 300, self.offer()):
            when(
                lambda: self.victims.count("stateferry_handoffs_total", outcome="received") > before,
                "the bytes",
            )

    def in_the_middle_of_the_answer(self) -> None:
        seen = b""
        with asked(self.decode.url, self.prompt, 300, self.offer(), stream=True) as connection:
            while seen.count(b"data:") < 3:
                more = connection.recv(4096)
                assert more, f"the answer ended early: {seen!r}"
                seen += more


POINTS = [name for name in vars(Leaving) if not name.startswith("_") and name != "offer"]


@pytest.mark.parametrize("point", POINTS)
def test_the_client_is_gone(victims: Victims, point: str) -> None:
    getattr(Leaving(victims), point)()
    victims.assert_well()


def test_there_are_eight_points() -> None:
    assert len(POINTS) == 8
