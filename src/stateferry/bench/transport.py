"""Bytes and pieces like those of real hand-offs, read from another process: how long, how near the limit.

No engine takes part. For every hand-off all arms read the same pieces, round by round and in random order,
and are polled as the ferry polls; each arm's first read is compared byte for byte. The limit is one plain
copy of as many bytes, which takes its turn like an arm.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

from stateferry.bench.figures import percentile
from stateferry.bench.transport_cases import Handoff
from stateferry.bench.transport_memory import Memory, devices, make_memory
from stateferry.bench.transport_peer import PeerProcess, register_all
from stateferry.errors import TransportError
from stateferry.layout.spec import Pieces
from stateferry.transport import MemoryKind, Peer, TransferState
from stateferry.transport.base import QUICK_PAUSE_S, QUICK_POLLS

LIMIT = "one plain copy"
TRANSPORTS = {
    MemoryKind.CPU: ("cma", "nixl", "mooncake"),
    MemoryKind.CUDA: ("cudaipc", "nixl"),
}
"""The arms there are."""
CONNECT_S = 30.0
TIMEOUT_S = 120.0
LATER_PAUSE_S = 0.001
"""As the ferry, after its quick looks."""
KEPT = ("post_ms", "done_ms", "held_ms", "longest_call_ms", "cpu_ms", "peer_cpu_ms")


@dataclass(slots=True)
class Sample:
    """One read of one hand-off by one arm. Milliseconds."""

    post_ms: float
    """Until the post returned."""
    done_ms: float
    """From before the post until all bytes were known to be there."""
    held_ms: float
    """How long the calling thread was inside the transport, post and looks together."""
    longest_call_ms: float
    """The longest of these calls."""
    cpu_ms: float
    """Processor time of the reading process, all threads."""
    peer_cpu_ms: float
    """Processor time of the process that was read from."""


@dataclass(slots=True)
class Measured:
    """One hand-off: same index, same round."""

    handoff: Handoff
    limit_ms: list[float] = field(default_factory=list)
    arms: dict[str, list[Sample]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """As the result file has it."""
        total = self.handoff.pieces.total_bytes
        limit = {"done_ms": spread(self.limit_ms), "gb_per_s": _rate(total, self.limit_ms)}
        return {
            "case": self.handoff.name,
            "tokens": self.handoff.tokens,
            "pieces": len(self.handoff.pieces),
            "bytes": total,
            "arms": {LIMIT: limit, **{name: self._arm(total, read) for name, read in self.arms.items()}},
        }

    def _arm(self, total: int, read: Sequence[Sample]) -> dict[str, Any]:
        figures: dict[str, Any] = {key: spread([getattr(one, key) for one in read]) for key in KEPT}
        figures["gb_per_s"] = _rate(total, [one.done_ms for one in read])
        shares = [limit / one.done_ms for limit, one in zip(self.limit_ms, read, strict=True)]
        return figures | {"share_of_limit": spread(shares, 3)}


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and extremes."""
    return {
        "median": round(percentile(values, 50), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def _rate(total_bytes: int, done_ms: Sequence[float]) -> dict[str, float]:
    return spread([total_bytes / milliseconds / 1e6 for milliseconds in done_ms], 3)


@dataclass(slots=True)
class Bench:
    """Arms that are connected to one peer."""

    memory: Memory
    process: PeerProcess
    arms: dict[str, Peer]
    left_out: dict[str, str]
    """Why transports that were asked for take no part."""

    def measure(
        self,
        handoffs: Sequence[Handoff],
        rounds: int,
        seed: int = 0,
        on_read: Callable[[], None] = lambda: None,
    ) -> list[Measured]:
        """`rounds` rounds a hand-off, after one that is compared and not counted. `on_read` is called after
        each turn of an arm or the limit.

        Raises TransportError when a read fails or brings other bytes than those that are there.
        """
        rng = random.Random(seed)
        found = []
        for handoff in handoffs:
            measured = Measured(handoff, arms={name: [] for name in self.arms})
            for number in range(-1, rounds):
                for name in rng.sample([LIMIT, *self.arms], len(self.arms) + 1):
                    self._turn(name, handoff, measured if number >= 0 else None)
                    on_read()
            found.append(measured)
        return found

    def _turn(self, name: str, handoff: Handoff, measured: Measured | None) -> None:
        """One read or plain copy. Without `measured`, the read is proven."""
        if name == LIMIT:
            seconds = self.memory.plain_copy(handoff.pieces.total_bytes)
            if measured is not None:
                measured.limit_ms.append(1000 * seconds)
        elif measured is not None:
            measured.arms[name].append(self._read(name, handoff.pieces))
        else:
            self.memory.clear(handoff.pieces)
            self._read(name, handoff.pieces)
            wrong = self.memory.wrong_pieces(handoff.pieces)
            if wrong:
                raise TransportError(f"{name}, {handoff.name}: {wrong} of {len(handoff.pieces)} pieces wrong")

    def _read(self, name: str, pieces: Pieces) -> Sample:
        peer_cpu = self.process.cpu_s()
        timed = timed_read(name, self.arms[name], pieces)
        timed.peer_cpu_ms = 1000 * (self.process.cpu_s() - peer_cpu)
        return timed


def timed_read(name: str, peer: Peer, pieces: Pieces) -> Sample:
    """Post one batch and poll it as the ferry does, `peer_cpu_ms` left out. Raises TransportError when it
    fails or does not end."""
    pause = threading.Event()
    cpu, start = process_time(), perf_counter()
    transfer = peer.post_read(pieces)
    called = perf_counter()
    post = held = longest = called - start
    state, looks = TransferState.PENDING, 0
    while True:
        state = transfer.poll()
        now = perf_counter()
        held += now - called
        longest = max(longest, now - called)
        if state is not TransferState.PENDING:
            break
        if now - start > TIMEOUT_S:
            raise TransportError(f"{name}: not done after {TIMEOUT_S:g} s")
        looks += 1
        pause.wait(QUICK_PAUSE_S if looks < QUICK_POLLS else LATER_PAUSE_S)
        called = perf_counter()
    used = process_time() - cpu
    if state is not TransferState.DONE:
        raise TransportError(f"{name}: {transfer.error}")
    return Sample(1000 * post, 1000 * (now - start), 1000 * held, 1000 * longest, 1000 * used, 0.0)


@contextmanager
def connected(kind: MemoryKind, room_bytes: int, names: Sequence[str]) -> Iterator[Bench]:
    """A process to read from, memory to read into, and every transport of `names` that works here.

    Raises EngineError when the process does not start.
    """
    ours, theirs = devices(kind)
    memory = make_memory(kind, room_bytes, ours, theirs)
    with ExitStack() as made:
        process = made.enter_context(PeerProcess(kind, room_bytes, names))
        found, left_out = register_all(list(process.registrations), memory.region, made)
        arms = {}
        for name, (transport, _) in found.items():
            try:
                arms[name] = transport.connect(process.registrations[name], CONNECT_S)
            except TransportError as e:
                left_out[name] = str(e)
        yield Bench(memory, process, arms, process.left_out | left_out)
        for peer in arms.values():
            peer.close()


def room_for(handoffs: Sequence[Handoff]) -> int:
    """Bytes that a region needs for all of them."""
    return max(handoff.room_bytes for handoff in handoffs)


def result(bench: Bench, measured: Sequence[Measured], rounds: int, kind: MemoryKind) -> Mapping[str, Any]:
    """The whole run as the result file has it, without host and date."""
    return {
        "rounds": rounds,
        "memory": kind.value,
        "left_out": bench.left_out,
        "cases": [one.summary() for one in measured],
    }
