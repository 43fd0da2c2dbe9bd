"""Ways to break the planner and its tables, one function each; the proofs must notice every one."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from stateferry.layout import plan, shard
from stateferry.layout.spec import Part, PartRule
from stateferry.testing import packed
from stateferry.vllm import kv_tables
from stateferry.vllm.kv_tables import Axis

UNITS = 4

Patch = Callable[[pytest.MonkeyPatch], None]


def blind(patch: pytest.MonkeyPatch) -> None:
    """All parts of an axis as one: what cuts a Q|K|V page into equal stretches does."""
    right = shard.overlaps

    def one_part(parts: tuple[Part, ...], *ranks: int, **more: int):  # type: ignore[no-untyped-def]
        size = sum(part.size for part in parts)
        whole = (Part(name="all", size=size, rule=PartRule.SPLIT),)
        return right(whole if size % UNITS == 0 else parts, *ranks, **more)

    patch.setattr(plan, "overlaps", one_part)


def groups_split_though_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "copies", lambda part, tp_size: 1)


def only_two_states(patch: pytest.MonkeyPatch) -> None:
    right = plan.tensor_strips
    beyond = ("record", "ring", "conv_v", "conv_k")

    def of_two(local, remote, shared):  # type: ignore[no-untyped-def]
        return right(local, remote, () if local.name.startswith(beyond) else shared)

    patch.setattr(plan, "tensor_strips", of_two)


def first_part_only(patch: pytest.MonkeyPatch) -> None:
    right = shard.overlaps
    patch.setattr(plan, "overlaps", lambda *args: right(*args)[:1])


def one_unit_late(patch: pytest.MonkeyPatch) -> None:
    right = shard.overlaps
    patch.setattr(
        plan, "overlaps", lambda *args: tuple(replace(o, remote=max(0, o.remote - 1)) for o in right(*args))
    )


class _Any:
    def __ne__(self, other: object) -> bool:
        return False


def every_copy_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "_chosen_copy", lambda *args: _Any())


def no_copy_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "_chosen_copy", lambda reader, readers, holders, turn: holders - 1 + reader)


def our_strides_on_both_sides(patch: pytest.MonkeyPatch) -> None:
    right = plan._repeated
    patch.setattr(plan, "_repeated", lambda strips, span, ours, theirs: right(strips, span, ours, ours))


def joined_though_apart_at_the_source(patch: pytest.MonkeyPatch) -> None:
    right = plan.adjacent
    patch.setattr(plan, "adjacent", lambda labels, local, remote, sizes: right(labels, local, local, sizes))


def our_block_stride_on_both_sides(patch: pytest.MonkeyPatch) -> None:
    right = plan._pieces_of

    def mixed(strips, local, remote, lengths):  # type: ignore[no-untyped-def]
        return right(replace(strips, remote_strides=strips.local_strides), local, remote, lengths)

    patch.setattr(plan, "_pieces_of", mixed)


def runs_of_blocks_that_do_not_touch(patch: pytest.MonkeyPatch) -> None:
    right = plan.adjacent

    def any_run(labels, local, remote, sizes):  # type: ignore[no-untyped-def]
        return right(labels, local, remote, sizes) if labels else np.zeros(1, np.int64)

    patch.setattr(plan, "adjacent", any_run)


def channels_and_window_exchanged(patch: pytest.MonkeyPatch) -> None:
    right = packed.state_axes

    def exchanged(mamba_type, replicated, states):  # type: ignore[no-untyped-def]
        axes = right(mamba_type, replicated, states)
        return [
            replace(a, dim=1 - a.dim) if a.name == "conv" and len(states.shapes[0]) == 2 and a.dim is not None
            else a
            for a in axes
        ]  # fmt: skip

    patch.setattr(packed, "state_axes", exchanged)


def parts_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = kv_tables.StateShapes.conv
    patch.setattr(kv_tables.StateShapes, "conv", lambda self, name, *parts: right(self, name, *parts[::-1]))


def groups_never_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_tables, "_mamba2_groups", lambda local, states: local * states.tp_size)


def every_state_on_all_ranks(patch: pytest.MonkeyPatch) -> None:
    right = packed.state_axes
    patch.setattr(packed, "state_axes", lambda mamba_type, _, states: right(mamba_type, True, states))


def heads_taken_as_dense(patch: pytest.MonkeyPatch) -> None:
    right = packed.attention_axis
    patch.setattr(packed, "attention_axis", lambda *args: replace(right(*args), strided=False, dim=2))


def sides_taken_for_heads(patch: pytest.MonkeyPatch) -> None:
    """As if the two slots were two heads."""
    right = packed.attention_axis
    patch.setattr(
        packed, "attention_axis", lambda *args: replace(right(*args), sides=False, dim=1, strided=True)
    )


def heads_packed_taken_for_rows(patch: pytest.MonkeyPatch) -> None:
    right = packed.attention_axis
    patch.setattr(packed, "attention_axis", lambda *args: replace(right(*args), strided=True, dim=3))


def heads_never_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed, "total_kv_heads", lambda local, tp_size, configured: local * tp_size)


def units_of_another_state(patch: pytest.MonkeyPatch) -> None:
    """Every state as if it began where the page does."""
    right = packed.Packed._tensors

    def at_the_start(self, *args):  # type: ignore[no-untyped-def]
        first, *rest = right(self, *args)
        moved = (msgspec.structs.replace(tensor, offset_bytes=first.offset_bytes) for tensor in rest)
        return (first, *moved)

    patch.setattr(packed.Packed, "_tensors", at_the_start)


def one_byte_late(patch: pytest.MonkeyPatch) -> None:
    right = plan._pieces_of

    def late(*args):  # type: ignore[no-untyped-def]
        pieces = right(*args)
        return replace(pieces, remote_offsets=pieces.remote_offsets + 1)

    patch.setattr(plan, "_pieces_of", late)


def no_such_layers(patch: pytest.MonkeyPatch) -> None:
    for family in ("SHORT_CONV", "LINEAR"):
        patch.delitem(kv_tables._FAMILIES, family)


def equal_ranks_only(patch: pytest.MonkeyPatch) -> None:
    right = packed.state_axes

    def opaque(*args):  # type: ignore[no-untyped-def]
        return [Axis(axis.name, opaque=True) for axis in right(*args)]

    patch.setattr(packed, "state_axes", opaque)
