"""Mooncake's transfer engine over TCP: between hosts, CPU memory.

`mooncake_engine.py` is the boundary to the library, `mooncake_transfer.py` one batch; here are registration
and connection. One engine serves our memory; each connection reads with an engine of its own, because one
peer that hangs while an engine opens it blocks that engine. Engines whose peers are gone are used again.

Mooncake listens on every address of the machine and asks nobody who they are: whoever reaches its port can
read the registered memory and write to it.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from stateferry.errors import (
    ProtocolError,
    TransportClosed,
    TransportTimeout,
    TransportUnavailable,
)
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
from stateferry.transport.mooncake_engine import MooncakeEngine
from stateferry.transport.mooncake_transfer import (
    COOKIE_BYTES,
    PIECE_BYTES,
    CookieCheck,
    Link,
    MooncakeTransfer,
)
from stateferry.transport.pieces import RegionTable, cut, resolve_pieces
from stateferry.transport.registrations import check_first, cpu_spans, decode_registration

logger = logging.getLogger(__name__)

CONNECT_POLL_S = 0.0005

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class _Registration(msgspec.Struct, frozen=True, tag="mooncake/1", forbid_unknown_fields=True):
    # Numbers only: no name that a peer sends is ever looked up.
    segment: Annotated[str, msgspec.Meta(pattern=r"^\d{1,3}(\.\d{1,3}){3}:\d{1,5}$", max_length=21)]
    regions: tuple[tuple[_Positive, _Positive], ...]
    """(address, size in bytes) in the order in which they were registered."""
    cookie_address: _Positive
    cookie: Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]
    """Random, so that it names one life of one engine rank."""


class _Reader:
    """An engine that reads, and whom it knows."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self.engine = engine
        self.cookies: dict[str, bytes] = {}
        """By segment. An engine keeps a segment's first description for ever, so it cannot read from the
        same address and port in another life."""
        self.in_use = False
        self.check: CookieCheck | None = None
        """The last connection's first read, while it may still hang or write."""

    def free_for(self, segment: str, cookie: bytes) -> bool:
        """Whether a new connection to that life of the segment may use it."""
        hangs = self.check is not None and not self._ended(self.check)
        return not (self.in_use or hangs) and self.cookies.get(segment, cookie) == cookie

    @staticmethod
    def _ended(check: CookieCheck) -> bool:
        check.poll()
        return check.read.settled


class MooncakeTransport(Transport):
    """See the module. `clock`, `pause` and `make_engine` are replaced in tests."""

    name = "mooncake"
    capabilities = Capabilities(memory_kinds=frozenset({MemoryKind.CPU}))

    def __init__(
        self,
        options: TransportOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        make_engine: Callable[[str], MooncakeEngine] = MooncakeEngine,
    ) -> None:
        self._host = (options or TransportOptions()).host
        self._make_engine = make_engine
        self._serving = make_engine(self._host)
        self._readers: list[_Reader] = []
        self.local = RegionTable("local", [])
        self.closed = False
        self._clock = clock
        self._pause = pause or threading.Event().wait
        # The peer reads it: kept alive, at one address, until the engine is gone.
        self._cookie = np.zeros(COOKIE_BYTES, dtype=np.uint8)
        self._registered = False

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        check_first(self.name, closed=self.closed, registered=self._registered)
        spans = cpu_spans(self.name, regions, "only cpu memory was ever tried")
        self.local = RegionTable("local", spans)
        self._registered = True
        self._cookie[:] = np.frombuffer(secrets.token_bytes(COOKIE_BYTES), dtype=np.uint8)
        for address, size in [(self._cookie.ctypes.data, COOKIE_BYTES), *spans]:
            self._serving.register(address, size)
        logger.warning(
            "mooncake listens on every address of this machine (%s is the one that peers are told) and knows "
            "nobody: whoever reaches it can read and overwrite this engine's cache",
            self._serving.segment,
        )
        return msgspec.msgpack.encode(
            _Registration(
                segment=self._serving.segment,
                regions=tuple(spans),
                cookie_address=self._cookie.ctypes.data,
                cookie=self._cookie.tobytes(),
            )
        )

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """As the base says. Reads the peer's cookie, so that no later post waits for the connection."""
        if self.closed:
            raise TransportClosed("mooncake: connect after close")
        blob = decode_registration(self.name, registration, _Registration)
        try:
            remote = RegionTable("remote", blob.regions)
        except ValueError as e:
            raise ProtocolError(f"mooncake registration: {e}") from e
        reader = self._reader(blob)
        link = Link(reader.engine, blob.segment, blob.cookie_address, blob.cookie)
        reader.check = CookieCheck(link, first=True)
        self._probe(blob.segment, reader.check, timeout_s)
        reader.in_use = True
        return _MooncakePeer(self, reader, link, remote)

    def close(self) -> None:
        """As the base says. Takes up to a second an engine: see `MooncakeEngine.close`."""
        if self.closed:
            return
        self.closed = True
        # A wiped cookie makes every later read of ours by a peer fail.
        self._cookie[:] = 0
        for reader in self._readers:
            reader.engine.close()
        self._serving.close()

    def _reader(self, blob: _Registration) -> _Reader:
        for reader in self._readers:
            if reader.free_for(blob.segment, blob.cookie):
                break
        else:
            reader = _Reader(self._make_engine(self._host))
            self._readers.append(reader)
        reader.cookies[blob.segment] = blob.cookie
        return reader

    def _probe(self, segment: str, check: CookieCheck, timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        while (state := check.poll()) is TransferState.PENDING:
            if self._clock() >= deadline:
                raise TransportTimeout(
                    f"mooncake: {segment} did not answer within {timeout_s:g} s; is its engine alive, and is "
                    f"there a network between the two?"
                )
            self._pause(CONNECT_POLL_S)
        if state is TransferState.FAILED:
            raise TransportUnavailable(f"mooncake: {segment} cannot be read: {check.error}")


class _MooncakePeer(Peer):
    def __init__(
        self, transport: MooncakeTransport, reader: _Reader, link: Link, remote: RegionTable
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._link = link
        self._remote = remote

    @property
    def usable(self) -> bool:
        """One failed read is enough: who listens there now is looked at by another connect."""
        return not self._link.broken

    def post_read(self, pieces: Pieces) -> Transfer:
        if self._link.closed or self._transport.closed:
            raise TransportClosed("mooncake: post_read after close")
        spans = resolve_pieces(pieces, self._transport.local, self._remote)
        return MooncakeTransfer(self._link, cut(spans, PIECE_BYTES))

    def close(self) -> None:
        if not self._link.closed:
            self._link.closed = True
            self._reader.in_use = False
