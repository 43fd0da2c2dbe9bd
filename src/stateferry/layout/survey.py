"""What hand-offs between two engines move, told from their layouts alone: blocks, bytes, strips, pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

from stateferry.errors import LayoutError
from stateferry.layout.blocks import needed_blocks
from stateferry.layout.fingerprint import compare
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.shard import producer_ranks_to_read
from stateferry.layout.spec import CacheLayout, GroupKind


@dataclass(frozen=True, slots=True)
class PairSurvey:
    """One producer rank that one consumer rank reads. Tuples have an entry per group."""

    producer_rank: int
    consumer_rank: int
    block_bytes: tuple[int, ...]
    """Bytes that this pair exchanges per block."""
    strips: tuple[int, ...]
    """Stretches that are dense on both sides inside a block, tensor by tensor."""
    merged_strips: tuple[int, ...]
    """The same after neighbours have been joined, across tensors and layers: what a hand-off reads."""
    pieces: tuple["PieceCounts", ...]
    """One entry per length."""


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """How many reads (descriptors) one hand-off is between a pair of ranks, all groups together."""

    unmerged: int
    """A strip of each block is a read of its own."""
    scattered: int
    """Strips merged; no two blocks lie one after the other."""
    consecutive: int
    """Strips merged, and all blocks one after the other on both sides, as on a fresh engine."""


@dataclass(frozen=True, slots=True)
class LengthSurvey:
    """The hand-off of a prompt of one length, all ranks together. Tuples have an entry per group."""

    prompt_tokens: int
    tokens: int
    """Tokens handed off: the consumer computes the last one itself."""
    blocks: tuple[int, ...]
    """Blocks that move, on each rank."""
    group_bytes: tuple[int, ...]
    state_bytes: int
    attention_bytes: int

    @property
    def total_bytes(self) -> int:
        """State and attention together."""
        return self.state_bytes + self.attention_bytes


@dataclass(frozen=True, slots=True)
class Survey:
    """Hand-offs from one engine to another."""

    producer_size: int
    consumer_size: int
    lengths: tuple[LengthSurvey, ...]
    pairs: tuple[PairSurvey, ...]


def survey(
    producers: Sequence[CacheLayout], consumers: Sequence[CacheLayout], prompt_tokens: Sequence[int]
) -> Survey:
    """Survey hand-offs from all `producers` ranks to all `consumers` ranks of two engines.

    Block counts of the layouts do not matter. Raises LayoutMismatch as the hand-shake does when the engines
    may not exchange data, LayoutError when their sizes do not fit each other or a list is not all ranks.
    """
    for side in (producers, consumers):
        check_ranks(side)
    pairs = []
    for consumer in consumers:
        for rank in producer_ranks_to_read(consumer, len(producers)):
            compare(consumer, producers[rank])
            pairs.append(_pair(producers[rank], consumer, prompt_tokens))
    block_bytes = [
        sum(pair.block_bytes[group] for pair in pairs) for group in range(len(consumers[0].groups))
    ]
    lengths = tuple(_length(consumers[0], block_bytes, length) for length in prompt_tokens)
    return Survey(len(producers), len(consumers), lengths, tuple(pairs))


def check_ranks(layouts: Sequence[CacheLayout]) -> None:
    """Raise LayoutError unless these are all ranks of one engine, in order."""
    found = [(layout.tp_rank, layout.tp_size) for layout in layouts]
    if not found or found != [(rank, len(layouts)) for rank in range(len(layouts))]:
        raise LayoutError(f"expected all ranks of one engine in order, found (rank, size) {found}")


def moved_blocks(layout: CacheLayout, prompt_tokens: int) -> tuple[int, ...]:
    """Blocks per group and rank that the hand-off of a prompt of this length moves."""
    tokens = max(0, prompt_tokens - 1)
    return tuple(len(needed_blocks(group, 0, tokens)) if group.transfers else 0 for group in layout.groups)


def _length(layout: CacheLayout, block_bytes: Sequence[int], prompt_tokens: int) -> LengthSurvey:
    blocks = moved_blocks(layout, prompt_tokens)
    sizes = tuple(count * size for count, size in zip(blocks, block_bytes, strict=True))
    kinds = [group.kind for group in layout.groups]
    state = sum(size for size, kind in zip(sizes, kinds, strict=True) if kind is GroupKind.STATE)
    return LengthSurvey(prompt_tokens, max(0, prompt_tokens - 1), blocks, sizes, state, sum(sizes) - state)


def _pair(producer: CacheLayout, consumer: CacheLayout, prompt_tokens: Sequence[int]) -> PairSurvey:
    raw, merged = make_plan(consumer, producer, merge=False), make_plan(consumer, producer)
    strips = tuple(len(group) for group in raw.groups)
    merged_strips = tuple(len(group) for group in merged.groups)
    pieces = []
    for length in prompt_tokens:
        blocks = moved_blocks(consumer, length)
        pieces.append(
            PieceCounts(
                unmerged=sum(n * count for n, count in zip(strips, blocks, strict=True)),
                scattered=sum(n * count for n, count in zip(merged_strips, blocks, strict=True)),
                consecutive=sum(_consecutive(merged, group, count) for group, count in enumerate(blocks)),
            )
        )
    return PairSurvey(
        producer_rank=producer.tp_rank,
        consumer_rank=consumer.tp_rank,
        block_bytes=tuple(merged.group_bytes(group) for group in range(len(merged.groups))),
        strips=strips,
        merged_strips=merged_strips,
        pieces=tuple(pieces),
    )


def _consecutive(plan: Plan, group: int, blocks: int) -> int:
    """Pieces when block ids follow each other: a strip that fills its block on both sides is one for all."""
    strips = plan.groups[group]
    whole = int(strips.fill_blocks.sum())
    return (whole + (len(strips) - whole) * blocks) if blocks else 0
