"""Gaps between tokens by the engine core's own clock, from vLLM's histogram of them.

Set beside what a client sees, they tell what an engine's steps do from what its API server and the client do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stateferry.stack import Metrics

NAME = "vllm:inter_token_latency_seconds"
FINE_BUCKETS_S = tuple(round(0.001 * 1.1**step, 6) for step in range(60))
"""From 1 to 277 ms, each a tenth more than the one before; vLLM's own begin at 10 ms."""


@dataclass(frozen=True, slots=True)
class EngineGaps:
    """A histogram of gaps in seconds, over all requests of an engine."""

    bounds_s: tuple[float, ...] = ()
    """Upper bounds of the buckets, the last one infinite; empty where an engine tells nothing."""
    counts: tuple[int, ...] = ()
    """Gaps in each bucket."""
    sum_s: float = 0.0

    @classmethod
    def of(cls, metrics: Metrics) -> Self:
        """All gaps since the engine's start."""
        upto: dict[float, float] = {}
        for sample in metrics.find(f"{NAME}_bucket"):
            bound_s = float(sample.labels["le"])
            upto[bound_s] = upto.get(bound_s, 0.0) + sample.value
        bounds_s = sorted(upto)
        before = [0.0, *(upto[bound_s] for bound_s in bounds_s)]
        counts = (round(upto[b] - less) for b, less in zip(bounds_s, before, strict=False))
        return cls(tuple(bounds_s), tuple(counts), metrics.total(f"{NAME}_sum"))

    def since(self, before: Self) -> Self:
        """The gaps that came in between; none where an engine told nothing at one of the two looks."""
        return self._with(before, -1) if self.bounds_s and before.bounds_s else type(self)()

    def plus(self, other: Self) -> Self:
        """Both together."""
        return self._with(other, 1) if self.bounds_s else other

    def _with(self, other: Self, sign: int) -> Self:
        pairs = zip(self.counts, other.counts or (0,) * len(self.counts), strict=True)
        counts = tuple(mine + sign * theirs for mine, theirs in pairs)
        return type(self)(self.bounds_s, counts, self.sum_s + sign * other.sum_s)

    def figures(self) -> dict[str, float]:
        """Median and 99th percentile (bounds of their buckets, from above) and mean; empty without gaps."""
        count = sum(self.counts)
        if not count:
            return {}
        return {"p50": self._bound_s(50), "mean": self.sum_s / count, "p99": self._bound_s(99)}

    def _bound_s(self, percent: int) -> float:
        needed = math.ceil(sum(self.counts) * percent / 100)
        upto = 0
        for bound_s, count in zip(self.bounds_s, self.counts, strict=True):
            upto += count
            if upto >= needed:
                return bound_s
        raise ValueError(f"{needed} gaps needed, {upto} are there")


def to_json(gaps: Mapping[str, EngineGaps]) -> dict[str, Any]:
    """Histograms by window; the infinite bound is left out, its count is the last one."""
    bounds_s = next((g.bounds_s for g in gaps.values() if g.bounds_s), ())
    return {"bounds_s": list(bounds_s[:-1]), "counts": {name: list(g.counts) for name, g in gaps.items()}}
