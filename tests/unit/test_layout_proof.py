"""Every kind of cache, between any two sizes: each byte arrives once, and is the unsharded model's.

The truth is `testing/unsharded.py`, which slices as vLLM's weight loaders do; the tables that describe
caches and the planner are both under test. `layout/reference.py` judges the planner by itself.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.unit.cache_kinds import (
    EQUAL_ONLY,
    KINDS,
    SIZES,
    fixed,
    fixed_handover,
    handovers,
    uneven_loads,
)

from stateferry.errors import LayoutMismatch
from stateferry.layout.plan import make_plan
from stateferry.layout.reference import faults
from stateferry.layout.shard import producer_ranks_to_read
from stateferry.layout.spec import GroupKind
from stateferry.session import producer_ranks
from stateferry.testing.packed import Layers, Packed, Packing
from stateferry.testing.proof import Handover
from stateferry.testing.unsharded import FLASH, Attention, Slots


@pytest.mark.parametrize("kind", [*KINDS, *EQUAL_ONLY])
def test_every_byte_of_a_random_cache_arrives_once_and_right(kind: str) -> None:
    prove(kind, tuple(Phase))


def prove(kind: str, phases: tuple[Phase, ...]) -> None:
    """Random caches of this kind."""

    @settings(
        max_examples=16,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow],  # no verdict on how busy the machine is
    )
    @given(handovers(kind), st.booleans(), st.data())
    def check(case: Handover, merge: bool, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, case.consumer_size - 1))
        reads = case.reads(rank, lambda ours, theirs: make_plan(ours, theirs, merge=merge))
        assert case.wrong_bytes(rank, reads) == []
        assert case.wrong_bytes(rank, case.reads(rank, in_runs=True)) == []
        layouts, blocks = (case.consumer(rank), case.producers()), (case.local_blocks, case.remote_blocks)
        assert faults(*layouts, case.group, *blocks, reads) == []
        _only_ranks_that_were_claimed(case, rank)

    check()


def _only_ranks_that_were_claimed(case: Handover, rank: int) -> None:
    """A plan must not read from a producer rank that holds no lease for this consumer rank."""
    sizes = (case.consumer_size, case.producer_size)
    if max(sizes) % min(sizes) == 0:
        claimed = producer_ranks(rank, *sizes)
        assert set(producer_ranks_to_read(case.consumer(rank), sizes[1])) <= set(claimed)


@pytest.mark.parametrize("dim_first", [True, False])
@pytest.mark.parametrize("kind", fixed(True))
def test_gather_of_scatter_is_the_unsharded_state(kind: str, dim_first: bool) -> None:
    for size in SIZES:
        scatter, gather = (
            fixed_handover(kind, size, 1, dim_first),
            fixed_handover(kind, 1, size, dim_first),
        )
        for rank in range(size):
            assert scatter.wrong_bytes(rank, scatter.reads(rank)) == [], f"scattered to {size}"
        assert gather.wrong_bytes(0, gather.reads(0)) == [], f"gathered from {size}"


@pytest.mark.parametrize("backend", ["somebody.elses.Backend", FLASH])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (4, 2)])
def test_a_page_of_unknown_inside_is_refused_between_unequal_ranks(
    backend: str, ours: int, theirs: int
) -> None:
    """A backend that is not in the table, and a known one with other slots than it is known for."""
    slots = Slots.K_HEADS_THEN_V_HEADS if backend == FLASH else Slots.HEADS
    layer = Attention(4, 2, 4, backend=backend, slots=slots)
    model = Packed((Layers((layer,), GroupKind.ATTENTION),))
    with pytest.raises(LayoutMismatch, match=r"page\.tp_size.*--tensor-parallel-size"):
        make_plan(model.layout(0, ours, Packing()), model.layout(0, theirs, Packing()))


COPIED = (
    "mamba 2, one group on all ranks",
    "state on every rank",
    "attention, one head on all ranks",
    "latents",
)


@pytest.mark.parametrize("kind", COPIED)
def test_what_every_producer_rank_holds_is_read_once_and_from_all_in_turn(kind: str) -> None:
    assert uneven_loads(kind) == []
