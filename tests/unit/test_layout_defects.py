"""Defects that other connectors have or had, each named after its symptom, shown not to be ours.

The numbers are those of the reports: small head counts, but real proportions.
"""

import numpy as np
import pytest

from stateferry.layout.plan import make_plan
from stateferry.layout.spec import GroupKind
from stateferry.testing.packed import Layers, Packed, Packing
from stateferry.testing.proof import Handover
from stateferry.testing.unsharded import (
    Attention,
    Layer,
    gated_delta,
    latent_attention,
    linear_attention,
    mamba1,
    mamba2,
    replicated,
    short_convolution,
)

PAIRS = [(1, 2), (2, 1), (1, 8), (8, 1), (2, 8), (8, 2), (4, 4)]


def handover(layer: Layer, ours: int, theirs: int, dim_first: bool = False) -> Handover:
    kind = GroupKind.ATTENTION if isinstance(layer, Attention) else GroupKind.STATE
    model = Packed((Layers((layer,) * 3, kind),), dim_first)
    return Handover(model, ours, theirs, local_blocks=[2], remote_blocks=[4])


def assert_arrives(case: Handover) -> None:
    for rank in range(case.consumer_size):
        assert case.wrong_bytes(rank, case.reads(rank)) == []
        assert case.wrong_bytes(rank, case.reads(rank, in_runs=True)) == []


@pytest.mark.parametrize("dim_first", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_gdn_page_is_not_cut_into_equal_stretches(ours: int, theirs: int, dim_first: bool) -> None:
    """Cut blindly, rank 1 of 2 gets the second half of Q|K|V and of a page that also holds matrices."""
    layer = gated_delta(8, 16, 4, 4, 3, dim_first, (2, 4))
    case = handover(layer, ours, theirs, dim_first)
    assert_arrives(case)
    if (ours, theirs) == (2, 1):
        consumer, producer = case.consumer(1), case.producers()[0]
        whole = sum(tensor.block_bytes for tensor in producer.groups[0].layers[0].tensors)
        pieces = make_plan(consumer, producer, merge=False).pieces(0, [2], [4])
        starts = pieces.remote_offsets - 4 * producer.groups[0].layers[0].tensors[0].block_stride_bytes
        assert starts.min() < whole // 2, "its share of Q lies in the first half of the page"


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("name", ["four tensors", "records of KDA", "ring of Mamba 2"])
def test_states_beyond_the_second_are_not_dropped(name: str, ours: int, theirs: int) -> None:
    """F3.13, otherwise."""
    layer = {
        "four tensors": gated_delta(8, 8, 4, 4, 3, False, (2, 4), apart=True),
        "records of KDA": gated_delta(8, 8, 4, 4, 5, False, (2, 4), record=3),
        "ring of Mamba 2": mamba2(8, 4, 8, 4, 3, False, (2, 4), ring=4),
    }[name]
    assert len(layer.tensors) > 2
    case = handover(layer, ours, theirs)
    assert_arrives(case)
    planned = sum(pieces.total_bytes for pieces in case.reads(0).values())
    held = sum(tensor.held(0, ours, 1).size for tensor in layer.tensors)
    assert planned == 3 * held


@pytest.mark.parametrize("dim_first", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (1, 8), (8, 1), (4, 8), (8, 4), (8, 8)])
def test_mamba2_convolution_is_not_read_past_its_end_with_fewer_groups_than_ranks(
    ours: int, theirs: int, dim_first: bool
) -> None:
    """One group of B and C lies whole on every rank: a share of it per rank reaches into what follows."""
    layer = mamba2(16, 4, 1, 6, 3, dim_first, (2, 4))
    case = handover(layer, ours, theirs, dim_first)
    assert_arrives(case)
    for rank in range(ours):
        consumer = case.consumer(rank)
        for producer in case.producers():
            plan = make_plan(consumer, producer, merge=False)
            strips = plan.groups[0]
            conv = strips.tensors == 0
            tensors = [producer.groups[0].layers[layer].tensors[0] for layer in strips.layers[conv]]
            ends = np.array([tensor.offset_bytes + tensor.block_bytes for tensor in tensors])
            assert np.all(strips.remote_offsets[conv] + strips.sizes[conv] <= ends)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(
    "layer",
    [short_convolution(16, 3, False, 2), linear_attention(8, 4, 4)],
    ids=["short convolution", "linear attention"],
)
def test_layers_of_one_state_are_not_refused(layer: Layer, ours: int, theirs: int) -> None:
    """F3.13, otherwise."""
    assert_arrives(handover(layer, ours, theirs))


@pytest.mark.parametrize(
    "layer",
    [
        mamba1(16, 4, 3, False, (2, 4)),
        mamba2(16, 2, 8, 3, 3, False, (2, 4)),
        gated_delta(8, 16, 4, 4, 3, False, (2, 4)),
        gated_delta(8, 8, 4, 4, 3, False, (2, 4)),
        short_convolution(16, 3, False, 2),
        linear_attention(8, 4, 4),
        replicated(5, 3, False, 2),
    ],
    ids=["mamba 1", "mamba 2", "gdn", "kda", "short convolution", "linear attention", "on every rank"],
)
def test_recurrent_state_is_not_refused_between_unequal_ranks(layer: Layer) -> None:
    """F2.5, F3.13, otherwise."""
    for ours in (1, 2, 4, 8):
        for theirs in (1, 2, 4, 8):
            assert_arrives(handover(layer, ours, theirs))


def test_a_hybrid_is_not_limited_to_one_recurrent_spec_or_one_attention_group() -> None:
    """Layers of two recurrent kinds, two attention groups and a window beside each other.

    F3.13, otherwise.
    """
    groups = (
        Layers((gated_delta(8, 8, 2, 2, 3, False, (2, 4)),) * 2),
        Layers((short_convolution(16, 2, False, 2),)),
        Layers((Attention(8, 4, 4, 2),), GroupKind.ATTENTION),
        Layers((latent_attention(4, 6, 2),) * 2, GroupKind.ATTENTION),
        Layers((Attention(2, 4, 4, 1),), GroupKind.WINDOW),
    )
    for group in range(len(groups)):
        for ours, theirs in ((1, 2), (4, 2), (2, 8)):
            case = Handover(Packed(groups), ours, theirs, [2, 0], [1, 4], group, Packing(5), Packing(6))
            assert_arrives(case)
