"""The proofs must fail when the planner or the tables are broken; otherwise they prove nothing.

Each mutant breaks one function of the fast path while the proofs run on one fixed layer of every kind.
`wrong_bytes` compares with the unsharded model, `faults` with the slow reference. The reference believes
the description, so mutants of the tables are for `wrong_bytes` alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import Phase
from tests.unit import planner_mutants as mutants
from tests.unit import test_layout_defects as defects
from tests.unit import test_layout_kimi as kimi
from tests.unit import test_layout_proof as proof
from tests.unit.cache_kinds import fixed, fixed_handover, uneven_loads

from stateferry.errors import LayoutError
from stateferry.layout import shard
from stateferry.layout.reference import faults
from stateferry.testing.unsharded import short_convolution

PAIRS = ((2, 1), (1, 2), (4, 2))


@pytest.fixture(autouse=True)
def _no_answers_of_mutants() -> Iterator[None]:
    """Cached intervals outlive a mutant."""
    yield
    shard.intervals.cache_clear()
    shard.overlaps.cache_clear()


def noticed(in_runs: bool = False) -> tuple[set[str], set[str]]:
    """The kinds for which each of the two proofs finds something wrong."""
    shard.intervals.cache_clear()
    shard.overlaps.cache_clear()
    by_bytes, by_reference = set(), set()
    for dim_first, kind, (ours, theirs) in product((True, False), fixed(True), PAIRS):
        case = fixed_handover(kind, ours, theirs, dim_first, mutants.UNITS)
        case = replace(case, local_blocks=[1, 2], remote_blocks=[2, 3])
        blocks = case.local_blocks, case.remote_blocks
        try:
            reads = case.reads(ours - 1, in_runs=in_runs)
            if case.wrong_bytes(ours - 1, reads):
                by_bytes.add(kind)
            if faults(case.consumer(ours - 1), case.producers(), 0, *blocks, reads):
                by_reference.add(kind)
        except (LayoutError, ValueError):  # a refusal is noticed, too
            by_bytes.add(kind)
            by_reference.add(kind)
    return by_bytes, by_reference


def test_nothing_is_wrong_without_a_mutant() -> None:
    assert noticed() == (set(), set())
    assert noticed(in_runs=True) == (set(), set())


PLANNER: dict[str, tuple[mutants.Patch, set[str]]] = {
    "pages are cut blindly": (mutants.blind, {"gated delta net", "kda", "mamba 2, groups split"}),
    "copied groups are split": (
        mutants.groups_split_though_copied,
        {"mamba 2, one group on all ranks", "latents"},
    ),
    "states beyond the second are dropped": (
        mutants.only_two_states,
        {"kda in four tensors", "gated delta net with records", "mamba 2 with a replay ring"},
    ),
    "only the first part": (mutants.first_part_only, {"gated delta net", "mamba 2, one group on all ranks"}),
    "one unit early at the source": (mutants.one_unit_late, {"mamba 1", "attention", "linear attention"}),
    "every copy is read": (mutants.every_copy_read, {"latents", "state on every rank"}),
    "no copy is read": (mutants.no_copy_read, {"latents", "attention, one head on all ranks"}),
    "our strides on both sides": (mutants.our_strides_on_both_sides, {"attention", "gated delta net"}),
    "joined though apart at the source": (
        mutants.joined_though_apart_at_the_source,
        {"gated delta net", "attention"},
    ),
    "our block stride on both sides": (mutants.our_block_stride_on_both_sides, set(fixed(True))),
}
"""Mutant -> how to break it, and the kinds that must at least be noticed."""


@pytest.mark.parametrize("name", PLANNER)
def test_both_proofs_notice_a_broken_planner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, least = PLANNER[name]
    patch(monkeypatch)
    by_bytes, by_reference = noticed()
    assert least <= by_bytes
    assert least <= by_reference


def test_runs_of_blocks_are_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.runs_of_blocks_that_do_not_touch(monkeypatch)
    by_bytes, by_reference = noticed(in_runs=True)
    assert by_bytes
    assert by_bytes == by_reference


TABLES: dict[str, tuple[mutants.Patch, set[str]]] = {
    "channels and window exchanged": (
        mutants.channels_and_window_exchanged,
        {"short convolution", "mamba 1"},
    ),
    "parts in another order": (
        mutants.parts_in_another_order,
        {"gated delta net", "mamba 2, one group on all ranks", "mamba 2, groups split"},
    ),
    "groups never copied": (mutants.groups_never_copied, {"mamba 2, one group on all ranks"}),
    "every state on all ranks": (mutants.every_state_on_all_ranks, {"mamba 1", "kda", "linear attention"}),
    "heads taken for tokens": (mutants.heads_taken_as_dense, {"attention"}),
    "two slots taken for two heads": (
        mutants.sides_taken_for_heads,
        {"attention, K and V apart, packed per head", "attention, K and V apart, token by token"},
    ),
    "packed heads taken for rows": (
        mutants.heads_packed_taken_for_rows,
        {"attention, K and V apart, packed per head"},
    ),
    "heads never copied": (mutants.heads_never_copied, {"attention, one head on all ranks"}),
    "states begin where the page does": (
        mutants.units_of_another_state,
        {"kda", "mamba 1", "kda in four tensors"},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_unsharded_model_notices_broken_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, least = TABLES[name]
    patch(monkeypatch)
    by_bytes, _ = noticed()
    assert least <= by_bytes


@pytest.mark.parametrize(
    "mutant",
    [
        lambda reader, readers, holders, turn: reader % readers * holders // readers,
        lambda reader, readers, holders, turn: reader % readers * holders // readers + turn.layer % 2,
    ],
    ids=["always the first copy", "no rank beyond the second"],
)
def test_a_load_on_one_rank_is_noticed(mutant: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_chosen_copy", mutant)
    assert uneven_loads("latents")


SHORT = short_convolution(16, 3, False, 2)
OTHERS: dict[str, tuple[mutants.Patch, Callable[[], None]]] = {
    "random caches": (mutants.blind, lambda: proof.prove("gated delta net", (Phase.generate,))),
    "random latents": (mutants.no_copy_read, lambda: proof.prove("latents", (Phase.generate,))),
    "scatter and gather": (
        mutants.first_part_only,
        lambda: proof.test_gather_of_scatter_is_the_unsharded_state("kda", True),
    ),
    "Kimi-Linear": (mutants.blind, lambda: kimi.test_kimi_linear_arrives_byte_for_byte(4, 8, False)),
    "Kimi-K3 with DCP": (
        mutants.one_byte_late,
        kimi.test_kimi_k3_with_context_parallel_ranks_arrives_byte_for_byte,
    ),
    "Kimi-Linear's latents": (
        mutants.every_copy_read,
        lambda: kimi.test_kimi_linear_arrives_byte_for_byte(4, 8, True),
    ),
    "GDN cut blindly": (
        mutants.blind,
        lambda: defects.test_a_gdn_page_is_not_cut_into_equal_stretches(2, 1, False),
    ),
    "states dropped": (
        mutants.only_two_states,
        lambda: defects.test_states_beyond_the_second_are_not_dropped("records of KDA", 1, 2),
    ),
    "Mamba 2 read past its end": (
        mutants.groups_split_though_copied,
        lambda: defects.test_mamba2_convolution_is_not_read_past_its_end_with_fewer_groups_than_ranks(
            4, 8, False
        ),
    ),
    "single states refused": (
        mutants.no_such_layers,
        lambda: defects.test_layers_of_one_state_are_not_refused(SHORT, 2, 1),
    ),
    "unequal ranks refused": (
        mutants.equal_ranks_only,
        lambda: defects.test_recurrent_state_is_not_refused_between_unequal_ranks(SHORT),
    ),
    "several groups": (
        mutants.our_block_stride_on_both_sides,
        defects.test_a_hybrid_is_not_limited_to_one_recurrent_spec_or_one_attention_group,
    ),
}
"""Test -> a mutant under which it must fail."""


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_proof_fails_under_its_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, run = OTHERS[name]
    shard.intervals.cache_clear()
    shard.overlaps.cache_clear()
    patch(monkeypatch)
    with pytest.raises((AssertionError, LayoutError)):
        run()
