"""`describe` on tensors that vLLM's own allocator made, without an engine."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kv_caches import (
    AITER,
    BF16,
    CPU,
    FLASH,
    allocate,
    choose_conv_layout,
    copy,
    described,
    engine_config,
    states_of,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaType
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVCacheLayout,
        MambaSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

from stateferry.errors import LayoutError
from stateferry.layout.blocks import merge
from stateferry.layout.fingerprint import compare
from stateferry.layout.plan import make_plan
from stateferry.layout.spec import CacheLayout, CacheTensor, GroupKind, PartRule
from stateferry.vllm.kv_cache import describe, outline
from stateferry.vllm.kv_facts import _config_facts

pytestmark = pytest.mark.scheduler


@pytest.fixture(autouse=True)
def conv_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Choose vLLM's convolution layout; SD unless a test says otherwise."""
    choose = partial(choose_conv_layout, monkeypatch)
    choose("SD")
    yield choose
    get_conv_state_layout.cache_clear()


def attention_spec(heads: int = 2, tokens: int = 32, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=32, dtype=BF16, **more)


def gdn_spec(tp_size: int = 1, tokens: int = 32, **more: Any) -> MambaSpec:
    shapes = Shapes.gated_delta_net_state_shape(tp_size, 2, 4, 16, 8, 4)
    return MambaSpec(
        block_size=tokens,
        shapes=shapes,
        dtypes=(BF16, torch.float32),
        mamba_type=MambaType.GDN_ATTN,
        mamba_cache_mode="align",
        **more,
    )


def hybrid_groups(tp_size: int = 1, scratch: int = 0) -> list[KVCacheGroupSpec]:
    """Three recurrent layers for one attention layer, pages padded to the same size as vLLM does."""
    attention = attention_spec(heads=2 // tp_size)
    state = gdn_spec(tp_size, page_size_padded=attention.page_size_bytes, num_speculative_blocks=scratch)
    groups = [KVCacheGroupSpec([f"layers.{i}.gdn"], state) for i in range(3)]
    return [*groups, KVCacheGroupSpec(["layers.3.attn"], attention)]


def test_hybrid_model_is_one_region_with_a_group_per_table() -> None:
    """F2.4, F2.9: one region a storage; every layer has a geometry of its own."""
    config = engine_config({"layers.3.attn": CPU})
    layout, memory, tensors = described(config, hybrid_groups(scratch=2))
    assert [g.kind for g in layout.groups] == [GroupKind.STATE] * 3 + [GroupKind.ATTENTION]
    assert [g.scratch_slots for g in layout.groups] == [2, 2, 2, 0]
    assert len(memory) == 1
    assert memory[0].address == tensors["layers.0.gdn"].untyped_storage().data_ptr()
    assert memory[0].size_bytes == memory[0].storage.nbytes == layout.region_sizes_bytes[0]
    plan = make_plan(layout, layout)
    state = gdn_spec()
    content = sum(s.numel() // 6 * s.element_size() for s in states_of(tensors["layers.0.gdn"], state))
    assert plan.group_bytes(0) == content < state.page_size_bytes + 10_000
    assert len(plan.layer_of(0)) == len(plan.layer_of(3)) == 1
    assert plan.group_bytes(3) == attention_spec().page_size_bytes


def test_layer_views_receive_exactly_the_producers_values() -> None:
    """F2.2: what vLLM's own views read is what was sent, without a copy on the way."""
    config = engine_config({"layers.3.attn": CPU})
    ours, our_memory, our_tensors = described(config, hybrid_groups())
    theirs, their_memory, their_tensors = described(config, hybrid_groups())
    their_memory[0].storage.random_(1, 256)
    plan = make_plan(ours, theirs)
    for group in range(4):
        copy(merge(plan.pieces(group, [group + 1], [5 - group])), their_memory, our_memory)
    for group, name in enumerate(our_tensors):
        if "attn" in name:
            assert torch.equal(our_tensors[name][4].view(torch.int8), their_tensors[name][2].view(torch.int8))
        else:
            for mine, its in zip(
                states_of(our_tensors[name], gdn_spec()),
                states_of(their_tensors[name], gdn_spec()),
                strict=True,
            ):
                assert torch.equal(
                    mine[group + 1].contiguous().view(torch.int8),
                    its[5 - group].contiguous().view(torch.int8),
                )
    assert not our_memory[0].storage[: ours.groups[0].layers[0].tensors[0].block_stride_bytes].any()


@pytest.mark.parametrize("name", [layout.name for layout in KVCacheLayout])
def test_every_cache_layout_gives_each_layer_its_own_bytes(name: str) -> None:
    """F2.3."""
    spec = attention_spec(heads=2, tokens=4)
    groups = [KVCacheGroupSpec(["a", "b"], spec)]
    config = engine_config({"a": FLASH, "b": FLASH}, layout=name)
    ours, our_memory, our_tensors = described(config, groups)
    theirs, their_memory, their_tensors = described(config, groups)
    their_memory[0].storage.random_(1, 256)
    pieces = merge(make_plan(ours, theirs).pieces(0, [2, 5], [1, 3]))
    copy(pieces, their_memory, our_memory)
    for layer in "ab":
        for mine, its in ((2, 1), (5, 3)):
            assert torch.equal(
                our_tensors[layer][mine].contiguous().view(torch.int8),
                their_tensors[layer][its].contiguous().view(torch.int8),
            )
    written = int((our_memory[0].storage != 0).sum())
    assert written == pieces.total_bytes == 2 * 2 * spec.page_size_bytes


@pytest.mark.parametrize("name", [layout.name for layout in KVCacheLayout])
def test_heads_of_a_known_backend_can_be_cut_in_every_layout(name: str) -> None:
    """One producer rank with both heads, two consumer ranks with one head each."""
    config = engine_config({"a": FLASH}, layout=name)
    whole, whole_memory, whole_tensors = described(config, [KVCacheGroupSpec(["a"], attention_spec(2, 4))])
    whole_memory[0].storage.random_(1, 256)
    for rank in range(2):
        groups = [KVCacheGroupSpec(["a"], attention_spec(1, 4))]
        half, memory, tensors = described(config, groups, tp_rank=rank, tp_size=2)
        copy(make_plan(half, whole).pieces(0, [2], [3]), whole_memory, memory)
        assert torch.equal(
            tensors["a"][2, 0].contiguous().view(torch.int8),
            whole_tensors["a"][3, rank].contiguous().view(torch.int8),
        )


def only_tensor(layout: CacheLayout, group: int = 0) -> CacheTensor:
    (layer,) = layout.groups[group].layers
    (tensor,) = layer.tensors
    return tensor


def test_cpu_page_is_cut_by_whole_heads_only() -> None:
    layout, _, _ = described(
        engine_config({"a": CPU}), [KVCacheGroupSpec(["a"], attention_spec(heads=2, tokens=32))]
    )
    tensor = only_tensor(layout)
    assert tensor.unit_bytes == 32 * 64 * 2
    assert tensor.axis is not None
    assert tensor.loops[tensor.axis].count == 2


def test_kernel_blocks_stay_inside_their_manager_block() -> None:
    groups = [KVCacheGroupSpec(["a"], attention_spec(heads=2, tokens=64))]
    config = engine_config({"a": CPU})
    split, _, tensors = described(config, groups, kernel_block_sizes=[32])
    assert tensors["a"].shape[0] == 2 * 6
    tensor = only_tensor(split)
    assert tensor.block_count == 6
    assert tensor.block_bytes == tensor.block_stride_bytes == attention_spec(2, 64).page_size_bytes
    assert [loop.count for loop in tensor.loops] == [2, 2]
    assert tensor.axis == 1
    plan = make_plan(split, split)
    assert plan.pieces(0, [5], [5]).local_offsets.tolist() == [5 * tensor.block_bytes]


@pytest.mark.parametrize("backend", [AITER, "unheard.of.Backend", None])
def test_unknown_page_goes_whole_and_between_equal_ranks_only(backend: str | None) -> None:
    groups = [KVCacheGroupSpec(["a"], attention_spec(heads=1))]
    config = engine_config({"a": backend} if backend else {})
    if backend == AITER:
        spec = dataclasses.replace(attention_spec(heads=1), num_head_slots=2, state_content_bytes=64)
        groups = [KVCacheGroupSpec(["a"], spec)]
    layout, _, _ = described(config, groups, tp_rank=0, tp_size=2)
    assert only_tensor(layout).opaque
    assert make_plan(layout, layout).group_bytes(0) == groups[0].kv_cache_spec.page_size_bytes
    other, _, _ = described(config, groups, tp_rank=0, tp_size=1)
    with pytest.raises(LayoutError, match=r"a\.page.*tensor-parallel-size"):
        make_plan(layout, with_groups_of(other, like=layout))


def with_groups_of(layout: CacheLayout, like: CacheLayout) -> CacheLayout:
    """`layout`'s sizes with the groups of `like`, so that nothing but the sizes differs."""
    return msgspec.structs.replace(layout, groups=like.groups)


def test_latent_attention_is_replicated_over_ranks() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=BF16, max_tp_shards=1)
    config = engine_config({"a": "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"})
    groups = [KVCacheGroupSpec(["a"], spec)]
    ours, _, _ = described(config, groups, tp_rank=1, tp_size=2)
    theirs, _, _ = described(config, groups)
    tensor = only_tensor(ours)
    assert (tensor.axis, tensor.opaque, tensor.unit_bytes) == (None, False, 16 * 576 * 2)
    assert make_plan(ours, theirs).group_bytes(0) == spec.page_size_bytes


def test_sliding_window_keeps_what_vllm_keeps() -> None:
    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=BF16, sliding_window=50, extra_retained_tokens=3
    )
    layout, _, _ = described(engine_config({"a": FLASH}), [KVCacheGroupSpec(["a"], spec)])
    assert layout.groups[0].kind is GroupKind.WINDOW
    assert layout.groups[0].window_tokens == 53


def test_layers_of_different_page_sizes_in_one_group() -> None:
    specs = {"a": attention_spec(heads=1, tokens=16), "b": attention_spec(heads=4, tokens=16)}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    config = engine_config({"a": FLASH, "b": FLASH})
    layout, memory, _ = described(config, [KVCacheGroupSpec(["a", "b"], uniform)])
    sizes = [layer.tensors[0].block_bytes for layer in layout.groups[0].layers]
    assert sizes == [specs["a"].page_size_bytes, specs["b"].page_size_bytes]
    assert len(memory) == 1


def test_shared_cache_is_moved_once() -> None:
    config = engine_config({"a": FLASH, "b": FLASH})
    cache, tensors = allocate(config, [KVCacheGroupSpec(["a"], attention_spec())])
    cache.kv_cache_groups[0].layer_names.append("b")
    tensors["b"] = tensors["a"]
    arguments: dict[str, Any] = {"engine_id": "e", "epoch": 1, "tp_rank": 0, "tp_size": 1}
    layout, _ = describe(cache, config, tensors, **arguments)
    assert [layer.name for layer in layout.groups[0].layers] == ["a"]
    tensors["b"] = torch.zeros_like(tensors["a"])
    with pytest.raises(LayoutError, match=r"'b' has no cache of its own"):
        describe(cache, config, tensors, **arguments)
    del tensors["b"]
    with pytest.raises(LayoutError, match=r"no cache tensor for layer 'b'"):
        describe(cache, config, tensors, **arguments)


def test_group_kept_out_of_transfer_keeps_its_place() -> None:
    """F3.1."""
    groups = hybrid_groups()
    groups[1].enable_kv_transfer = False
    config = engine_config({"layers.3.attn": CPU})
    layout, _, _ = described(config, groups)
    bare = tuple(msgspec.structs.replace(group, layers=()) for group in layout.groups)
    assert outline(allocate(config, groups)[0], config) == bare
    assert [g.transfers for g in layout.groups] == [True, False, True, True]
    assert layout.groups[1].layers == ()
    assert make_plan(layout, layout).group_bytes(1) == 0


def mamba2_spec(tp_size: int, n_groups: int) -> MambaSpec:
    extended = n_groups + Shapes.extra_groups_for_head_shards(n_groups, tp_size)
    shapes = Shapes.mamba2_state_shape(tp_size, 64, extended, 8, 8, 16, 4)
    return MambaSpec(block_size=16, shapes=shapes, dtypes=(BF16, torch.float32), mamba_type=MambaType.MAMBA2)


@pytest.mark.parametrize("layout_name", ["SD", "DS"])
@pytest.mark.parametrize("n_groups", [1, 4])
def test_mamba2_parts_are_the_same_on_every_rank_count(
    n_groups: int, layout_name: str, conv_layout: Callable[[str], None]
) -> None:
    conv_layout(layout_name)
    config = engine_config(model_config__hf_text_config=SimpleNamespace(n_groups=n_groups))
    found = []
    for tp_size in (1, 2, 4):
        groups = [KVCacheGroupSpec(["m"], mamba2_spec(tp_size, n_groups))]
        layout, _, _ = described(config, groups, tp_rank=tp_size - 1, tp_size=tp_size)
        found.append(layout)
        compare(layout, found[0])
    conv, ssm = found[0].groups[0].layers[0].tensors
    assert [(p.name, p.size, p.rule, p.granules) for p in conv.parts] == [
        ("x", 64, PartRule.SPLIT, 1),
        ("B", 16 * n_groups, PartRule.GROUPED, n_groups),
        ("C", 16 * n_groups, PartRule.GROUPED, n_groups),
    ]
    assert conv.axis == (0 if layout_name == "DS" else 1)
    assert ssm.parts[0].size == 8


def test_one_group_of_unknown_kind_is_not_cut() -> None:
    config = engine_config(model_config__hf_text_config=SimpleNamespace())
    layout, _, _ = described(config, [KVCacheGroupSpec(["m"], mamba2_spec(2, 1))], tp_rank=0, tp_size=2)
    conv, ssm = layout.groups[0].layers[0].tensors
    assert conv.opaque
    assert not ssm.opaque


def test_replicated_state_has_no_axis() -> None:
    spec = MambaSpec(
        block_size=16,
        shapes=Shapes.short_conv_state_shape(1, 24, 4),
        dtypes=(BF16,),
        mamba_type=MambaType.SHORT_CONV,
        tp_replicated=True,
    )
    layout, _, _ = described(engine_config(), [KVCacheGroupSpec(["m"], spec)], tp_rank=1, tp_size=2)
    assert only_tensor(layout).axis is None
    assert only_tensor(layout).unit_bytes == 24 * 3 * 2


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (
            ChunkedLocalAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=32, dtype=BF16, attention_chunk_size=64
            ),
            "ChunkedLocalAttentionSpec",
        ),
        (SinkFullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=BF16, sink_len=4), "Sink"),
        (CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=BF16), "CircularBufferSpec"),
        (
            MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=BF16, tokens_per_state=4),
            "4 tokens per cached state",
        ),
        (
            MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(BF16,), mamba_type=MambaType.CUSTOM),
            "'CUSTOM'",
        ),
        (
            MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(BF16,), mamba_type=MambaType.MAMBA2),
            "not a known set of states",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(spec: Any, word: str) -> None:
    """F3.13: a spec other than full attention, sliding window and the known recurrent ones."""
    with pytest.raises(LayoutError, match=rf"layer 'a'.*{word}|{word}"):
        described(engine_config({"a": CPU}), [KVCacheGroupSpec(["a"], spec)])


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size is 2"),
        ({"cache_config__use_replayssm": True}, "--use-replayssm"),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode"),
    ],
)
def test_what_is_not_built_is_refused_by_its_flag(change: dict[str, Any], flag: str) -> None:
    """F3.13."""
    with pytest.raises(LayoutError, match=flag):
        described(engine_config({"a": CPU}, **change), [KVCacheGroupSpec(["a"], attention_spec())])


def test_context_parallel_ranks_share_a_block_and_are_not_cut() -> None:
    layout, _, _ = described(
        engine_config({"a": FLASH}, dcp=2),
        [KVCacheGroupSpec(["a"], attention_spec(heads=1, tokens=16))],
        tp_rank=1,
        tp_size=2,
    )
    assert layout.groups[0].block_tokens == 32
    assert only_tensor(layout).opaque
    assert layout.facts["dcp"].startswith("2 ranks")


def test_tensor_of_another_shape_is_refused() -> None:
    config = engine_config({"a": CPU})
    cache, tensors = allocate(config, [KVCacheGroupSpec(["a"], attention_spec())])
    arguments: dict[str, Any] = {"engine_id": "e", "epoch": 1, "tp_rank": 0, "tp_size": 1}
    for wrong in (tensors["a"][:, :1], tensors["a"].flatten(1), tensors["a"].transpose(2, 3)):
        with pytest.raises(LayoutError, match="layer 'a': expected"):
            describe(cache, config, {"a": wrong}, **arguments)


def test_a_models_configuration_is_told_key_by_key_and_long_values_by_their_hash() -> None:
    """Symptom: two hashes differed, and nobody said that it was max_position_embeddings."""
    layers = ["linear_attention", "full_attention"] * 20
    config = {"a": 1, "rope": {"theta": 0.5, "kind": None, "none": {}}, "layers": layers, "_commit_hash": "x"}
    facts = dict(_config_facts(config))
    assert facts.pop("layers").startswith(f"{len(json.dumps(layers))} characters, hash ")
    assert facts == {"a": "1", "rope.theta": "0.5", "rope.kind": "null", "rope.none": "{}"}
    other = dict(_config_facts({"layers": [*layers[:-1], "linear_attention"]}))
    assert other["layers"] != dict(_config_facts(config))["layers"]


def test_facts_name_what_must_be_equal() -> None:
    layout, _, _ = described(engine_config({"layers.3.attn": CPU}), hybrid_groups())
    assert layout.facts["model"] == "tiny"
    assert layout.facts["conv_layout"] == "SD"
    assert layout.facts["mamba_cache_mode"] == "align"
    assert "CPUAttentionBackend" in layout.facts["attention_backends"]
    assert "attention" in layout.facts["cpu_packing"]
    assert all(isinstance(value, str) and value for value in layout.facts.values())
    assert layout.facts["hf_config.hidden_size"] == "8"
    assert not [name for name in layout.facts if "_name_or_path" in name], "where it lies is not what it is"
    other = engine_config({"layers.3.attn": CPU}, model_config__architecture="Other")
    with pytest.raises(LayoutError, match=r"facts\.architecture.*'TinyForCausalLM'"):
        compare(layout, described(other, hybrid_groups())[0])
