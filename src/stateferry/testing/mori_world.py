"""What happens to the requests of the MoRI double: behaviours, and the memory that they move bytes in.

All engines of one `World` see one another, as processes on one network do. Its clock is its own: it goes on
only when a test or a wait moves it, unless `real_time`.
"""

import ctypes
import enum
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any


class Code(enum.IntEnum):
    """MoRI's status codes. Failures are above 10."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15

    def __str__(self) -> str:
        return f"StatusCode.{self.name}"


class Kind(enum.Enum):
    """What becomes of a request."""

    RUNS = "runs"
    """Bytes move and it succeeds, after `looks`."""
    REFUSED = "refused"
    """Failed when posted; `part` of it had been posted before and lands when the world says so."""
    FAILS_WRITING = "fails writing"
    """Failed after `looks`; `part` of it lands when the world says so."""
    NEVER = "never"
    """In progress for ever."""
    RAISES = "raises"
    """Posting raises; `part` of it had been posted."""


SQ_FULL = "SQ full (batch): ep=0 depth=4096 requested=64 max=4096"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one request goes."""

    kind: Kind = Kind.RUNS
    looks: int = 0
    """How often somebody must look before it ends."""
    init_looks: int = 0
    """How often it then says INIT, not IN_PROGRESS, first."""
    message: str = "work completion error: retry counter exceeded"
    code: Code = Code.ERR_RDMA_OP
    part: float = 0.0
    """Which share of its pieces is written although it failed."""


def sq_full(part: float = 0.0) -> Behaviour:
    """The send queue had no room; `part` of the request had been posted before it ran out."""
    return Behaviour(Kind.REFUSED, message=SQ_FULL, part=part)


@dataclass(slots=True)
class Posted:
    """One batch as it was posted."""

    engine: str
    """Who reads."""
    local: Any
    """Descriptors of the two regions."""
    remote: Any
    local_offsets: list[int]
    remote_offsets: list[int]
    sizes: list[int]

    def copies(self) -> list[tuple[int, int, int]]:
        """(local address, remote address, size) of each piece."""
        return [
            (self.local.data + mine, self.remote.data + its, size)
            for mine, its, size in zip(self.local_offsets, self.remote_offsets, self.sizes, strict=True)
        ]


@dataclass
class World:
    """One network of engines, and a script for what their requests do."""

    default: Behaviour = field(default_factory=Behaviour)
    largest_piece: int = (1 << 32) - 1
    real_time: bool = False
    in_order: bool = True
    """A session is one queue pair: what was posted earlier has landed before a later request succeeds."""
    moves_bytes: bool = True
    """False: only cookies are moved; everything else is written down and succeeds."""
    next_sessions: deque[str] = field(default_factory=deque)
    """What `create_session` does next: `none`, `raise`; then it works."""
    script: deque[Behaviour] = field(default_factory=deque)
    """What the next requests do, cookies aside; then `default`."""
    cookie_script: deque[Behaviour] = field(default_factory=deque)
    posted: list[Posted] = field(default_factory=list)
    """Every batch, cookies aside."""
    cookie_reads: int = 0
    engines: dict[str, Any] = field(default_factory=dict)
    """Those that live, by name."""
    registrations: list[Any] = field(default_factory=list)
    """Every memory descriptor ever made."""
    sessions: list[tuple[Any, Any]] = field(default_factory=list)
    waits_ms: list[int] = field(default_factory=list)
    """What `wait_all` was called with."""
    defects: list[str] = field(default_factory=list)
    """What would have crashed a process: an object freed that MoRI still writes to."""
    _now_s: float = 1000.0
    _late: list[tuple[Posted, Posted]] = field(default_factory=list)
    """Batches that failed, and what of them has yet to land."""

    def clock(self) -> float:
        """Seconds."""
        return time.monotonic() if self.real_time else self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def kill(self, name: str) -> None:
        """The engine's process is gone; what it held cannot be read any more."""
        self.engines.pop(name, None)

    def land_late(self) -> int:
        """What was posted of requests that failed lands now. Returns how many bytes."""
        late, self._late = self._late, []
        return sum(self._move(rest) for _, rest in late)

    @property
    def restless(self) -> bool:
        """Whether bytes of failed requests have yet to land."""
        return bool(self._late)

    def next_behaviour(self, is_cookie: bool) -> Behaviour:
        """What the request that is posted now does."""
        script = self.cookie_script if is_cookie else self.script
        return script.popleft() if script else self.default

    def write(self, batch: Posted) -> str:
        """Move a batch's bytes. Returns why it failed, or nothing."""
        peer = self.engines.get(batch.remote.engine_key)
        if peer is None or batch.remote.id not in peer.memory:
            return "work completion error: transport retry counter exceeded"
        if self.in_order:
            pair = (batch.local, batch.remote)
            earlier = [(b, rest) for b, rest in self._late if (b.local, b.remote) == pair]
            self._late = [late for late in self._late if late not in earlier]
            for _, rest in earlier:
                self._move(rest)
        self._move(batch)
        return ""

    def write_some(self, batch: Posted, part: float) -> None:
        """Keep a share of a batch in flight, for `land_late`."""
        count = int(len(batch.sizes) * part)
        if count:
            offsets = batch.local_offsets[:count], batch.remote_offsets[:count], batch.sizes[:count]
            self._late.append((batch, Posted(batch.engine, batch.local, batch.remote, *offsets)))

    def watch(self, thing: Any, batch: Posted, what: str, progress: Any) -> None:
        """Notice when something is freed that MoRI still needs for a batch."""
        weakref.finalize(thing, self._freed, batch, what, progress)

    def _freed(self, batch: Posted, what: str, progress: Any) -> None:
        if batch.engine not in self.engines:
            return  # its queue pairs are gone
        if progress.in_flight:
            self.defects.append(f"a {what} was freed while its request was in progress")
        elif any(failed is batch for failed, _ in self._late):
            self.defects.append(f"a {what} was freed while bytes of its failed request were in flight")

    def _move(self, batch: Posted) -> int:
        moved = 0
        if self.moves_bytes or is_cookie_read(batch):
            for local, remote, size in batch.copies():
                ctypes.memmove(local, remote, size)
                moved += size
        return moved


def is_cookie_read(batch: Posted) -> bool:
    """Whether a batch looks at a peer's cookie: that is the first memory that an engine registers."""
    return bool(batch.remote.id == 0)
