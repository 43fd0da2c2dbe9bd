"""What every transport does. One file beside this one per library; one conformance suite for all.

A transport is used by one thread, the ferry thread, from construction to `close`. It owns no
memory: the caller registers memory that outlives the transport. Exceptions are for the control path
(`register`, `connect`, `post_read`'s bad arguments); a posted transfer reports by `state`.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from stateferry.errors import ProtocolError
from stateferry.layout.spec import Pieces
from stateferry.transport.mori_options import MoriOptions

QUICK_POLLS = 400
"""Looks after a post with so short a sleep between them, before looks every millisecond: most reads end
within them. Counted, because some transports move bytes in a look."""
QUICK_PAUSE_S = 0.00002
"""Asleep, not spinning: who looks again at once takes Python's lock again before a thread that waits for it
wakes up, and vLLM's own would then wait for Python's switch interval, 5 ms. Also after a look that moved
bytes with that lock released: without a pause there the same was measured."""


class TransferState(enum.Enum):
    """Where a posted batch stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class MemoryKind(enum.Enum):
    """Where a region lies."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A stretch of this process's memory. The caller keeps it alive until the transport is closed."""

    address: int
    size_bytes: int
    kind: MemoryKind = MemoryKind.CPU
    device_index: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do."""

    memory_kinds: frozenset[MemoryKind]
    read: bool = True
    write: bool = False
    cancel: bool = False
    """A pending transfer can be stopped so that it is quiet at once."""
    self_progressing: bool = True
    """False: bytes move inside `poll`, a bounded slice a call (cross-memory attach)."""
    same_host_only: bool = False
    max_piece_bytes: int = 1 << 62
    """Larger pieces are cut by the transport itself."""


class Transfer(ABC):
    """One posted batch of reads. Keep it referenced until `quiet`: libraries hold raw pointers to it.

    The local memory of its pieces belongs to the transfer until then.
    """

    error: str = ""
    """Why it failed; empty otherwise."""

    @property
    @abstractmethod
    def bytes_done(self) -> int:
        """Bytes known to have arrived; equal to the batch's total exactly when DONE."""

    @abstractmethod
    def poll(self) -> TransferState:
        """Look, without waiting. May move a bounded slice where the library has no progress of its
        own (see `Capabilities.self_progressing`). Terminal states stay. Never raises."""

    @property
    @abstractmethod
    def quiet(self) -> bool:
        """No byte can land any more. DONE is quiet; FAILED is not always."""

    def cancel(self) -> None:  # noqa: B027 - most libraries cannot
        """Ask for an early end, where the library can; otherwise nothing. `poll` tells the result."""


class Peer(ABC):
    """A connection to one remote rank's registered memory, for one life (epoch) of it."""

    @abstractmethod
    def post_read(self, pieces: Pieces) -> Transfer:
        """Start reading all `pieces` from the peer's regions into ours; returns without waiting for
        the network. An empty batch is DONE at once. `pieces` may be dropped after the call.

        Raises ValueError for a piece outside a registered region on either side (a bug of the
        caller's: nothing is read), TransportClosed after our own `close` of peer or transport.
        Anything that is wrong with the peer gives a FAILED transfer instead.
        """

    def announce(self, read: int, orders: Sequence[Mapping[str, Any]]) -> None:
        """Under test: the next `post_read` is its hand-off's read number `read`, the first is 1, and is
        to go wrong as `orders` say (see `transport.faults`, which alone can do that).

        Raises ProtocolError for orders that cannot be obeyed.
        """
        if orders:
            raise ProtocolError(
                "faults were ordered for a hand-off, but this engine's transport makes none: start it with "
                "transport 'faults'"
            )

    @property
    def usable(self) -> bool:
        """False after a failure that no new read can get over: close it, and connect again with the
        registration that the peer has then."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Forget the peer. Idempotent. No transfer may be pending."""


class Transport(ABC):
    """Moves bytes between registered memory of two processes."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        """Register our memory, once. Returns what a peer needs for `connect`: opaque, under 1 MiB.

        Raises TransportError when the library refuses or when called twice, TransportUnavailable
        for a kind of memory that this transport cannot move, TransportClosed after `close`.
        """

    @abstractmethod
    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """Make the peer's regions readable. May block up to `timeout_s`.

        Raises ProtocolError for a registration that cannot be parsed, TransportUnavailable with a
        reason and a cure when the peer cannot be reached by this means (another host, no
        permission) or that life of it has ended, TransportTimeout past the deadline,
        TransportClosed after `close`.
        """

    @abstractmethod
    def close(self) -> None:
        """Deregister everything. Idempotent. No transfer may be pending."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Settings that some transports read. Others ignore them."""

    nixl_backends: tuple[str, ...] = ("UCX",)
    nixl_threads: int = 0
    mori: MoriOptions = field(default_factory=MoriOptions)
    host: str = "127.0.0.1"
    """Address of this machine that peers dial, where the library has sockets of its own."""
    epoch: int = 0
    """Of this engine rank: part of the name that a library knows it by."""
    transfer_timeout_s: float = 60.0
    """A read that a transport tries again by itself is given up after so long."""
    rocm: bool = False
    """Whether CUDA memory is an AMD GPU's, which torch calls by the same name."""
    faults: Mapping[str, Any] = field(default_factory=dict)
    """What the `faults` transport is to do, as an operator wrote it."""
    memory_kind: MemoryKind = MemoryKind.CPU
    """Where this engine's cache lies, for a transport that picks another."""
