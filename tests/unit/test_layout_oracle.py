"""The planner against the slow reference: any shape, any pair of rank counts, any blocks.

A plan is right when every destination byte is written once, with the byte of the same meaning.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stateferry.errors import LayoutError
from stateferry.layout.blocks import concatenate, merge, needed_blocks, take
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.reference import faults, meanings, positions_needed, units_held
from stateferry.layout.shard import intervals, producer_ranks_to_read
from stateferry.layout.spec import (
    CacheLayout,
    Group,
    GroupKind,
    Part,
    PartRule,
    Pieces,
)
from stateferry.testing.caches import Model, Tensor

RANKS = (1, 2, 3, 4, 6, 8)
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No verdict depends on how busy the machine is."""
SPLIT, REPLICATED, GROUPED = PartRule.SPLIT, PartRule.REPLICATED, PartRule.GROUPED


def read_all(
    consumer: CacheLayout,
    producers: list[CacheLayout],
    local: list[int],
    remote: list[int],
    plan_with: Callable[[CacheLayout, CacheLayout], Plan] = make_plan,
) -> dict[int, Pieces]:
    return {p.tp_rank: plan_with(consumer, p).pieces(0, local, remote) for p in producers}


@st.composite
def parts_for(draw: st.DrawFn, ours: int, theirs: int) -> tuple[Part, ...]:
    """Parts that divide over both rank counts."""
    common = int(np.lcm(ours, theirs))
    divisors = [g for g in range(1, 9) if all(g % r == 0 or r % g == 0 for r in (ours, theirs))]
    found = []
    for number in range(draw(st.integers(1, 3))):
        rule = draw(st.sampled_from(PartRule))
        if rule is SPLIT:
            part = Part(name=f"p{number}", size=common * draw(st.integers(1, 2)), rule=rule)
        elif rule is REPLICATED:
            part = Part(name=f"p{number}", size=draw(st.integers(1, 5)), rule=rule)
        else:
            granules = draw(st.sampled_from(divisors))
            part = Part(
                name=f"p{number}", size=granules * draw(st.integers(1, 3)), rule=rule, granules=granules
            )
        found.append(part)
    return tuple(found)


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[Model, int, int, list[int], list[int]]:
    """A model, the consumer's and the producer's rank counts, and block ids on both sides."""
    ours, theirs = draw(st.sampled_from(RANKS)), draw(st.sampled_from(RANKS))
    layers = []
    for _ in range(draw(st.integers(1, 2))):
        tensors = []
        for number in range(draw(st.integers(1, 3))):
            dims: list[int | tuple[Part, ...]] = draw(st.lists(st.integers(1, 3), max_size=2))
            if draw(st.integers(0, 3)):
                dims.insert(draw(st.integers(0, len(dims))), draw(parts_for(ours, theirs)))
            tensors.append(Tensor(f"t{number}", tuple(dims), draw(st.integers(1, 2))))
        layers.append(tuple(tensors))
    count = draw(st.integers(1, 3))
    ids = st.lists(st.integers(0, 4), min_size=count, max_size=count, unique=True)
    return Model(tuple(layers)), ours, theirs, draw(ids), draw(ids)


@settings(CALM, max_examples=120)
@given(handoffs(), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.data())
def test_every_destination_byte_is_written_once_and_right(
    handoff: tuple[Model, int, int, list[int], list[int]],
    our_seed: int,
    their_seed: int,
    merged: bool,
    data: st.DataObject,
) -> None:
    model, ours, theirs, local, remote = handoff
    rank = data.draw(st.integers(0, ours - 1))
    consumer = model.layout(rank, ours, our_seed)
    producers = [model.layout(r, theirs, their_seed) for r in range(theirs)]
    reads = read_all(consumer, producers, local, remote, lambda c, p: make_plan(c, p, merge=merged))
    assert faults(consumer, producers, 0, local, remote, reads) == []
    assert sum(p.total_bytes for p in reads.values()) == len(meanings(consumer, 0, local))
    needed = {p.tp_rank for p in producers if len(reads[p.tp_rank])}
    assert set(producer_ranks_to_read(consumer, theirs)) == needed
    reworked = {r: merge(concatenate([take(p, np.arange(len(p))[::-1])])) for r, p in reads.items()}
    assert faults(consumer, producers, 0, local, remote, reworked) == []
    for producer in producers:
        plan = make_plan(consumer, producer, merge=merged)
        quick = plan.merged_pieces(0, local, remote)
        assert len(quick) <= len(reads[producer.tp_rank])
        reads[producer.tp_rank] = quick
    assert faults(consumer, producers, 0, local, remote, reads) == []


@given(handoffs())
@settings(CALM, max_examples=40)
def test_equal_ranks_read_only_their_own_rank(
    handoff: tuple[Model, int, int, list[int], list[int]],
) -> None:
    model, ours, *_ = handoff
    consumer = model.layout(0, ours)
    assert producer_ranks_to_read(consumer, ours) == (0,)
    plan = make_plan(consumer, model.layout(0, ours, blocks=9))
    assert len(plan.groups[0]) <= len(model.layers), "a layer's page without gaps is one strip"
    for other in range(1, ours):
        assert make_plan(consumer, model.layout(other, ours)).group_bytes(0) == 0


@given(st.data())
@settings(CALM, max_examples=80)
def test_intervals_are_the_units_that_the_reference_counts(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(RANKS))
    parts = data.draw(parts_for(size, data.draw(st.sampled_from(RANKS))))
    for rank in range(size):
        local = 0
        for part, found in zip(parts, intervals(parts, rank, size), strict=True):
            held = units_held(part, rank, size)
            assert list(range(found.start, found.start + found.size)) == held
            assert found.local == local
            local += len(held)


@given(
    st.sampled_from(GroupKind), st.integers(1, 5), st.integers(1, 9), st.integers(0, 24), st.integers(0, 24)
)
@settings(CALM, max_examples=300)
def test_positions_are_those_counted_token_by_token(
    kind: GroupKind, block_tokens: int, window: int, first: int, second: int
) -> None:
    group = Group(kind=kind, block_tokens=block_tokens, layers=(), window_tokens=window)
    local, total = sorted((first, second))
    assert list(needed_blocks(group, local, total)) == positions_needed(group, local, total)


def conv(parts: tuple[Part, ...], dim_first: bool, rows: int = 3) -> Tensor:
    return Tensor("conv", (parts, rows) if dim_first else (rows, parts))


def split(name: str, size: int) -> Part:
    return Part(name=name, size=size, rule=SPLIT)


def grouped(name: str, size: int, granules: int) -> Part:
    return Part(name=name, size=size, rule=GROUPED, granules=granules)


GDN = (split("Q", 24), split("K", 24), split("V", 48))
HEADS = (split("heads", 24),)
NAMED: dict[str, tuple[Tensor, ...]] = {
    "mamba1": (conv((split("x", 24),), True), Tensor("ssm", ((split("channels", 24),), 2))),
    "mamba2, one group for all ranks": (
        conv((split("x", 24), grouped("B", 4, 1), grouped("C", 4, 1)), False),
        Tensor("ssm", (HEADS, 2)),
    ),
    "mamba2, groups split over ranks": (
        conv((split("x", 24), grouped("B", 48, 24), grouped("C", 48, 24)), True),
        Tensor("ssm", (HEADS, 2)),
    ),
    "gdn, dimension first": (conv(GDN, True), Tensor("matrix", (HEADS,), 4)),
    "gdn, window first": (conv(GDN, False), Tensor("matrix", (HEADS,), 4)),
    "kda as four tensors": (
        *(Tensor(f"conv_{n}", ((split(n, 24),), 3)) for n in "QKV"),
        Tensor("matrix", (HEADS, 2)),
    ),
    "more than two states": (
        conv(GDN, True),
        Tensor("matrix", (HEADS, 2)),
        Tensor("record_1", (HEADS, 3)),
        Tensor("record_2", (HEADS,), 2),
    ),
    "short convolution": (conv((split("x", 24),), False),),
    "linear attention": (Tensor("matrix", (HEADS, 2, 2)),),
    "state on every rank": (Tensor("conv", (3, 5)),),
    "attention heads": (Tensor("heads", (2, (grouped("heads", 24, 24),), 3), 2),),
    "one head for all ranks": (Tensor("heads", (1, (grouped("heads", 1, 1),), 4), 2),),
    "latent": (Tensor("latent", (), 36),),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 1), (1, 8), (8, 8)])
def test_known_states_between_rank_counts(name: str, ours: int, theirs: int) -> None:
    model = Model((NAMED[name],))
    producers = [model.layout(r, theirs, seed=2) for r in range(theirs)]
    for rank in range(ours):
        consumer = model.layout(rank, ours)
        reads = read_all(consumer, producers, [1, 3], [4, 2])
        assert faults(consumer, producers, 0, [1, 3], [4, 2], reads) == []


def test_copies_are_read_from_all_producer_ranks_in_turn() -> None:
    """A latent lies on all 8 producer ranks: one consumer rank spreads its layers over them."""
    model = Model(tuple(((Tensor("latent", (), 4)),) for _ in range(16)))
    consumer = model.layout(0, 1)
    loads = [make_plan(consumer, model.layout(r, 8)).group_bytes(0) for r in range(8)]
    assert loads == [8] * 8
    assert producer_ranks_to_read(consumer, 8) == tuple(range(8))


def memory_of(layout: CacheLayout, values: dict[object, int]) -> list[np.ndarray]:
    """Each region with the value of each byte's meaning; `values` grows as meanings are met."""
    memory = [np.zeros(size, np.uint16) for size in layout.region_sizes_bytes]
    for (region, offset), meaning in meanings(layout, 0, range(5)).items():
        memory[region][offset] = values.setdefault(meaning, len(values) + 1)
    return memory


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", NAMED)
def test_gather_of_scatter_is_the_unsharded_state(name: str, size: int) -> None:
    """P at `size` ranks, D unsharded, real memory: D ends up with what one rank would have."""
    model = Model((NAMED[name],))
    producers = [model.layout(r, size, seed=1) for r in range(size)]
    values: dict[object, int] = {}
    whole = model.layout(0, 1, seed=4)
    expected = memory_of(whole, values)
    gathered = [np.zeros_like(region) for region in expected]
    for producer in producers:
        source = memory_of(producer, values)
        pieces = make_plan(whole, producer).pieces(0, list(range(5)), list(range(5)))
        local = zip(pieces.local_regions, pieces.local_offsets, strict=True)
        remote = zip(pieces.remote_regions, pieces.remote_offsets, strict=True)
        for (lr, lo), (rr, ro), n in zip(local, remote, pieces.sizes, strict=True):
            gathered[lr][lo : lo + n] = source[rr][ro : ro + n]
    assert all(np.array_equal(ours, right) for ours, right in zip(gathered, expected, strict=True))


def test_two_heads_on_three_ranks_are_refused() -> None:
    part = grouped("heads", 2, 2)
    with pytest.raises(LayoutError, match=r"'heads'.*2 units do not divide over 3 ranks"):
        Model(((Tensor("heads", ((part,), 4)),),)).layout(0, 3)
    with pytest.raises(LayoutError, match=r"'heads'.*2 .*3 ranks"):
        intervals((part,), 0, 3)
