"""Hand-offs as a transport sees them: the pieces of one request that one consumer rank reads from one peer.

What the planner lays over scattered blocks, for the layouts of Kimi-Linear and Kimi-K3; and four made-up ones
of equal pieces, as other connectors or unequal ranks cut them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stateferry.bench.plan import PROMPT_TOKENS, Case, block_tables, layouts
from stateferry.layout.blocks import concatenate
from stateferry.layout.plan import make_plan
from stateferry.layout.spec import Pieces
from stateferry.testing.kimi import KIMI_K3, KIMI_LINEAR

ENGINES = (Case(KIMI_LINEAR, 1, 1), Case(KIMI_LINEAR, 8, 8), Case(KIMI_K3, 8, 8, dcp_ranks=8))
"""Equal ranks, so that one peer has everything."""
ROOM = 1.25
"""Blocks in a cache over those of the longest prompt: they are scattered, and memory is not endless."""
GAP_BYTES = 4096
"""Between one made-up piece and the next: nothing may be merged."""
MADE_UP = ((91, 857 << 10), (98, 1805 << 10), (500, 857 << 10), (4000, 64 << 10))
"""Kimi-Linear-48B on one rank at about 1,000, 32,000 and 128,000 tokens as vLLM's connectors cut it, and
what unequal ranks or small blocks make of it."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """One request's pieces, in one region on each side."""

    name: str
    tokens: int
    """Of its prompt; 0 for a made-up one."""
    pieces: Pieces
    room_bytes: int
    """What a region must hold."""


def planned(
    engines: Sequence[Case] = ENGINES, prompts: Sequence[int] = PROMPT_TOKENS, seed: int = 0
) -> list[Handoff]:
    """As the ferry would post them. The peer is the producer rank with the consumer rank's number."""
    rng = random.Random(seed)
    found = []
    for case in engines:
        ours, theirs = layouts(case, case.consumer_size - 1, int(ROOM * max(prompts)))
        plans = [make_plan(ours, producer) for producer in theirs]
        assert len(plans) == 1, f"{case.name}: {len(plans)} producer ranks have it"
        for tokens in prompts:
            tables = block_tables(ours, tokens, False, rng)
            pieces = concatenate(
                [plans[0].merged_pieces(group, local, remote) for group, (local, remote) in enumerate(tables)]
            )
            (room,) = ours.region_sizes_bytes
            found.append(Handoff(case.name, tokens, pieces, room))
    return found


def made_up(seed: int = 5) -> list[Handoff]:
    """In order here, in another order there, none next to another on both sides."""
    rng = np.random.default_rng(seed)
    return [_equal_pieces(count, size, rng) for count, size in MADE_UP]


def _equal_pieces(count: int, size: int, rng: np.random.Generator) -> Handoff:
    stride = size + GAP_BYTES
    zeros = np.zeros(count, np.int64)
    pieces = Pieces(
        local_regions=zeros,
        local_offsets=np.arange(count, dtype=np.int64) * stride,
        remote_regions=zeros,
        remote_offsets=rng.permutation(count).astype(np.int64) * stride,
        sizes=np.full(count, size, np.int64),
    )
    return Handoff(f"{count} equal pieces of {size >> 10} KiB", 0, pieces, count * stride)
