"""Benchmarks: interleaved arms in one run, medians and spread, host facts. Numbers, never tests."""

from stateferry.bench.added_latency import MAX_TOKENS, MIN_TOKENS, Result, Times, measure
from stateferry.bench.arms import IN_TREE, ONE_ENGINE, Arm, ArmSpec, arm_spec, arm_specs, started_arms
from stateferry.bench.figures import percentile
from stateferry.bench.plan import (
    APPLY_TARGET_MS,
    CASES,
    FIRST_PLAN_TARGET_MS,
    IN_A_ROW,
    PROMPT_TOKENS,
    SCATTERED,
    UNMERGED,
    Case,
    Measured,
    measure_plans,
)

__all__ = [
    "APPLY_TARGET_MS",
    "CASES",
    "FIRST_PLAN_TARGET_MS",
    "IN_A_ROW",
    "IN_TREE",
    "MAX_TOKENS",
    "MIN_TOKENS",
    "ONE_ENGINE",
    "PROMPT_TOKENS",
    "SCATTERED",
    "UNMERGED",
    "Arm",
    "ArmSpec",
    "Case",
    "Measured",
    "Result",
    "Times",
    "arm_spec",
    "arm_specs",
    "measure",
    "measure_plans",
    "percentile",
    "started_arms",
]
