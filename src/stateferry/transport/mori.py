"""MoRI-IO on AMD GPUs: RDMA between hosts, XGMI between GPUs of one host.

**Never run on hardware.** It is written to MoRI's API as the published packages have it (`make
mori-contract`) and proven over a double that behaves as MoRI's sources show (`testing/mori_double.py`).

    mori_options    what can be set            mori_cookies    how a peer's life is recognised
    mori_engine     MoRI's engine, sessions    mori_request    one request: how it stands, when it is over
    mori_transfer   one batch of reads         mori_wait       waiting for many requests at once

Memory is registered by address: one region a storage and one for the cookie, however many layers there are.
There is one session for each pair of regions that is read. The engine's name carries the epoch and random
bits, so a peer that restarts is another engine to MoRI, which remembers names for ever. Both engines need the
same version of MoRI: descriptors of one are not read by another.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from stateferry.errors import (
    ProtocolError,
    StateFerryError,
    TransportClosed,
    TransportError,
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
from stateferry.transport.mori_cookies import COOKIE_BYTES, Cookies, page_for
from stateferry.transport.mori_engine import MoriEngine
from stateferry.transport.mori_options import MoriBackend
from stateferry.transport.mori_transfer import (
    LONGEST_PAUSE_S,
    PART_BYTES,
    CookieCheck,
    Link,
    MoriTransfer,
    split,
)
from stateferry.transport.mori_wait import Waiter
from stateferry.transport.pieces import RegionTable, cut, resolve_pieces
from stateferry.transport.registrations import check_first, decode_registration

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class _Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    address: _Positive
    size_bytes: _Positive
    descriptor: bytes
    """MoRI's own: how this memory is named, and its keys."""


class _Registration(msgspec.Struct, frozen=True, tag="mori/1", forbid_unknown_fields=True):
    backend: MoriBackend
    engine: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    """Its name: of one life of one engine rank."""
    engine_descriptor: bytes
    regions: tuple[_Region, ...]
    cookie_page: bytes
    """MoRI's descriptor of it; the cookie lies at its start."""
    cookie: Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]


class MoriTransport(Transport):
    """See the module. MoRI's threads run from construction to `close`.

    `io`, `clock` and `pause` are replaced in tests.
    """

    name = "mori"
    capabilities = Capabilities(memory_kinds=frozenset({MemoryKind.CPU, MemoryKind.CUDA}))

    def __init__(
        self,
        options: TransportOptions | None = None,
        *,
        io: Any = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        options = options or TransportOptions()
        self._backend = options.mori.backend
        name = f"stateferry-{options.epoch:x}-{uuid.uuid4().hex}"
        self.engine = MoriEngine(name, options.host, options.mori, io, clock)
        self._pause = pause or threading.Event().wait
        self.waiter = Waiter(self.engine, self._pause)
        self.local = RegionTable("local", [])
        self._timeout_s = options.transfer_timeout_s
        self._descriptors: list[Any] = []
        self._cookies: Cookies | None = None
        self._cookie_page: Any = None
        self._known: dict[str, tuple[Any, int]] = {}
        """MoRI's descriptor of each connected engine, and how many open peers use it."""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        check_first(self.name, closed=self.engine.closed, registered=self._cookies is not None)
        self.local = RegionTable("local", [(r.address, r.size_bytes) for r in regions])
        cookies = Cookies(page_for(regions, self._backend is MoriBackend.XGMI))
        # First, always: see `mori_cookies`.
        self._cookie_page = self.engine.register(cookies.page.region)
        self._descriptors = [self.engine.register(region) for region in regions]
        self._cookies = cookies
        return msgspec.msgpack.encode(
            _Registration(
                backend=self._backend,
                engine=self.engine.name,
                engine_descriptor=self.engine.description(),
                regions=tuple(
                    _Region(r.address, r.size_bytes, bytes(d.pack()))
                    for r, d in zip(regions, self._descriptors, strict=True)
                ),
                cookie_page=bytes(self._cookie_page.pack()),
                cookie=cookies.ours,
            )
        )

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """As the base says, but for MoRI's own hand-shake, which takes its own time (`MoriEngine.session`).

        Sessions of regions with the same number are made here, and the peer's cookie is read, so that no
        later post between equal ranks pays for the connection. After a failure MoRI may still have the same
        queue pair: then the cookie cannot be read, and this fails.
        """
        if self.engine.closed:
            raise TransportClosed("mori: connect after close")
        if self._cookies is None:
            raise TransportError("mori: connect before register")
        blob = decode_registration(self.name, registration, _Registration)
        try:
            remote = RegionTable("remote", [(r.address, r.size_bytes) for r in blob.regions])
        except ValueError as e:
            raise ProtocolError(f"mori registration: {e}") from e
        if blob.backend is not self._backend:
            raise TransportUnavailable(
                f"mori: the peer uses back end {blob.backend.value}, this engine {self._backend.value}: set "
                "'mori_backend' to the same on both"
            )
        self._meet(blob)
        try:
            link = self._link(blob, self._cookies)
            self._probe(link, timeout_s)
        except StateFerryError:
            self.forget(blob.engine)
            raise
        return _MoriPeer(self, link, remote)

    def forget(self, name: str) -> None:
        """One peer of that engine less; the last one makes MoRI forget it. Called by the peer's `close`."""
        if self.engine.closed:
            return
        descriptor, users = self._known.pop(name)
        if users > 1:
            self._known[name] = descriptor, users - 1
        else:
            self.engine.part(descriptor)

    def close(self) -> None:
        if self.engine.closed:
            return
        if self._cookies is not None:
            # A wiped cookie makes every later read of ours by a peer fail.
            self._cookies.wipe()
        for descriptor, _ in self._known.values():
            self.engine.part(descriptor)
        self._known.clear()
        self.engine.close()

    def _meet(self, blob: _Registration) -> None:
        known = self._known.get(blob.engine)
        if known is not None:
            self._known[blob.engine] = known[0], known[1] + 1
            return
        try:
            descriptor = self.engine.meet(blob.engine_descriptor)
        except TransportError as e:
            raise TransportUnavailable(f"mori: engine {blob.engine}: {e}{_versions()}") from e
        if descriptor.key != blob.engine:
            self.engine.part(descriptor)
            raise ProtocolError(
                f"mori registration: of engine {blob.engine}, its descriptor of {descriptor.key}"
            )
        self._known[blob.engine] = descriptor, 1

    def _link(self, blob: _Registration, cookies: Cookies) -> Link:
        """Unpack what MoRI needs, and connect. Raises TransportUnavailable."""
        try:
            page = self.engine.unpack_memory(blob.cookie_page)
            theirs = [self.engine.unpack_memory(region.descriptor) for region in blob.regions]
        except TransportError as e:
            raise TransportUnavailable(f"mori: engine {blob.engine}: {e}{_versions()}") from e
        for descriptor, region in zip(theirs, blob.regions, strict=True):
            if descriptor.engine_key != blob.engine or descriptor.size != region.size_bytes:
                raise ProtocolError(
                    f"mori registration: engine {blob.engine}, region of {region.size_bytes} bytes, but its "
                    f"descriptor is of {descriptor.engine_key} and {descriptor.size} bytes"
                )
        try:
            link = Link(
                self.engine,
                cookies,
                blob.engine,
                blob.cookie,
                self._timeout_s,
                self.engine.session(self._cookie_page, page),
                self._descriptors,
                theirs,
            )
            for index in range(min(len(self._descriptors), len(theirs))):
                link.session((index, index))
        except TransportUnavailable as e:
            raise TransportUnavailable(
                f"mori: engine {blob.engine}: {e}; is it alive, and is there a network between the two?"
            ) from e
        return link

    def _probe(self, link: Link, timeout_s: float) -> None:
        """Read the cookie once; again where others' reads have filled the send queue just now."""
        try:
            wrong = self._read_cookie(link, self.engine.clock() + timeout_s)
        except TransportTimeout as e:
            raise TransportTimeout(f"mori: engine {link.name} did not answer: {e}") from e
        except (TransportError, RuntimeError) as e:  # RuntimeError: torch's, where the cookie is on a device
            raise TransportUnavailable(f"mori: engine {link.name}: {e}") from e
        if wrong:
            raise TransportUnavailable(f"mori: engine {link.name}: {wrong}")

    def _read_cookie(self, link: Link, deadline_s: float) -> str:
        """What is wrong with the peer's cookie; empty: nothing. Raises TransportError."""
        landing = link.cookies.take()
        if landing is None:
            raise TransportError("no room to read its cookie: too many reads do not end")
        try:
            check = CookieCheck(link, landing)
            while check.request.look() is TransferState.FAILED and check.request.full:
                if self.engine.clock() >= deadline_s:
                    raise TransportTimeout(check.request.error)
                self._pause(LONGEST_PAUSE_S)
                check = CookieCheck(link, landing)
            left_s = deadline_s - self.engine.clock()
            self.waiter.wait([check.request], left_s, "handshake_timeout_s")
            return check.wrong()
        finally:
            link.cookies.give(landing)


class _MoriPeer(Peer):
    def __init__(self, transport: MoriTransport, link: Link, remote: RegionTable) -> None:
        self.link = link
        self._transport = transport
        self._remote = remote

    @property
    def usable(self) -> bool:
        """False once a request failed for another reason than a full send queue, or the peer's life ended."""
        return not self.link.broken

    def post_read(self, pieces: Pieces) -> Transfer:
        if self.link.closed or self.link.engine.closed:
            raise TransportClosed("mori: post_read after close")
        local = self._transport.local
        spans = cut(resolve_pieces(pieces, local, self._remote), PART_BYTES)
        return MoriTransfer(self.link, list(split(spans, local, self._remote)))

    def close(self) -> None:
        if not self.link.closed:
            self.link.closed = True
            self._transport.forget(self.link.name)


def _versions() -> str:
    return "; do both engines have the same version of amd-mori?"
