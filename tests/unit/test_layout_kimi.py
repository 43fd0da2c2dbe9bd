"""Kimi-Linear and Kimi-K3 in their full size, byte for byte, with few blocks."""

from dataclasses import replace

import numpy as np
import pytest

from stateferry.errors import LayoutMismatch
from stateferry.layout.plan import make_plan
from stateferry.layout.spec import GroupKind
from stateferry.testing.kimi import KIMI_K3, KIMI_LINEAR, Kimi
from stateferry.testing.packed import Packed, Packing
from stateferry.testing.proof import Handover


@pytest.mark.parametrize(
    ("model", "sizes", "tokens", "page_bytes"),
    [
        # 20 layers of 4 heads, 7 of latents: 271,360 bytes of state in a page of 256 latents
        (KIMI_LINEAR, [8], 256, 294_912),
        (KIMI_LINEAR, [4, 8], 512, 589_824),
        # 69 layers of 12 heads, 24 of latents: 814,080 bytes of state in a page of 768 latents
        (KIMI_K3, [8], 768, 884_736),
    ],
)
def test_groups_and_pages(model: Kimi, sizes: list[int], tokens: int, page_bytes: int) -> None:
    """F3.15: 20 and 69 recurrent layers."""
    packed = model.packed(sizes)
    assert [group.kind for group in packed.groups] == [GroupKind.STATE] * 3 + [GroupKind.ATTENTION]
    assert sum(len(group.layers) for group in packed.groups[:3]) == model.recurrent_layers
    assert {group.block_tokens for group in packed.groups} == {tokens}
    latents = packed.layout(0, sizes[0], Packing()).groups[3].layers
    assert {tensor.block_bytes for layer in latents for tensor in layer.tensors} == {page_bytes}
    assert len(latents) == model.latent_layers


@pytest.mark.parametrize(
    ("ours", "theirs", "block_outermost"),
    [(8, 8, True), (4, 8, True), (4, 8, False), (8, 4, True), (8, 4, False), (1, 8, False)],
)
def test_kimi_linear_arrives_byte_for_byte(ours: int, theirs: int, block_outermost: bool) -> None:
    """F3.15."""
    model = KIMI_LINEAR.packed([ours, theirs], conv_dim_first=block_outermost)
    for group in range(4):
        case = Handover(
            one_page(model, group),
            ours,
            theirs,
            local_blocks=[1],
            remote_blocks=[0],
            consumer_packing=Packing(blocks=2, block_outermost=block_outermost),
            producer_packing=Packing(blocks=1),
            tag_type=np.uint16,
        )
        rank = ours - 1
        assert case.wrong_bytes(rank, case.reads(rank, in_runs=True)) == []


def test_kimi_k3_with_context_parallel_ranks_arrives_byte_for_byte() -> None:
    """TP 8 with DCP 8: each rank has other tokens of an attention block, and its own heads of a state.

    F3.15.
    """
    model = KIMI_K3.packed([8], dcp_ranks=8)
    assert model.groups[3].block_tokens == 8 * 768
    for group in range(4):
        case = Handover(one_page(model, group), 8, 8, [0], [0], tag_type=np.uint16)
        case = replace(case, consumer_packing=Packing(blocks=1), producer_packing=Packing(blocks=1))
        reads = case.reads(5, in_runs=True)
        assert [rank for rank, pieces in reads.items() if len(pieces)] == [5]
        assert case.wrong_bytes(5, reads) == []


def test_kimi_k3_between_unequal_ranks_arrives_byte_for_byte() -> None:
    model = KIMI_K3.packed([4, 8])
    for group in range(4):
        case = Handover(one_page(model, group), 4, 8, [0], [0], tag_type=np.uint16)
        case = replace(case, consumer_packing=Packing(blocks=1), producer_packing=Packing(blocks=1))
        assert case.wrong_bytes(3, case.reads(3)) == []


def test_context_parallel_pages_are_refused_between_unequal_ranks() -> None:
    model = KIMI_LINEAR.packed([4, 8], dcp_ranks=4)
    with pytest.raises(LayoutMismatch, match=r"page\.tp_size.*--tensor-parallel-size"):
        make_plan(model.layout(0, 4, Packing()), model.layout(0, 8, Packing()))


def one_page(model: Packed, group: int) -> Packed:
    """The model with this group alone in the pool: all of its layers, less memory."""
    return replace(model, groups=(model.groups[group],))
