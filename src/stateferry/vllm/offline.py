"""How an engine's KV cache will lie, without the engine: no weights, no cache memory, no second process.

vLLM makes the config, builds the model's layers on torch's `meta` device (shapes without memory), asks each
layer for its spec, groups the specs and views a buffer that does not exist: every step is its own code, in
the order in which its engine core takes them. `describe` then sees what it sees in an engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

from stateferry.errors import ConfigError, LayoutError, StateFerryError
from stateferry.ids import EngineId, Epoch
from stateferry.layout.spec import CacheLayout
from stateferry.vllm.gates import LAYERLESS_DRAFTS, drafts_are_proven
from stateferry.vllm.kv_cache import describe, layer_spec, refuse_unproven
from stateferry.vllm.offline_config import arguments_of_file, kept_environment, make_config, short_reason
from stateferry.vllm.offline_ranks import stand_in_ranks

__all__ = ["OfflineEngine", "arguments_of_file", "lay_out"]

NO_EPOCH = Epoch(1)
"""Epoch of an engine that never ran."""
_PLENTY_BYTES = 1 << 60
"""So that vLLM's check for room never fails: no memory is taken."""


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """An engine that was not started."""

    model: str
    architecture: str
    max_model_len: int
    layouts: tuple[CacheLayout, ...]
    """By tensor-parallel rank."""
    kv_role: str
    """What it is configured to do in a hand-off, as vLLM calls it."""
    shapes: dict[str, tuple[tuple[int, ...], ...]]
    """Layer -> what its tensors hold of one block on one rank, in the layout's order: states as their layer
    sees them, attention as [kernel blocks, heads, tokens, numbers a token]."""


def lay_out(arguments: Sequence[str], tp_size: int | None = None, num_blocks: int = 64) -> OfflineEngine:
    """The layouts that an engine with these arguments of `vllm serve` would have.

    `num_blocks`: how many blocks its cache has; more blocks cost nothing. Takes seconds. Not thread-safe:
    vLLM keeps settings in module variables. Raises ConfigError when vLLM refuses the arguments or model,
    LayoutError when the cache is of a kind that StateFerry does not hand off.
    """
    with kept_environment():
        config = make_config(arguments, tp_size)
        refuse_unproven(config)
        _refuse_drafts(config)
        try:
            cache, tensors = _cache(config, num_blocks)
        except StateFerryError:
            raise
        except Exception as e:  # block sizes, cache layouts and pages that vLLM cannot bring together
            raise ConfigError(f"vLLM would not start like this: {short_reason(e)}") from e
        size = config.parallel_config.tensor_parallel_size
        layouts = tuple(
            describe(
                cache,
                config,
                tensors,
                engine_id=EngineId("offline"),
                epoch=NO_EPOCH,
                tp_rank=rank,
                tp_size=size,
                device=current_platform.device_type,
            )[0]
            for rank in range(size)
        )
    model = config.model_config
    return OfflineEngine(
        model=str(model.model),
        architecture=str(model.architecture),
        max_model_len=int(model.max_model_len),
        layouts=layouts,
        kv_role=str(config.kv_transfer_config.kv_role),
        shapes={name: _shapes(cache, name, tensor) for name, tensor in tensors.items()},
    )


def _shapes(cache: KVCacheConfig, name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    group = next(group for group in cache.kv_cache_groups if name in group.layer_names)
    spec = layer_spec(group, name)
    if isinstance(spec, MambaSpec):
        return tuple(tuple(shape) for shape in spec.shapes)
    return ((tensor.shape[0] // cache.num_blocks, *tensor.shape[1:]),)


def _refuse_drafts(config: VllmConfig) -> None:
    speculative = config.speculative_config
    if speculative is not None and not drafts_are_proven(speculative):
        raise LayoutError(
            f"speculative decoding with {speculative.method!r} adds layers that only a started engine has: "
            "ask one with `stateferry doctor --prefill-url`, or leave --speculative-config out"
        )


def _cache(config: VllmConfig, num_blocks: int) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """The cache config of one worker and what it would register, on the `meta` device."""
    with stand_in_ranks(config.parallel_config), set_current_vllm_config(config):
        _build_layers(config)
        current_platform.update_block_size_for_backend(config)
        register_all_kvcache_specs(config)
        specs = get_kv_cache_spec(config)
        if not specs:
            raise LayoutError(
                f"{config.model_config.architecture} keeps no KV cache: there is nothing to hand off"
            )
        supported = [
            layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))
        ]
        layout = resolve_kv_cache_layout(config, [supported], specs.values())
        cache = _cache_config(config, specs, num_blocks)
        groups = [_attention_groups(config, cache, number) for number in range(len(cache.kv_cache_groups))]
        sizes = prepare_kernel_block_sizes(cache, groups)
        return cache, allocate_kv_cache(cache, torch.device("meta"), layout, sizes)


def _build_layers(config: VllmConfig) -> None:
    """Fill `static_forward_context`, from which vLLM reads specs and backends."""
    speculative = config.speculative_config
    try:
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
            if speculative is not None and speculative.method not in LAYERLESS_DRAFTS:
                initialize_model(config, model_config=speculative.draft_model_config)
    except Exception as e:  # vLLM's layers may do anything when they are built
        raise LayoutError(
            f"vLLM cannot build the layers of {config.model_config.architecture} here: {short_reason(e)}"
        ) from e


def _cache_config(config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    """Grouped as in an engine with plenty of memory, then shrunk as vLLM shrinks a rank with too much."""
    config.cache_config.num_gpu_blocks_override = None
    (plenty,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [_PLENTY_BYTES])
    groups = plenty.kv_cache_groups
    block_bytes = kv_cache_utils._pool_bytes_per_block(config, groups)
    cache = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, num_blocks * block_bytes)
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    return cache


def _attention_groups(config: VllmConfig, cache: KVCacheConfig, number: int) -> list[AttentionGroup]:
    """The group's layers by backend and spec: what vLLM picks the size of kernel blocks by."""
    group = cache.kv_cache_groups[number]
    found: dict[tuple[type, KVCacheSpec], list[str]] = {}
    layers = get_layers_from_vllm_config(config, AttentionLayerBase, group.layer_names)
    for name, layer in layers.items():
        found.setdefault((layer.get_attn_backend(), layer_spec(group, name)), []).append(name)
    return [AttentionGroup(backend, names, spec, number) for (backend, spec), names in found.items()]
