"""Mooncake's own: whom it reads from, what it posts at a time, and what it does to the process it runs in."""

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stateferry.errors import ProtocolError, TransportTimeout, TransportUnavailable
from stateferry.testing.transport_reads import finish, pieces
from stateferry.testing.transport_rigs import ProcessRig, content, regions_of
from stateferry.transport import MemoryKind, MemoryRegion, TransferState, TransportOptions, create_transport
from stateferry.transport import mooncake_transfer as transfers
from stateferry.transport.mooncake import MooncakeTransport
from stateferry.transport.mooncake_transfer import (
    BYTES_IN_FLIGHT,
    COOKIE_BYTES,
    MOST_LANES,
    PIECE_BYTES,
    PIECES_IN_FLIGHT,
    POSTS_PER_CALL,
    MooncakeTransfer,
)

ROOT = Path(__file__).parents[2]
SIZES = (1 << 20,)
HERE = content(2, SIZES)
THERE = content(3, SIZES)
"""Memory to read into and from; it outlives every transport."""
COOKIE = np.arange(COOKIE_BYTES, dtype=np.uint8)
OTHER_COOKIE = COOKIE[::-1].copy()


class Native:
    """Mooncake's bindings as seen by one engine: reads end when and how a test says.

    Everybody's memory is this process's. Like the real ones, it keeps a segment's first description: who
    listened there when it was opened.
    """

    made: list["Native"]
    life_now: dict[str, int]
    """Who listens at a segment; the same for all engines."""

    def __init__(self) -> None:
        self.made.append(self)
        self.lives: dict[str, int] = {}
        self.pending: dict[int, tuple[int, int, int]] = {}
        self.order: list[int] = []
        """Sizes, as they were posted."""
        self.statuses: dict[int, int] = {}
        self.hold = False
        """Nothing ends until this is taken back."""
        self.refuses = False
        self.looked_at_twice = False
        self.looks = 0
        self._numbers = itertools.count(1000)

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert (host, metadata, protocol, devices) == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        return 0

    def get_rpc_port(self) -> int:
        return 12000 + len(self.made)

    def register_memory(self, address: int, size: int) -> int:
        return 0

    def batch_transfer_async_read(
        self, segment: str, local: list[int], remote: list[int], sizes: list[int]
    ) -> int:
        if self.refuses:
            return 0
        now = self.life_now.get(segment, 0)
        stale = self.lives.setdefault(segment, now) != now
        batch = next(self._numbers)
        ((here,), (there,), (size,)) = local, remote, sizes
        self.order.append(size)
        self.pending[batch] = (here, there, size)
        if stale:
            self.statuses[batch] = -1
        return batch

    def transfer_check_status(self, batch: int) -> int:
        self.looks += 1
        if batch not in self.pending:
            self.looked_at_twice = True
            return -1
        status = self.statuses.get(batch, 0 if self.hold else 1)
        if status == 1:
            here, there, size = self.pending[batch]
            ctypes.memmove(here, there, size)
        if status in (1, -1):
            del self.pending[batch]
        return status


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[Native]:
    """The engines that were made, in order; the first one serves."""
    made: list[Native] = []

    class Counted(Native):
        pass

    Counted.made, Counted.life_now = made, {}
    monkeypatch.setattr("stateferry.transport.mooncake_engine._load", lambda: Counted)
    return made


@pytest.fixture
def reader(native: list[Native]) -> Iterator[MooncakeTransport]:
    with MooncakeTransport() as made:
        made.register(regions_of(HERE))
        yield made
    assert not any(engine.looked_at_twice for engine in native), "a batch that was over was looked at again"


def registration(
    segment: str = "127.0.0.1:13000", cookie: np.ndarray = COOKIE, at: np.ndarray = COOKIE
) -> bytes:
    """Of somebody at `segment` whose cookie is `cookie`, while `at` is what lies where it should be."""
    return msgspec.msgpack.encode(
        {
            "type": "mooncake/1",
            "segment": segment,
            "regions": [(buffer.ctypes.data, buffer.nbytes) for buffer in THERE],
            "cookie_address": at.ctypes.data,
            "cookie": cookie.tobytes(),
        }
    )


def rows(count: int, size: int) -> list[tuple[int, int, int, int, int]]:
    return [(0, i * size, 0, i * size, size) for i in range(count)]


def test_data_comes_before_the_cookie_that_proves_it(reader: MooncakeTransport, native: list[Native]) -> None:
    peer = reader.connect(registration(), 5.0)
    native[1].order.clear()
    transfer = peer.post_read(pieces(rows(10, 100)))
    assert finish([transfer], 5.0) == [TransferState.DONE]
    assert native[1].order == [100] * 10 + [COOKIE_BYTES]
    assert (HERE[0][:1000] == THERE[0][:1000]).all()


def fails_where_the_peer_changed(reader: MooncakeTransport) -> None:
    """Somebody else's memory lies where the peer's was when the data had arrived."""
    cookie = COOKIE.copy()
    peer = reader.connect(registration(at=cookie), 5.0)
    transfer = peer.post_read(pieces(rows(4, 100)))
    cookie[:] = 0
    assert finish([transfer], 5.0) == [TransferState.FAILED]
    assert "cookie" in transfer.error
    assert transfer.bytes_done < 400
    assert transfer.quiet
    assert not peer.usable


def test_bytes_of_a_peer_that_closed_meanwhile_do_not_count(reader: MooncakeTransport) -> None:
    fails_where_the_peer_changed(reader)


def test_a_transfer_that_asks_nobody_is_caught(
    reader: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(self: MooncakeTransfer) -> None:
        self._state = TransferState.DONE

    monkeypatch.setattr(MooncakeTransfer, "_check_cookie", trusting)
    with pytest.raises(AssertionError):
        fails_where_the_peer_changed(reader)


def test_another_cookie_is_refused_at_once(reader: MooncakeTransport) -> None:
    with pytest.raises(TransportUnavailable, match="does not hold the registration's cookie"):
        reader.connect(registration(cookie=OTHER_COOKIE), 5.0)


def survives_a_restart_at_the_same_address(reader: MooncakeTransport, native: list[Native]) -> None:
    """The peer is another one now, at the address and port of the first."""
    first = reader.connect(registration(), 5.0)
    first.close()
    native[0].life_now["127.0.0.1:13000"] = 1
    second = reader.connect(registration(cookie=OTHER_COOKIE, at=OTHER_COOKIE), 5.0)
    assert finish([second.post_read(pieces(rows(3, 50)))], 5.0) == [TransferState.DONE]


def test_an_engine_that_knew_the_last_life_of_an_address_is_not_asked_about_the_next(
    reader: MooncakeTransport, native: list[Native]
) -> None:
    survives_a_restart_at_the_same_address(reader, native)


def test_an_engine_that_is_asked_all_the_same_is_caught(
    reader: MooncakeTransport, native: list[Native], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateferry.transport.mooncake._Reader.free_for", lambda *_: True)
    with pytest.raises(TransportUnavailable, match="cannot be read"):
        survives_a_restart_at_the_same_address(reader, native)


def test_engines_are_used_again_and_never_by_two_peers(
    reader: MooncakeTransport, native: list[Native]
) -> None:
    one = reader.connect(registration("127.0.0.1:13000"), 5.0)
    two = reader.connect(registration("127.0.0.1:13001"), 5.0)
    assert len(native) == 3
    one.close()
    reader.connect(registration("127.0.0.1:13002"), 5.0)
    assert len(native) == 3
    two.close()
    reader.connect(registration("127.0.0.1:13000"), 5.0)
    assert len(native) == 3


def most_in_flight(reader: MooncakeTransport, native: list[Native], size: int, count: int) -> tuple[int, int]:
    """Pieces and bytes that four batches have in flight when none of them may post any more."""
    peer = reader.connect(registration(), 5.0)
    engine = native[1]
    engine.hold = True
    batches = [peer.post_read(pieces(rows(count, size))) for _ in range(4)]
    for _ in range(count // POSTS_PER_CALL + 2):
        for batch in batches:
            batch.poll()
    flying = len(engine.pending), sum(size for _, _, size in engine.pending.values())
    engine.hold = False
    assert finish(batches, 10.0) == [TransferState.DONE] * 4
    return flying


def test_pieces_in_flight_are_bounded_over_all_batches_of_a_link(
    reader: MooncakeTransport, native: list[Native]
) -> None:
    assert most_in_flight(reader, native, 64, 1000) == (PIECES_IN_FLIGHT, PIECES_IN_FLIGHT * 64)


def test_bytes_in_flight_are_bounded(
    reader: MooncakeTransport, native: list[Native], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "BYTES_IN_FLIGHT", 10_000)
    count, total = most_in_flight(reader, native, 999, 100)
    assert (count, total) == (10, 9_990)
    # One piece may always go, however large.
    monkeypatch.setattr(transfers, "BYTES_IN_FLIGHT", 10)
    peer = reader.connect(registration(), 5.0)
    assert finish([peer.post_read(pieces(rows(3, 999)))], 5.0) == [TransferState.DONE]


def test_limits_stay_inside_those_of_mooncake() -> None:
    assert PIECES_IN_FLIGHT <= 1024 // 2
    assert PIECE_BYTES <= BYTES_IN_FLIGHT


def test_one_call_posts_a_bounded_number(reader: MooncakeTransport, native: list[Native]) -> None:
    peer = reader.connect(registration(), 5.0)
    native[1].hold = True
    transfer = peer.post_read(pieces(rows(1000, 64)))
    assert len(native[1].pending) == POSTS_PER_CALL
    native[1].hold = False
    finish([transfer], 5.0)


def test_only_what_may_have_begun_is_looked_at(reader: MooncakeTransport, native: list[Native]) -> None:
    peer = reader.connect(registration(), 5.0)
    engine = native[1]
    engine.hold = True
    transfer = peer.post_read(pieces(rows(200, 64)))
    transfer.poll()
    engine.looks, ended = 0, list(engine.pending)[:50]
    engine.statuses = dict.fromkeys(ended, 1)
    transfer.poll()
    assert engine.looks == len(ended) + MOST_LANES
    engine.hold = False
    assert finish([transfer], 5.0) == [TransferState.DONE]
    assert (HERE[0][: 200 * 64] == THERE[0][: 200 * 64]).all()


def failed_with_one_piece_out(
    reader: MooncakeTransport, native: list[Native]
) -> tuple[MooncakeTransfer, Callable[[int], None]]:
    """Three pieces, of which the second failed and the third is still under way."""
    peer = reader.connect(registration(), 5.0)
    engine = native[1]
    engine.hold = True
    transfer = peer.post_read(pieces(rows(3, 64)))
    first, second, third = engine.pending
    engine.statuses = {first: 1, second: -1}
    assert transfer.poll() is TransferState.FAILED
    assert isinstance(transfer, MooncakeTransfer)

    def end(status: int) -> None:
        engine.statuses[third] = status

    return transfer, end


@pytest.mark.parametrize("end", [1, -1])
def test_a_failed_batch_is_quiet_when_its_last_piece_has_ended(
    reader: MooncakeTransport, native: list[Native], end: int
) -> None:
    transfer, end_third = failed_with_one_piece_out(reader, native)
    assert not transfer.quiet
    assert transfer.bytes_done == 64
    end_third(end)
    assert transfer.quiet
    assert transfer.poll() is TransferState.FAILED


def test_a_time_out_of_mooncakes_ends_nothing(reader: MooncakeTransport, native: list[Native]) -> None:
    transfer, end_third = failed_with_one_piece_out(reader, native)
    end_third(-2)
    assert not transfer.quiet
    end_third(-1)
    assert transfer.quiet


def test_a_cancelled_batch_posts_nothing_more(reader: MooncakeTransport, native: list[Native]) -> None:
    peer = reader.connect(registration(), 5.0)
    native[1].hold = True
    transfer = peer.post_read(pieces(rows(1000, 64)))
    transfer.cancel()
    transfer.poll()
    assert len(native[1].pending) == POSTS_PER_CALL
    assert not transfer.quiet
    native[1].hold = False
    assert transfer.quiet
    assert peer.usable


def test_a_read_that_is_refused_fails_and_is_quiet(reader: MooncakeTransport, native: list[Native]) -> None:
    peer = reader.connect(registration(), 5.0)
    native[1].refuses = True
    transfer = peer.post_read(pieces(rows(3, 64)))
    assert transfer.poll() is TransferState.FAILED
    assert transfer.quiet
    assert not peer.usable


@pytest.mark.parametrize(
    "segment",
    ["somewhere.example:1", "127.0.0.1", "127.0.0.1:port", "::1:5", "127.0.0.1:1;x", "1" * 30 + ":1"],
)
def test_no_name_that_a_peer_sends_is_looked_up(reader: MooncakeTransport, segment: str) -> None:
    with pytest.raises(ProtocolError, match="mooncake registration"):
        reader.connect(registration(segment), 1.0)


def test_other_memory_than_the_processors_is_refused(native: list[Native]) -> None:
    with MooncakeTransport() as made, pytest.raises(TransportUnavailable, match="cuda memory; only cpu"):
        made.register([MemoryRegion(1 << 30, 4096, MemoryKind.CUDA)])


def test_a_host_without_an_ipv4_address_is_refused(native: list[Native]) -> None:
    with pytest.raises(TransportUnavailable, match="'host' is '::1', which is no IPv4 address"):
        MooncakeTransport(TransportOptions(host="::1"))


def test_a_missing_library_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'stateferry\[mooncake\]'"):
        create_transport("mooncake", TransportOptions())


@pytest.fixture(scope="module")
def rig() -> Iterator[ProcessRig]:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with ProcessRig("mooncake") as rig:
        yield rig


def test_a_peer_that_does_not_answer_holds_up_nobody_else(rig: ProcessRig) -> None:
    hung, alive = rig.target(SIZES), rig.target(SIZES)
    reader = rig.reader()
    reader.register(regions_of(HERE))
    os.kill(hung.process_id, signal.SIGSTOP)
    try:
        with pytest.raises(TransportTimeout, match=r"did not answer within 0.3 s"):
            reader.connect(hung.registration, 0.3)
        peer = reader.connect(alive.registration, 20.0)
        assert finish([peer.post_read(pieces([(0, 0, 0, 0, 64)]))], 20.0) == [TransferState.DONE]
    finally:
        os.kill(hung.process_id, signal.SIGCONT)
    # It was only slow.
    assert reader.connect(hung.registration, 20.0).usable


def test_mooncake_itself_refuses_what_is_not_registered(rig: ProcessRig) -> None:
    """Our own checks aside: a peer with another idea of our memory reads nothing of it."""
    target = rig.target(SIZES)
    reader = rig.reader()
    reader.register(regions_of(HERE))
    blob = msgspec.msgpack.decode(target.registration)
    (address, size) = blob["regions"][0]
    peer = reader.connect(msgspec.msgpack.encode(blob | {"regions": [(address, size + (1 << 20))]}), 20.0)
    transfer = peer.post_read(pieces([(0, 0, 0, size, 64)]))
    assert finish([transfer], 20.0) == [TransferState.FAILED]


def test_an_idle_transport_leaves_the_processor_and_stdout_alone() -> None:
    code = """
import json
from stateferry.transport import TransportOptions, create_transport
from tests.unit.restless import restless_threads
with create_transport("mooncake", TransportOptions()) as transport:
    transport.register([])
    restless = restless_threads()
print(json.dumps(restless))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(result.stdout) == []


def test_mooncake_is_not_loaded_before_it_is_asked_for() -> None:
    code = "import sys, stateferry.transport.mooncake; print('mooncake' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
