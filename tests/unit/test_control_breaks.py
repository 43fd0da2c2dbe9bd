"""A control connection that breaks while both engines live: nothing waits, or is held, because of it."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from tests.unit.control_wire import ControlWire, Fate
from tests.unit.test_awaited_ends import answers, expect, grant, wait_for

from stateferry.config import Config, Verify
from stateferry.ferry import inquiries as ferry_inquiries
from stateferry.ferry import links as ferry_links
from stateferry.ferry.inquiry import Place
from stateferry.ferry.link import Link
from stateferry.ferry.links import Links
from stateferry.ids import RequestId
from stateferry.session import Close, Ledger, Orders, VirtualClock
from stateferry.testing.peers import EngineRank, wait_until
from stateferry.wire import (
    Await,
    AwaitAnswer,
    Claim,
    ClaimAnswer,
    DigestAnswer,
    DigestRequest,
    Hello,
    Message,
    Release,
    ReleaseAnswer,
    Welcome,
)

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
ELSEWHERE = ((9, 10, 11), (12,))
PATIENT = Config(verify=Verify.ALL, lease_s=600, handshake_timeout_s=600, transfer_timeout_s=600)
"""Nothing ends because a time is over."""
MESSAGES = [Hello, Welcome, Claim, ClaimAnswer, DigestRequest, DigestAnswer, Release, ReleaseAnswer]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_links, "LOOK_S", 0.005)


class Once:
    """A judge that does something to the first message of a kind, and lets all others pass."""

    def __init__(self, kind: type[Message], fate: Fate = Fate.LOST) -> None:
        self._kind = kind
        self._fate = fate
        self.happened = False

    def __call__(self, message: Message) -> Fate:
        if self.happened or not isinstance(message, self._kind):
            return Fate.PASS
        self.happened = True
        return self._fate


def hand_off_twice(kind: type[Message], fate: Fate = Fate.LOST, patience_s: float = 20.0) -> None:
    """Two hand-offs, the first one's connection broken at a message. Raises TimeoutError, AssertionError."""
    once = Once(kind, fate)
    with (
        EngineRank("p", config=PATIENT) as producer,
        ControlWire(producer.address.port if producer.address else 0, once) as wire,
        EngineRank("d", config=PATIENT) as consumer,
    ):
        producer.write_tags(1)
        for name in ("first", "second"):
            offer = wire.through(producer.grant(40, TABLES, name))
            results = consumer.read(name, offer, LOCAL, patience_s)
            assert not results.failed, results.reports[-1].reason
            assert consumer.page(0, LOCAL[0][2]) == producer.page(0, TABLES[0][2])
            producer.wait_sent(name, patience_s)
        assert once.happened
        assert producer.ferry.counters.claimed == producer.ferry.counters.released == 2
        wait_until(lambda: wire.connections == 2)


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.LAST], ids=lambda fate: fate.value)
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_connection_that_breaks_at_any_message_costs_nothing_but_a_moment(
    kind: type[Message], fate: Fate
) -> None:
    """Symptom: a request waited for its whole lease, or a minute, and was computed anew; or the producer kept
    its blocks for the lease; and where digests are compared, so did every request after it."""
    hand_off_twice(kind, fate)


@pytest.mark.parametrize("kind", [Claim, ClaimAnswer, DigestRequest, DigestAnswer, Release])
def test_a_question_that_is_not_asked_again_is_noticed(
    kind: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Link.ask_again
    monkeypatch.setattr(Link, "ask_again", lambda link, now_s, came_back: right(link, now_s, False))
    with pytest.raises(TimeoutError):
        hand_off_twice(kind, patience_s=0.5)


def test_a_consumer_that_does_not_say_again_who_it_is_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "_is_a_stranger", lambda links, link: False)
    with pytest.raises(TimeoutError):
        hand_off_twice(DigestRequest, patience_s=0.5)


def test_a_producer_that_refuses_whoever_asks_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ledger._claim

    def once_only(ledger: Ledger, claim: Claim, now_s: float) -> ClaimAnswer:
        holding = ledger._holdings.get(claim.transfer_id)
        if holding is not None and claim.tp_rank in holding.claimed_ranks:
            return ledger._refuse(claim, "has claimed it before")
        return right(ledger, claim, now_s)

    monkeypatch.setattr(Ledger, "_claim", once_only)
    with pytest.raises(AssertionError, match="has claimed it before"):
        hand_off_twice(ClaimAnswer)


def test_a_claim_that_waits_for_its_grant_is_answered_over_the_next_connection() -> None:
    cut = [False]

    def judge(message: Message) -> Fate:
        return Fate.LOST if cut and cut.pop() else Fate.PASS

    with (
        EngineRank("p", config=PATIENT) as producer,
        ControlWire(producer.address.port if producer.address else 0, judge) as wire,
        EngineRank("d", config=PATIENT) as consumer,
    ):
        early = producer.offer(40, TABLES, "early")
        consumer.open("early", wire.through(early))
        ledger = producer.ferry._loop._producer.ledger  # type: ignore[union-attr]
        wait_until(lambda: ledger.parked_count == 1)
        parked = next(iter(ledger._parked.values()))
        before = parked[0].sender
        cut[:] = [True]
        consumer.open("other", wire.through(producer.grant(40, TABLES, "other")))
        wait_until(lambda: parked[0].sender != before)
        producer.submit_grant(early)
        consumer.load("early", wire.through(early), LOCAL)
        assert not consumer.wait_received("early").failed


def test_digests_are_made_for_hand_offs_after_a_break_while_another_one_is_open() -> None:
    """Symptom: as long as any request was open over the link, every hand-off failed after a minute."""
    once = Once(ReleaseAnswer)
    with (
        EngineRank("p", config=PATIENT) as producer,
        ControlWire(producer.address.port if producer.address else 0, once) as wire,
        EngineRank("d", config=PATIENT) as consumer,
    ):
        producer.write_tags(1)
        consumer.open("queued", wire.through(producer.grant(40, TABLES, "queued")))
        for name in ("one", "two", "three"):
            offer = wire.through(producer.grant(40, TABLES, name))
            assert not consumer.read(name, offer, ELSEWHERE).failed
        assert (once.happened, wire.connections) == (True, 2)


def claim_that_is_answered_late(patience_s: float = 20.0) -> None:
    """Its first copy was lost. The lease counts from that one: so it is renewed as soon as it is held."""
    clock = VirtualClock()
    once = Once(Claim)
    config = Config(handshake_timeout_s=600)
    with (
        EngineRank("p", config=config) as producer,
        ControlWire(producer.address.port if producer.address else 0, once) as wire,
        EngineRank("d", config=config, clock=clock) as consumer,
    ):
        consumer.open("r", wire.through(producer.grant(40, TABLES)))
        wait_until(lambda: once.happened)
        wire.mends = False
        clock.advance(0.9 * config.lease_s)
        wire.mends = True

        def happens(what: Callable[[], bool]) -> Callable[[], bool]:
            def look() -> bool:
                clock.advance(0.0001)
                return what()

            return look

        counters = producer.ferry.counters
        wait_until(happens(lambda: counters.claimed == 1))
        wait_until(happens(lambda: counters.renewed == 1), patience_s)


def test_a_lease_counts_from_when_its_claim_was_sent_first() -> None:
    claim_that_is_answered_late()


def test_a_lease_that_counts_from_when_its_claim_was_repeated_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Link.ask_again

    def count_anew(link: Link, now_s: float, came_back: bool) -> None:
        right(link, now_s, came_back)
        if came_back:
            link.claims_sent_s = dict.fromkeys(link.claims_sent_s, now_s)

    monkeypatch.setattr(Link, "ask_again", count_anew)
    with pytest.raises(TimeoutError):
        claim_that_is_answered_late(patience_s=0.5)


def leave_before_it_opens(kind: type[Message], fate: Fate) -> None:
    """With both legs sent at once: the offer came, its request went. Raises TimeoutError if its blocks are
    kept for a lease."""
    once = Once(kind, fate)
    with (
        EngineRank("p", config=PATIENT) as producer,
        ControlWire(producer.address.port if producer.address else 0, once) as wire,
        EngineRank("d", config=PATIENT) as consumer,
    ):
        assert producer.address is not None
        wait_for(consumer, expect("r", replace(producer.address, port=wire.port)))
        wait_until(lambda: producer.ferry._loop._producer.awaited.count == 1)  # type: ignore[union-attr]
        grant(producer, "r")
        assert answers(consumer, "r")["r"].params == b"r"
        consumer.ferry.submit(Orders(closes=(Close(RequestId("r")),)))
        assert producer.wait_sent("prefill r", 2.0).sent == {"prefill r"}
        assert once.happened or fate is Fate.PASS
        consumer.wait_idle()
        inquiries = consumer.ferry._loop._consumer.inquiries  # type: ignore[union-attr]
        wait_until(lambda: inquiries._release_again_at_s == float("inf"))


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.LAST], ids=lambda fate: fate.value)
@pytest.mark.parametrize("kind", [Await, AwaitAnswer, Release])
def test_an_offer_whose_request_left_is_given_back_whatever_the_connection_breaks_at(
    kind: type[Message], fate: Fate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a release was lost, and the blocks were kept for a lease."""
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 0.05)
    leave_before_it_opens(kind, fate)


def test_a_release_that_is_sent_once_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 0.05)
    monkeypatch.setattr(Place, "release_again", lambda place, now_s: None)
    with pytest.raises(TimeoutError):
        leave_before_it_opens(Release, Fate.LOST)


def test_a_release_that_nobody_answers_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 0.01)
    clock, config = VirtualClock(), Config(lease_s=15)
    with EngineRank("d", config=config, clock=clock) as consumer:
        with EngineRank("p") as producer:
            wait_for(consumer, expect("r", producer.address))
            inquiries = consumer.ferry._loop._consumer.inquiries  # type: ignore[union-attr]
            wait_until(lambda: all(i.epoch for i in inquiries._waiting.values()) and bool(inquiries._waiting))
        consumer.close("r")
        (place,) = inquiries._places.values()
        wait_until(lambda: len(place.unheard) == 1)
        clock.advance(0.9 * config.lease_s)
        assert len(place.unheard) == 1
        clock.advance(0.2 * config.lease_s)
        wait_until(lambda: inquiries._release_again_at_s == float("inf"))
        assert not place.unheard
