"""NIXL (UCX and others): between hosts, and between GPUs.

`nixl_agent.py` is the boundary to the library, `nixl_transfer.py` one batch; here are registration and
connection. The registration carries NIXL's own metadata, the regions, and the address of a random cookie
that the peer wipes when it closes.
"""

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from stateferry.errors import (
    ProtocolError,
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
from stateferry.transport.nixl_agent import NixlAgent
from stateferry.transport.nixl_transfer import (
    COOKIE_BYTES,
    PART_BYTES,
    CookieCheck,
    Landings,
    Link,
    Memory,
    NixlTransfer,
    rows_of,
    split,
)
from stateferry.transport.pieces import cut, resolve_pieces
from stateferry.transport.registrations import check_first, decode_registration

CONNECT_POLL_S = 0.0005

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class _Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    address: _Positive
    size_bytes: _Positive
    kind: MemoryKind
    device_index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class _Registration(msgspec.Struct, frozen=True, tag="nixl/1", forbid_unknown_fields=True):
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    """Random, so that it names one life of one engine rank."""
    metadata: bytes
    """NIXL's own: how to reach the agent, and the keys of its memory."""
    regions: tuple[_Region, ...]
    cookie_address: _Positive
    cookie: Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]


class NixlTransport(Transport):
    """See the module. NIXL's progress thread runs from construction to `close`.

    `clock` and `pause` are replaced in tests.
    """

    name = "nixl"
    capabilities = Capabilities(memory_kinds=frozenset({MemoryKind.CPU, MemoryKind.CUDA}))

    def __init__(
        self,
        options: TransportOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        options = options or TransportOptions()
        self.agent = NixlAgent(f"stateferry-{uuid.uuid4().hex}", options.nixl_backends, options.nixl_threads)
        self.local = Memory.of("local", [])
        self._users: dict[str, int] = {}
        """How many open peers use each connected agent."""
        self._clock = clock
        self._pause = pause or threading.Event().wait
        self._landings = Landings(self.agent)
        # The peer reads it: kept alive, at one address, until the agent is gone.
        self._cookie = np.zeros(COOKIE_BYTES, dtype=np.uint8)
        self._tokens: list[object] = []

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        check_first(self.name, closed=self.agent.closed, registered=bool(self._tokens))
        self.local = Memory.of("local", regions)
        self._cookie[:] = np.frombuffer(secrets.token_bytes(COOKIE_BYTES), dtype=np.uint8)
        self._tokens.append(self.agent.register(MemoryKind.CPU, rows_of(self._cookie)))
        for kind in MemoryKind:
            rows = [(r.address, r.size_bytes, r.device_index) for r in regions if r.kind is kind]
            if rows:
                self._tokens.append(self.agent.register(kind, np.array(rows, dtype=np.uint64)))
        return msgspec.msgpack.encode(
            _Registration(
                agent=self.agent.name,
                metadata=self.agent.metadata(),
                regions=tuple(_Region(r.address, r.size_bytes, r.kind, r.device_index) for r in regions),
                cookie_address=self._cookie.ctypes.data,
                cookie=self._cookie.tobytes(),
            )
        )

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """As the base says. Reads the peer's cookie, so that no later post pays for the connection."""
        if self.agent.closed:
            raise TransportClosed("nixl: connect after close")
        blob = decode_registration(self.name, registration, _Registration)
        try:
            remote = Memory.of("remote", blob.regions)
        except ValueError as e:
            raise ProtocolError(f"nixl registration: {e}") from e
        if blob.agent not in self._users:
            self._add(blob)
        self._users[blob.agent] = self._users.get(blob.agent, 0) + 1
        link = Link(self.agent, self._landings, self._clock, blob.agent, blob.cookie_address, blob.cookie)
        peer = _NixlPeer(self, link, remote)
        try:
            self._probe(peer, timeout_s)
        except TransportError:
            peer.close()
            raise
        return peer

    def forget(self, name: str) -> None:
        """One peer of that agent less; the last one disconnects. Called by the peer's `close`."""
        if self.agent.closed:
            return
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            self.agent.remove_peer(name)

    def close(self) -> None:
        if self.agent.closed:
            return
        # A wiped cookie makes every later read of ours by a peer fail.
        self._cookie[:] = 0
        for name in self._users:
            self.agent.remove_peer(name)
        self._users.clear()
        for token in self._tokens:
            self.agent.deregister(token)
        self._landings.close()
        self.agent.close()

    def _add(self, blob: _Registration) -> None:
        try:
            name = self.agent.add_peer(blob.metadata)
        except TransportError as e:
            raise TransportUnavailable(
                f"nixl: agent {blob.agent} cannot be reached ({e}): its engine ended, there is no network "
                f"between the two (UCX_TLS, UCX_NET_DEVICES), or their NIXL versions differ"
            ) from e
        if name != blob.agent:
            if name not in self._users:
                self.agent.remove_peer(name)
            raise ProtocolError(f"nixl registration: of agent {blob.agent}, its metadata of {name}")

    def _probe(self, peer: "_NixlPeer", timeout_s: float) -> None:
        deadline = self._clock() + timeout_s
        check = CookieCheck(peer.link)
        while check.poll() is TransferState.PENDING:
            if self._clock() >= deadline:
                raise TransportTimeout(
                    f"nixl: agent {peer.link.name} did not answer within {timeout_s:g} s; is its engine "
                    f"alive, and is there a network between the two (UCX_TLS, UCX_NET_DEVICES)?"
                )
            self._pause(CONNECT_POLL_S)
        if check.error:
            raise TransportUnavailable(f"nixl: agent {peer.link.name}: {check.error}")


class _NixlPeer(Peer):
    def __init__(self, transport: NixlTransport, link: Link, remote: Memory) -> None:
        self.link = link
        self._transport = transport
        self._remote = remote

    @property
    def usable(self) -> bool:
        """NIXL gives an agent up at the first failed operation; another connect starts anew."""
        return not self.link.broken

    def post_read(self, pieces: Pieces) -> Transfer:
        if self.link.closed or self.link.agent.closed:
            raise TransportClosed("nixl: post_read after close")
        local, remote = self._transport.local, self._remote
        spans = cut(resolve_pieces(pieces, local.table, remote.table), PART_BYTES)
        return NixlTransfer(self.link, list(split(spans, local, remote)))

    def close(self) -> None:
        if not self.link.closed:
            self.link.closed = True
            self._transport.forget(self.link.name)
