"""Plans over vLLM's own specs, shapes, allocator and views: what arrives is the unsharded model's.

Every rank's cache is filled from one unsharded model, cut as vLLM's weight loaders cut it
(`testing/unsharded.py`; a test below compares that with the loaders themselves). Then the pieces are
copied, and the consumer's whole pool must be what its own share of the model would have made it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import msgspec
import pytest
from kv_caches import (
    BF16,
    CPU,
    choose_conv_layout,
    described,
    engine_config,
    torch,
)
from plan_cases import ATTENTION, FP32, MLA, PAIRS, STATES, apart, packed_sides
from plan_engines import Engines
from vllm._aiter_ops import rocm_aiter_ops
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
    _make_fused_conv1d_weight_loader as kimi_loader,
)
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    _make_fused_conv1d_weight_loader as olmo_loader,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaType
from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import (
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
)

from stateferry.errors import LayoutMismatch
from stateferry.layout import plan as planner
from stateferry.layout import shard
from stateferry.layout.fingerprint import compare
from stateferry.layout.spec import Part, PartRule
from stateferry.testing import unsharded
from stateferry.testing.kimi import KIMI_K3, KIMI_LINEAR, Kimi
from stateferry.testing.packed import Packing
from stateferry.testing.unsharded import Slots
from stateferry.vllm import kv_tables, kv_tensors
from stateferry.vllm.kv_tables import StateShapes

pytestmark = pytest.mark.scheduler


@pytest.fixture(autouse=True)
def conv_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    choose = partial(choose_conv_layout, monkeypatch)
    choose("SD")
    yield choose
    get_conv_state_layout.cache_clear()


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("name", STATES)
def test_states_of_vllm_arrive_as_the_model_has_them(
    name: str, layout: str, conv_layout: Callable[[str], None]
) -> None:
    conv_layout(layout)
    engines = Engines(STATES[name])
    for ours, theirs in PAIRS:
        spec = STATES[name].spec(ours)
        assert spec.shapes == tuple(tensor.shape(0, ours) for tensor in engines.layer.tensors)
        assert engines.wrong(ours, theirs) == []


def runs(name: str, cache_layout: str) -> bool:
    """Whether vLLM does: what is packed head by head has no layout with tokens before heads, and kernel
    blocks need dense pages."""
    case = ATTENTION[name]
    packed = case.backend == CPU or case.sides is not None
    return not (
        (packed and cache_layout == "LBNHC") or (case.kernel_tokens and cache_layout in ("BLHNC", "LHBNC"))
    )


@pytest.mark.parametrize(
    ("name", "cache_layout"),
    [pair for pair in product(ATTENTION, ("LBHNC", "LBNHC", "BLHNC")) if runs(*pair)],
)
def test_attention_of_vllm_arrives_as_the_model_has_it(name: str, cache_layout: str) -> None:
    case = ATTENTION[name]
    engines = Engines(case, cache_layout, alone=True)
    for ours, theirs in PAIRS:
        total = case.total_kv_heads
        if all(total % size == 0 or size % total == 0 for size in (ours, theirs)):
            assert engines.wrong(ours, theirs) == []


@pytest.mark.parametrize("cache_layout", [layout.name for layout in KVCacheLayout])
def test_heads_arrive_in_every_cache_layout_of_vllm(cache_layout: str) -> None:
    assert Engines(ATTENTION["heads split"], cache_layout, alone=True).wrong(2, 4) == []
    assert Engines(ATTENTION["heads split"], cache_layout, alone=True).wrong(4, 2) == []


def test_all_ranks_of_both_engines() -> None:
    for name in ("mamba 2, one group", "gated delta net"):
        for ours, theirs in ((8, 2), (2, 8)):
            assert Engines(STATES[name]).wrong(ours, theirs) == []
    assert Engines(ATTENTION["two heads on more ranks"], alone=True).wrong(8, 4) == []


@pytest.mark.parametrize("name", [n for n in ATTENTION if n.startswith("K and V apart") and runs(n, "LHBNC")])
def test_k_and_v_apart_arrive_where_all_k_lies_before_all_v(name: str) -> None:
    """What ROCm's kernels want: a plane of K over all blocks, then one of V."""
    engines = Engines(ATTENTION[name], "LHBNC", alone=True)
    assert engines.wrong(2, 4) == engines.wrong(4, 2) == engines.wrong(2, 2) == []


def test_heads_of_k_and_v_apart_cut_as_if_packed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tables, "SIDE_PACKED", kv_tables.SIDE_PACKED | kv_tables.SIDE_ROWS)
    monkeypatch.setattr(kv_tables, "SIDE_ROWS", frozenset())
    assert Engines(ATTENTION["K and V apart, token by token"], alone=True).wrong(2, 1)


def test_shuffled_slots_of_aiter_go_whole_between_equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where heads lie inside them depends on the kernel: nothing here can prove it, so none is cut."""
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
    shuffled = apart(AiterFlashAttentionBackend, Slots.SIDES_PACKED, packed_sides, heads=4, tokens=16)
    assert shuffled.spec(1).num_head_slots == 2
    engines = Engines(shuffled, alone=True)
    assert engines.wrong(2, 2) == []
    with pytest.raises(LayoutMismatch, match=r"page\.tp_size.*attention backend"):
        engines.wrong(2, 1)


@pytest.mark.parametrize("name", ["heads split", "latents"])
def test_context_parallel_ranks_hold_other_tokens_of_a_block(name: str) -> None:
    engines = Engines(ATTENTION[name], alone=True, dcp=2)
    assert engines.wrong(4, 4) == []
    with pytest.raises(LayoutMismatch, match=r"page\.tp_size"):
        engines.wrong(2, 4)


@pytest.mark.parametrize(
    ("dcp", "change"),
    [(1, {}), (2, {"parallel_config__cp_kv_cache_interleave_size": 8})],
    ids=["another number of ranks", "another interleave"],
)
def test_context_parallel_settings_are_compared(dcp: int, change: dict[str, Any]) -> None:
    ours = Engines(ATTENTION["latents"], alone=True, dcp=2).rank(0, 2)
    theirs = Engines(ATTENTION["latents"], alone=True, dcp=dcp).rank(0, 2, **change)
    with pytest.raises(LayoutMismatch, match=r"facts\.dcp.*--dcp-kv-cache-interleave-size"):
        compare(ours.layout, theirs.layout)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("n_groups", [1, 8])
def test_the_unsharded_model_is_cut_as_the_loader_of_mamba2_cuts_it(n_groups: int, size: int) -> None:
    """Its convolution's weights have the channels of its state, in the same order."""
    heads, head_dim, state_size = 8, 3, 5
    inner, groups = heads * head_dim, n_groups * state_size
    layer = unsharded.mamba2(heads, head_dim, n_groups, state_size, 1, True, (1, 1))
    extra = Shapes.extra_groups_for_head_shards(n_groups, size) * state_size
    group_settings = (groups + extra, extra, n_groups == 1)
    channels = torch.arange(1, inner + 2 * groups + 1)[:, None]
    for rank in range(size):
        mine = torch.zeros(((inner + 2 * (groups + extra)) // size, 1), dtype=channels.dtype)
        load = mamba_v2_sharded_weight_loader([(inner, 0, False), group_settings, group_settings], size, rank)
        load(mine, channels)
        assert mine[:, 0].tolist() == layer.tensors[0].held(rank, size, 1).ravel().tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_unsharded_model_is_cut_as_the_loader_of_gated_delta_net_cuts_it(size: int) -> None:
    key, value = 8 * 2, 16 * 3
    layer = unsharded.gated_delta(8, 16, 2, 3, 1, True, (1, 1))
    channels = torch.arange(1, 2 * key + value + 1)[:, None]
    for rank in range(size):
        mine = torch.zeros(((2 * key + value) // size, 1), dtype=channels.dtype)
        settings = [(key, 0, False), (key, 0, False), (value, 0, False)]
        mamba_v2_sharded_weight_loader(settings, size, rank)(mine, channels)
        assert mine[:, 0].tolist() == layer.tensors[0].held(rank, size, 1).ravel().tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("loader", [kimi_loader, olmo_loader], ids=["Kimi", "Olmo"])
def test_the_unsharded_model_is_cut_as_the_loaders_of_separate_convolutions_cut_it(
    loader: Callable[..., Any], size: int
) -> None:
    """Q, K and V come apart in the checkpoint and lie in one weight, and one state, on each rank."""
    dims = [8, 8, 24]
    layer = unsharded.gated_delta(4, 8, 2, 3, 1, True, (1, 1))
    whole = torch.arange(1, sum(dims) + 1).split(dims)
    for rank in range(size):
        mine = torch.zeros((sum(dims) // size, 1, 1), dtype=torch.int64)
        load = loader(dims, size, rank)
        for number, part in enumerate(whole):
            load(mine, part[:, None, None], number)
        assert mine.ravel().tolist() == layer.tensors[0].held(rank, size, 1).ravel().tolist()


def _blind(parts: tuple[Part, ...], *ranks: Any) -> Any:
    """Several parts as one: what cuts a Q|K|V page into equal stretches does."""
    whole = (Part(name="all", size=sum(part.size for part in parts), rule=PartRule.SPLIT),)
    return shard.overlaps(whole if len(parts) > 1 else parts, *ranks)


def test_a_planner_that_cuts_blindly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "overlaps", _blind)
    for name in ("gated delta net", "kda", "mamba 2, groups split"):
        assert Engines(STATES[name]).wrong(2, 1)


def test_states_that_are_dropped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = planner.tensor_strips
    beyond = ("record", "ring", "conv_v")
    monkeypatch.setattr(
        planner, "tensor_strips", lambda a, b, o: right(a, b, () if a.name.startswith(beyond) else o)
    )
    for name in ("kda in four tensors", "kda with records", "mamba 2 with a replay ring"):
        assert Engines(STATES[name]).wrong(2, 1)


def test_a_description_of_the_other_convolution_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot pass unseen: the channels of the whole model come out different at another size.

    F3.13: the convolution layout may be either, on both engines the same.
    """
    monkeypatch.setattr(kv_tensors, "is_conv_state_dim_first", lambda: True)
    with pytest.raises(LayoutMismatch, match=r"conv\.parts"):
        Engines(STATES["short convolution"]).wrong(2, 1)


def test_parts_described_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StateShapes.conv
    monkeypatch.setattr(StateShapes, "conv", lambda self, name, *parts: right(self, name, *parts[::-1]))
    for name in ("gated delta net", "mamba 2, groups split"):
        assert Engines(STATES[name]).wrong(2, 1)


@pytest.mark.parametrize("model", [KIMI_LINEAR, KIMI_K3], ids=lambda model: model.name)
def test_the_made_up_kimi_is_what_vllm_makes_of_its_specs(model: Kimi) -> None:
    """Groups, pages and places of the synthetic layouts that other tests and the bench use."""
    size, rank, dcp = 8, 3, 8
    state = MambaSpec(
        block_size=model.page_tokens([size]),
        shapes=Shapes.kda_state_shape(size, model.heads, 128, conv_kernel_size=4),
        dtypes=(BF16, FP32),
        page_size_padded=model.page_tokens([size]) * 576 * 2,
        mamba_type=MambaType.GDN_ATTN,
        mamba_cache_mode="align",
    )
    latent = MLAAttentionSpec(
        block_size=model.page_tokens([size]), num_kv_heads=1, head_size=576, dtype=BF16, max_tp_shards=1
    )
    specs = {f"kda{i}": state for i in range(model.recurrent_layers)}
    specs |= {f"mla{i}": latent for i in range(model.latent_layers)}
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    made = model.packed([size], dcp).layout(rank, size, Packing(blocks=2))
    real, _, _ = described(
        engine_config({name: MLA for name in specs if "mla" in name}, dcp=dcp, num_blocks=2),
        groups,
        tp_rank=rank,
        tp_size=size,
    )
    assert [len(group.layers) for group in made.groups] == [len(group.layers) for group in real.groups]
    assert made.region_sizes_bytes == real.region_sizes_bytes
    for ours, theirs in zip(made.groups, real.groups, strict=True):
        assert (ours.kind, ours.block_tokens) == (theirs.kind, theirs.block_tokens)
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            dtypes = [tensor.dtype for tensor in other.tensors]
            renamed = zip(layer.tensors, dtypes, strict=True)
            assert tuple(msgspec.structs.replace(t, dtype=d) for t, d in renamed) == other.tensors
