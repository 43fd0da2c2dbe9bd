"""One batch of reads over MoRI: cut into requests, posted again where the send queue was full, proven alive.

A request that finds MoRI's send queue full is posted again, after 1 ms and then twice as long each time, up
to 50 ms, until the read's own time is over or somebody cancels; nothing else that fails is. Nothing waits in
here: `poll` posts what is due.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stateferry.errors import TransportError
from stateferry.transport.base import Transfer, TransferState
from stateferry.transport.mori_cookies import COOKIE_BYTES, Cookies, Landing
from stateferry.transport.mori_engine import MoriEngine, MoriSession
from stateferry.transport.mori_request import Request
from stateferry.transport.pieces import RegionTable, Spans, batch_ends

PART_BYTES = 32 << 20
"""Far below the 32 bits that MoRI counts a piece in, and the 1 GiB that a work request may have."""
PART_PIECES = 512
PARTS_IN_FLIGHT = 4
"""Few enough work requests that MoRI posts a part at once, and that all parts fit into its send queue (of
8,192 unless made smaller): one that meets a full queue between two posts leaves its endpoint degraded, which
is worse than being full."""
FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05

Regions = tuple[int, int]
"""Our region and the peer's."""


@dataclass(slots=True)
class Part:
    """One request to be: pieces between one pair of regions, offsets from the start of each."""

    regions: Regions
    local: list[int]
    remote: list[int]
    sizes: list[int]
    size_bytes: int
    not_before_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    """How long to wait when the send queue is full once more."""


def split(spans: Spans, local: RegionTable, remote: RegionTable) -> Iterator[Part]:
    """The batch in requests of one pair of regions each, within the limits.

    No piece is larger than `PART_BYTES`.
    """
    if len(spans.sizes) == 0:
        return
    ours = spans.local.astype(np.int64) - local.addresses[spans.local_regions]
    theirs = spans.remote.astype(np.int64) - remote.addresses[spans.remote_regions]
    pairs = spans.local_regions * len(remote) + spans.remote_regions
    for pair in np.unique(pairs).tolist():
        chosen = np.flatnonzero(pairs == pair)
        start = 0
        for end in batch_ends(spans.sizes[chosen], PART_BYTES, PART_PIECES):
            rows = chosen[start:end]
            sizes = spans.sizes[rows].tolist()
            yield Part(
                divmod(pair, len(remote)), ours[rows].tolist(), theirs[rows].tolist(), sizes, sum(sizes)
            )
            start = end


@dataclass(slots=True)
class Link:
    """What a batch needs to know about its peer."""

    engine: MoriEngine
    cookies: Cookies
    name: str
    cookie: bytes
    timeout_s: float
    """How long a read may find the send queue full."""
    cookie_session: MoriSession
    local: Sequence[Any]
    """Descriptors of our regions."""
    remote: Sequence[Any]
    sessions: dict[Regions, MoriSession] = field(default_factory=dict)
    closed: bool = False
    broken: bool = False
    """A request failed, or the peer's life has ended: the next read needs a new connection."""

    def session(self, regions: Regions) -> MoriSession:
        """The session of this pair of regions, made when it is first needed. Raises TransportError."""
        if regions not in self.sessions:
            ours, theirs = regions
            self.sessions[regions] = self.engine.session(self.local[ours], self.remote[theirs])
        return self.sessions[regions]


class CookieCheck:
    """One read of the peer's cookie."""

    def __init__(self, link: Link, landing: Landing) -> None:
        self._link = link
        self._landing = landing
        self.request = link.cookie_session.read([landing.offset], [0], [COOKIE_BYTES])
        landing.requests.append(self.request)

    def wrong(self) -> str:
        """What is wrong with what arrived; empty: it is the peer that was connected to."""
        if self._landing.content() == self._link.cookie:
            return ""
        return (
            "it does not hold the registration's cookie: the peer closed its transport, or MoRI reads another"
        )


class MoriTransfer(Transfer):
    """Parts wait in a queue, are posted a few at a time, and end in any order; then the cookie is read.

    Quiet as `mori_request` argues it for each request. One that found a full send queue may have been posted
    in part, too: a transfer is DONE only once such a request is over, whatever its next try has brought.
    """

    def __init__(self, link: Link, parts: Sequence[Part]) -> None:
        self._link = link
        self._queue = deque(parts)
        self._active: list[tuple[Request, Part]] = []
        self._failed: list[Request] = []
        """Those that may still write."""
        self._landing: Landing | None = None
        self._check: CookieCheck | None = None
        self._check_not_before_s, self._check_pause_s = 0.0, FIRST_PAUSE_S
        self._total = sum(part.size_bytes for part in parts)
        self._arrived = 0
        self._deadline_s = link.engine.clock() + link.timeout_s
        self._state = TransferState.PENDING if self._total else TransferState.DONE
        self._post()

    @property
    def bytes_done(self) -> int:
        if self._state is TransferState.DONE:
            return self._total
        # The last byte is known to be the right one only when the cookie came after it.
        return min(self._arrived, self._total - 1)

    @property
    def quiet(self) -> bool:
        if self._state is not TransferState.FAILED or self._link.engine.closed:
            return self._state is not TransferState.PENDING
        self._look()
        return not self._active and self._failures_over

    def poll(self) -> TransferState:
        if self._state is TransferState.PENDING and (self._link.closed or self._link.engine.closed):
            self._fail("closed here while the read was pending")
        if self._link.engine.closed:
            return self._state
        self._look()
        if self._state is TransferState.PENDING:
            self._post()
        if self._state is TransferState.PENDING and not self._queue and not self._active:
            self._check_cookie()
        return self._state

    def cancel(self) -> None:
        """MoRI cannot stop what is posted; what is not stays unposted."""
        if self._queue:
            self._fail("cancelled")

    @property
    def _failures_over(self) -> bool:
        self._failed = [request for request in self._failed if not request.over]
        return not self._failed

    def _look(self) -> None:
        """Look at what was posted."""
        active, self._active = self._active, []
        for request, part in active:
            state = request.look()
            if state is TransferState.PENDING:
                self._active.append((request, part))
            elif state is TransferState.DONE:
                self._arrived += part.size_bytes
            else:
                self._part_failed(request, part)

    def _post(self) -> None:
        """Post what is due. A full send queue holds up what stands behind it, which would find it full."""
        while self._state is TransferState.PENDING and self._queue and len(self._active) < PARTS_IN_FLIGHT:
            if self._link.engine.clock() < self._queue[0].not_before_s:
                return
            part = self._queue.popleft()
            try:
                session = self._link.session(part.regions)
            except TransportError as e:
                self._native_failure(str(e))
                return
            request = session.read(part.local, part.remote, part.sizes)
            if request.look() is TransferState.FAILED:
                self._part_failed(request, part)
            else:
                self._active.append((request, part))

    def _part_failed(self, request: Request, part: Part) -> None:
        self._failed.append(request)
        pause_s = self._pause_after(request, part.pause_s)
        if pause_s:
            part.not_before_s = self._link.engine.clock() + pause_s
            part.pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._queue.appendleft(part)

    def _pause_after(self, request: Request, pause_s: float) -> float:
        """How long to wait before this request is posted again; 0: it is not, and the read has failed."""
        if self._state is TransferState.PENDING and request.full:
            if self._link.engine.clock() + pause_s < self._deadline_s:
                return pause_s
            self._fail(f"the send queue stayed full for {self._link.timeout_s:g} s: {request.error}")
        elif self._state is TransferState.PENDING:
            self._native_failure(request.error)
        return 0.0

    def _check_cookie(self) -> None:
        try:
            self._advance_check()
        except RuntimeError as e:  # torch's, where the cookie lies on a device
            self._fail(f"the device failed: {e}")

    def _advance_check(self) -> None:
        if self._check is None and not self._begin_check():
            return
        assert self._check is not None
        assert self._landing is not None
        request = self._check.request
        state = request.look()
        if state is TransferState.PENDING:
            return
        if state is TransferState.DONE:
            wrong = self._check.wrong()
            if wrong:
                self._native_failure(wrong)
            else:
                self._state = TransferState.DONE
                self._give_landing()
            return
        # It may still write, but only into its landing, which nobody gets before it cannot.
        self._check = None
        pause_s = self._pause_after(request, self._check_pause_s)
        if pause_s:
            self._check_not_before_s = self._link.engine.clock() + pause_s
            self._check_pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _begin_check(self) -> bool:
        """Post the read of the cookie, after the last byte: no request before it may write after it."""
        if not self._failures_over or self._link.engine.clock() < self._check_not_before_s:
            return False
        if self._landing is None:
            self._landing = self._link.cookies.take()
        if self._landing is None:
            return False
        self._check = CookieCheck(self._link, self._landing)
        return True

    def _native_failure(self, why: str) -> None:
        self._link.broken = True
        self._fail(why)

    def _fail(self, why: str) -> None:
        if self._state is TransferState.PENDING:
            self.error = f"mori: reading engine {self._link.name}: {why}"
            self._state = TransferState.FAILED
            self._queue.clear()
            self._give_landing()

    def _give_landing(self) -> None:
        if self._landing is not None:
            self._link.cookies.give(self._landing)
            self._landing = None
