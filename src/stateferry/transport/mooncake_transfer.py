"""One batch of reads over Mooncake: a bounded number of pieces at a time, then the peer's cookie.

Bytes count only if the registration that was connected still stood when all of them had arrived: the cookie
is read after the data. Mooncake reads from an address and a port, whoever listens there now.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stateferry.transport.base import Transfer, TransferState
from stateferry.transport.mooncake_engine import MooncakeEngine, MooncakeRead
from stateferry.transport.pieces import Spans

COOKIE_BYTES = 32
PIECE_BYTES = 4 << 20
"""Larger pieces are cut, so that none of them fills the link for long."""
PIECES_IN_FLIGHT = 256
BYTES_IN_FLIGHT = 32 << 20
"""Of one link, all its batches together. Mooncake queues 1,024 reads a peer and fails those beyond 2,048."""
MOST_LANES = 16
"""Connections to one peer that Mooncake may have. It takes reads up in the order in which they were posted,
so behind so many that are pending none has begun. Every look lets go of Python's lock once: looking at all of
them held the thread more than twice as long."""
POSTS_PER_CALL = 64
"""Most pieces that one call posts: keeps it under a millisecond."""


class FirstRead(Protocol):
    """`MooncakeRead` or `Opening`."""

    def poll(self) -> TransferState: ...
    @property
    def settled(self) -> bool: ...
    @property
    def error(self) -> str: ...


@dataclass(slots=True)
class Link:
    """What a batch needs to know about its peer."""

    engine: MooncakeEngine
    segment: str
    cookie_address: int
    cookie: bytes
    pieces: int = 0
    """Posted and not settled, over all batches."""
    size_bytes: int = 0
    closed: bool = False
    broken: bool = False
    """A read failed: connect again, and see who is there."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether a piece of this size may be posted now."""
        return self.pieces < PIECES_IN_FLIGHT and (
            not self.pieces or self.size_bytes + size_bytes <= BYTES_IN_FLIGHT
        )


class CookieCheck:
    """One read of the peer's cookie."""

    def __init__(self, link: Link, first: bool = False) -> None:
        """`first`: of that segment by that engine, so in a thread of its own."""
        self._cookie = link.cookie
        self._found = np.zeros(COOKIE_BYTES, dtype=np.uint8)
        self.read: FirstRead = (
            link.engine.opening(link.segment, self._found, link.cookie_address)
            if first
            else link.engine.read(link.segment, self._found.ctypes.data, link.cookie_address, COOKIE_BYTES)
        )
        self.error = ""

    def poll(self) -> TransferState:
        """FAILED, with `error`: it could not be read, or is another's."""
        state = self.read.poll()
        if state is TransferState.FAILED:
            self.error = self.read.error
        elif state is TransferState.DONE and self._found.tobytes() != self._cookie:
            self.error = "it does not hold the registration's cookie: the peer closed its transport"
            state = TransferState.FAILED
        return state


class MooncakeTransfer(Transfer):
    """Pieces wait in a queue, are posted while the link has room, and end in any order."""

    def __init__(self, link: Link, spans: Spans) -> None:
        """No piece of `spans` is larger than `PIECE_BYTES`."""
        self._link = link
        self._queue = deque(_rows(spans))
        self._active: deque[tuple[MooncakeRead, int]] = deque()
        """Posted and not settled, the oldest first."""
        self._check: CookieCheck | None = None
        self._total = int(spans.sizes.sum())
        self._arrived = 0
        self._state = TransferState.PENDING if self._total else TransferState.DONE
        self._post()

    @property
    def bytes_done(self) -> int:
        if self._state is TransferState.DONE:
            return self._total
        # The last byte is known to be the right one only when the cookie came after it.
        return max(0, min(self._arrived, self._total - 1))

    @property
    def quiet(self) -> bool:
        """DONE is quiet. FAILED is quiet when every piece that was posted has settled (see
        `MooncakeRead`). A peer that hangs keeps it waiting until Mooncake gives the connection up, 30 s
        after the last byte unless MC_TCP_PROGRESS_TIMEOUT_SEC says otherwise."""
        if self._state is TransferState.PENDING:
            return False
        self._collect()
        return not self._active and (self._check is None or self._check.read.settled)

    def poll(self) -> TransferState:
        if self._state is TransferState.PENDING and (self._link.closed or self._link.engine.closed):
            self._fail("closed here while the read was pending")
        self._collect()
        if self._state is TransferState.PENDING:
            self._post()
        if self._state is TransferState.PENDING and not self._active and not self._queue:
            self._check_cookie()
        return self._state

    def cancel(self) -> None:
        """Post nothing more. What was posted ends by itself."""
        self._fail("cancelled")

    def _post(self) -> None:
        link = self._link
        for _ in range(POSTS_PER_CALL):
            if not self._queue or not link.has_room(self._queue[0][2]):
                return
            local, remote, size = self._queue.popleft()
            read = link.engine.read(link.segment, local, remote, size)
            link.pieces += 1
            link.size_bytes += size
            self._active.append((read, size))
            if read.settled:
                # Refused at once; the rest would be, too.
                return

    def _collect(self) -> None:
        """Look at what was posted, as far as it may have begun."""
        pending: list[tuple[MooncakeRead, int]] = []
        while self._active and len(pending) < MOST_LANES:
            read, size = self._active.popleft()
            state = read.poll()
            if state is TransferState.PENDING:
                pending.append((read, size))
                continue
            self._link.pieces -= 1
            self._link.size_bytes -= size
            if state is TransferState.DONE:
                self._arrived += size
            else:
                self._link.broken = True
                self._fail(read.error)
        self._active.extendleft(reversed(pending))
        if self._check is not None and self._state is TransferState.FAILED:
            self._check.poll()

    def _check_cookie(self) -> None:
        if self._check is None:
            self._check = CookieCheck(self._link)
        state = self._check.poll()
        if state is TransferState.DONE:
            self._state = state
        elif state is TransferState.FAILED:
            self._link.broken = True
            self._fail(self._check.error)

    def _fail(self, why: str) -> None:
        if self._state is TransferState.PENDING:
            self.error = f"mooncake: reading {self._link.segment}: {why}"
            self._state = TransferState.FAILED
            self._queue.clear()


def _rows(spans: Spans) -> Iterator[tuple[int, int, int]]:
    return zip(spans.local.tolist(), spans.remote.tolist(), spans.sizes.tolist(), strict=True)
