"""vLLM's own cache tensors without an engine, for tests of `describe` and of plans over them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheLayout, MambaSpec
    from vllm.v1.worker.utils import allocate_kv_cache

from stateferry.ids import EngineId, Epoch
from stateferry.layout.spec import CacheLayout, Pieces
from stateferry.vllm.kv_cache import RegionMemory, describe

BF16 = torch.bfloat16
CPU = f"{cpu_attn.__name__}.CPUAttentionBackend"
FLASH = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
AITER = "vllm.v1.attention.backends.rocm_aiter_fa.AiterFlashAttentionBackend"


def choose_conv_layout(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """vLLM's convolution layout: SD or DS. The caller clears vLLM's cache of it in the end."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", name)
    get_conv_state_layout.cache_clear()


def backend_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": module, "__qualname__": name})


def engine_config(
    backends: dict[str, str] | None = None,
    layout: str = "LBHNC",
    total_kv_heads: int = 2,
    dcp: int = 1,
    num_blocks: int = 6,
    **changes: Any,
) -> Any:
    """As much of a VllmConfig as describing reads."""
    hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": "/somewhere"})
    context = {
        layer: SimpleNamespace(get_attn_backend=lambda path=path: backend_class(path))
        for layer, path in (backends or {}).items()
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="/models/tiny",
            revision=None,
            architecture="TinyForCausalLM",
            dtype=BF16,
            hf_config=hf_config,
            hf_text_config=SimpleNamespace(mamba_n_groups=1),
            get_total_num_kv_heads=lambda: total_kv_heads,
            enable_sleep_mode=False,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            mamba_cache_mode="align",
            use_replayssm=False,
            use_kda_recoverssm=False,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        compilation_config=SimpleNamespace(static_forward_context=context),
        speculative_config=None,
    )
    for path, value in changes.items():
        room, _, name = path.partition("__")
        setattr(getattr(config, room), name, value) if name else setattr(config, room, value)
    return config


def allocate(
    config: Any, groups: list[KVCacheGroupSpec], kernel_block_sizes: list[int] | None = None
) -> tuple[KVCacheConfig, dict[str, Any]]:
    cache = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return cache, allocate_kv_cache(cache, torch.device("cpu"), layout, kernel_block_sizes)


def described(
    config: Any,
    groups: list[KVCacheGroupSpec],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    kernel_block_sizes: list[int] | None = None,
) -> tuple[CacheLayout, list[RegionMemory], dict[str, Any]]:
    cache, tensors = allocate(config, groups, kernel_block_sizes)
    layout, memory = describe(
        cache, config, tensors, engine_id=EngineId("e"), epoch=Epoch(1), tp_rank=tp_rank, tp_size=tp_size
    )
    return layout, memory, tensors


def copy(pieces: Pieces, source: list[RegionMemory], target: list[RegionMemory]) -> None:
    for lr, lo, rr, ro, size in zip(
        pieces.local_regions.tolist(),
        pieces.local_offsets.tolist(),
        pieces.remote_regions.tolist(),
        pieces.remote_offsets.tolist(),
        pieces.sizes.tolist(),
        strict=True,
    ):
        target[lr].storage[lo : lo + size] = source[rr].storage[ro : ro + size]


def states_of(tensor: Any, spec: MambaSpec) -> list[Any]:
    """Views as vLLM's layers bind them."""
    layer = SimpleNamespace(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes)
    MambaBase.bind_kv_cache(layer, tensor)
    return list(layer.kv_cache)
