"""The memory transport's own: when bytes land, and who finds whom."""

import pytest

from stateferry.errors import TransportUnavailable
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import content, regions_of
from stateferry.transport import TransferState
from stateferry.transport.memory import MemoryTransport


def test_bytes_land_in_the_poll_that_was_asked_for() -> None:
    there, here = content(1, [64]), content(2, [64])
    with MemoryTransport() as target, MemoryTransport(polls=3) as reader:
        registration = target.register(regions_of(there))
        reader.register(regions_of(here))
        transfer = reader.connect(registration, 1.0).post_read(pieces([(0, 0, 0, 0, 64)]))
        for _ in range(2):
            assert transfer.poll() is TransferState.PENDING
            assert not (here[0] == there[0]).all()
            assert (transfer.bytes_done, transfer.quiet) == (0, False)
        assert transfer.poll() is TransferState.DONE
        assert (here[0] == there[0]).all()


def test_a_peer_that_closes_before_the_copy_fails_it() -> None:
    there, here = content(1, [64]), content(2, [64])
    with MemoryTransport() as target, MemoryTransport(polls=2) as reader:
        reader.register(regions_of(here))
        transfer = reader.connect(target.register(regions_of(there)), 1.0).post_read(
            pieces([(0, 0, 0, 0, 64)])
        )
        assert transfer.poll() is TransferState.PENDING
        target.close()
        assert transfer.poll() is TransferState.FAILED
        assert transfer.error == "memory: the peer closed its transport"
        assert (here[0] == content(2, [64])[0]).all()


def test_a_closed_peer_is_not_found() -> None:
    target = MemoryTransport()
    registration = target.register([])
    target.close()
    with (
        MemoryTransport() as reader,
        pytest.raises(TransportUnavailable, match="in another process"),
    ):
        reader.connect(registration, 1.0)


def test_bytes_cannot_land_before_the_first_poll() -> None:
    with pytest.raises(ValueError, match="polls = 0"):
        MemoryTransport(polls=0)
