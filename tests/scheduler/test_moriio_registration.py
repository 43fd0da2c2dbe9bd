"""What vLLM's MoRIIO connector registers and records of a hybrid cache, as we describe it (F2.2 to F2.9)."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from kv_caches import BF16, CPU, allocate, choose_conv_layout, described, engine_config, states_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaType
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheLayout, MambaSpec

from stateferry.errors import LayoutError
from stateferry.ids import EngineId, Epoch
from stateferry.vllm.kv_cache import describe
from stateferry.vllm.kv_tensors import Regions

pytestmark = pytest.mark.scheduler

BLOCKS = 6
ATTENTION = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=BF16)
CONFIG = {"layers.1.attn": CPU, "layers.3.attn": CPU}


def kda() -> MambaSpec:
    """As vLLM shapes it under the convolution layout that holds now."""
    return MambaSpec(
        block_size=32,
        shapes=Shapes.kda_state_shape(1, 4, 16, conv_kernel_size=4),
        dtypes=(BF16, torch.float32),
        mamba_type=MambaType.GDN_ATTN,
        mamba_cache_mode="align",
        page_size_padded=16384,
    )


def groups() -> list[KVCacheGroupSpec]:
    return [
        KVCacheGroupSpec(["layers.0.kda", "layers.2.kda"], kda()),
        KVCacheGroupSpec(["layers.1.attn", "layers.3.attn"], ATTENTION),
    ]


@pytest.fixture(autouse=True)
def conv_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    yield partial(choose_conv_layout, monkeypatch)
    get_conv_state_layout.cache_clear()


@pytest.mark.parametrize("name", [layout.name for layout in KVCacheLayout])
@pytest.mark.parametrize("conv", ["SD", "DS"])
def test_states_lie_where_vllm_binds_them_without_a_copy(
    name: str, conv: str, conv_layout: Callable[[str], None]
) -> None:
    """F2.2, F2.3 and F2.5: address and length of every slot of every state, in every layout of the pool. The
    connector takes the DS convolution layout only; both are described here."""
    conv_layout(conv)
    layout, memory, tensors = described(engine_config(CONFIG, name), groups())
    for layer in layout.groups[0].layers:
        bound = states_of(tensors[layer.name], kda())
        assert len(layer.tensors) == len(bound) == 2
        for described_state, state in zip(layer.tensors, bound, strict=True):
            region = memory[described_state.region]
            assert described_state.block_bytes == state[0].numel() * state.element_size()
            assert described_state.block_count == BLOCKS
            for slot in range(BLOCKS):
                place = described_state.offset_bytes + slot * described_state.block_stride_bytes
                assert region.address + place == state[slot].data_ptr()


@pytest.mark.parametrize("name", [layout.name for layout in KVCacheLayout])
def test_one_region_covers_the_storage_and_no_more(name: str) -> None:
    """F2.3 and F2.4: no alias per layer, so no length to clamp: the last byte of the last slot is inside."""
    layout, memory, tensors = described(engine_config(CONFIG, name), groups())
    found = (tensor.untyped_storage() for tensor in tensors.values())
    storages = {storage.data_ptr(): storage.nbytes() for storage in found}
    assert {region.address: region.size_bytes for region in memory} == storages
    for group in layout.groups:
        for layer in group.layers:
            for tensor in layer.tensors:
                last = tensor.offset_bytes + (tensor.block_count - 1) * tensor.block_stride_bytes
                assert last + tensor.block_bytes <= layout.region_sizes_bytes[tensor.region]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda page: page[:, 0],
        lambda page: page.expand(-1, 2, -1, -1),
        lambda page: page.view(torch.bfloat16),
        lambda page: page[..., ::2],
        lambda page: page[..., :100],
        lambda page: page[:-1],
    ],
    ids=["three axes", "two heads", "two bytes an element", "gaps", "too short", "a slot too few"],
)
def test_a_page_that_is_no_packed_page_is_refused(spoil: Callable[[Any], Any]) -> None:
    """F2.2: number of axes, their sizes, element size, stride of the last axis, states longer than it."""
    config = engine_config(CONFIG)
    cache, tensors = allocate(config, groups())
    place = {"engine_id": EngineId("e"), "epoch": Epoch(1), "tp_rank": 0, "tp_size": 1}
    describe(cache, config, tensors, **place)
    tensors["layers.0.kda"] = spoil(tensors["layers.0.kda"])
    with pytest.raises(LayoutError, match=r"layers\.0\.kda"):
        describe(cache, config, tensors, **place)


def test_the_geometry_of_attention_is_attentions_whatever_layer_comes_first() -> None:
    """F2.9: the connector records one geometry for all layers, and must not take a recurrent layer's."""
    straight, _, _ = described(engine_config(CONFIG), groups())
    turned, _, _ = described(engine_config(CONFIG), groups()[::-1])
    ours, theirs = straight.groups[1].layers, turned.groups[0].layers
    assert [layer.tensors[0].loops for layer in ours] == [layer.tensors[0].loops for layer in theirs]
    assert {layer.tensors[0].block_bytes for layer in ours} == {ATTENTION.page_size_bytes}
    assert {layer.tensors[0].unit_bytes for layer in ours} == {
        layer.tensors[0].unit_bytes for layer in theirs
    }


def test_a_place_that_is_wrong_by_a_byte_is_caught(
    monkeypatch: pytest.MonkeyPatch, conv_layout: Callable[[str], None]
) -> None:
    """The mutant of the places above."""
    place = Regions.place

    def shifted(self: Regions, tensor: Any) -> tuple[int, int]:
        region, offset = place(self, tensor)
        return region, offset + 1

    monkeypatch.setattr(Regions, "place", shifted)
    with pytest.raises((AssertionError, LayoutError)):
        test_states_lie_where_vllm_binds_them_without_a_copy("LBHNC", "DS", conv_layout)
