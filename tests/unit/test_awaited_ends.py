"""Questions for offers that are not made yet, and how each ends: many at once, given up, closed, refused.

Whatever happens to one, every request hears what becomes of its own, and nobody's blocks are kept in vain.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.ferry import inquiries as ferry_inquiries
from stateferry.ferry import loop as ferry_loop
from stateferry.ferry.answers import Answers
from stateferry.ferry.inquiries import Inquiries
from stateferry.ferry.inquiry import Place
from stateferry.ferry.keys import write_key
from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.session import (
    Answered,
    AwaitedOffers,
    Close,
    Expect,
    Grant,
    Ledger,
    Orders,
    VirtualClock,
    Withdrawal,
)
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.wire import Await, AwaitAnswer, Message, Promise, RankAddress, Refusal, Release, transfer_of

TABLES = ((1, 2, 3), (4,))
NOBODY = RankAddress("127.0.0.1", 9, Epoch(1))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 0.05)


def expect(request_id: str, address: RankAddress | None, name: str | None = None) -> Expect:
    assert address is not None
    return Expect(RequestId(request_id), Promise(transfer_of(name or request_id), address))


def wait_for(consumer: EngineRank, *expects: Expect) -> None:
    consumer.ferry.submit(Orders(expects=expects))


def answers(consumer: EngineRank, *request_ids: str) -> dict[str, Answered]:
    """What the consumer's ferry says of these requests, once it has said it of all."""
    found: dict[str, Answered] = {}

    def all_there() -> bool:
        found.update((a.request_id, a) for a in consumer.ferry.take().answered)
        return found.keys() >= set(request_ids)

    wait_until(all_there)
    return found


def grant(producer: EngineRank, name: str) -> None:
    offer = producer.offer(40, TABLES, f"prefill {name}")
    made = Grant(
        offer.request_id,
        transfer_of(name),
        40,
        offer.block_ids,
        offer.first_blocks,
        offer.prefix_digest,
        params=name.encode(),
    )
    producer.ferry.submit(Orders(grants=(made,)))


def inquiries_of(consumer: EngineRank) -> Inquiries:
    loop = consumer.ferry._loop
    assert loop is not None
    return loop._consumer.inquiries


def wait_until_told_to_wait(consumer: EngineRank, *request_ids: str) -> None:
    waiting = inquiries_of(consumer)._waiting
    wait_until(lambda: all(r in waiting and waiting[r].epoch for r in map(RequestId, request_ids)))


def check_freed_without_a_lease(producer: EngineRank, name: str) -> None:
    """The default lease is far longer than this waits."""
    assert f"prefill {name}" in producer.wait_sent(f"prefill {name}", 10.0).sent
    assert producer.ferry.counters.expired == 0


# -- the producer keeps nothing for those who have gone ------------------------------------------


def test_an_offer_that_comes_after_its_decode_leg_gave_up_is_not_kept_for_a_lease() -> None:
    with EngineRank("p") as producer, EngineRank("d", config=Config(offer_timeout_s=0.3)) as consumer:
        wait_for(consumer, expect("r", producer.address))
        assert "offer_timeout_s" in answers(consumer, "r")["r"].reason
        loop = producer.ferry._loop
        assert loop is not None
        wait_until(lambda: loop._producer.ledger.made(transfer_of("r")) is not None)
        grant(producer, "r")
        check_freed_without_a_lease(producer, "r")


def test_a_decode_engine_that_shuts_down_while_legs_wait_takes_their_questions_back() -> None:
    with EngineRank("p") as producer:
        loop = producer.ferry._loop
        assert loop is not None
        with EngineRank("d") as consumer:
            wait_for(consumer, expect("a", producer.address), expect("b", producer.address))
            wait_until_told_to_wait(consumer, "a", "b")
        wait_until(lambda: all(loop._producer.ledger.made(transfer_of(n)) is not None for n in "ab"))
        for name in "ab":
            grant(producer, name)
            check_freed_without_a_lease(producer, name)


def test_a_client_that_leaves_between_the_offer_and_its_opening_frees_the_blocks() -> None:
    """The ferry had answered, so it knew of no question any more; the offer was never opened."""
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        wait_for(consumer, expect("r", producer.address))
        wait_until_told_to_wait(consumer, "r")
        grant(producer, "r")
        assert answers(consumer, "r")["r"].params == b"r"
        consumer.ferry.submit(Orders(closes=(Close(RequestId("r")),)))
        check_freed_without_a_lease(producer, "r")
        assert not inquiries_of(consumer)._told


def test_a_client_that_leaves_before_the_producers_first_answer_frees_the_blocks() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        expected = expect("r", producer.address)
        consumer.ferry.submit(Orders(expects=(expected,), closes=(Close(RequestId("r")),)))
        loop = producer.ferry._loop
        assert loop is not None
        wait_until(lambda: loop._producer.ledger.made(transfer_of("r")) is not None)
        assert consumer.ferry.open_count == 0
        wait_until(
            lambda: not inquiries_of(consumer)._places["127.0.0.1", expected.promise.address.port].inquiries
        )
        grant(producer, "r")
        check_freed_without_a_lease(producer, "r")
        assert not consumer.ferry.take().answered


def test_an_offer_that_was_opened_is_given_back_once_and_by_its_hand_off() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        wait_for(consumer, expect("r", producer.address))
        wait_until_told_to_wait(consumer, "r")
        offer = replace(producer.offer(40, TABLES), transfer_id=transfer_of("r"))
        grant(producer, "r")
        answers(consumer, "r")
        results = consumer.read("r", offer, ((5, 6, 7), (8,)))
        assert not results.failed
        assert not inquiries_of(consumer)._told
        consumer.ferry.submit(Orders(closes=(Close(RequestId("r")),)))
        check_freed_without_a_lease(producer, "r")
        assert producer.ferry.counters.late_releases == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_0_gives_an_offer_back_for_all_ranks_of_its_engine(ranks: int) -> None:
    """A producer rank waits for as many releases as there are ranks to read from it."""
    with (
        EngineRank("p") as producer,
        EngineRank("d", layout=small_layout("d", tp_size=ranks)) as consumer,
    ):
        wait_for(consumer, expect("r", producer.address))
        wait_until_told_to_wait(consumer, "r")
        grant(producer, "r")
        answers(consumer, "r")
        consumer.ferry.submit(Orders(closes=(Close(RequestId("r")),)))
        check_freed_without_a_lease(producer, "r")


# -- one question's trouble is its own -----------------------------------------------------------


def test_two_requests_under_one_name_both_hear_what_becomes_of_it() -> None:
    """The scheduler half forgets a name after 8,192 others; the first request waited for ever."""
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        wait_for(consumer, expect("first", producer.address, "n"), expect("second", producer.address, "n"))
        assert "first" in answers(consumer, "second")["second"].reason
        wait_until_told_to_wait(consumer, "first")
        grant(producer, "n")
        assert answers(consumer, "first")["first"].params == b"n"
        wait_until(lambda: consumer.ferry.open_count == 0)


class Unwalked(dict):  # type: ignore[type-arg]
    """A dictionary over which nobody may walk."""

    def __iter__(self) -> Any:
        raise AssertionError("walked over all that wait")

    values = items = __iter__


class Scripted:
    """Inquiries on a clock that the test moves, over producers whose messages the test writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: float) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clock = VirtualClock()
        self.sent: list[Message] = []
        self.full = False
        monkeypatch.setattr(Place, "send", self._send)
        self.inquiries = Inquiries(
            self.context, zmq.Poller(), self.clock, Config(**config), small_layout("d"), None
        )

    def _send(self, message: Message) -> bool:
        if not self.full:
            self.sent.append(message)
        return not self.full

    def hear(self, message: Message) -> None:
        self.inquiries._handle(self.inquiries._places[NOBODY.host, NOBODY.port], message)

    def asked(self) -> list[TransferId]:
        asked = [m.transfer_id for m in self.sent if isinstance(m, Await)]
        self.sent.clear()
        return asked

    def reasons(self) -> dict[str, str]:
        return {a.request_id: a.reason for a in self.inquiries.take_answered()}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 2.0)
    made = Scripted(monkeypatch, handshake_timeout_s=10.0, offer_timeout_s=60.0)
    yield made
    made.inquiries.shut()
    made.context.destroy(linger=0)


def pending(name: str, epoch: int = 5) -> AwaitAnswer:
    return AwaitAnswer(epoch=Epoch(epoch), transfer_id=transfer_of(name))


def test_a_release_that_a_restarted_producer_refuses_gives_nobody_else_up(scripted: Scripted) -> None:
    scripted.inquiries.ask(expect("old", NOBODY))
    scripted.inquiries.tick(scripted.clock.now_s())
    scripted.hear(pending("old", epoch=5))
    scripted.inquiries.close(RequestId("old"))
    assert isinstance(scripted.sent[-1], Release)
    scripted.inquiries.ask(expect("new", NOBODY))
    scripted.inquiries.tick(scripted.clock.now_s())
    scripted.hear(Refusal(reason="this engine is in epoch 6, not 5: it was restarted", epoch=Epoch(6)))
    assert scripted.reasons() == {}
    scripted.hear(Refusal(reason="await is not known", epoch=Epoch(6)))
    assert "await is not known" in scripted.reasons()["new"], "one release, one refusal"


def test_a_producer_that_answers_one_of_many_questions_is_not_called_dead(scripted: Scripted) -> None:
    """Of 6,000 legs that waited for one engine 2,516 were computed, because "nobody listens there"."""
    for name in ("heard", "starved"):
        scripted.inquiries.ask(expect(name, NOBODY))
    for _ in range(29):
        scripted.inquiries.tick(scripted.clock.now_s())
        scripted.hear(pending("heard"))
        scripted.clock.advance(2.0)
    assert scripted.reasons() == {}
    scripted.clock.advance(2.0)
    scripted.inquiries.tick(scripted.clock.now_s())
    assert all("no offer within offer_timeout_s = 60 s" in said for said in scripted.reasons().values())


def test_a_producer_that_falls_silent_is_given_up_at_that_time_and_not_a_repetition_later(
    scripted: Scripted,
) -> None:
    end_s = scripted.clock.now_s() + 11.5
    scripted.inquiries.ask(expect("r", NOBODY))
    scripted.inquiries.tick(scripted.clock.now_s())
    scripted.clock.advance(1.5)
    scripted.hear(pending("r"))
    while (due_s := scripted.inquiries.next_deadline_s()) < end_s:
        scripted.clock.advance(due_s - scripted.clock.now_s())
        scripted.inquiries.tick(scripted.clock.now_s())
    assert (scripted.reasons(), due_s) == ({}, end_s)
    scripted.clock.advance(due_s - scripted.clock.now_s())
    scripted.inquiries.tick(scripted.clock.now_s())
    assert "has not answered for 10 s" in scripted.reasons()["r"]


def test_many_legs_are_asked_about_in_turns_each_as_often_as_any_other(scripted: Scripted) -> None:
    count = 3 * ferry_inquiries.QUESTIONS_PER_TURN - 5
    for number in range(count):
        scripted.inquiries.ask(expect(f"r{number}", NOBODY))
    asked = []
    for _ in range(3):
        scripted.inquiries.tick(scripted.clock.now_s())
        assert len(scripted.sent) <= ferry_inquiries.QUESTIONS_PER_TURN
        asked += scripted.asked()
    assert len(set(asked)) == len(asked) == count
    scripted.inquiries.tick(scripted.clock.now_s())
    assert scripted.asked() == []
    assert scripted.inquiries.next_deadline_s() == scripted.clock.now_s() + 2.0


def test_a_full_queue_is_tried_again_soon_where_somebody_takes_from_it(scripted: Scripted) -> None:
    scripted.inquiries.ask(expect("r", NOBODY))
    scripted.full = True
    scripted.inquiries.tick(scripted.clock.now_s())
    assert scripted.inquiries.next_deadline_s() == scripted.clock.now_s() + 2.0, "nobody was ever heard there"
    scripted.hear(pending("another"))
    scripted.clock.advance(2.0)
    scripted.hear(pending("another"))
    scripted.inquiries.tick(scripted.clock.now_s())
    assert scripted.inquiries.next_deadline_s() == scripted.clock.now_s() + ferry_inquiries.SOON_S


def test_a_request_that_ends_costs_nothing_of_those_that_wait(scripted: Scripted) -> None:
    """Every request that ends is closed, handed off or not; the ferry walked over all that waited."""

    scripted.inquiries.ask(expect("r", NOBODY))
    scripted.inquiries.ask(expect("s", NOBODY))
    places = scripted.inquiries._places
    for place in places.values():
        place.inquiries = Unwalked(place.inquiries)
    scripted.inquiries._places = Unwalked(places)
    scripted.inquiries._waiting = Unwalked(scripted.inquiries._waiting)
    scripted.inquiries.close(RequestId("another"))
    scripted.inquiries.close(RequestId("r"))
    scripted.hear(pending("r"))
    assert scripted.inquiries.open_count == 1
    scripted.inquiries._places, scripted.inquiries._waiting = places, {}
    assert not scripted.reasons()


# -- what outsiders can make it do ---------------------------------------------------------------


def test_addresses_that_nobody_asks_any_more_make_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client named 512 dead addresses: nobody else was asked until a minute after they were given up."""
    monkeypatch.setattr(ferry_inquiries, "MAX_PLACES", 2)
    with EngineRank("p") as producer, EngineRank("d", config=Config(handshake_timeout_s=1.5)) as consumer:
        dead = [RankAddress("127.0.0.1", port, Epoch(1)) for port in (9, 10)]
        wait_for(consumer, expect("a", dead[0]), expect("b", dead[1]), expect("c", producer.address))
        assert "2 prefill engines are asked already" in answers(consumer, "a", "b", "c")["c"].reason
        wait_for(consumer, expect("d", producer.address))
        wait_until_told_to_wait(consumer, "d")
        grant(producer, "d")
        assert answers(consumer, "d")["d"].params == b"d"
        assert len(inquiries_of(consumer)._by_socket) == 2


def test_no_question_is_answered_without_the_key(tmp_path: Path) -> None:
    key, other = tmp_path / "one.key", tmp_path / "two.key"
    write_key(key)
    write_key(other)
    ours = Config(auth_key_file=str(key))
    with EngineRank("p", config=ours) as producer, EngineRank("d", config=ours) as friend:
        grant(producer, "n")
        for file in ("", str(other)):
            config = Config(auth_key_file=file, handshake_timeout_s=0.5)
            with EngineRank("s", config=config) as stranger:
                wait_for(stranger, expect("r", producer.address, "n"))
                said = answers(stranger, "r")["r"]
                assert not said.params
                assert "auth_key_file" in said.reason
        wait_for(friend, expect("r", producer.address, "n"))
        assert answers(friend, "r")["r"].params == b"n"


def test_an_engine_with_a_key_tells_its_question_to_nobody_without(tmp_path: Path) -> None:
    """A name is what allows to claim: it is not for whoever listens at an address that a client wrote."""
    key = tmp_path / "one.key"
    write_key(key)
    with (
        EngineRank("p") as stranger,
        EngineRank("d", config=Config(auth_key_file=str(key), handshake_timeout_s=0.5)) as consumer,
    ):
        loop = stranger.ferry._loop
        assert loop is not None
        wait_for(consumer, expect("r", stranger.address))
        assert "another auth_key_file" in answers(consumer, "r")["r"].reason
        assert loop._producer.awaited.count == 0


@pytest.mark.parametrize("who", [Answers, Inquiries])
def test_a_message_that_meets_a_defect_does_not_end_the_ferry(
    who: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty in a row from one peer ended it for everybody."""
    monkeypatch.setattr(ferry_loop, "MAX_FAILED_TURNS", 1)

    def defect(*_: object) -> None:
        raise TypeError("a defect")

    with EngineRank("p") as producer, EngineRank("d") as consumer, caplog.at_level(logging.ERROR):
        good = producer.grant(40, TABLES, "good")
        with monkeypatch.context() as patch:
            patch.setattr(who, "_handle", defect)
            if who is Inquiries:
                wait_for(consumer, expect("r", producer.address))
                assert "defect" in answers(consumer, "r")["r"].reason
            else:
                consumer.open("r", producer.grant(40, TABLES, "bad"))
                wait_until(lambda: "could not take what" in caplog.text)
        assert consumer.ferry.alive
        assert not consumer.read("good", good, ((5, 6, 7), (8,))).failed


# -- an engine that is both ----------------------------------------------------------------------


def test_an_engine_that_is_both_can_wait_for_itself() -> None:
    with EngineRank("b") as both:
        wait_for(both, expect("r", both.address))
        wait_until_told_to_wait(both, "r")
        grant(both, "r")
        assert answers(both, "r")["r"].params == b"r"
        both.ferry.submit(Orders(closes=(Close(RequestId("r")),)))
        check_freed_without_a_lease(both, "r")


def test_a_question_goes_to_an_ipv6_address() -> None:
    with EngineRank("p", bind_host="::1") as producer, EngineRank("d") as consumer:
        assert producer.address is not None
        wait_for(consumer, expect("r", RankAddress("::1", producer.address.port, Epoch(1))))
        wait_until_told_to_wait(consumer, "r")
        producer.ferry.submit(Orders(withdrawals=(Withdrawal(transfer_of("r"), "will not be made"),)))
        assert answers(consumer, "r")["r"].reason == "the offer will not be made"


# -- what waits costs a producer nothing ---------------------------------------------------------


def test_a_ferrys_turn_does_not_walk_over_all_who_wait_and_all_that_is_kept() -> None:
    """With 6,000 decode legs waiting each turn of their producer's ferry took 4 ms."""
    ledger = Ledger(Epoch(1), 1, 15.0)
    awaited = AwaitedOffers(Epoch(1), ledger)
    awaited.ask(Await(transfer_id=transfer_of("w")), "d", 0.0)
    ledger.grant(Grant(RequestId("r"), transfer_of("n"), 20, (BlockIds([1]),), (0,), "0" * 32), 0.0)
    awaited.expire(0.0)
    ledger.expire(0.0)
    seen = awaited._askers, ledger._holdings
    awaited._askers, ledger._holdings = Unwalked(seen[0]), Unwalked(seen[1])  # type: ignore[assignment]
    for now_s in (0.1, 0.5, 0.9):
        awaited.expire(now_s)
    for now_s in (0.1, 5.0, 14.9):
        assert ledger.expire(now_s) == ([], [])
    awaited._askers, ledger._holdings = seen
    awaited.expire(16.0)
    assert awaited.count == 0
    assert [h.grant.request_id for h in ledger.expire(15.0)[0]] == ["r"]
