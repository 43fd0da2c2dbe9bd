"""The proofs must fail when the planner or the tables are broken; otherwise they prove nothing.

Each mutant breaks one function of the fast path while the proofs run on one fixed layer of every kind.
`wrong_bytes` compares with the unsharded model, `faults` with the slow reference. The reference believes
the description, so mutants of the tables are for `wrong_bytes` alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import msgspec
import numpy as np
import pytest
from tests.unit.cache_kinds import fixed, fixed_handover, uneven_loads

from stateferry.errors import LayoutError
from stateferry.layout import plan, shard
from stateferry.layout.reference import faults
from stateferry.layout.spec import Part, PartRule
from stateferry.testing import packed
from stateferry.vllm import kv_tables

PAIRS = ((2, 1), (1, 2), (4, 2))
UNITS = 4

Patch = Callable[[pytest.MonkeyPatch], None]


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
        case = fixed_handover(kind, ours, theirs, dim_first, UNITS)
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


def _blind(patch: pytest.MonkeyPatch) -> None:
    """All parts of an axis as one: what cuts a Q|K|V page into equal stretches does."""
    right = shard.overlaps

    def one_part(parts: tuple[Part, ...], *ranks: int, **more: int):  # type: ignore[no-untyped-def]
        size = sum(part.size for part in parts)
        whole = (Part(name="all", size=size, rule=PartRule.SPLIT),)
        return right(whole if size % UNITS == 0 else parts, *ranks, **more)

    patch.setattr(plan, "overlaps", one_part)


def _groups_split_though_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "copies", lambda part, tp_size: 1)


def _only_two_states(patch: pytest.MonkeyPatch) -> None:
    right = plan.tensor_strips
    beyond = ("record", "ring", "conv_v", "conv_k")

    def of_two(local, remote, shared):  # type: ignore[no-untyped-def]
        return right(local, remote, () if local.name.startswith(beyond) else shared)

    patch.setattr(plan, "tensor_strips", of_two)


def _first_part_only(patch: pytest.MonkeyPatch) -> None:
    right = shard.overlaps
    patch.setattr(plan, "overlaps", lambda *args: right(*args)[:1])


def _one_unit_late(patch: pytest.MonkeyPatch) -> None:
    right = shard.overlaps
    patch.setattr(
        plan, "overlaps", lambda *args: tuple(replace(o, remote=max(0, o.remote - 1)) for o in right(*args))
    )


class _Any:
    def __ne__(self, other: object) -> bool:
        return False


def _every_copy_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "_chosen_copy", lambda *args: _Any())


def _no_copy_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "_chosen_copy", lambda reader, readers, holders, turn: holders - 1 + reader)


def _our_strides_on_both_sides(patch: pytest.MonkeyPatch) -> None:
    right = plan._repeated
    patch.setattr(plan, "_repeated", lambda strips, span, ours, theirs: right(strips, span, ours, ours))


def _joined_though_apart_at_the_source(patch: pytest.MonkeyPatch) -> None:
    right = plan.adjacent
    patch.setattr(plan, "adjacent", lambda labels, local, remote, sizes: right(labels, local, local, sizes))


def _our_block_stride_on_both_sides(patch: pytest.MonkeyPatch) -> None:
    right = plan._pieces_of

    def mixed(strips, local, remote, lengths):  # type: ignore[no-untyped-def]
        return right(replace(strips, remote_strides=strips.local_strides), local, remote, lengths)

    patch.setattr(plan, "_pieces_of", mixed)


def _runs_of_blocks_that_do_not_touch(patch: pytest.MonkeyPatch) -> None:
    right = plan.adjacent

    def any_run(labels, local, remote, sizes):  # type: ignore[no-untyped-def]
        return right(labels, local, remote, sizes) if labels else np.zeros(1, np.int64)

    patch.setattr(plan, "adjacent", any_run)


PLANNER: dict[str, tuple[Patch, set[str]]] = {
    "pages are cut blindly": (_blind, {"gated delta net", "kda", "mamba 2, groups split"}),
    "copied groups are split": (_groups_split_though_copied, {"mamba 2, one group on all ranks", "latents"}),
    "states beyond the second are dropped": (
        _only_two_states,
        {"kda in four tensors", "gated delta net with records", "mamba 2 with a replay ring"},
    ),
    "only the first part": (_first_part_only, {"gated delta net", "mamba 2, one group on all ranks"}),
    "one unit early at the source": (_one_unit_late, {"mamba 1", "attention", "linear attention"}),
    "every copy is read": (_every_copy_read, {"latents", "state on every rank"}),
    "no copy is read": (_no_copy_read, {"latents", "attention, one head on all ranks"}),
    "our strides on both sides": (_our_strides_on_both_sides, {"attention", "gated delta net"}),
    "joined though apart at the source": (
        _joined_though_apart_at_the_source,
        {"gated delta net", "attention"},
    ),
    "our block stride on both sides": (_our_block_stride_on_both_sides, set(fixed(True))),
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
    _runs_of_blocks_that_do_not_touch(monkeypatch)
    by_bytes, by_reference = noticed(in_runs=True)
    assert by_bytes
    assert by_bytes == by_reference


def _channels_and_window_exchanged(patch: pytest.MonkeyPatch) -> None:
    right = packed.state_axes

    def exchanged(mamba_type, replicated, states):  # type: ignore[no-untyped-def]
        axes = right(mamba_type, replicated, states)
        return [
            replace(a, dim=1 - a.dim) if a.name == "conv" and len(states.shapes[0]) == 2 and a.dim is not None
            else a
            for a in axes
        ]  # fmt: skip

    patch.setattr(packed, "state_axes", exchanged)


def _parts_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = kv_tables.StateShapes.conv
    patch.setattr(kv_tables.StateShapes, "conv", lambda self, name, *parts: right(self, name, *parts[::-1]))


def _groups_never_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_tables, "_mamba2_groups", lambda local, states: local * states.tp_size)


def _every_state_on_all_ranks(patch: pytest.MonkeyPatch) -> None:
    right = packed.state_axes
    patch.setattr(packed, "state_axes", lambda mamba_type, _, states: right(mamba_type, True, states))


def _heads_taken_as_dense(patch: pytest.MonkeyPatch) -> None:
    right = packed.attention_axis
    patch.setattr(packed, "attention_axis", lambda *args: replace(right(*args), strided=False, dim=2))


def _heads_never_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed, "total_kv_heads", lambda local, tp_size, configured: local * tp_size)


def _units_of_another_state(patch: pytest.MonkeyPatch) -> None:
    """Every state as if it began where the page does."""
    right = packed.Packed._tensors

    def at_the_start(self, *args):  # type: ignore[no-untyped-def]
        first, *rest = right(self, *args)
        moved = (msgspec.structs.replace(tensor, offset_bytes=first.offset_bytes) for tensor in rest)
        return (first, *moved)

    patch.setattr(packed.Packed, "_tensors", at_the_start)


TABLES: dict[str, tuple[Patch, set[str]]] = {
    "channels and window exchanged": (_channels_and_window_exchanged, {"short convolution", "mamba 1"}),
    "parts in another order": (
        _parts_in_another_order,
        {"gated delta net", "mamba 2, one group on all ranks", "mamba 2, groups split"},
    ),
    "groups never copied": (_groups_never_copied, {"mamba 2, one group on all ranks"}),
    "every state on all ranks": (_every_state_on_all_ranks, {"mamba 1", "kda", "linear attention"}),
    "heads taken for tokens": (_heads_taken_as_dense, {"attention"}),
    "heads never copied": (_heads_never_copied, {"attention, one head on all ranks"}),
    "states begin where the page does": (_units_of_another_state, {"kda", "mamba 1", "kda in four tensors"}),
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
