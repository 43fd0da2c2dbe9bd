"""Describe one worker's KV cache: vLLM's cache config and tensors -> CacheLayout and its memory."""

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from stateferry.errors import LayoutError
from stateferry.ids import EngineId, Epoch
from stateferry.layout.shard import check_layout
from stateferry.layout.spec import CacheLayout, Group, GroupKind
from stateferry.vllm.gates import refuse_together
from stateferry.vllm.kv_facts import collect_facts
from stateferry.vllm.kv_tensors import Engine, RegionMemory, Regions, describe_layer

__all__ = ["RegionMemory", "describe", "layer_spec", "outline", "refuse_unproven"]


_KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: GroupKind.ATTENTION,
    MLAAttentionSpec: GroupKind.ATTENTION,
    SlidingWindowSpec: GroupKind.WINDOW,
    SlidingWindowMLASpec: GroupKind.WINDOW,
    MambaSpec: GroupKind.STATE,
}
"""By exact class: a subclass means something more than its base does, and is refused."""


def describe(
    kv_cache_config: KVCacheConfig,
    vllm_config: VllmConfig,
    kv_caches: dict[str, torch.Tensor],
    *,
    engine_id: EngineId,
    epoch: Epoch,
    tp_rank: int,
    tp_size: int,
    device: str = "",
) -> tuple[CacheLayout, list[RegionMemory]]:
    """Describe the cache that vLLM allocated for this rank.

    `kv_caches` is what `register_kv_caches` hands over: one `[blocks, heads, states, content]` tensor a
    layer. `device`: where they would be, when they are only stand-ins on torch's `meta` device. Region i of
    the layout is entry i of the memory. Raises LayoutError for anything whose hand-off is not known to be
    right, naming it.
    """
    refuse_unproven(vllm_config)
    engine = Engine(vllm_config, kv_cache_config.num_blocks, tp_size, Regions())
    own_storage = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    groups = tuple(
        _group(f"group {index}", group, kv_caches, own_storage, engine)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    refuse_together(groups, vllm_config)
    layout = CacheLayout(
        engine_id=engine_id,
        epoch=epoch,
        tp_rank=tp_rank,
        tp_size=tp_size,
        groups=groups,
        region_sizes_bytes=tuple(memory.size_bytes for memory in engine.regions.memory),
        facts=collect_facts(vllm_config, kv_cache_config, device or _devices(engine.regions.memory)),
    )
    check_layout(layout)
    return layout, engine.regions.memory


def _devices(memory: list[RegionMemory]) -> str:
    return ", ".join(sorted({region.device for region in memory}))


def outline(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[Group, ...]:
    """All groups in vLLM's order without their layers: what can be told without tensors.

    Raises LayoutError as `describe` does for kinds of cache that are not known.
    """
    refuse_unproven(vllm_config)
    own_storage = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    groups = tuple(
        _group_table(f"group {index}", group, own_storage, vllm_config)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    refuse_together(groups, vllm_config)
    return groups


def refuse_unproven(config: VllmConfig) -> None:
    """Raise LayoutError for settings under which no hand-off has been shown to be right."""
    parallel, cache = config.parallel_config, config.cache_config
    for flag, value, allowed in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size, 1),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1),
        ("--use-replayssm", cache.use_replayssm or cache.use_kda_recoverssm, False),
        # Sleeping frees the cache, whose memory is registered once, for an engine's whole life.
        ("--enable-sleep-mode", config.model_config.enable_sleep_mode, False),
    ):
        if value != allowed:
            raise LayoutError(f"{flag} is {value}: StateFerry only hands off with {allowed} so far")


def _owners(group: KVCacheGroupSpec, own_storage: set[str]) -> list[str]:
    """The group's layers that have a place of their own; others share one of theirs."""
    return [name for name in group.layer_names if name in own_storage]


def _group_table(where: str, group: KVCacheGroupSpec, own_storage: set[str], config: VllmConfig) -> Group:
    """The group without its layers."""
    spec = group.kv_cache_spec
    if not group.enable_kv_transfer:
        tokens = max(1, spec.block_size)
        return Group(kind=GroupKind.ATTENTION, block_tokens=tokens, layers=(), transfers=False)
    if group.host_resident or group.role is not KVCacheGroupRole.DEFAULT:
        raise LayoutError(f"{where}: host-resident and HiSparse groups ({group.role}) are not supported")
    owners = _owners(group, own_storage)
    if not owners:
        raise LayoutError(f"{where}: none of its layers {group.layer_names} has a cache tensor")
    tables = {name: _table(f"{where}, layer {name!r}", layer_spec(group, name), config) for name in owners}
    if len(set(tables.values())) > 1:
        raise LayoutError(f"{where}: its layers need different block tables: {tables}")
    kind, block_tokens, window_tokens, scratch_slots = tables[owners[0]]
    return Group(
        kind=kind,
        block_tokens=block_tokens,
        layers=(),
        window_tokens=window_tokens,
        scratch_slots=scratch_slots,
    )


def _group(
    where: str,
    group: KVCacheGroupSpec,
    kv_caches: dict[str, torch.Tensor],
    own_storage: set[str],
    engine: Engine,
) -> Group:
    table = _group_table(where, group, own_storage, engine.config)
    if not table.transfers:
        return table
    owners = _owners(group, own_storage)
    _refuse_strangers(where, group, owners, kv_caches)
    layers = [describe_layer(name, layer_spec(group, name), kv_caches[name], engine) for name in owners]
    return msgspec.structs.replace(table, layers=tuple(layers))


def layer_spec(group: KVCacheGroupSpec, layer: str) -> KVCacheSpec:
    """The layer's own spec, where a group's layers have different ones."""
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _refuse_strangers(
    where: str, group: KVCacheGroupSpec, owners: list[str], kv_caches: dict[str, torch.Tensor]
) -> None:
    """Every layer must be registered, and one without a place of its own must share an owner's."""
    for name in group.layer_names:
        if name not in kv_caches:
            raise LayoutError(f"{where}: vLLM registered no cache tensor for layer {name!r}")
    places = {(kv_caches[name].data_ptr(), tuple(kv_caches[name].shape)) for name in owners}
    for name in set(group.layer_names).difference(owners):
        if (kv_caches[name].data_ptr(), tuple(kv_caches[name].shape)) not in places:
            raise LayoutError(f"{where}: layer {name!r} has no cache of its own and shares none in its group")


def _table(where: str, spec: KVCacheSpec, config: VllmConfig) -> tuple[GroupKind, int, int, int]:
    """What a layer asks of its group's block table: kind, tokens per block, window, scratch slots."""
    _refuse_spec(where, spec)
    kind = _KINDS[type(spec)]
    ranks = config.parallel_config.decode_context_parallel_size
    block_tokens = spec.block_size * (ranks if spec.dcp_sharded else 1)
    window = spec.sliding_window + spec.extra_retained_tokens if kind is GroupKind.WINDOW else 0
    scratch = spec.num_speculative_blocks if kind is GroupKind.STATE else 0
    return kind, block_tokens, window, scratch


def _refuse_spec(where: str, spec: KVCacheSpec) -> None:
    if type(spec) not in _KINDS:
        raise LayoutError(
            f"{where}: caches of type {type(spec).__name__} are not supported; known: "
            f"{', '.join(known.__name__ for known in _KINDS)}"
        )
    if isinstance(spec, AttentionSpec) and spec.tokens_per_state != 1:
        raise LayoutError(
            f"{where}: {spec.tokens_per_state} tokens per cached state are not supported, only 1"
        )
    if spec.prefix_replay_tokens:
        raise LayoutError(f"{where}: caches that replay {spec.prefix_replay_tokens} tokens are not supported")
