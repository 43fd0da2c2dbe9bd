"""Asking for an offer that is not made yet, over real sockets: lost questions, restarts, strangers."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from stateferry.config import Config
from stateferry.ferry import inquiries as ferry_inquiries
from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.session import Answered, AwaitedOffers, Close, Expect, Grant, Orders, Withdrawal
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.wire import (
    Await,
    AwaitAnswer,
    Message,
    Promise,
    RankAddress,
    Refusal,
    decode_message,
    encode_message,
    transfer_of,
)

NAME = transfer_of("a name")
TABLES = ((1, 2, 3), (4,))
NOBODY = RankAddress("127.0.0.1", 9, Epoch(1))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 0.05)


def expect(consumer: EngineRank, address: RankAddress | None, transfer_id: TransferId = NAME) -> None:
    assert address is not None
    order = Expect(RequestId("r"), Promise(transfer_id, address))
    consumer.ferry.submit(Orders(expects=(order,)))


def answer(consumer: EngineRank) -> Answered:
    """What the consumer's ferry says of request `r`, once it does."""
    found: list[Answered] = []
    wait_until(lambda: bool(found.extend(consumer.ferry.take().answered) or found))
    assert [a.request_id for a in found] == ["r"]
    return found[0]


def grant(producer: EngineRank, params: bytes = b"params") -> None:
    offer = producer.offer(40, TABLES)
    made = Grant(
        offer.request_id, NAME, 40, offer.block_ids, offer.first_blocks, offer.prefix_digest, params=params
    )
    producer.ferry.submit(Orders(grants=(made,)))


def awaited(producer: EngineRank) -> int:
    loop = producer.ferry._loop
    assert loop is not None
    return loop._producer.awaited.count


def test_the_offer_comes_when_it_is_made() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        expect(consumer, producer.address)
        wait_until(lambda: awaited(producer) == 1)
        assert consumer.ferry.open_count == 1
        grant(producer)
        assert answer(consumer) == Answered(RequestId("r"), b"params")
        wait_until(lambda: consumer.ferry.open_count == 0)
        assert awaited(producer) == 0


def test_an_offer_that_is_withdrawn_is_told_with_its_reason() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        expect(consumer, producer.address)
        wait_until(lambda: awaited(producer) == 1)
        producer.ferry.submit(Orders(withdrawals=(Withdrawal(NAME, "will not be made: aborted"),)))
        assert answer(consumer).reason == "the offer will not be made: aborted"


def test_an_answer_that_is_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer believes that it told; a connection that broke took it along."""
    monkeypatch.setattr(AwaitedOffers, "settled", lambda self, transfer_id: [])
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        expect(consumer, producer.address)
        wait_until(lambda: awaited(producer) == 1)
        grant(producer)
        assert answer(consumer).params == b"params"


def test_a_producer_that_nobody_reaches_is_given_up() -> None:
    with EngineRank("d", config=Config(handshake_timeout_s=0.3)) as consumer:
        expect(consumer, NOBODY)
        assert "127.0.0.1:9 has not answered for 0.3 s" in answer(consumer).reason


def test_a_producer_that_makes_no_offer_is_given_up_though_it_lives() -> None:
    with (
        EngineRank("p") as producer,
        EngineRank("d", config=Config(handshake_timeout_s=20.0, offer_timeout_s=0.3)) as consumer,
    ):
        expect(consumer, producer.address)
        assert "no offer within offer_timeout_s = 0.3 s" in answer(consumer).reason


def test_a_request_that_ends_first_asks_no_more_and_frees_the_blocks() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        expect(consumer, producer.address)
        loop = consumer.ferry._loop
        assert loop is not None
        places = loop._consumer.inquiries._places
        wait_until(
            lambda: all(i.epoch for p in places.values() for i in p.inquiries.values()) and bool(places)
        )
        consumer.ferry.submit(Orders(closes=(Close(RequestId("r")),)))
        wait_until(lambda: consumer.ferry.open_count == 0)
        wait_until(lambda: producer.ferry._loop._producer.ledger.made(NAME) is not None)  # type: ignore[union-attr]
        grant(producer)
        assert "prefill" in producer.wait_sent("prefill").sent
        assert producer.ferry.counters.expired == 0


def test_only_rank_0_asks() -> None:
    with (
        EngineRank("p") as producer,
        EngineRank("d", layout=small_layout("d", tp_rank=1, tp_size=2)) as other,
    ):
        expect(other, producer.address)
        producer.wait_idle()
        wait_until(lambda: other.ferry.open_count == 0)
        assert awaited(producer) == 0


def test_a_ferry_that_stopped_answers_for_its_engine() -> None:
    with EngineRank("d") as consumer:
        consumer.ferry.stop()
        expect(consumer, NOBODY)
        assert "stopped" in answer(consumer).reason


def test_a_ferry_that_meets_a_defect_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateferry.ferry.loop.MAX_FAILED_TURNS", 1)
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        expect(consumer, producer.address)
        wait_until(lambda: awaited(producer) == 1)
        loop = consumer.ferry._loop
        assert loop is not None
        monkeypatch.setattr(loop._consumer, "advance", lambda: 1 / 0)
        consumer.ferry.submit(Orders(closes=(Close(RequestId("another")),)))
        assert "cannot go on" in answer(consumer).reason


def test_a_client_cannot_make_it_dial_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_inquiries, "MAX_PLACES", 1)
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        consumer.ferry.submit(Orders(expects=(Expect(RequestId("other"), Promise(NAME, NOBODY)),)))
        expect(consumer, producer.address, transfer_of("second"))
        assert "asked already" in answer(consumer).reason


class Stranger:
    """Listens like a producer and says what it likes, one answer to every question."""

    def __init__(self, *answers: Message | bytes) -> None:
        self._answers = list(answers)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = RankAddress("127.0.0.1", self._socket.bind_to_random_port("tcp://127.0.0.1"), Epoch(1))
        self.asked: list[Message] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for said in self._answers:
            if not self._socket.poll(20_000):
                return
            sender, frame = self._socket.recv_multipart()
            self.asked.append(decode_message(frame))
            self._socket.send_multipart([sender, said if isinstance(said, bytes) else encode_message(said)])

    def close(self) -> None:
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def strangers() -> Iterator[list[Stranger]]:
    made: list[Stranger] = []
    yield made
    for stranger in made:
        stranger.close()


def pending(epoch: int) -> AwaitAnswer:
    return AwaitAnswer(epoch=Epoch(epoch), transfer_id=NAME)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((pending(5), pending(6)), "restarted before it made its offer"),
        ((Refusal(reason="await is not known"),), "await is not known"),
        ((b"\xc1",), "cannot be read"),
        ((encode_message(pending(5))[:-3],), "cannot be read"),
    ],
    ids=["restarted", "refuses", "junk", "half a message"],
)
def test_strangers_are_given_up_with_a_reason(
    answers: tuple[Any, ...], said: str, strangers: list[Stranger]
) -> None:
    strangers.append(Stranger(*answers))
    with EngineRank("d") as consumer:
        expect(consumer, strangers[0].address)
        assert said in answer(consumer).reason
        assert strangers[0].asked[0] == Await(transfer_id=NAME)


def test_an_answer_to_what_nobody_asked_changes_nothing(strangers: list[Stranger]) -> None:
    other = AwaitAnswer(epoch=Epoch(5), transfer_id=transfer_of("another"), params=b"x")
    strangers.append(Stranger(other, pending(5), AwaitAnswer(epoch=Epoch(5), transfer_id=NAME, params=b"y")))
    with EngineRank("d") as consumer:
        expect(consumer, strangers[0].address)
        assert answer(consumer).params == b"y"
