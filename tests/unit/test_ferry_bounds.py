"""What outsiders can make a ferry do is bounded: work in a turn, connections, lines in the log, sizes."""

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.errors import ProtocolError
from stateferry.ferry import inquiries, links, loop, producer
from stateferry.ferry.producer import MESSAGES_PER_TURN, ProducerService
from stateferry.ferry.quiet import INTERVAL_S, LogLimit
from stateferry.ferry.socket_events import SocketEvents
from stateferry.ids import EngineId, Epoch, RequestId, new_transfer_id
from stateferry.layout import shard
from stateferry.layout.digest import table_digest
from stateferry.layout.fingerprint import decode_layout, encode_layout
from stateferry.layout.plan import make_plan
from stateferry.layout.spec import CacheLayout
from stateferry.session import Grant, VirtualClock
from stateferry.testing.peers import ArrayMemory, EngineRank, small_layout
from stateferry.wire import (
    PROTOCOL_VERSION,
    Claim,
    Claimed,
    DigestAnswer,
    DigestRequest,
    Hello,
    Message,
    RankAddress,
    Refusal,
    Renewal,
    decode_message,
    encode_message,
)

TABLES = ((1, 2, 3), (4,))


class Flood:
    """A socket that always has one more message."""

    def __init__(self) -> None:
        self.sent = 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        return [b"stranger", encode_message(Renewal(epoch=Epoch(1), sequence=1, claims=()))]

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self.sent += 1


def service_over(socket: object, layout: CacheLayout) -> ProducerService:
    """A producer that hears and answers over that."""
    return ProducerService(
        socket,  # type: ignore[arg-type]
        VirtualClock(),
        layout,
        encode_layout(layout),
        "testing",
        "memory",
        b"",
        15.0,
        ArrayMemory(layout.region_sizes_bytes[0]),
    )


def test_a_flood_of_messages_does_not_keep_a_producer_from_its_leases() -> None:
    flood, layout = Flood(), small_layout("p")
    service = service_over(flood, layout)
    service.receive()  # returns
    assert flood.sent == MESSAGES_PER_TURN


class Script:
    """A socket with these messages, as (who, what). Keeps the answers."""

    def __init__(self, *said: tuple[bytes, Message]) -> None:
        self.frames = [[sender, encode_message(message)] for sender, message in said]
        self.answers: list[tuple[bytes, Message]] = []

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.frames:
            raise zmq.Again
        return self.frames.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self.answers.append((frames[0], decode_message(frames[1])))


def digests_after_others_came(monkeypatch: pytest.MonkeyPatch, others: int, *, heard_of: bool) -> Message:
    """What a producer, who remembers three consumers, says to the first of many."""
    monkeypatch.setattr(producer, "MAX_CONSUMERS", 3)
    layout, encoded = small_layout("p"), encode_layout(small_layout("d"))
    offer = Grant(
        RequestId("prefill"), new_transfer_id(), 16, (BlockIds((1,)), BlockIds((2,))), (0, 0), "0" * 32
    )
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        software="testing",
        engine_id=EngineId("d"),
        epoch=Epoch(1),
        expects_epoch=layout.epoch,
        transport="memory",
        layout=encoded,
    )
    claim = Claim(
        epoch=layout.epoch,
        transfer_id=offer.transfer_id,
        claimant="d/r",
        tp_rank=0,
        tp_size=1,
        table_digest=table_digest(16, offer.block_ids, (0, 0), "0" * 32),
    )
    renewal = Renewal(epoch=layout.epoch, sequence=1, claims=(Claimed(offer.transfer_id, "d/r"),))
    question = DigestRequest(
        epoch=layout.epoch,
        transfer_id=offer.transfer_id,
        claimant="d/r",
        groups=(0,),
        first_blocks=(0,),
        block_counts=(1,),
    )
    said: list[tuple[bytes, Message]] = [(b"first", hello), (b"first", claim)]
    for number in range(others):
        said += [(b"other %d" % number, hello), *([(b"first", renewal)] if heard_of else [])]
    socket = Script(*said, (b"first", question))
    service = service_over(socket, layout)
    service.grant(offer)
    service.receive()
    return socket.answers[-1][1]


def test_a_consumer_that_is_heard_of_is_not_forgotten_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = digests_after_others_came(monkeypatch, 5, heard_of=True)
    assert isinstance(answer, DigestAnswer)
    assert not answer.reason
    assert len(answer.digests) == 1


def test_of_more_consumers_than_are_remembered_one_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = digests_after_others_came(monkeypatch, 5, heard_of=False)
    assert isinstance(answer, Refusal)
    assert "before a hand-shake" in answer.reason


def test_log_lines_are_few_and_say_how_many_are_missing() -> None:
    limit, clock = LogLimit(), VirtualClock()
    said = []
    for _ in range(500):
        if limit.may_log(clock.now_s()):
            said.append(limit.left_out())
        clock.advance(INTERVAL_S / 100)
    assert len(said) in (5, 6)
    assert said[0] == ""
    assert "99 more" in said[1] or "100 more" in said[1]


def test_offers_that_name_address_after_address_do_not_use_up_all_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 3)
    config = Config(handshake_timeout_s=30)
    with EngineRank("p") as producer, EngineRank("d", config=config) as consumer:
        good = producer.grant(40, TABLES)
        for number in range(1, 6):
            nowhere = RankAddress("127.0.0.1", 1, Epoch(number))
            consumer.open(f"r{number}", replace(producer.offer(40, TABLES), ranks=(nowhere,)))
        assert consumer.wait_lost("r5").lost == {"r4", "r5"}
        results = consumer.read("good", good, ((5, 6, 7), (8,)))
        assert "3 producer ranks are known already" in results.reports[-1].reason


def test_dead_addresses_that_nobody_waits_for_any_more_make_room_for_a_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client named 512 of them: for half a minute no hand-off met a producer that was not known before."""
    monkeypatch.setattr(links, "MAX_LINKS", 3)
    with EngineRank("p") as producer, EngineRank("d", config=Config(handshake_timeout_s=0.3)) as consumer:
        for number in range(1, 4):
            nowhere = RankAddress("127.0.0.1", 1, Epoch(number))
            consumer.open(f"r{number}", replace(producer.offer(40, TABLES), ranks=(nowhere,)))
        consumer.wait_lost("r3")
        for number in range(1, 4):
            consumer.close(f"r{number}")
        consumer.ferry._loop._consumer._links._config = Config()  # type: ignore[union-attr]
        assert not consumer.read("good", producer.grant(40, TABLES), ((5, 6, 7), (8,))).failed


def test_an_offer_of_many_ranks_does_not_take_the_place_of_its_own_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 3)
    with EngineRank("p") as producer, EngineRank("d", config=Config(handshake_timeout_s=30)) as consumer:
        four = tuple(RankAddress("127.0.0.1", 1, Epoch(number)) for number in range(1, 5))
        consumer.open("r", replace(producer.offer(40, TABLES), ranks=four))
        assert consumer.wait_lost("r").lost == {"r"}
        consumer.close("r")
        assert "3 producer ranks are known already" in consumer.wait_idle().reports[-1].reason
        assert not consumer.read("good", producer.grant(40, TABLES), ((5, 6, 7), (8,))).failed


HUGE = {
    "region": lambda tree: tree.update(region_sizes_bytes=[1 << 63]),
    "offset": lambda tree: (
        tree.update(region_sizes_bytes=[(1 << 64) - 1]),
        tensor(tree).update(offset_bytes=1 << 63),
    ),
    "stride": lambda tree: (
        tree.update(region_sizes_bytes=[(1 << 64) - 1]),
        tensor(tree).update(block_stride_bytes=1 << 58),
    ),
}


def tensor(tree: dict) -> dict:  # type: ignore[type-arg]
    return tree["groups"][0]["layers"][0]["tensors"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", HUGE)
def test_a_layout_whose_numbers_overflow_is_refused(kind: str) -> None:
    tree = msgspec.msgpack.decode(encode_layout(small_layout("p")))
    HUGE[kind](tree)
    with pytest.raises(ProtocolError, match="at most"):
        decode_layout(msgspec.msgpack.encode(tree))


def test_without_that_check_a_plan_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: this error would have left the thread's handler of messages."""
    monkeypatch.setattr(shard, "LIMIT", 1 << 70)
    tree = msgspec.msgpack.decode(encode_layout(small_layout("p")))
    HUGE["offset"](tree)
    theirs = decode_layout(msgspec.msgpack.encode(tree))
    with pytest.raises(OverflowError):
        make_plan(small_layout("d"), theirs)


def test_a_frame_that_is_too_large_is_never_taken_in() -> None:
    """ZeroMQ closes the connection when it reads the size, before there is memory for it."""
    with EngineRank("p") as producer, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        assert producer.address is not None
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{producer.address.port}")
        stranger.send(b"short")
        assert stranger.poll(20_000)
        assert b"refusal" in stranger.recv()
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send(b"\x00" * ((16 << 20) + 1))
        assert monitor.poll(20_000), "the connection was not closed"
        stranger.disable_monitor()
        monitor.close(linger=0)
        assert producer.ferry.alive
        assert producer.ferry.counters.claimed == 0


def test_there_are_sockets_for_all_links_and_all_questions_together() -> None:
    """A link is watched by two more: ours, and ZeroMQ's on the other end of it."""
    needed = 3 * links.MAX_LINKS + inquiries.MAX_PLACES + len(("listener", "zap", "failures", "monitor"))
    assert needed < loop.MAX_SOCKETS


def test_a_new_link_is_not_refused_because_an_old_ones_watcher_is_not_gone_yet() -> None:
    """Address already in use: it was named after an object that was gone, while ZeroMQ, on a thread of
    its own, still had the socket. The hand-off that met a new producer then failed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as watched:
        watched.linger = 0
        for _ in range(200):
            events = SocketEvents(context, watched, zmq.EVENT_DISCONNECTED)
            events.close()
            del events


def test_a_watcher_that_cannot_watch_leaves_no_socket_behind() -> None:
    """There are only so many, and where none is left is where this happens."""

    class Unwatchable:
        def monitor(self, address: str, events: int) -> None:
            raise zmq.ZMQError(zmq.EADDRINUSE)

    with zmq.Context() as context:
        made = []
        right = context.socket
        context.socket = lambda kind: made.append(right(kind)) or made[-1]  # type: ignore
        with pytest.raises(zmq.ZMQError):
            SocketEvents(context, Unwatchable(), zmq.EVENT_DISCONNECTED)  # type: ignore[arg-type]
        assert [socket.closed for socket in made] == [True]
