"""A ferry thread that meets a defect strands nobody: neither what was open nor what comes after."""

import logging
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.ferry.consumer import ConsumerService
from stateferry.ferry.desk import Desk
from stateferry.ferry.loop import MAX_FAILED_TURNS, Loop
from stateferry.ferry.part import Part
from stateferry.ferry.producer import ProducerService
from stateferry.ids import RequestId
from stateferry.session import Close, GroupLoad, Load, Open, Orders, Outcome, VirtualClock
from stateferry.testing.peers import EngineRank, wait_until
from stateferry.transport import TransportOptions
from stateferry.transport.base import Peer
from stateferry.transport.faults import FaultsTransport
from stateferry.transport.memory import MemoryTransport
from stateferry.wire import Offer

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))


class Saboteur:
    """Makes one ferry's turns fail from `strike` on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = ZeroDivisionError
    ) -> None:
        self.victim: Desk | None = None
        self.left = 0
        turn = Loop._turn

        def broken(loop: Loop) -> None:
            if loop.desk is self.victim and self.left > 0:
                self.left -= 1
                raise error("a defect")
            turn(loop)

        monkeypatch.setattr(Loop, "_turn", broken)

    def strike(self, rank: EngineRank, turns: int = 1 << 30) -> None:
        self.left, self.victim = turns, rank.ferry._desk


def faulty(*rules: dict[str, Any]) -> FaultsTransport:
    return FaultsTransport(TransportOptions(faults={"rules": list(rules)}), MemoryTransport())


def loads_of(offer: Offer) -> tuple[GroupLoad, ...]:
    """Everything that it offers, into `LOCAL`."""
    return tuple(
        GroupLoad(index, offer.first_blocks[index], BlockIds(mine), offer.block_ids[index])
        for index, mine in enumerate(LOCAL)
    )


def fill_inbox(rank: EngineRank) -> None:
    """Wake the thread, so that it takes its next turn."""
    rank.close("nobody")


def test_a_passing_error_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    saboteur = Saboteur(monkeypatch)
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        saboteur.strike(consumer, MAX_FAILED_TURNS - 1)
        assert not consumer.read("r", producer.grant(40, TABLES), LOCAL).failed
        wait_until(lambda: saboteur.left == 0)
        assert consumer.ferry.alive


def broken_for(monkeypatch: pytest.MonkeyPatch, service: type, method: str, *victims: str) -> None:
    """Make that method of that service fail for these requests' orders, before it does anything."""
    carry_out = getattr(service, method)

    def broken(self: Any, order: Any, **rest: Any) -> None:
        if order.request_id in victims:
            raise ZeroDivisionError("a defect")
        carry_out(self, order, **rest)

    monkeypatch.setattr(service, method, broken)


def test_an_order_that_meets_a_defect_is_answered_and_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for method in ("open", "load", "close_handoff"):
        broken_for(monkeypatch, ConsumerService, method, f"bad {method}")
    broken_for(monkeypatch, ProducerService, "grant", "bad grant")
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        producer.submit_grant(producer.offer(40, TABLES, "bad grant"))
        assert producer.wait_sent("bad grant").sent == {"bad grant"}
        offers = {name: producer.grant(40, TABLES, name) for name in ("bad open", "bad load", "good")}
        loads = tuple(Load(RequestId(name), 0, loads_of(offers["good"])) for name in ("bad load", "good"))
        consumer.ferry.submit(
            Orders(
                opens=tuple(Open(RequestId(name), offer) for name, offer in offers.items()),
                loads=loads,
                closes=(Close(RequestId("bad close_handoff")), Close(RequestId("bad open"))),
            )
        )
        results = consumer.wait_received("good")
        assert (results.received, results.failed) == ({"bad load", "good"}, {"bad load"})
        assert results.lost == {"bad open"}
        assert "a defect" in next(r.reason for r in results.reports if r.request_id == "bad load")
        consumer.close("bad load")
        assert producer.wait_sent("bad load").sent >= {"bad load"}
        wait_until(lambda: consumer.ferry.open_count == 0)
        assert consumer.ferry.alive


def test_blocks_of_a_grant_that_met_a_defect_too_late_are_kept_for_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Any, transfer_id: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(ProducerService, "_tell", broken)
    clock = VirtualClock()
    with EngineRank("p", clock=clock) as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        assert not producer.ferry.take().sent, "a consumer has claimed them"
        clock.advance(1.1 * producer.config.lease_s)
        assert producer.wait_sent("prefill").sent == {"prefill"}


def test_a_defect_that_one_read_meets_in_every_turn_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    met = []

    def broken(part: Part, *_: Any) -> bool:
        met.append(part)
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Part, "advance", broken)
    config = Config(testing=True)
    with (
        EngineRank("p") as producer,
        EngineRank("d", transport=faulty({"kind": "never"}), config=config) as consumer,
    ):
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: len(met) >= 5)
        assert not consumer.ferry.take().received, "its blocks may be written to"
    assert sum("could not go on" in record.message for record in caplog.records) == 1


class SecondConnectMeetsADefect(MemoryTransport):
    connects = 0

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        self.connects += 1
        if self.connects == 2:
            raise ZeroDivisionError("a defect")
        return super().connect(registration, timeout_s)


def test_a_defect_while_a_link_connects_again_does_not_leave_it_ready_without_a_connection() -> None:
    """Symptom: every later hand-off over it met a defect, too."""
    transport = FaultsTransport(inner=SecondConnectMeetsADefect())
    config = Config(testing=True)
    with EngineRank("p") as producer, EngineRank("d", transport=transport, config=config) as consumer:
        broken = {"faults": [{"kind": "break", "reads": [1]}]}
        offer = replace(producer.grant(40, TABLES, "first"), tamper=broken)
        assert consumer.read("first", offer, LOCAL).failed == {"first"}
        assert not consumer.read("second", producer.grant(40, TABLES, "other"), LOCAL).failed
    assert transport.inner.connects == 3  # type: ignore[attr-defined]


def test_results_are_given_to_vllm_although_they_cannot_be_logged() -> None:
    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise ZeroDivisionError("an operator's filter")

    broken, logger = Broken(), logging.getLogger("stateferry.ferry.handoff_log")
    logger.addFilter(broken)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with EngineRank("p") as producer, EngineRank("d") as consumer:
            assert not consumer.read("r", producer.grant(40, TABLES), LOCAL).failed
    finally:
        logger.removeFilter(broken)
        logger.setLevel(level)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_everything_open_on_the_consumer_is_reported_failed(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    saboteur = Saboteur(monkeypatch, error)
    config = Config(testing=True)
    with (
        EngineRank("p") as producer,
        EngineRank("d", transport=faulty({"kind": "hang"}), config=config) as consumer,
    ):
        consumer.open("queued", producer.grant(40, TABLES, "q"))
        reading = producer.grant(40, TABLES, "r")
        consumer.open("reading", reading)
        consumer.load("reading", reading, LOCAL)
        wait_until(lambda: producer.ferry.counters.claimed == 2)
        saboteur.strike(consumer)
        fill_inbox(consumer)
        results = consumer.wait_received("reading")
        assert results.failed == {"reading"}
        assert results.lost == {"queued"}
        assert "cannot go on" in results.reports[-1].reason
        assert not consumer.ferry.alive
        # What comes later is refused, and says why.
        late = producer.offer(40, TABLES)
        consumer.open("late", late)
        assert consumer.wait_lost("late").lost == {"late"}
        consumer.load("late", late, LOCAL)
        results = consumer.wait_received("late")
        assert results.failed == {"late"}
        assert error.__name__ in results.reports[-1].reason
        consumer.submit_grant(consumer.offer(40, TABLES, "own"))
        assert consumer.wait_sent("own").sent == {"own"}
        wait_until(lambda: consumer.ferry.open_count == 0)


def test_a_read_that_may_still_write_is_not_reported_by_a_dying_ferry_before_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saboteur = Saboteur(monkeypatch)
    late = {"kind": "land_late", "polls": 10}
    config = Config(testing=True)
    with (
        EngineRank("p") as producer,
        EngineRank("d", transport=faulty(late), config=config) as consumer,
    ):
        producer.write_tags(1)
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        consumer.load("r", offer, LOCAL)
        saboteur.strike(consumer, turns=0)
        wait_until(lambda: consumer.page(1, 8) != bytes(352))  # posted: poisoned at least
        saboteur.strike(consumer)
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        before = consumer.memory.bytes.copy()
        assert not consumer.ferry.wait(0.3)
        assert (before == consumer.memory.bytes).all()


def test_a_read_that_never_becomes_quiet_stays_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    saboteur = Saboteur(monkeypatch)
    clock = VirtualClock()
    with (
        EngineRank("p") as producer,
        EngineRank("d", transport=faulty({"kind": "never"}), clock=clock) as consumer,
    ):
        consumer.open("other", producer.grant(40, TABLES, "o"))
        offer = producer.grant(40, TABLES, "r")
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 2)
        consumer.load("r", offer, LOCAL)
        saboteur.strike(consumer, 0)
        consumer.close("other")
        wait_until(lambda: producer.ferry.counters.released == 1)
        saboteur.strike(consumer)
        fill_inbox(consumer)
        wait_until(lambda: not consumer.ferry.alive)
        clock.advance(2 * consumer.config.transfer_timeout_s)
        wait_until(lambda: consumer.ferry.quarantined_count == 1)
        assert not consumer.ferry.take().received
        assert consumer.ferry.open_count == 1


def test_blocks_of_a_dead_producer_ferry_stay_until_its_readers_have_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saboteur = Saboteur(monkeypatch)
    theirs, ours = VirtualClock(), VirtualClock()
    with EngineRank("p", clock=theirs) as producer, EngineRank("d", clock=ours) as consumer:
        consumer.open("r", producer.grant(40, TABLES))
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        saboteur.strike(producer)
        fill_inbox(producer)
        wait_until(lambda: not producer.ferry.alive)
        theirs.advance(0.9 * producer.config.lease_s)
        assert not producer.ferry.wait(0.2)
        theirs.advance(0.2 * producer.config.lease_s)
        assert producer.wait_sent("prefill").sent == {"prefill"}
        ours.advance(1.1 * producer.config.lease_s)
        assert consumer.wait_lost("r").lost == {"r"}


def test_orders_that_come_after_the_stop_are_refused() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        consumer.ferry.stop()
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        results = consumer.ferry.take()
        assert (results.lost, results.failed) == ({"r"}, {"r"})
        assert {r.outcome for r in results.reports} == {Outcome.FAILED}
        assert "was stopped" in results.reports[0].reason
        assert threading.active_count() >= 1
