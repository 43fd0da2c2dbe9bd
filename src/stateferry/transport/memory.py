"""Transport inside one process, for tests: deterministic, needs nothing, copies inside `poll`.

Peers find each other through a process-wide hub; the registration is a random key into it.
"""

import ctypes
import secrets
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from stateferry.errors import TransportClosed, TransportUnavailable
from stateferry.layout.spec import Pieces
from stateferry.transport.base import (
    Capabilities,
    MemoryKind,
    MemoryRegion,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
)
from stateferry.transport.pieces import RegionTable, Spans, resolve_pieces
from stateferry.transport.registrations import check_first, decode_registration
from stateferry.transport.settling import SettlingTransfer


class _Shelf:
    """What one transport registered. The lock keeps its memory in place during a copy."""

    def __init__(self, regions: RegionTable) -> None:
        self.regions = regions
        self.lock = threading.Lock()
        self.open = True


_HUB: Final[dict[bytes, _Shelf]] = {}


class _Registration(msgspec.Struct, frozen=True, tag="memory", forbid_unknown_fields=True):
    key: bytes


class MemoryTransport(Transport):
    """Copies between registered memory of one process.

    Two transports of one process may belong to two threads; each is used by one.
    """

    name = "memory"
    capabilities = Capabilities(
        memory_kinds=frozenset({MemoryKind.CPU}), cancel=True, self_progressing=False, same_host_only=True
    )

    def __init__(self, options: TransportOptions | None = None, *, polls: int = 1) -> None:
        """`polls`: the bytes are copied inside the poll of that number, all at once."""
        if polls < 1:
            raise ValueError(f"polls = {polls}: the bytes are copied in a poll, the first at the earliest")
        self.polls = polls
        self.local = RegionTable("local", [])
        self.closed = False
        self._key = b""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        check_first(self.name, closed=self.closed, registered=bool(self._key))
        self.local = RegionTable("local", [(r.address, r.size_bytes) for r in regions])
        self._key = secrets.token_bytes(16)
        _HUB[self._key] = _Shelf(RegionTable("remote", [(r.address, r.size_bytes) for r in regions]))
        return msgspec.msgpack.encode(_Registration(self._key))

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        if self.closed:
            raise TransportClosed("memory transport: connect after close")
        blob = decode_registration(self.name, registration, _Registration)
        shelf = _HUB.get(blob.key)
        if shelf is None:
            raise TransportUnavailable(
                "memory transport: the peer is closed or in another process; it works inside one process only"
            )
        return _MemoryPeer(self, shelf)

    def close(self) -> None:
        self.closed = True
        shelf = _HUB.pop(self._key, None)
        if shelf is not None:
            with shelf.lock:
                shelf.open = False


class _MemoryPeer(Peer):
    def __init__(self, transport: MemoryTransport, shelf: _Shelf) -> None:
        self.transport = transport
        self.shelf = shelf
        self.closed = False

    @property
    def usable(self) -> bool:
        """False once the peer closed its transport."""
        return self.shelf.open

    def post_read(self, pieces: Pieces) -> Transfer:
        if self.closed or self.transport.closed:
            raise TransportClosed("memory transport: post_read after close")
        return _MemoryTransfer(self, resolve_pieces(pieces, self.transport.local, self.shelf.regions))

    def close(self) -> None:
        self.closed = True


class _MemoryTransfer(SettlingTransfer):
    def __init__(self, peer: _MemoryPeer, spans: Spans) -> None:
        super().__init__(int(spans.sizes.sum()), "memory")
        self._peer = peer
        self._spans = spans
        self._polls_left = peer.transport.polls

    def poll(self) -> TransferState:
        if self._state is not TransferState.PENDING:
            return self._state
        if self._peer.closed or self._peer.transport.closed:
            self._fail("closed here while the read was pending")
            return self._state
        self._polls_left -= 1
        with self._peer.shelf.lock:
            if not self._peer.shelf.open:
                self._fail("the peer closed its transport")
            elif self._polls_left <= 0:
                self._copy()
        return self._state

    def cancel(self) -> None:
        if self._state is TransferState.PENDING:
            self._fail("cancelled")

    def _copy(self) -> None:
        for local, remote, size in zip(*(a.tolist() for a in self._spans[:3]), strict=True):
            ctypes.memmove(local, remote, size)
        self._bytes_done = self._total
        self._state = TransferState.DONE
