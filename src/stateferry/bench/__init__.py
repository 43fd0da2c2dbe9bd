"""Benchmarks: interleaved arms in one run, medians and spread, host facts. Numbers, never tests."""

from stateferry.bench.added_latency import (
    IN_TREE,
    MAX_TOKENS,
    MIN_TOKENS,
    ONE_ENGINE,
    Arm,
    Result,
    Times,
    measure,
    started_arms,
)
from stateferry.bench.figures import percentile

__all__ = [
    "IN_TREE",
    "MAX_TOKENS",
    "MIN_TOKENS",
    "ONE_ENGINE",
    "Arm",
    "Result",
    "Times",
    "measure",
    "percentile",
    "started_arms",
]
