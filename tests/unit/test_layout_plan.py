"""Plans: what they merge, how they are labelled, and what they refuse."""

from typing import Any

import msgspec
import numpy as np
import pytest

from stateferry.errors import LayoutError, LayoutMismatch
from stateferry.layout.blocks import merge
from stateferry.layout.plan import SEVERAL, make_plan
from stateferry.layout.shard import check_layout, producer_ranks_to_read
from stateferry.layout.spec import CacheLayout, CacheTensor, GroupKind, Loop, Part, PartRule
from stateferry.testing.caches import Model, Tensor

HEADS = (Part(name="heads", size=8, rule=PartRule.SPLIT),)
HYBRID = Model(((Tensor("conv", (6,)), Tensor("matrix", (HEADS, 4))),) * 2)


def changed(layout: CacheLayout, tensor: dict[str, Any] | None = None, **group: Any) -> CacheLayout:
    """`layout` with fields of its first tensor, or of its first group, replaced."""
    replace = msgspec.structs.replace
    first = layout.groups[0]
    if tensor:
        layer = first.layers[0]
        layer = replace(layer, tensors=(replace(layer.tensors[0], **tensor), *layer.tensors[1:]))
        group["layers"] = (layer, *first.layers[1:])
    return replace(layout, groups=(replace(first, **group), *layout.groups[1:]))


def test_states_of_a_page_are_one_strip() -> None:
    plan = make_plan(HYBRID.layout(0, 1), HYBRID.layout(0, 1, blocks=9))
    assert plan.group_bytes(0) == 2 * 38
    assert plan.groups[0].sizes.tolist() == [38, 38]
    assert plan.layer_of(0).tolist() == [0, 1]
    assert plan.tensor_of(0).tolist() == [SEVERAL, SEVERAL]


def test_unmerged_strips_belong_to_one_tensor_each() -> None:
    plan = make_plan(HYBRID.layout(0, 1), HYBRID.layout(0, 1), merge=False)
    assert plan.layer_of(0).tolist() == [0, 0, 1, 1]
    assert plan.tensor_of(0).tolist() == [0, 1, 0, 1]
    assert plan.groups[0].sizes.tolist() == [6, 32, 6, 32]


def test_pieces_come_strip_by_strip_then_block_by_block() -> None:
    """F2.6."""
    layout = HYBRID.layout(0, 1)
    pieces = make_plan(layout, HYBRID.layout(0, 1, blocks=9), merge=False).pieces(0, [4, 0, 1], [2, 8, 3])
    assert pieces.local_offsets.tolist()[:6] == [4 * 38, 0, 38, 4 * 38 + 6, 6, 38 + 6]
    assert pieces.remote_offsets.tolist()[:3] == [2 * 38, 8 * 38, 3 * 38]
    assert pieces.sizes.tolist() == [6] * 3 + [32] * 3 + [6] * 3 + [32] * 3
    assert pieces.local_offsets.dtype == np.int64


def test_gaps_are_not_covered() -> None:
    """A page padded from 38 to 50 bytes, as vLLM pads state pages to the size of attention pages."""
    plain = HYBRID.layout(0, 1)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            tensors=tuple(
                msgspec.structs.replace(
                    t, block_stride_bytes=50, offset_bytes=t.offset_bytes % 190 + number * 250
                )
                for t in layer.tensors
            ),
        )
        for number, layer in enumerate(plain.groups[0].layers)
    )
    padded = msgspec.structs.replace(changed(plain, layers=layers), region_sizes_bytes=(500,))
    check_layout(padded)
    plan = make_plan(padded, plain)
    assert plan.groups[0].sizes.tolist() == [38, 38]
    assert plan.merged_pieces(0, [1, 2, 3], [1, 2, 3]).total_bytes == 3 * 76


def test_neighbours_with_other_block_strides_stay_apart() -> None:
    """Two tensors that touch in block 0 but drift apart in block 1 are two strips."""

    def tensor(name: str, offset: int, stride: int) -> CacheTensor:
        return CacheTensor(
            name=name,
            region=0,
            offset_bytes=offset,
            block_stride_bytes=stride,
            block_count=3,
            unit_bytes=4,
            element_bytes=1,
            dtype="uint8",
        )

    layout = HYBRID.layout(0, 1)
    layer = msgspec.structs.replace(
        layout.groups[0].layers[0], tensors=(tensor("a", 0, 8), tensor("b", 4, 16))
    )
    layout = changed(layout, layers=(layer,))
    assert make_plan(layout, layout).groups[0].sizes.tolist() == [4, 4]


def test_runs_of_blocks_are_one_piece_where_the_strip_fills_its_block() -> None:
    plan = make_plan(HYBRID.layout(0, 1), HYBRID.layout(0, 1, blocks=9))
    pieces = plan.merged_pieces(0, [1, 2, 4, 3], [5, 6, 8, 7])
    assert pieces.sizes.tolist() == [4 * 38, 4 * 38]
    assert len(merge(plan.pieces(0, [1, 2, 4, 3], [5, 6, 8, 7]))) == 2
    apart = plan.merged_pieces(0, [1, 2, 4], [5, 7, 8])
    assert apart.sizes.tolist() == [38] * 6


@pytest.mark.parametrize("method", ["pieces", "merged_pieces"])
@pytest.mark.parametrize(
    ("local", "remote", "text"),
    [
        ([5], [0], r"group 0: local block id 5 is outside 0\.\.4"),
        ([-1], [0], r"group 0: local block id -1"),
        ([0, 1], [0, 9], r"group 0: remote block id 9 is outside 0\.\.8"),
        ([0, 1], [0], r"group 0: 2 local blocks for 1 remote"),
    ],
)
def test_wrong_block_ids_are_a_bug_of_the_caller(
    method: str, local: list[int], remote: list[int], text: str
) -> None:
    """F2.6."""
    plan = make_plan(HYBRID.layout(0, 1), HYBRID.layout(0, 1, blocks=9))
    with pytest.raises(ValueError, match=text):
        getattr(plan, method)(0, local, remote)


def test_no_blocks_no_pieces() -> None:
    """F2.6."""
    plan = make_plan(HYBRID.layout(0, 1), HYBRID.layout(0, 1))
    assert len(plan.pieces(0, [], [])) == len(plan.merged_pieces(0, [], [])) == 0


def test_group_kept_out_of_transfer_has_no_strips() -> None:
    layout = changed(HYBRID.layout(0, 1), transfers=False, layers=())
    assert make_plan(layout, layout).group_bytes(0) == 0
    assert producer_ranks_to_read(layout, 2) == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": GroupKind.ATTENTION}, r"groups\[0\]\.kind"),
        ({"block_tokens": 8}, r"groups\[0\]\.block_tokens"),
        ({"window_tokens": 8}, r"groups\[0\]\.window_tokens"),
        ({"scratch_slots": 1}, r"groups\[0\]\.scratch_slots.*--speculative-config"),
        ({"transfers": False, "layers": ()}, r"groups\[0\]\.transfers"),
        ({"layers": ()}, r"groups\[0\]\.layers"),
        ({"tensor": {"name": "other"}}, r"layer0\.tensors"),
        ({"tensor": {"dtype": "float16"}}, r"layer0\.conv\.dtype.*--dtype"),
        ({"tensor": {"unit_bytes": 2}}, r"layer0\.conv\.unit_bytes"),
        ({"tensor": {"loops": ()}}, r"layer0\.conv\.loops\.count"),
        ({"tensor": {"loops": (Loop(count=5, stride_bytes=1),)}}, r"layer0\.conv\.loops\[0\]\.count"),
        ({"tensor": {"opaque": True}}, r"layer0\.conv\.opaque"),
    ],
)
def test_caches_that_do_not_correspond_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    layout = HYBRID.layout(0, 1)
    with pytest.raises(LayoutMismatch, match=field):
        make_plan(layout, changed(layout, **change))


def test_parts_in_another_order_are_refused() -> None:
    def model(*names: str) -> Model:
        return Model(((Tensor("conv", (tuple(Part(name=n, size=4, rule=PartRule.SPLIT) for n in names),)),),))

    with pytest.raises(LayoutMismatch, match=r"layer0\.conv\.parts"):
        make_plan(model("Q", "K").layout(0, 1), model("K", "Q").layout(0, 1))


def test_unknown_inside_goes_between_equal_ranks_only() -> None:
    page = Model(((Tensor("page", (), 16),),))
    ours, theirs = (changed(page.layout(0, 2), tensor={"opaque": True}) for _ in range(2))
    assert make_plan(ours, theirs).group_bytes(0) == 16
    assert make_plan(ours, msgspec.structs.replace(theirs, tp_rank=1)).group_bytes(0) == 0
    with pytest.raises(LayoutError, match=r"layer0\.page\.tp_size.*has 2.*has 1.*--tensor-parallel-size"):
        make_plan(ours, msgspec.structs.replace(theirs, tp_size=1))


def test_an_axis_that_does_not_divide_names_layer_and_tensor() -> None:
    layout = HYBRID.layout(0, 1)
    with pytest.raises(LayoutError, match=r"layer 'layer0', tensor 'matrix'.*'heads'.*8 units.*3 ranks"):
        make_plan(layout, msgspec.structs.replace(layout, tp_size=3))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tensor": {"unit_bytes": 0}}, "at least 1"),
        ({"tensor": {"block_count": 0}}, "at least 1"),
        ({"tensor": {"offset_bytes": -1}}, "not negative"),
        ({"tensor": {"unit_bytes": 3, "element_bytes": 2}}, "multiple of element_bytes"),
        ({"tensor": {"region": 1}}, "region 1 of 1 does not exist"),
        ({"tensor": {"block_count": 99}}, "ends at byte"),
        ({"tensor": {"parts": HEADS}}, "parts but no axis"),
        ({"tensor": {"axis": 3, "parts": HEADS}}, "axis 3 of 1 loops"),
        ({"tensor": {"axis": 0, "parts": HEADS, "opaque": True}}, "opaque: True"),
        ({"tensor": {"axis": 0, "parts": HEADS}}, "its axis has 6 units here.*8 units"),
        ({"block_tokens": 0}, "block_tokens 0 must be at least 1"),
        ({"scratch_slots": -1}, "scratch_slots -1"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        check_layout(changed(HYBRID.layout(0, 1), **change))


def test_impossible_ranks_are_refused() -> None:
    layout = HYBRID.layout(0, 1)
    for rank, size in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(LayoutError, match=f"rank {rank} of {size}"):
            check_layout(msgspec.structs.replace(layout, tp_rank=rank, tp_size=size))


def test_strips_that_fill_their_block_merge_though_others_do_not() -> None:
    """One dense layer among padded ones: both ways of laying strips over blocks in one answer."""
    dense = HYBRID.layout(0, 1)
    tensors = tuple(
        msgspec.structs.replace(t, block_stride_bytes=60, offset_bytes=t.offset_bytes)
        for t in dense.groups[0].layers[1].tensors
    )
    layers = (dense.groups[0].layers[0], msgspec.structs.replace(dense.groups[0].layers[1], tensors=tensors))
    layout = msgspec.structs.replace(changed(dense, layers=layers), region_sizes_bytes=(600,))
    pieces = make_plan(layout, dense).merged_pieces(0, [1, 2, 3], [2, 3, 4])
    assert sorted(pieces.sizes.tolist()) == [38, 38, 38, 3 * 38]
