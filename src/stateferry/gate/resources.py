"""What the processes of an engine use, from /proc, and whether that grows."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stateferry.stack.guard import session_members

ALLOWED_BYTES = 64 << 20
"""Allocators and caches still fill in the first minutes."""
ALLOWED_COUNT = 8
"""Of threads and of file descriptors: connections of clients come and go."""
LEAST_SAMPLES = 9


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes of one engine together."""

    resident_bytes: int
    threads: int
    file_descriptors: int

    def to_json(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


def sample(session_id: int) -> Sample:
    """Look at every process of a session; those that end meanwhile do not count."""
    resident = threads = descriptors = 0
    for pid in session_members(session_id):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        resident += int(values.get("VmRSS", "0 kB").split()[0]) * 1024
        threads += int(values.get("Threads", "0"))
    return Sample(resident, threads, descriptors)


def growth(samples: Sequence[Sample]) -> list[str]:
    """What is more in the last third than in the second, by medians, than may be. Few samples say nothing.

    The first third is when allocators and caches fill.
    """
    if len(samples) < LEAST_SAMPLES:
        return []
    third = len(samples) // 3
    found = []
    for name, allowed in (
        ("resident_bytes", ALLOWED_BYTES),
        ("threads", ALLOWED_COUNT),
        ("file_descriptors", ALLOWED_COUNT),
    ):
        before, after = (
            statistics.median(getattr(one, name) for one in part)
            for part in (samples[third : 2 * third], samples[-third:])
        )
        if after - before > allowed:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}, more than {allowed}")
    return found
