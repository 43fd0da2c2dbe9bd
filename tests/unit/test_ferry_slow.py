"""Engines that are only slow: threads that get no turn for seconds cost no hand-off that would succeed."""

import threading
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import pytest
import zmq
from msgspec.structs import replace
from tests.unit.control_wire import ControlWire, Fate
from tests.unit.test_awaited_ends import answers, expect, grant, wait_for
from tests.unit.test_ferry_lost_peers import LOCAL, TABLES, link_of, peers
from tests.unit.test_ferry_silence import PATIENT, wired

from stateferry.config import Config
from stateferry.ferry import connection as ferry_connection
from stateferry.ferry import links as ferry_links
from stateferry.ferry.consumer import ConsumerService
from stateferry.ferry.link import LinkState
from stateferry.ferry.links import Links
from stateferry.ferry.loop import Loop
from stateferry.ferry.producer import ProducerService
from stateferry.session import VirtualClock
from stateferry.testing.peers import EngineRank, wait_until
from stateferry.wire import Message, Refusal, Renewal

LEASE_S = 15.0


@pytest.fixture(autouse=True)
def looks_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_links, "LOOK_S", 0.0)


class Fates:
    """A judge of one kind of message: what becomes of the first, of the second, and so on; the rest pass."""

    def __init__(self, kind: type[Message], fates: Iterable[Fate]) -> None:
        self._kind = kind
        self._fates = iter(fates)
        self.judged = 0

    def __call__(self, message: Message) -> Fate:
        if not isinstance(message, self._kind):
            return Fate.PASS
        self.judged += 1
        return next(self._fates, Fate.PASS)


def break_shortly_before_a_lease_ends(patience_s: float = 20.0) -> None:
    """A connection takes two renewals along and is back long before the lease ends, but the third would be
    due only when it does."""
    judge, clock = Fates(Renewal, [Fate.GONE, Fate.LOST]), VirtualClock()
    with (
        EngineRank("p") as producer,
        ControlWire(producer.address.port if producer.address else 0, judge) as wire,
        EngineRank("d", clock=clock) as consumer,
    ):
        offer = wire.through(producer.grant(40, TABLES, "r"))
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 1 and not link_of(consumer).claims_sent_s)
        (handoff,) = consumer.ferry._loop._consumer.open_here.handoffs.values()  # type: ignore[union-attr]
        clock.advance(LEASE_S / 3)
        wait_until(lambda: judge.judged == 1)
        clock.advance(LEASE_S / 3)
        wait_until(lambda: judge.judged >= 2)
        # On a clock that stands still the third one is never due.
        wait_until(lambda: handoff.leases[0].ends_s > clock.now_s() + LEASE_S - 1, patience_s)
        consumer.load("r", offer, LOCAL)
        assert not consumer.wait_received("r").failed


def test_a_lease_is_renewed_as_soon_as_a_connection_is_back() -> None:
    """Symptom: a producer that hung for eleven seconds, fewer than a lease has, cost its hand-offs."""
    break_shortly_before_a_lease_ends()


def test_renewals_that_wait_for_their_turn_after_a_break_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Links._look_at_connections

    def look(links: Links, now_s: float) -> None:
        due = {address: link.next_renewal_s for address, link in links._links.items()}
        right(links, now_s)
        for address, due_s in due.items():
            links._links[address].next_renewal_s = due_s

    monkeypatch.setattr(Links, "_look_at_connections", look)
    with pytest.raises(TimeoutError):
        break_shortly_before_a_lease_ends(0.6)


def starve_once(
    rank: EngineRank,
    clock: VirtualClock,
    look: Callable[[Loop], "zmq.Socket[bytes] | None"],
) -> threading.Event:
    """Once `look` names a socket, on the ferry's thread and after it has read what came: let it get no turn
    for longer than a lease, while something arrives there. The event is set when that begins."""
    loop = rank.ferry._loop
    assert loop is not None
    right, begun = loop._take_orders, threading.Event()

    def take_orders() -> None:
        right()
        if (socket := look(loop)) is not None:
            loop._take_orders = right  # type: ignore[method-assign]
            begun.set()
            assert socket.poll(20_000)
            clock.advance(LEASE_S + 1)

    loop._take_orders = take_orders  # type: ignore[method-assign]
    return begun


def starve_while_greeted() -> None:
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:

        def greeted(loop: Loop) -> "zmq.Socket[bytes] | None":
            links = loop._consumer._links._links.values()
            return next((link.socket for link in links if link.waits_for_welcome), None)

        starve_once(consumer, clock, greeted)
        results = consumer.read("r", producer.grant(40, TABLES), LOCAL)
        assert not results.failed, results.reports[-1].reason


def starve_while_asked() -> None:
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:

        def asked(loop: Loop) -> "zmq.Socket[bytes] | None":
            inquiries = loop._consumer.inquiries
            inquiries.tick(clock.now_s())
            return next((place.socket for place in inquiries._places.values()), None)

        starve_once(consumer, clock, asked)
        wait_for(consumer, expect("r", producer.address))
        wait_until(lambda: producer.ferry._loop._producer.awaited.count == 1)  # type: ignore[union-attr]
        grant(producer, "r")
        assert not answers(consumer, "r")["r"].reason


def starve_while_claimed() -> None:
    clock = VirtualClock()
    with EngineRank("p", clock=clock) as producer, EngineRank("d") as consumer:
        assert not consumer.read("met", producer.grant(40, TABLES, "met"), LOCAL).failed
        producer.wait_sent("met")

        def granted(loop: Loop) -> "zmq.Socket[bytes] | None":
            return loop._listener if loop._producer.ledger.open_count else None

        starved = starve_once(producer, clock, granted)
        offer = producer.grant(40, TABLES, "r")
        assert starved.wait(20)
        results = consumer.read("r", offer, LOCAL)
        assert not results.failed, results.reports[-1].reason


STARVED = (starve_while_greeted, starve_while_asked, starve_while_claimed)


@pytest.mark.parametrize("starve", STARVED)
def test_a_ferry_thread_that_got_no_turn_reads_what_came_before_it_gives_up(
    starve: Callable[[], None],
) -> None:
    """Symptom: a crowded machine cost hand-offs whose answers had arrived in time."""
    starve()


@pytest.mark.parametrize("starve", STARVED)
def test_a_ferry_thread_that_judges_before_it_reads_is_noticed(
    starve: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in (ConsumerService, ProducerService):

        def tick(self: Any, heard_s: float, right: Callable[[Any, float], None] = service.tick) -> None:
            right(self, self._clock.now_s())

        monkeypatch.setattr(service, "tick", tick)
    with pytest.raises(AssertionError):
        starve()


def test_a_ferry_thread_that_gets_no_turn_is_not_taken_for_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patient = {zmq.HEARTBEAT_IVL: 50, zmq.HEARTBEAT_TIMEOUT: 60_000}
    monkeypatch.setattr(ferry_connection, "SIGN_OF_LIFE", patient)
    goes_on = threading.Event()
    with wired(PATIENT) as (producer, wire, consumer):
        service = producer.ferry._loop._producer  # type: ignore[union-attr]
        right, waits = service.tick, threading.Event()

        def tick(heard_s: float) -> None:
            waits.set()
            goes_on.wait(60)
            right(heard_s)

        service.tick = tick  # type: ignore[method-assign]
        producer.grant(40, TABLES, "wakes it")
        try:
            assert waits.wait(20)
            before = wire.pongs
            wait_until(lambda: wire.pongs >= before + 5)
            assert not goes_on.is_set()
            assert peers(consumer) == {"ready": 1}
        finally:
            goes_on.set()


def ask_a_place_where_a_former_life_is_silent() -> str:
    """Of two lives of an engine at one address only the first is silent. What a leg that awaits an offer is
    told; empty: the offer."""
    judge = Fates(Refusal, repeat(Fate.LOST))
    with (
        EngineRank("p") as former,
        EngineRank("p") as latter,
        ControlWire(former.address.port if former.address else 0, judge) as wire,
        EngineRank("d", config=Config(handshake_timeout_s=0.3)) as consumer,
    ):
        assert latter.address is not None
        assert not consumer.read("r", wire.through(former.grant(40, TABLES)), LOCAL).failed
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"silent": 1})
        consumer.ferry._loop._consumer._links._config = Config()  # type: ignore[union-attr]
        wire.port_behind, wire.hangs = latter.address.port, False
        assert not consumer.read("s", wire.through(latter.grant(40, TABLES)), LOCAL).failed
        wait_until(lambda: peers(consumer) == {"silent": 1, "ready": 1})
        wait_for(consumer, expect("t", replace(latter.address, port=wire.port)))
        grant(latter, "t")
        return answers(consumer, "t")["t"].reason


@pytest.fixture
def quick_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {option: value // 100 for option, value in ferry_connection.SIGN_OF_LIFE.items()}
    monkeypatch.setattr(ferry_connection, "SIGN_OF_LIFE", quick)


@pytest.mark.usefixtures("quick_signs_of_life")
def test_an_engine_that_was_restarted_is_asked_for_offers_though_its_former_life_is_silent() -> None:
    """Symptom: legs for it were told that it hangs."""
    assert not ask_a_place_where_a_former_life_is_silent()


@pytest.mark.usefixtures("quick_signs_of_life")
def test_a_silence_that_is_taken_for_that_of_the_latter_life_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why_silent(links: Links, host: str, port: int) -> str:
        silent = (link for link in links._links.values() if link.state is LinkState.SILENT)
        return next((link.reason for link in silent if link.address.port == port), "")

    monkeypatch.setattr(Links, "why_silent", why_silent)
    assert "has not answered since" in ask_a_place_where_a_former_life_is_silent()
