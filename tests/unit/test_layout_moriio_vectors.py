"""Offsets and sizes as vLLM 0.32's MoRIIO connector computes them, for the shapes of its reference table.

Ours differ in two ways only, and the tests say where: a storage is one region, however many tensors lie in
it, and what is adjacent on both sides is one piece (K and V of a block, the states of a page), as it is there
for attention but not for recurrent states.
"""

from collections.abc import Sequence
from math import prod

import pytest

from stateferry.ids import EngineId, Epoch
from stateferry.layout.blocks import merge
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.spec import (
    CacheLayout,
    CacheTensor,
    Group,
    GroupKind,
    LayerCache,
    Loop,
    Part,
    PartRule,
    Pieces,
)

BF16 = 2
LOCAL, REMOTE = (1, 3), (4, 5)


def tensor(name: str, offset: int, stride: int, size: int, blocks: int, region: int = 0) -> CacheTensor:
    """A tensor whose block is one run of bytes."""
    return CacheTensor(
        name=name,
        region=region,
        offset_bytes=offset,
        block_stride_bytes=stride,
        block_count=blocks,
        unit_bytes=BF16,
        element_bytes=BF16,
        dtype="bfloat16",
        loops=(Loop(count=size // BF16, stride_bytes=BF16),),
    )


def layout(
    tensors: Sequence[CacheTensor], kind: GroupKind = GroupKind.ATTENTION, rank: int = 0, ranks: int = 1
) -> CacheLayout:
    regions = 1 + max(t.region for t in tensors)
    ends = [0] * regions
    for t in tensors:
        end = t.offset_bytes + (t.block_count - 1) * t.block_stride_bytes + t.block_bytes
        ends[t.region] = max(ends[t.region], end)
    return CacheLayout(
        engine_id=EngineId("e"),
        epoch=Epoch(1),
        tp_rank=rank,
        tp_size=ranks,
        groups=(
            Group(kind=kind, block_tokens=4, layers=(LayerCache(name="layer", tensors=tuple(tensors)),)),
        ),
        region_sizes_bytes=tuple(ends),
        facts={},
    )


def split(shape: Sequence[int], blocks: int) -> list[CacheTensor]:
    """K of all blocks, then V of all blocks: `[2, blocks, …]`, kernel blocks counted as parts of a block."""
    block = prod(shape[1:]) // blocks * BF16
    return [tensor("k", 0, block, block, blocks), tensor("v", blocks * block, block, block, blocks)]


def interleaved(shape: Sequence[int], blocks: int) -> list[CacheTensor]:
    """K and V of a kernel block, then those of the next: `[blocks, 2, …]`; a block is one slab of them."""
    kernel_blocks = shape[0] // blocks
    each = prod(shape[2:]) * BF16
    stride = 2 * each * kernel_blocks
    return [
        tensor(f"{name}{part}", 2 * each * part + each * number, stride, each, blocks)
        for part in range(kernel_blocks)
        for number, name in enumerate("kv")
    ]


def whole(shape: Sequence[int], blocks: int) -> list[CacheTensor]:
    """One tensor a block: a latent, or `[blocks, heads, tokens, content]` with K and V in the content."""
    block = prod(shape) // blocks * BF16
    return [tensor("page", 0, block, block, blocks)]


def rows(pieces: Pieces) -> tuple[list[int], list[int], list[int]]:
    """Local offsets, remote offsets, sizes, by local offset."""
    merged = merge(pieces)
    return merged.local_offsets.tolist(), merged.remote_offsets.tolist(), merged.sizes.tolist()


VECTORS = [
    # name, how K and V lie, local shape, blocks here and there, local offsets, remote offsets, size
    ("split", split, [2, 8, 4, 2, 3], 8, 16, [48, 144, 432, 528], [192, 240, 960, 1008], 48),
    ("interleaved", interleaved, [8, 2, 4, 2, 3], 8, 16, [96, 288], [384, 480], 96),
    ("head-major split", split, [2, 8, 2, 4, 3], 8, 16, [48, 144, 432, 528], [192, 240, 960, 1008], 48),
    ("head-major interleaved", interleaved, [8, 2, 2, 4, 3], 8, 16, [96, 288], [384, 480], 96),
    ("split, kernel block 2", split, [2, 16, 2, 2, 3], 8, 16, [48, 144, 432, 528], [192, 240, 960, 1008], 48),
    ("interleaved, kernel block 2", interleaved, [16, 2, 2, 2, 3], 8, 16, [96, 288], [384, 480], 96),
    (
        *("split, block 16, 8 heads", split, [2, 32, 8, 2, 3], 4, 8),
        *([768, 2304, 3840, 5376], [3072, 3840, 9216, 9984], 768),
    ),
    ("interleaved, block 16, 8 heads", interleaved, [32, 2, 8, 2, 3], 4, 8, [1536, 4608], [6144, 7680], 1536),
    ("latents", whole, [8, 1, 4, 3], 8, 16, [24, 72], [96, 120], 24),
    ("[B,H,N,C]", whole, [8, 2, 4, 6], 8, 16, [96, 288], [384, 480], 96),
]


@pytest.mark.parametrize("vector", VECTORS, ids=[vector[0] for vector in VECTORS])
def test_attention_offsets_are_those_of_the_table(vector: tuple) -> None:  # type: ignore[type-arg]
    """F3.9 and section 1.4. One region here, where the connector registers K and V apart."""
    _, lie, shape, here, there, local_offsets, remote_offsets, size = vector
    bigger = list(shape)
    bigger[lie is split] *= there // here
    ours, theirs = layout(lie(shape, here)), layout(lie(bigger, there))
    plan = make_plan(ours, theirs)
    found = rows(plan.merged_pieces(0, LOCAL, REMOTE))
    assert found == (local_offsets, remote_offsets, [size] * len(local_offsets))
    assert len(ours.region_sizes_bytes) == 1
    assert ours.region_sizes_bytes[0] == prod(shape) * BF16


def test_neighbours_on_both_sides_are_one_piece() -> None:
    """Section 1.4: K and V of a block are adjacent on both sides when interleaved; so are blocks in a row."""
    cache = layout(interleaved([8, 2, 4, 2, 3], 8))
    assert rows(make_plan(cache, cache).merged_pieces(0, (1, 2), (4, 5))) == ([96], [384], [192])
    split_cache = layout(split([2, 8, 4, 2, 3], 8))
    found = rows(make_plan(split_cache, split_cache).merged_pieces(0, (1, 2), (4, 5)))
    assert found == ([48, 432], [192, 576], [96, 96])


# -- recurrent states ----------------------------------------------------------------------------


def convolution(ranks: int, width: int, offset: int, stride: int, parts: Sequence[int]) -> CacheTensor:
    """Dimensions first: Q | K | V over ranks, `width` inputs each."""
    return CacheTensor(
        name="conv",
        region=0,
        offset_bytes=offset,
        block_stride_bytes=stride,
        block_count=4,
        unit_bytes=width * BF16,
        element_bytes=BF16,
        dtype="bfloat16",
        loops=(Loop(count=sum(parts) // ranks, stride_bytes=width * BF16),),
        axis=0,
        parts=tuple(
            Part(name=n, size=size, rule=PartRule.SPLIT) for n, size in zip("qkv", parts, strict=True)
        ),
    )


def test_a_convolution_state_is_one_copy_between_equal_ranks() -> None:
    """F2.7 and section 1.4: the connector reads Q, K and V, (0,24) (24,24) (48,48), which are adjacent on
    both sides; one copy of 96 bytes is the same."""
    cache = layout([convolution(1, 3, 0, 96, (4, 4, 8))], GroupKind.STATE)
    strips = make_plan(cache, cache, merge=False).groups[0]
    assert (strips.local_offsets.tolist(), strips.sizes.tolist()) == ([0], [96])


def test_the_three_projections_are_cut_between_unequal_ranks() -> None:
    """F2.5 and F2.7: where the connector has only NotImplementedError, each projection is cut by itself."""
    whole_cache = layout([convolution(1, 3, 0, 96, (4, 4, 8))], GroupKind.STATE)
    found = []
    for rank in range(2):
        half = layout([convolution(2, 3, 0, 48, (4, 4, 8))], GroupKind.STATE, rank, 2)
        strips = make_plan(whole_cache, half, merge=False).groups[0]
        found.append(
            list(
                zip(
                    strips.local_offsets.tolist(),
                    strips.remote_offsets.tolist(),
                    strips.sizes.tolist(),
                    strict=True,
                )
            )
        )
    assert found == [[(0, 0, 12), (24, 12, 12), (48, 24, 24)], [(12, 0, 12), (36, 12, 12), (72, 24, 24)]]


def page(offset: int, conv: int, matrix: int, stride: int) -> CacheLayout:
    """Convolution and matrix of one layer, one after the other in its page."""
    return layout(
        [tensor("conv", offset, stride, conv, 4), tensor("matrix", offset + conv, stride, matrix, 4)],
        GroupKind.STATE,
    )


def by_tensor(plan: Plan, local: Sequence[int], remote: Sequence[int]) -> list[tuple[int, int, int]]:
    pieces = plan.pieces(0, local, remote)
    return list(
        zip(pieces.local_offsets.tolist(), pieces.remote_offsets.tolist(), pieces.sizes.tolist(), strict=True)
    )


def test_states_in_a_shared_region_are_addressed_by_their_place_in_it() -> None:
    """Section 1.4, shared MR: page 32 = conv 16 + ssm 16, at 128 here and 256 there, slot 1 from slot 0. The
    connector reads conv in three (4, 4, 8) and ssm in one; here they are one of 32 bytes."""
    ours, theirs = page(128, 16, 16, 32), page(256, 16, 16, 32)
    assert by_tensor(make_plan(ours, theirs, merge=False), [1], [0]) == [(160, 256, 16), (176, 272, 16)]
    assert rows(make_plan(ours, theirs).merged_pieces(0, [1], [0])) == ([160], [256], [32])


def test_several_slots_are_read_conv_first_and_then_the_matrix() -> None:
    """F2.6: slots [3, 0, 2]; convolutions slot by slot, then matrices; base = slot x stride."""
    cache = page(0, 96, 64, 160)
    found = by_tensor(make_plan(cache, cache, merge=False), [3, 0, 2], [1, 2, 3])
    assert found == [
        *((480, 160, 96), (0, 320, 96), (320, 480, 96)),
        *((576, 256, 64), (96, 416, 64), (416, 576, 64)),
    ]
    assert by_tensor(make_plan(cache, cache), [], []) == []


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ([1, 2], [1], "2 local blocks for 1 remote"),
        ([4], [0], "local block id 4 is outside 0..3"),
        ([0], [-1], "remote block id -1 is outside"),
        ([0], [4], "remote block id 4 is outside 0..3"),
    ],
)
def test_slots_outside_the_table_are_refused_on_both_sides(
    local: list[int], remote: list[int], says: str
) -> None:
    """F2.6: lists that differ in length, slots out of range; also past the last remote one, which we know."""
    cache = page(0, 96, 64, 160)
    with pytest.raises(ValueError, match=says):
        make_plan(cache, cache).pieces(0, local, remote)


def test_a_wrong_stride_would_be_noticed() -> None:
    """The mutant of the table: one element more between blocks on the producer."""
    ours = layout(whole([8, 2, 4, 6], 8))
    theirs = layout([tensor("page", 0, 98, 96, 16)])
    assert rows(make_plan(ours, theirs).merged_pieces(0, LOCAL, REMOTE)) != ([96, 288], [384, 480], [96, 96])
