"""What every transport must do: one suite, for those in this package and for yours.

Each check takes a rig (`transport_rigs`) and raises AssertionError that says what the transport did
wrong. With pytest:

    @pytest.mark.parametrize("check", CHECKS)
    def test_conformance(rig: Rig, check: str) -> None:
        CHECKS[check](rig)

The transports' own tests hold, for every check, a broken transport that it catches.
"""

from collections.abc import Callable

import numpy as np

from stateferry.errors import ProtocolError, TransportClosed, TransportError
from stateferry.testing.transport_reads import (
    Row,
    expect_done,
    expect_failed,
    finish,
    pieces,
    raises,
    random_rows,
    read,
    wait_quiet,
)
from stateferry.testing.transport_rigs import Link, Rig
from stateferry.transport import TransferState

SMALL = (1 << 20, (1 << 16) + 13, 4099)
LARGE = ((33 << 20) + 5,)


def exact_bytes(rig: Rig) -> None:
    """Random pieces over several regions arrive, and nothing else changes."""
    rng = np.random.default_rng(7)
    for count in (3, 40, 200):
        read(rig, rig.standing(SMALL), pieces(random_rows(rng, SMALL, count)))


def empty_batch(rig: Rig) -> None:
    """An empty batch is DONE at once."""
    link = rig.standing(SMALL)
    transfer = link.peer.post_read(pieces([]))
    assert transfer.poll() is TransferState.DONE, f"the first poll of an empty batch: {transfer.error}"
    expect_done(rig, link, transfer, pieces([]))


def one_piece(rig: Rig) -> None:
    """One byte, and one whole region."""
    for row in ((1, 77, 0, 999, 1), (2, 0, 2, 0, SMALL[2]), (0, SMALL[0] - 5, 1, SMALL[1] - 5, 5)):
        read(rig, rig.standing(SMALL), pieces([row]))


def many_pieces(rig: Rig) -> None:
    """Past the 1,024 pieces that one system call takes, by one and by far."""
    for count in (1023, 1024, 1025, 3000):
        rows = [(0, 300 * i, 0, 300 * (count - 1 - i) + 7, 1 + i % 211) for i in range(count)]
        read(rig, rig.standing(SMALL), pieces(rows))


def large_piece(rig: Rig) -> None:
    """More than 32 MiB in one piece, and small ones around it."""
    whole = LARGE[0]
    read(rig, rig.standing(LARGE), pieces([(0, 0, 0, 1, 3), (0, 3, 0, 0, whole - 4)]))


def adjacent_pieces(rig: Rig) -> None:
    """Neighbours on both sides, on one side only, and in falling order."""
    both = [(0, 1000 + 37 * i, 1, 501 + 37 * i, 37) for i in range(50)]
    local_only = [(0, 5000 + 37 * i, 1, 60000 - 1001 * i, 37) for i in range(50)]
    falling = [(2, 4000 - 39 * i, 2, 4000 - 39 * i, 39) for i in range(50)]
    read(rig, rig.standing(SMALL), pieces([*both, *local_only, *falling]))


def many_transfers(rig: Rig) -> None:
    """Sixteen batches at a time through one peer, polled in turn."""
    link = rig.standing(SMALL)
    rows = random_rows(np.random.default_rng(11), SMALL, 160)
    batches = [pieces(rows[i::16]) for i in range(16)]
    transfers = [link.peer.post_read(batch) for batch in batches]
    states = finish(transfers, rig.timeout_s)
    failed = [t.error for t, s in zip(transfers, states, strict=True) if s is not TransferState.DONE]
    assert not failed, f"failed: {failed}"
    found = link.local.differences(pieces(rows), link.target.content)
    assert not found, f"all DONE, but {'; '.join(found)}"
    assert all(t.bytes_done == b.total_bytes for t, b in zip(transfers, batches, strict=True)), "bytes_done"


def pending_is_not_quiet(rig: Rig) -> None:
    """Until a transfer is terminal it may write, and not all its bytes count as arrived."""
    link = rig.standing(LARGE)
    batch = pieces([(0, 0, 0, 0, LARGE[0])])
    transfer = link.peer.post_read(batch)
    for _ in range(1000):
        quiet, arrived = transfer.quiet, transfer.bytes_done
        if transfer.poll() is not TransferState.PENDING:
            break
        assert not quiet, "PENDING, but quiet"
        assert arrived < batch.total_bytes, "PENDING, but all bytes count as arrived"
    expect_done(rig, link, transfer, batch)


def cancelled(rig: Rig) -> None:
    """A cancelled transfer ends; where the library can stop it, at once."""
    link = rig.link(SMALL)
    transfer = link.peer.post_read(pieces([(0, 0, 0, 0, SMALL[0])]))
    transfer.cancel()
    if link.transport.capabilities.cancel:
        assert transfer.poll() is TransferState.FAILED, "cancelled, but not FAILED"
        assert transfer.quiet, "cancelled, but not quiet"
        assert transfer.error, "cancelled without an error text"
        assert not link.local.differences(pieces([]), link.target.content), "cancelled, but bytes landed"
    finish([transfer], rig.timeout_s)
    wait_quiet(transfer, rig.timeout_s)
    assert link.peer.usable, "one cancelled transfer made the peer unusable"


def out_of_range(rig: Rig) -> None:
    """A piece outside a region is ValueError, and no byte moves."""
    link = rig.standing(SMALL)
    good: Row = (0, 0, 0, 0, 16)
    end, huge = SMALL[1], (1 << 63) - 1
    for name, bad in {
        "past the local end": (1, end - 15, 0, 0, 16),
        "past the remote end": (0, 0, 1, end - 15, 16),
        "negative local offset": (1, -1, 0, 0, 16),
        "negative remote offset": (0, 0, 1, -1, 16),
        "no such local region": (3, 0, 0, 0, 16),
        "no such remote region": (0, 0, 3, 0, 16),
        "negative region": (-1, 0, 0, 0, 16),
        "empty": (0, 0, 0, 0, 0),
        "negative size": (0, 0, 0, 0, -16),
        "sum past 64 bits": (0, 0, 0, huge - 8, 16),
        "huge": (0, 0, 0, 0, huge),
    }.items():
        with raises(ValueError, f"a piece that is {name}"):
            link.peer.post_read(pieces([good, bad]))
    found = link.local.differences(pieces([]), link.target.content)
    assert not found, f"refused, but {'; '.join(found)}"
    read(rig, link, pieces([good]))


def garbage_registration(rig: Rig) -> None:
    """What is no registration of this transport is ProtocolError."""
    link = rig.standing(SMALL)
    good = link.target.registration
    samples = [b"", b"\x00", b"no registration", b"\xff" * 64, good[:-1], good[: len(good) // 2], good[1:]]
    for sample in [*samples, good + b"\x00", b"\x81\xa4type\xa5other", b"\xc1" * (2 << 20)]:
        with raises(ProtocolError, f"connect to {sample[:20]!r} ({len(sample)} bytes)"):
            link.transport.connect(sample, 1.0)
    read(rig, link, pieces([(0, 0, 0, 0, 16)]))


def closing(rig: Rig) -> None:
    """Closing twice is nothing; using what is closed is TransportClosed; so much for one life."""
    link = rig.link(SMALL)
    with raises(TransportError, "register a second time"):
        link.transport.register([])
    batch = pieces([(0, 0, 0, 0, 16)])
    read(rig, link, batch)
    link.peer.close()
    link.peer.close()
    with raises(TransportClosed, "post_read after the peer's close"):
        link.peer.post_read(batch)
    peer = link.transport.connect(link.target.registration, rig.timeout_s)
    link.transport.close()
    link.transport.close()
    with raises(TransportClosed, "post_read after the transport's close"):
        peer.post_read(batch)
    peer.close()
    with raises(TransportClosed, "connect after close"):
        link.transport.connect(link.target.registration, 1.0)
    with raises(TransportClosed, "register after close"):
        link.transport.register([])


def peer_closed(rig: Rig) -> None:
    """A peer that closed before or during a read fails it, also if its memory is still there."""
    link = rig.link(SMALL)
    whole = pieces([(0, 0, 0, 0, SMALL[0])])
    read(rig, link, whole)
    stale = link.target.registration
    link.target.close_transport()
    expect_failed(rig, link, whole)
    _refused(rig, link, stale, "of a closed transport")
    link.target.reopen()
    _refused(rig, link, stale, "of an earlier life")
    _reconnect(rig, link)


def peer_killed(rig: Rig) -> None:
    """A peer that dies before a read fails it; its next life is another peer."""
    link = rig.link(SMALL)
    link.target.kill()
    expect_failed(rig, link, pieces([(0, 0, 0, 0, SMALL[0])]))
    _refused(rig, link, link.target.registration, "of a dead peer")
    link.target.end()
    link.target = rig.target(SMALL, seed=2)
    _reconnect(rig, link)


def peer_killed_during(rig: Rig) -> None:
    """A peer that dies during reads: each ends in time, and is right if it says DONE."""
    link = rig.link(LARGE)
    batch = pieces([(0, 0, 0, 0, LARGE[0])])
    transfers = [link.peer.post_read(batch) for _ in range(3)]
    transfers[0].poll()
    link.target.kill()
    states = finish(transfers, rig.timeout_s)
    for transfer in transfers:
        wait_quiet(transfer, rig.timeout_s)
    assert TransferState.FAILED in states, "all DONE, although the peer died"
    if TransferState.DONE in states:
        found = link.local.differences(batch, link.target.content)
        assert not found, f"DONE, but {'; '.join(found)}"


def _refused(rig: Rig, link: Link, registration: bytes, what: str) -> None:
    with raises(TransportError, f"connect to the registration {what}"):
        link.transport.connect(registration, rig.timeout_s / 10)


def _reconnect(rig: Rig, link: Link) -> None:
    """The reader goes on with the target's new registration."""
    link.peer.close()
    link.local.reset()
    link.peer = link.transport.connect(link.target.registration, rig.timeout_s)
    assert link.peer.usable, "a new connection, but not usable"
    read(rig, link, pieces(random_rows(np.random.default_rng(3), SMALL, 30)))


CHECKS: dict[str, Callable[[Rig], None]] = {
    check.__name__: check
    for check in (
        exact_bytes,
        empty_batch,
        one_piece,
        many_pieces,
        large_piece,
        adjacent_pieces,
        many_transfers,
        pending_is_not_quiet,
        cancelled,
        out_of_range,
        garbage_registration,
        closing,
        peer_closed,
        peer_killed,
        peer_killed_during,
    )
}
"""Every check by name, in the order in which they are best read."""
