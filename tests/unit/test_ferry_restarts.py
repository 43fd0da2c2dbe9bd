"""A producer that dies or is restarted: how often that is told, and how long it is waited for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from stateferry.config import Config
from stateferry.ferry import answers as ferry_answers
from stateferry.ferry import links as ferry_links
from stateferry.ferry.answers import Answers
from stateferry.ferry.connection import Connection
from stateferry.ferry.link import Link, LinkState
from stateferry.session import VirtualClock
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.transport import TransportOptions
from stateferry.transport.faults import FaultsTransport
from stateferry.transport.memory import MemoryTransport
from stateferry.wire import Message, Refusal

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
MET, LOST = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
NOBODY, SOMEBODY = zmq.EVENT_CLOSED, zmq.EVENT_CONNECTED


def link_of(rank: EngineRank) -> Link:
    """The first link it made."""
    assert rank.ferry._loop is not None
    return next(iter(rank.ferry._loop._consumer._links._links.values()))


def look_until(consumer: EngineRank, clock: VirtualClock, connection: Connection) -> None:
    """Let time go by until the consumer has noticed what became of its connection."""

    def noticed() -> bool:
        clock.advance(0.001)
        return link_of(consumer).connection is connection

    clock.advance(ferry_links.LOOK_S)
    wait_until(noticed)


def live_through(consumer: EngineRank, clock: VirtualClock, seconds: int) -> None:
    """A second at a time; the ferry has looked around after each."""
    assert consumer.ferry._loop is not None
    links = consumer.ferry._loop._consumer._links
    for _ in range(seconds):
        clock.advance(1.0)
        wait_until(lambda: links._next_look_s > clock.now_s())


def epoch_refusals(producer: EngineRank) -> int:
    assert producer.ferry._loop is not None
    return producer.ferry._loop.counts().get(("stateferry_refusals", "epoch"), 0)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Refusal]:
    """Refusals that consumers have dealt with."""
    dealt_with: list[Refusal] = []
    right = Answers._handle

    def handle(answers: Answers, link: Link, message: Message) -> None:
        right(answers, link, message)
        if isinstance(message, Refusal):
            dealt_with.append(message)

    monkeypatch.setattr(Answers, "_handle", handle)
    return dealt_with


def warnings_of_pauses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "next try in" in r.getMessage()]


@pytest.mark.parametrize("down_s", [4, 6], ids=["while it is greeted", "after that was given up"])
def test_one_restart_of_an_idle_producer_is_one_failure_one_warning_and_one_refusal(
    caplog: pytest.LogCaptureFixture, refused: list[Refusal], down_s: int
) -> None:
    """Symptom: four warnings in one second, with pauses of up to 12 s, and four times `do not fit: epoch` on
    the new engine. The greeting was repeated while nobody was there, and every copy was refused."""
    clock = VirtualClock()
    with EngineRank("d", config=Config(handshake_timeout_s=5), clock=clock) as consumer:
        with EngineRank("p") as producer:
            offer = producer.grant(40, TABLES, "before")
            assert not consumer.read("before", offer, LOCAL).failed
            look_until(consumer, clock, Connection.UP)
        look_until(consumer, clock, Connection.REFUSED)
        wait_until(lambda: link_of(consumer).state is LinkState.GREETING)
        live_through(consumer, clock, down_s)
        with EngineRank("p", layout=small_layout("p"), port=offer.ranks[0].port) as producer:
            wait_until(lambda: len(refused) > 0)
            former = link_of(consumer)
            assert not consumer.read("after", producer.grant(40, TABLES, "after"), LOCAL).failed
            assert epoch_refusals(producer) == 1
        assert (former.state, former.failures) == (LinkState.FAILED, 1)
    assert len(warnings_of_pauses(caplog)) == 1


def test_greetings_that_pile_up_while_nobody_is_there_are_noticed(
    caplog: pytest.LogCaptureFixture, refused: list[Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ferry_links, "Connection", SimpleNamespace(UP=Connection.REFUSED))
    with pytest.raises(AssertionError):
        test_one_restart_of_an_idle_producer_is_one_failure_one_warning_and_one_refusal(caplog, refused, 4)


def questions_to_a_former_life(refused: list[Refusal]) -> Link:
    """The link over which three requests asked a producer that was restarted before they did."""
    clock = VirtualClock()
    with EngineRank("d", clock=clock) as consumer:
        with EngineRank("p") as producer:
            consumer.open("first", producer.grant(40, TABLES, "first"))
            offers = [producer.offer(40, TABLES, f"r{number}") for number in range(3)]
            wait_until(lambda: producer.ferry.counters.claimed == 1)
            look_until(consumer, clock, Connection.UP)
        look_until(consumer, clock, Connection.REFUSED)
        for number, offer in enumerate(offers):
            consumer.open(f"r{number}", offer)
        # The first one's answer may have died with the producer.
        wait_until(lambda: {"r0", "r1", "r2"} <= set(link_of(consumer).claims_sent_s))
        with EngineRank("p", layout=small_layout("p"), port=offers[0].ranks[0].port):

            def all_are_refused() -> bool:
                clock.advance(0.01)  # what was asked while nobody was there waits until somebody is
                return len(refused) >= len(offers)

            wait_until(all_are_refused)
            return link_of(consumer)


def test_every_question_to_a_former_life_is_refused_and_that_is_one_failure(
    caplog: pytest.LogCaptureFixture, refused: list[Refusal]
) -> None:
    link = questions_to_a_former_life(refused)
    assert (link.state, link.failures) == (LinkState.FAILED, 1)
    assert "it was restarted" in link.reason
    assert len(warnings_of_pauses(caplog)) == 1


def test_refusals_that_are_all_taken_for_failures_are_noticed(
    caplog: pytest.LogCaptureFixture, refused: list[Refusal], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = SimpleNamespace(GREETING=LinkState.GREETING, READY=LinkState.READY, FAILED=None)
    monkeypatch.setattr(ferry_answers, "LinkState", states)
    assert questions_to_a_former_life(refused).failures > 1
    assert len(warnings_of_pauses(caplog)) > 1


PATIENT = Config(testing=True, handshake_timeout_s=600, transfer_timeout_s=600, lease_s=600)


def read_from_the_dead(order: str, patience_s: float = 20.0) -> str:
    """Why a hand-off fails whose producer died. Raises TimeoutError if it is not told in `patience_s`."""
    with EngineRank("d", config=PATIENT) as consumer:
        with EngineRank("p", config=PATIENT) as producer:
            offer = producer.grant(40, TABLES, "r")
            assert not consumer.read("before", producer.grant(40, TABLES, "before"), LOCAL).failed
            if order == "claimed before":
                consumer.open("r", offer)
                wait_until(lambda: producer.ferry.counters.claimed == 2)
        if order != "claimed before":
            wait_until(lambda: link_of(consumer).state is LinkState.GREETING)
            consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        results = consumer.wait_received("r", patience_s)
        assert results.failed == {"r"}
        return results.reports[-1].reason


@pytest.mark.parametrize("order", ["claimed before", "claimed after"])
def test_a_read_from_a_producer_that_died_does_not_wait_for_an_answer_to_the_hand_shake(order: str) -> None:
    """Symptom: a decode leg waited for ten seconds, although its reason said that the process was gone."""
    assert "cannot be dialled" in read_from_the_dead(order)


def test_a_wait_for_the_dead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_links, "Connection", SimpleNamespace(UP=Connection.UP, REFUSED=None))
    with pytest.raises(TimeoutError):
        read_from_the_dead("claimed before", patience_s=1.0)


def wait_for_a_slow_producer(
    monkeypatch: pytest.MonkeyPatch, once_it_is_slow: Callable[[], None] = lambda: None
) -> None:
    """A hand-off waits for a second greeting's answer, which comes after four seconds."""
    clock, slow = VirtualClock(), [False]
    right = Link.greet

    def greet(link: Link, *more: Any) -> None:
        if not slow[0]:
            right(link, *more)

    monkeypatch.setattr(Link, "greet", greet)
    transport = FaultsTransport(TransportOptions(), MemoryTransport())
    with (
        EngineRank("p", config=PATIENT) as producer,
        EngineRank("d", config=PATIENT, clock=clock, transport=transport) as consumer,
    ):
        broken = {"nothing": True, "faults": [{"kind": "break", "reads": [1]}]}
        offer = replace(producer.grant(40, TABLES, "r"), tamper=broken)
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        look_until(consumer, clock, Connection.UP)
        link = link_of(consumer)
        slow[0] = True
        once_it_is_slow()
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: link.greeting_again or consumer.ferry.open_count == 0)
        live_through(consumer, clock, 4)
        assert link.greeting_again, f"given up: {link.reason}"
        slow[0] = False
        live_through(consumer, clock, 4)
        results = consumer.wait_received("r")
        assert not results.failed
        assert results.reports[-1].retries == 1


def test_a_producer_that_is_only_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_a_slow_producer(monkeypatch)


def test_a_slow_producer_that_is_taken_for_dead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_it_for_dead() -> None:
        dead_is_up = SimpleNamespace(UP=Connection.UP, REFUSED=Connection.UP)
        monkeypatch.setattr(ferry_links, "Connection", dead_is_up)

    # Not from the start: on a busy machine the first hand-shake would fail of it, now and then.
    with pytest.raises(AssertionError, match="given up"):
        wait_for_a_slow_producer(monkeypatch, take_it_for_dead)


@pytest.mark.parametrize(
    ("events", "connection"),
    [
        ([], Connection.DIALLED),
        ([NOBODY, SOMEBODY, LOST, NOBODY], Connection.DIALLED),
        ([NOBODY, SOMEBODY, MET], Connection.UP),
        ([MET, LOST], Connection.BROKEN),
        ([MET, LOST, NOBODY], Connection.REFUSED),
        ([MET, LOST, NOBODY, SOMEBODY], Connection.BROKEN),
        ([MET, LOST, NOBODY, SOMEBODY, LOST], Connection.BROKEN),
        ([MET, LOST, NOBODY, SOMEBODY, MET], Connection.UP),
        ([MET, LOST, SOMEBODY, LOST, NOBODY], Connection.REFUSED),
    ],
)
def test_only_who_was_there_and_takes_no_calls_any_more_is_gone(
    events: list[int], connection: Connection
) -> None:
    found = Connection.DIALLED
    for event in events:
        found = found.after(event)
    assert found is connection
