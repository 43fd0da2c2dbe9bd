"""Whole hand-offs over the MoRI double: a read that failed, and bytes of it that land later."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from stateferry.config import Config
from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import Behaviour, Kind, World, sq_full
from stateferry.testing.peers import EngineRank, wait_until
from stateferry.transport import TransportOptions
from stateferry.transport.mori import MoriTransport
from stateferry.transport.mori_options import MoriOptions
from stateferry.transport.mori_request import Request
from stateferry.wire import Offer

REMOTE, LOCAL = ((1, 2, 3), (4,)), ((5, 6, 7), (8,))
QUIET_S = 30.0
HALF = Behaviour(Kind.FAILS_WRITING, message="port went down", part=0.5)


@dataclass
class Engines:
    world: World
    producer: EngineRank
    consumer: EngineRank

    def order(self) -> Offer:
        """One hand-off, under way."""
        self.producer.write_tags(seed=1)
        offer = self.producer.grant(40, REMOTE)
        self.consumer.open("request", offer)
        self.consumer.load("request", offer, LOCAL)
        return offer

    def same_bytes(self) -> bool:
        return all(
            self.consumer.page(group, here) == self.producer.page(group, there)
            for group in range(2)
            for here, there in zip(LOCAL[group], REMOTE[group], strict=True)
        )


@contextmanager
def engines(retries: int = 0, queues: int = 1) -> Iterator[Engines]:
    """A pair whose transports' time stands still."""
    world = World()
    double = MoriDouble(world)
    options = TransportOptions(mori=MoriOptions(quiet_s=QUIET_S, qp_per_transfer=queues))

    def rank(name: str) -> EngineRank:
        transport = MoriTransport(options, io=double, clock=world.clock, pause=world.advance)
        return EngineRank(name, config=Config(read_retries=retries), transport=transport)

    with rank("p") as producer, rank("d") as consumer:
        yield Engines(world, producer, consumer)


def test_a_hand_off_arrives() -> None:
    with engines() as pair:
        pair.order()
        assert not pair.consumer.wait_received("request").failed
        assert pair.same_bytes()


def ended_while_bytes_may_land(patience_s: float) -> bool:
    """A read fails with half of it in flight: whether vLLM gets the blocks back before that has landed.

    `patience_s` is how long to wait for it; the ferry looks every millisecond.
    """
    with engines() as pair:
        pair.world.script.append(HALF)
        pair.order()
        wait_until(lambda: pair.world.restless)
        early = bool(pair.consumer.ferry.wait(patience_s) and pair.consumer.ferry.take().received)
        if not early:
            pair.world.land_late()
            pair.world.advance(QUIET_S)
            assert pair.consumer.wait_received("request").failed == {"request"}
        return early


def test_blocks_come_back_only_when_nothing_can_land_in_them() -> None:
    """Law 2, W12 and section 6.4: FAILED is not quiet."""
    assert not ended_while_bytes_may_land(patience_s=0.2)


def test_blocks_that_come_back_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a failed request counts as over."""
    monkeypatch.setattr(Request, "over", property(lambda self: self.state.value != "pending"))
    assert ended_while_bytes_may_land(patience_s=20.0)


def test_the_next_try_begins_after_the_last_one_is_over() -> None:
    """Section 6.4: late bytes of the first try land before the second is posted, and the second is right."""
    with engines(retries=1) as pair:
        pair.world.script.append(HALF)
        pair.order()
        wait_until(lambda: pair.world.restless)
        assert len(pair.world.posted) == 1
        pair.world.land_late()
        pair.world.advance(QUIET_S)
        results = pair.consumer.wait_received("request")
        assert not results.failed
        assert results.reports[0].retries == 1
        assert pair.same_bytes()


def test_a_full_send_queue_is_no_failure_of_the_hand_off() -> None:
    """Section 2.5: posted again by the transport, within the request's time; no try is used up."""
    with engines() as pair:
        pair.world.script.extend([sq_full()] * 5)
        pair.order()
        while not pair.consumer.ferry.wait(0.01):
            pair.world.advance(0.01)
        results = pair.consumer.wait_received("request")
        assert not results.failed
        assert results.reports[0].retries == 0
        assert len(pair.world.posted) == 6
        assert pair.same_bytes()


def test_a_producer_that_restarts_is_read_again() -> None:
    """W16: the first life's engine is gone; its offer fails, and one of the next life arrives."""
    world = World()
    double = MoriDouble(world)

    def rank(name: str) -> EngineRank:
        transport = MoriTransport(
            TransportOptions(mori=MoriOptions(quiet_s=0.1)), io=double, clock=world.clock, pause=world.advance
        )
        return EngineRank(name, config=Config(read_retries=0, retry_interval_s=0.05), transport=transport)

    with rank("d") as consumer:
        with rank("p") as first:
            offer = first.grant(40, REMOTE)
            assert not consumer.read("one", offer, LOCAL).failed
        with rank("p") as second:
            pair = Engines(world, second, consumer)
            pair.order()
            assert not consumer.wait_received("request").failed
            assert pair.same_bytes()
    assert world.defects == []
