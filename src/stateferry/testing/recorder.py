"""A transport that remembers what was posted over another, so that a test can ask what may still write."""

from collections.abc import Mapping, Sequence
from typing import Any

from stateferry.layout.spec import Pieces
from stateferry.transport.base import MemoryRegion, Peer, Transfer, Transport


class Recorder(Transport):
    """Passes everything on. Written by the ferry thread, looked at by the test's."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.transfers: list[Transfer] = []
        self.peers: list[RecordedPeer] = []
        self.overlaps: list[str] = []
        """Reads that were posted into memory that an earlier one might still write to."""
        self.places: list[set[tuple[int, int]]] = []
        """Per transfer: where its pieces begin, as (local region, offset)."""

    @property
    def restless(self) -> int:
        """Transfers that may still write. 0 once everything was reported, if all is well."""
        return sum(not transfer.quiet for transfer in self.transfers)

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return self.inner.register(regions)

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        peer = RecordedPeer(self, self.inner.connect(registration, timeout_s))
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        self.inner.close()

    def record(self, pieces: Pieces, transfer: Transfer) -> None:
        """Remember a read that was just posted."""
        begins = set(zip(pieces.local_regions.tolist(), pieces.local_offsets.tolist(), strict=True))
        for number, (before, earlier) in enumerate(zip(self.transfers, self.places, strict=True)):
            if not before.quiet and begins & earlier:
                self.overlaps.append(
                    f"read {len(self.transfers)} overlaps read {number}, which may still write"
                )
        self.transfers.append(transfer)
        self.places.append(begins)


class RecordedPeer(Peer):
    """One connection of a recorder."""

    def __init__(self, recorder: Recorder, inner: Peer) -> None:
        self.recorder = recorder
        self.inner = inner
        self.closed = False

    @property
    def usable(self) -> bool:
        return self.inner.usable

    def announce(self, read: int, orders: Sequence[Mapping[str, Any]]) -> None:
        self.inner.announce(read, orders)

    def post_read(self, pieces: Pieces) -> Transfer:
        transfer = self.inner.post_read(pieces)
        self.recorder.record(pieces, transfer)
        return transfer

    def close(self) -> None:
        self.closed = True
        self.inner.close()
