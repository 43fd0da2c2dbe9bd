"""Bytes and pieces like those of real hand-offs, read from another process: how long, and how near the limit.

No engine takes part. All arms read the same pieces in turn, case by case and round by round; each arm's
first read of a case is compared byte for byte. The limit is one plain copy of as many bytes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stateferry.bench.figures import percentile
from stateferry.errors import TransportError
from stateferry.layout.spec import Pieces
from stateferry.testing.transport_rigs import Link, Rig
from stateferry.transport import TransferState

GAP_BYTES = 4096
"""Between one piece and the next: nothing may be merged."""
TIMEOUT_S = 60.0
LIMIT = "one plain copy"


@dataclass(frozen=True, slots=True)
class Case:
    """How a hand-off looks to a transport."""

    name: str
    pieces: int
    piece_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that move."""
        return self.pieces * self.piece_bytes

    @property
    def room_bytes(self) -> int:
        """Size of the region that the pieces lie in."""
        return self.pieces * (self.piece_bytes + GAP_BYTES)


CASES = (
    Case("80 MB in 91 pieces", 91, 857 << 10),
    Case("181 MB in 98 pieces", 98, 1805 << 10),
    Case("439 MB in 500 pieces", 500, 857 << 10),
    Case("262 MB in 4,000 pieces", 4000, 64 << 10),
)
"""Kimi-Linear-48B on one rank at about 1,000, 32,000 and 128,000 tokens as vLLM's connectors cut it, and
what unequal ranks or small blocks make of it."""


@dataclass(slots=True)
class Samples:
    """One arm's reads of one case, in seconds."""

    post_s: list[float] = field(default_factory=list)
    """How long the calling thread was held by the post."""
    done_s: list[float] = field(default_factory=list)
    """From before the post until all bytes were there."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of the reading process meanwhile; it polls without a pause."""

    def summary(self, total_bytes: int, limit_s: float) -> dict[str, float]:
        """Medians, spread, and the share of the limit that was reached."""
        done_s = percentile(self.done_s, 50)
        return {
            "rounds": len(self.done_s),
            "post_ms": round(percentile(self.post_s, 50) * 1e3, 4),
            "done_ms": round(done_s * 1e3, 4),
            "done_p90_ms": round(percentile(self.done_s, 90) * 1e3, 4),
            "cpu_ms": round(percentile(self.cpu_s, 50) * 1e3, 4),
            "gb_per_s": round(total_bytes / done_s / 1e9, 2),
            "share_of_limit": round(limit_s / done_s, 3),
        }


def scattered(case: Case) -> Pieces:
    """The case's pieces: in order here, in another order there, none next to another on both sides."""
    stride = case.piece_bytes + GAP_BYTES
    order = np.random.default_rng(5).permutation(case.pieces)
    zeros = np.zeros(case.pieces, np.int64)
    return Pieces(
        local_regions=zeros,
        local_offsets=np.arange(case.pieces, dtype=np.int64) * stride,
        remote_regions=zeros,
        remote_offsets=order.astype(np.int64) * stride,
        sizes=np.full(case.pieces, case.piece_bytes, np.int64),
    )


def measure(
    rigs: Mapping[str, Rig],
    plain_copy: Callable[[int], Callable[[], float]],
    cases: Sequence[Case] = CASES,
    rounds: int = 7,
    on_read: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Case -> arm -> figures. `plain_copy(size)` makes a function that copies so much and returns seconds.

    One round before the first is not counted. Raises TransportError when a read fails or brings other
    bytes than those that are there.
    """
    room = max(case.room_bytes for case in cases)
    links = {name: rig.link((room,)) for name, rig in rigs.items()}
    result = {}
    for case in cases:
        pieces, copy = scattered(case), plain_copy(case.total_bytes)
        samples = {name: Samples() for name in links}
        limits = []
        for number in range(-1, rounds):
            limit_s = copy()
            for name, link in links.items():
                if number < 0:
                    _proven_read(name, link, case, pieces)
                else:
                    _timed_read(name, link, pieces, samples[name])
                on_read()
            if number >= 0:
                limits.append(limit_s)
        limit_s = percentile(limits, 50)
        figures = {name: arm.summary(case.total_bytes, limit_s) for name, arm in samples.items()}
        figures[LIMIT] = {
            "rounds": rounds,
            "done_ms": round(limit_s * 1e3, 4),
            "gb_per_s": round(case.total_bytes / limit_s / 1e9, 2),
        }
        result[case.name] = figures
    return result


def _timed_read(name: str, link: Link, pieces: Pieces, samples: Samples) -> None:
    cpu, start = time.process_time(), time.perf_counter()
    transfer = link.peer.post_read(pieces)
    posted = time.perf_counter()
    while transfer.poll() is TransferState.PENDING:
        if time.perf_counter() - start > TIMEOUT_S:
            raise TransportError(f"{name}: not done after {TIMEOUT_S:g} s")
    done = time.perf_counter()
    if transfer.poll() is not TransferState.DONE:
        raise TransportError(f"{name}: {transfer.error}")
    samples.post_s.append(posted - start)
    samples.done_s.append(done - start)
    samples.cpu_s.append(time.process_time() - cpu)


def _proven_read(name: str, link: Link, case: Case, pieces: Pieces) -> None:
    link.local.reset()
    _timed_read(name, link, pieces, Samples())
    wrong = link.local.differences(pieces, link.target.content)
    if wrong:
        raise TransportError(f"{name}, {case.name}: {'; '.join(wrong)}")
