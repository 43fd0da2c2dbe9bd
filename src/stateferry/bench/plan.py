"""What planning costs: the first plan of a pair of ranks, and laying it over one request's blocks.

Caches are the layouts of Kimi-Linear and Kimi-K3, without memory. In every round all arms run once, in
random order. An arm's figure is what one consumer rank does for one request: the pieces of all groups,
from every producer rank that it reads.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from stateferry.bench.figures import percentile
from stateferry.layout import shard
from stateferry.layout.blocks import concatenate, needed_blocks
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.spec import CacheLayout, Pieces
from stateferry.testing.kimi import KIMI_K3, KIMI_LINEAR, Kimi
from stateferry.testing.packed import Packing

PROMPT_TOKENS = (1_024, 8_192, 32_768, 131_072)
UNMERGED, SCATTERED, IN_A_ROW = "unmerged", "merged, scattered blocks", "merged, blocks in a row"
ARMS = (UNMERGED, SCATTERED, IN_A_ROW)
"""A piece for every strip of every tensor and block (the baseline); as the ferry lays a plan, over blocks
that do not follow each other, and over blocks that do."""

APPLY_TARGET_MS, FIRST_PLAN_TARGET_MS = 1.0, 50.0


@dataclass(frozen=True, slots=True)
class Case:
    """Two engines."""

    model: Kimi
    producer_size: int
    consumer_size: int
    dcp_ranks: int = 1
    block_outermost: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        dcp = f" DCP{self.dcp_ranks}" if self.dcp_ranks > 1 else ""
        order = "blocks outermost" if self.block_outermost else "layers outermost"
        return f"{self.model.name} TP{self.producer_size} to TP{self.consumer_size}{dcp}, {order}"


_PAIRS = (
    (KIMI_LINEAR, 8, 8, 1),
    (KIMI_LINEAR, 8, 4, 1),
    (KIMI_K3, 8, 8, 8),
    (KIMI_K3, 8, 8, 1),
    (KIMI_K3, 8, 4, 1),
    (replace(KIMI_K3, name="twice Kimi-K3", recurrent_layers=138, latent_layers=48), 8, 8, 1),
)
CASES = tuple(Case(*pair, block_outermost=order) for pair in _PAIRS for order in (False, True))
"""The last model, twice as deep, shows how the cost follows the number of layers."""


@dataclass(slots=True)
class Applied:
    """One arm at one prompt length."""

    pieces: int
    bytes: int
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """One case. All seconds have one entry a round."""

    case: Case
    regions: int
    """Registered stretches of memory of one rank."""
    tensors: int
    """States and attention pages of one rank: what a registration for each would have to name."""
    block_tokens: int
    first_plan_s: list[float] = field(default_factory=list)
    """One pair of ranks, nothing cached."""
    applied: dict[tuple[int, str], Applied] = field(default_factory=dict)
    """By prompt tokens and arm."""

    def summary(self) -> dict[str, Any]:
        """As the result file has it."""
        return {
            "case": self.case.name,
            "registered_regions": self.regions,
            "tensors": self.tensors,
            "block_tokens": self.block_tokens,
            "first_plan_ms": _spread_ms(self.first_plan_s),
            "apply": [
                {
                    "tokens": tokens,
                    "arm": arm,
                    "pieces": applied.pieces,
                    "bytes": applied.bytes,
                    "ms": _spread_ms(applied.seconds),
                }
                for (tokens, arm), applied in self.applied.items()
            ],
        }


def measure_plans(
    cases: Sequence[Case] = CASES,
    rounds: int = 15,
    seed: int = 0,
    on_round: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Time every case in `rounds` rounds, after one that is not counted."""
    rng = random.Random(seed)
    measured, jobs = [], []
    for case in cases:
        result, timed = _prepared(case, rng)
        measured.append(result)
        jobs += timed
    for number in range(-1, rounds):
        for times, job in rng.sample(jobs, len(jobs)):
            seconds = job()
            if number >= 0:
                times.append(seconds)
        if number >= 0 and on_round is not None:
            on_round(number + 1)
    return measured


Job = tuple[list[float], Callable[[], float]]
"""Where a time goes, and what takes it."""


def _prepared(case: Case, rng: random.Random) -> tuple[Measured, list[Job]]:
    """The case with its counts, and its jobs."""
    rank = case.consumer_size - 1
    ours, theirs = layouts(case, rank, 3 * max(PROMPT_TOKENS))
    tensors = sum(len(layer.tensors) for group in ours.groups for layer in group.layers)
    attention_tokens = ours.groups[-1].block_tokens
    result = Measured(case, len(ours.region_sizes_bytes), tensors, attention_tokens)
    plans = {merge: [make_plan(ours, producer, merge) for producer in theirs] for merge in (True, False)}
    jobs: list[Job] = [(result.first_plan_s, lambda: _first_plan_s(ours, theirs[0]))]
    for tokens in PROMPT_TOKENS:
        for arm in ARMS:
            apply = _Apply(
                plans[arm != UNMERGED], arm, tuple(block_tables(ours, tokens, arm == IN_A_ROW, rng))
            )
            pieces = apply.pieces()
            applied = result.applied[tokens, arm] = Applied(len(pieces), pieces.total_bytes)
            jobs.append((applied.seconds, apply.timed_s))
    return result, jobs


def layouts(case: Case, rank: int, room_tokens: int) -> tuple[CacheLayout, list[CacheLayout]]:
    """The consumer rank's layout, and those of the producer ranks that it reads, with room for prompts of so
    many tokens together."""
    sizes = case.producer_size, case.consumer_size
    model = case.model.packed(sizes, case.dcp_ranks)
    blocks = room_tokens // model.groups[-1].block_tokens + 8
    packing = Packing(blocks=blocks, block_outermost=case.block_outermost)
    ours = model.layout(rank, case.consumer_size, packing)
    sources = shard.producer_ranks_to_read(ours, case.producer_size)
    return ours, [model.layout(source, case.producer_size, packing) for source in sources]


def block_tables(
    layout: CacheLayout, tokens: int, in_a_row: bool, rng: random.Random
) -> Iterator[tuple[list[int], list[int]]]:
    """Block ids of a request on both sides, a group at a time: one after the other, or scattered. No block
    is in two groups."""
    count = layout.groups[0].layers[0].tensors[0].block_count
    ours, theirs = range(1, count), range(3, count)
    needed = [len(needed_blocks(group, 0, tokens)) for group in layout.groups]
    sides = [list(ids) if in_a_row else rng.sample(ids, sum(needed)) for ids in (ours, theirs)]
    start = 0
    for many in needed:
        yield sides[0][start : start + many], sides[1][start : start + many]
        start += many


@dataclass(frozen=True, slots=True)
class _Apply:
    plans: Sequence[Plan]
    arm: str
    tables: Sequence[tuple[Any, Any]]

    def pieces(self) -> Pieces:
        """What one consumer rank posts for one request."""
        return concatenate(
            [
                (plan.pieces if self.arm == UNMERGED else plan.merged_pieces)(group, local, remote)
                for plan in self.plans
                for group, (local, remote) in enumerate(self.tables)
            ]
        )

    def timed_s(self) -> float:
        start = perf_counter()
        self.pieces()
        return perf_counter() - start


def _first_plan_s(ours: CacheLayout, theirs: CacheLayout) -> float:
    shard.overlaps.cache_clear()
    shard.intervals.cache_clear()
    start = perf_counter()
    make_plan(ours, theirs)
    return perf_counter() - start


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    figures = {"median": 50, "p90": 90, "worst": 100}
    best = {"best": round(1000 * min(seconds), 4)}
    return best | {name: round(1000 * percentile(seconds, percent), 4) for name, percent in figures.items()}
