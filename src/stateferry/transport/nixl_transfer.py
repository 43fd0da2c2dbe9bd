"""One batch of reads over NIXL: in parts, then the peer's cookie, then it counts.

Between processes of one host NIXL copies inside the call that starts a part; parts keep that call
short. After the data one more read fetches the peer's cookie: bytes count only if the registration that
was connected still stood when they had arrived.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stateferry.errors import TransportError
from stateferry.layout.spec import Int64Array
from stateferry.transport.base import MemoryKind, Transfer, TransferState
from stateferry.transport.nixl_agent import Descriptors, NixlAgent, NixlRead
from stateferry.transport.pieces import AddressArray, RegionTable, Spans, batch_ends

COOKIE_BYTES = 32
PART_BYTES = 32 << 20
PART_PIECES = 2048
PARTS_IN_FLIGHT = 8
QUIET_AFTER_S = 1.0
"""How long after a failed native read no byte can land any more: see `NixlTransfer.quiet`."""
_LANDINGS_A_PAGE = 64
_KINDS = tuple(MemoryKind)


class Part(NamedTuple):
    """What one native request reads."""

    local_kind: MemoryKind
    local: Descriptors
    remote_kind: MemoryKind
    remote: Descriptors
    size_bytes: int


class RegionLike(Protocol):
    """`MemoryRegion`, or what a peer tells of one."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def kind(self) -> MemoryKind: ...
    @property
    def device_index(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """One side's regions, as whole arrays."""

    table: RegionTable
    kinds: Int64Array
    """Indices into `_KINDS`."""
    devices: Int64Array

    @classmethod
    def of(cls, side: str, regions: Sequence[RegionLike]) -> "Memory":
        """`side` is for messages. Raises ValueError for a region that cannot be memory."""
        return cls(
            RegionTable(side, [(r.address, r.size_bytes) for r in regions]),
            np.array([_KINDS.index(r.kind) for r in regions], dtype=np.int64),
            np.array([r.device_index for r in regions], dtype=np.int64),
        )


def split(spans: Spans, local: Memory, remote: Memory) -> Iterator[Part]:
    """The batch in requests that NIXL takes: one kind of memory on each side, within the limits.

    No piece is larger than `PART_BYTES`.
    """
    if len(spans.sizes) == 0:
        return
    ours = _rows(spans.local, spans.sizes, local.devices[spans.local_regions])
    theirs = _rows(spans.remote, spans.sizes, remote.devices[spans.remote_regions])
    pairs = local.kinds[spans.local_regions] * len(_KINDS) + remote.kinds[spans.remote_regions]
    for pair in np.unique(pairs).tolist():
        chosen = np.flatnonzero(pairs == pair)
        start = 0
        for end in batch_ends(spans.sizes[chosen], PART_BYTES, PART_PIECES):
            rows = chosen[start:end]
            yield Part(
                _KINDS[pair // len(_KINDS)],
                ours[rows],
                _KINDS[pair % len(_KINDS)],
                theirs[rows],
                int(spans.sizes[rows].sum()),
            )
            start = end


def _rows(addresses: AddressArray, sizes: AddressArray, devices: Int64Array) -> Descriptors:
    return np.stack([addresses, sizes, devices.astype(np.uint64)], axis=1)


def rows_of(array: npt.NDArray[np.uint8]) -> Descriptors:
    """CPU memory of an array as one descriptor."""
    return np.array([[array.ctypes.data, array.nbytes, 0]], dtype=np.uint64)


class Landings:
    """Registered memory for peers' cookies to arrive in.

    A piece comes back only when its read is over; one whose read failed is never used again.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._pages: list[tuple[npt.NDArray[np.uint8], object]] = []
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self) -> npt.NDArray[np.uint8]:
        """`uint8[32]`, zeroed. Raises TransportError when more memory cannot be registered."""
        if not self._free:
            page = np.zeros((_LANDINGS_A_PAGE, COOKIE_BYTES), dtype=np.uint8)
            self._pages.append((page, self._agent.register(MemoryKind.CPU, rows_of(page))))
            self._free.extend(page)
        landing = self._free.pop()
        landing[:] = 0
        return landing

    def give(self, landing: npt.NDArray[np.uint8]) -> None:
        """Return one that no read writes to any more."""
        self._free.append(landing)

    def close(self) -> None:
        """Deregister all, before the agent is closed."""
        for _, token in self._pages:
            self._agent.deregister(token)
        self._free.clear()


@dataclass(slots=True)
class Link:
    """What a batch needs to know about its peer."""

    agent: NixlAgent
    landings: Landings
    clock: Callable[[], float]
    name: str
    cookie_address: int
    cookie: bytes
    closed: bool = False
    broken: bool = False
    """A native read failed: NIXL reads nothing from that agent any more."""


class CookieCheck:
    """One read of the peer's cookie."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._landing = link.landings.take()
        remote = np.array([[link.cookie_address, COOKIE_BYTES, 0]], dtype=np.uint64)
        local = rows_of(self._landing)
        self.read = link.agent.read(link.name, MemoryKind.CPU, local, MemoryKind.CPU, remote)
        self.error = ""

    def poll(self) -> TransferState:
        """FAILED: it could not be read. DONE: something came, and `error` says if it is the wrong thing."""
        state = self.read.poll()
        if state is TransferState.FAILED:
            self.error = self.read.error
        elif state is TransferState.DONE:
            if not self.read.settled:
                return TransferState.PENDING
            if self._landing.tobytes() != self._link.cookie:
                self.error = "it does not hold the registration's cookie: the peer closed its transport"
            self._link.landings.give(self._landing)
        return state


class NixlTransfer(Transfer):
    """Parts wait in a queue, are started a few at a time, and end in any order."""

    def __init__(self, link: Link, parts: Sequence[Part]) -> None:
        self._link = link
        self._queue = deque(parts)
        self._active: list[tuple[NixlRead, int]] = []
        self._check: CookieCheck | None = None
        self._total = sum(part.size_bytes for part in parts)
        self._arrived = 0
        self._failed_at: float | None = None
        """When a native read failed last."""
        self._state = TransferState.PENDING if self._total else TransferState.DONE
        self._start_parts()

    @property
    def bytes_done(self) -> int:
        if self._state is TransferState.DONE:
            return self._total
        # The last byte is known to be the right one only when the cookie came after it.
        return min(self._arrived, self._total - 1)

    @property
    def quiet(self) -> bool:
        """DONE is quiet. FAILED is quiet when every request that was started has ended and
        `QUIET_AFTER_S` have passed since the last one that failed.

        NIXL reports a request as failed as soon as one of its operations is; UCX then tears the
        connection down and completes the others while flushing it, which nothing reports to us. So a
        failed request alone proves nothing, and the time is a margin of several orders of magnitude
        over a flush. A request that has neither ended nor failed is never taken for quiet.
        """
        if self._state is not TransferState.FAILED or self._link.agent.closed:
            return self._state is not TransferState.PENDING
        self._collect()
        if self._active or (self._check is not None and not self._check.read.settled):
            return False
        return self._failed_at is None or self._link.clock() - self._failed_at >= QUIET_AFTER_S

    def poll(self) -> TransferState:
        if self._state is TransferState.PENDING and (self._link.closed or self._link.agent.closed):
            self._fail("closed here while the read was pending")
        self._collect()
        if self._state is TransferState.PENDING:
            self._start_parts()
        if self._state is TransferState.PENDING and not self._active:
            self._check_cookie()
        return self._state

    def _collect(self) -> None:
        """Look at what was started."""
        active = self._active
        self._active = []
        for read, size in active:
            state = read.poll()
            if not read.settled:
                self._active.append((read, size))
            elif state is TransferState.DONE:
                self._arrived += size
            if state is TransferState.FAILED and (read.settled or self._state is TransferState.PENDING):
                self._native_failure(read.error)
        if self._check is not None and self._state is TransferState.FAILED:
            self._check.read.poll()

    def _start_parts(self) -> None:
        while self._queue and len(self._active) < PARTS_IN_FLIGHT:
            part = self._queue.popleft()
            read = self._link.agent.read(self._link.name, *part[:4])
            self._active.append((read, part.size_bytes))
            if read.state is not TransferState.PENDING:
                # It was copied inside the call, which took its time; or the peer is gone.
                return

    def _check_cookie(self) -> None:
        if self._check is None:
            try:
                self._check = CookieCheck(self._link)
            except TransportError as e:
                self._fail(str(e))
                return
        state = self._check.poll()
        if state is TransferState.FAILED:
            self._native_failure(self._check.error)
        elif state is TransferState.DONE:
            if self._check.error:
                self._link.broken = True
                self._fail(self._check.error)
            else:
                self._state = TransferState.DONE

    def _native_failure(self, why: str) -> None:
        self._failed_at = self._link.clock()
        self._link.broken = True
        self._fail(why)

    def _fail(self, why: str) -> None:
        if self._state is TransferState.PENDING:
            self.error = f"nixl: reading agent {self._link.name}: {why}"
            self._state = TransferState.FAILED
            self._queue.clear()
