"""Peers that die, lie, answer late or speak another tongue: each costs what was asked of it, no more."""

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest
import zmq
from msgspec.structs import replace

from stateferry.config import Config
from stateferry.ferry import asking as ferry_asking
from stateferry.ferry import links as ferry_links
from stateferry.ferry.connection import Connection
from stateferry.ferry.link import Link
from stateferry.ids import EngineId, Epoch
from stateferry.layout.fingerprint import encode_layout
from stateferry.session import Outcome, VirtualClock, claimant_name
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.transport.memory import MemoryTransport
from stateferry.wire import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Offer,
    RankAddress,
    Refusal,
    Release,
    Welcome,
    decode_message,
    encode_message,
)

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
ELSEWHERE = ((9, 10, 11), (12,))


@pytest.mark.parametrize("number", range(6))
def test_of_two_claimants_the_one_that_was_granted_reads(number: int) -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        names = [f"{number}-{end}" for end in "ab"]
        for name in names:
            consumer.open(name, offer)
        for name, local in zip(names, (LOCAL, ELSEWHERE), strict=True):
            consumer.load(name, offer, local)
        reports = {r.request_id: r for r in consumer.wait_idle().reports}
        assert {r.outcome for r in reports.values()} == {Outcome.RECEIVED, Outcome.FAILED}
        for name, other in (names, reversed(names)):
            if reports[name].outcome is Outcome.FAILED:
                assert f"d/{other}" in reports[name].reason, "the answer to another's claim was taken"


def test_a_queued_request_whose_producer_died_hears_of_it_when_its_lease_lapses() -> None:
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:
        consumer.open("r", producer.grant(40, TABLES))
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        producer.ferry.stop()
        clock.advance(0.9 * producer.config.lease_s)
        assert not consumer.ferry.wait(0.3), "lost while its lease held"
        clock.advance(0.2 * producer.config.lease_s)
        assert consumer.wait_lost("r").lost == {"r"}


def test_a_claim_that_nobody_answers_is_given_up_before_blocks_are_given() -> None:
    clock = VirtualClock()
    with EngineRank("p", clock=VirtualClock()) as producer, EngineRank("d", clock=clock) as consumer:
        other = producer.grant(40, TABLES, "other")
        consumer.open("s", other)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        offer = producer.offer(40, TABLES)
        consumer.open("r", offer)  # parked there, where time stands still
        for _ in range(4):
            clock.advance(0.4 * producer.config.lease_s)
            wait_until(lambda n=producer.ferry.counters.renewed: producer.ferry.counters.renewed > n)
        assert consumer.wait_lost("r").lost == {"r"}
        consumer.load("s", other, LOCAL)
        assert not consumer.wait_received("s").failed


def test_a_read_whose_claim_nobody_answers_is_given_up_long_before_its_deadline() -> None:
    clock = VirtualClock()
    with EngineRank("p", clock=VirtualClock()) as producer, EngineRank("d", clock=clock) as consumer:
        producer.write_tags(1)
        offer = producer.offer(40, TABLES)
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        # Every byte is there, and still nobody has said that the offer is ours.
        wait_until(lambda: consumer.page(1, LOCAL[1][0]) == producer.page(1, TABLES[1][0]))
        clock.advance(1.1 * producer.config.lease_s)
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        assert "did not answer the claim" in results.reports[0].reason


def test_block_ids_out_of_range_are_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "stateferry"),
        EngineRank("p") as producer,
        EngineRank("d") as consumer,
    ):
        bad = producer.grant(40, ((1, 2, 99), (4,)), "bad")
        assert consumer.read("r", bad, LOCAL).failed == {"r"}
    posting = [r for r in caplog.records if "could not post" in r.getMessage()]
    assert [(r.levelno, r.exc_info, "99" in r.getMessage()) for r in posting] == [(logging.INFO, None, True)]


def test_one_question_that_a_producer_cannot_read_costs_only_whoever_asked_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_long = "x" * 2000
    monkeypatch.setattr(
        ferry_asking,
        "claimant_name",
        lambda engine, request: too_long if request == "bad" else claimant_name(engine, request),
    )
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:
        good, bad = producer.grant(40, TABLES, "good"), producer.grant(40, TABLES, "bad")
        consumer.open("bad", bad)
        consumer.open("good", good)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        consumer.load("good", good, LOCAL)
        assert not consumer.wait_received("good").failed
        clock.advance(2 * producer.config.lease_s)
        assert consumer.wait_lost("bad").lost == {"bad"}


class Impostor:
    """Listens where a producer should, and answers what a test wants, releases aside. Has a thread."""

    def __init__(self, answer: Callable[[Message | None], bytes | None]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.greeted = 0
        self._answer = answer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.context.destroy(linger=0)

    def _run(self) -> None:
        while not self._over.is_set():
            if not self.socket.poll(10):
                continue
            sender, frame = self.socket.recv_multipart()
            message = decode_message(frame)
            self.greeted += isinstance(message, Hello)
            answer = None if isinstance(message, Release) else self._answer(message)
            if answer is not None:
                self.socket.send_multipart([sender, answer])


def offer_from(port: int) -> Offer:
    with EngineRank("p") as producer:
        offer = producer.offer(40, TABLES)
    return replace(offer, ranks=(RankAddress("127.0.0.1", port, offer.ranks[0].epoch),))


@pytest.mark.parametrize("answer", [None, b"", b"garbage", b"\x81\xa4type\xa5claim"], ids=repr)
def test_a_peer_that_answers_nothing_of_use_costs_the_hand_shakes_time(answer: bytes | None) -> None:
    config = Config(handshake_timeout_s=0.3)
    with Impostor(lambda _: answer) as impostor, EngineRank("d", config=config) as consumer:
        results = consumer.read("r", offer_from(impostor.port), LOCAL)
        assert results.failed == {"r"}
        assert "no answer to the hand-shake" in results.reports[0].reason
        assert consumer.ferry.alive


def test_another_version_is_refused_by_its_number_on_both_sides() -> None:
    def welcome(message: Message | None) -> bytes:
        assert isinstance(message, Hello)
        return encode_message(
            Welcome(
                protocol=99,
                software="stateferry/9.9",
                engine_id=EngineId("p"),
                epoch=message.expects_epoch,
                layout=b"in another language",
                registration=b"",
            )
        )

    with Impostor(welcome) as impostor, EngineRank("d") as consumer:
        results = consumer.read("r", offer_from(impostor.port), LOCAL)
        assert results.failed == {"r"}
        assert f"protocol 99, this engine speaks {PROTOCOL_VERSION}" in results.reports[0].reason
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        hello = Hello(
            protocol=99,
            software="stateferry/9.9",
            engine_id=EngineId("d"),
            epoch=Epoch(5),
            expects_epoch=producer.layout.epoch,
            transport="memory",
            layout=b"in another language",
        )
        assert producer.address is not None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{producer.address.port}")
        dealer.send(encode_message(hello))
        assert dealer.poll(10_000)
        answer = decode_message(dealer.recv())
        context.destroy(linger=0)
        assert isinstance(answer, Refusal)
        assert f"protocol 99 asked for, {PROTOCOL_VERSION} spoken here" in answer.reason
        assert not consumer.read("r", producer.grant(40, TABLES), LOCAL).failed


def test_a_peer_that_cannot_be_met_is_left_alone_longer_each_time_and_success_forgets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ferry_links.random, "random", lambda: 0.0)
    clock = VirtualClock()
    theirs = small_layout("p")
    moods: list[str] = []

    def answer(message: Message | None) -> bytes:
        mood = moods.pop(0)
        if mood == "refuses":
            return encode_message(Refusal(reason="not now", epoch=theirs.epoch))
        if mood == "is another":
            return encode_message(Refusal(reason="restarted", epoch=Epoch(theirs.epoch + 1)))
        return encode_message(
            Welcome(
                protocol=PROTOCOL_VERSION,
                software="testing",
                engine_id=theirs.engine_id,
                epoch=theirs.epoch,
                layout=encode_layout(theirs),
                registration=registration,
            )
        )

    memory = MemoryTransport()
    registration = memory.register([])
    with Impostor(answer) as impostor, EngineRank("d", clock=clock) as consumer:
        address = RankAddress("127.0.0.1", impostor.port, theirs.epoch)
        offer = replace(consumer.offer(40, TABLES), engine_id=EngineId("p"), ranks=(address,))
        numbers = itertools.count()

        def fails() -> None:
            name = f"r{next(numbers)}"
            consumer.open(name, offer)
            # It lives on here, and does not keep others from meeting the peer.
            assert consumer.wait_lost(name).lost == {name}

        def fails_after_pause(pause: float, greeted: int) -> None:
            clock.advance(0.9 * pause)
            fails()
            assert impostor.greeted == greeted, "asked again within its pause"
            clock.advance(0.2 * pause)
            moods.append("refuses")
            fails()
            assert impostor.greeted == greeted + 1

        first = consumer.config.retry_interval_s
        moods.append("refuses")
        fails()
        fails_after_pause(first, 1)
        fails_after_pause(2 * first, 2)
        fails_after_pause(4 * first, 3)
        # Met at last, and lost again over the claim: the pause is short once more.
        clock.advance(8 * first)
        moods += ["welcomes", "is another"]
        fails()
        fails_after_pause(first, 5)
    memory.close()


def test_one_link_that_failed_is_met_again_although_a_request_of_it_lives_on() -> None:
    """Symptom: until the last request that failed through a link had ended, all new ones failed, too."""
    with EngineRank("p") as producer:
        assert producer.address is not None
        port = producer.address.port
        layout = producer.layout
        offer = producer.offer(40, TABLES)
    config = Config(handshake_timeout_s=0.2, retry_interval_s=0.05)
    with EngineRank("d", config=config) as consumer:
        consumer.open("early", offer)
        assert consumer.wait_lost("early").lost == {"early"}
        with EngineRank("p", layout=layout, port=port) as producer:
            producer.write_tags(1)

            def served() -> bool:
                name = f"r{producer.ferry.counters.granted}"
                return not consumer.read(name, producer.grant(40, TABLES, name), LOCAL).failed

            wait_until(served)
        assert consumer.ferry.open_count == 1, "the early one was meant to live on"


def test_an_offer_that_one_rank_cannot_serve_is_given_back_to_the_other_and_not_claimed_after_that() -> None:
    """Symptom: claims after their release, which the other rank counted as refused."""
    config = Config(handshake_timeout_s=0.2, retry_interval_s=600)
    layout = small_layout("p", tp_rank=1, tp_size=2)
    with EngineRank("p", layout=layout) as producer, EngineRank("d", config=config) as consumer:

        def offer(name: str) -> Offer:
            made = producer.offer(40, TABLES, name)
            made = replace(made, ranks=(RankAddress("127.0.0.1", 1, Epoch(1)), *made.ranks))
            producer.submit_grant(made)
            return made

        for name in ("meets", "met before", "after that"):
            consumer.open(name, offer(name))
            assert consumer.wait_lost(name).lost == {name}
            producer.wait_sent(name)
        assert producer.ferry.counters.refused_claims == 0


@pytest.mark.parametrize("again", [False, True], ids=["first greeting", "greeting of a second connection"])
def test_a_greeting_that_went_down_with_its_connection_is_repeated(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Symptom: on a busy machine the first hand-off of a pair failed after the hand-shake's whole time,
    although both engines were well: ZeroMQ had made a new connection, and the greeting was gone."""
    clock = VirtualClock()
    right, lost = Link.greet, [not again]

    def greet(link: Link, *more: Any) -> None:
        if lost.pop() if lost else False:
            return
        right(link, *more)

    monkeypatch.setattr(Link, "greet", greet)
    # Much patience: the clock moves until the connection is there, and that takes what it takes.
    config = Config(handshake_timeout_s=600, lease_s=600)
    with (
        EngineRank("p", config=config) as producer,
        EngineRank("d", config=config, clock=clock) as consumer,
    ):
        links = consumer.ferry._loop._consumer._links  # type: ignore[union-attr]

        def connected() -> bool:
            clock.advance(0.1 * ferry_links.LOOK_S)
            return [link.connection for link in links._links.values()] == [Connection.UP]

        if again:
            assert not consumer.read("r", producer.grant(40, TABLES, "r"), LOCAL).failed
            wait_until(connected)
            (link,) = links._links.values()
            first = link.peer
            lost.append(True)
            links.greet_again(link)
            clock.advance(1.1 * ferry_links.REPEAT_S)
            wait_until(lambda: link.peer is not first)
        else:
            offer = producer.grant(40, TABLES, "r")
            consumer.open("r", offer)
            wait_until(lambda: not lost)
            wait_until(connected)
            clock.advance(1.1 * ferry_links.REPEAT_S)
            consumer.load("r", offer, LOCAL)
            assert not consumer.wait_received("r").failed
