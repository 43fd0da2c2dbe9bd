"""What a simulated engine is made of: vLLM's configs, its cache config and tensors, the worker half."""

import functools
import warnings
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaType
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_config_from_groups,
        resolve_cache_hit_alignment_tokens,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.worker.utils import allocate_kv_cache

from steered_transport import SteeredTransport, Tap

from stateferry.vllm import plugin, worker

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class CacheModel:
    """Which KV-cache groups a model has. Each has two layers."""

    states: int
    """Groups of recurrent layers; they come first, as vLLM sorts them."""
    block: int = 4
    mode: str = "align"
    """vLLM's mamba cache mode: a state for each block, or (`none`) one for each request."""
    scratch: int = 0
    """Slots for speculated states behind the one that counts."""
    drafting: str = ""
    """How as many tokens are drafted each step: `ngram`, or `mtp`, whose layers vLLM has regard for."""
    window: int = 0
    """Tokens of one more group with a sliding window."""
    hash_block: int | None = None
    """Tokens of a block hash, where smaller than a block."""
    layout: str = "LBHNC"

    @property
    def caching(self) -> bool:
        """vLLM has no prefix cache without aligned states."""
        return not self.states or self.mode == "align"


@functools.cache
def _base_config() -> VllmConfig:
    """Made once: it takes most of a second."""
    return VllmConfig(
        cache_config=CacheConfig(block_size=16),
        scheduler_config=SchedulerConfig.default_factory(
            max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        ),
        device_config=DeviceConfig(device="cpu"),
    )


def make_config(
    role: str,
    model: CacheModel,
    *,
    blocks: int = 96,
    max_batched_tokens: int = 256,
    max_seqs: int = 64,
    policy: str = "recompute",
    caching: bool = True,
    async_scheduling: bool = False,
    model_name: str = "simulated",
    ranks: int = 1,
    **connector_settings: Any,
) -> VllmConfig:
    """A VllmConfig for one engine; only the model is a stand-in."""
    plugin.register()
    config = copy(_base_config())
    config.model_config = _model_config(model_name, ranks)
    config.cache_config = CacheConfig(
        block_size=model.block,
        enable_prefix_caching=caching and model.caching,
        num_gpu_blocks_override=blocks,
        mamba_cache_mode=model.mode,
        prefix_match_unit=model.hash_block,
    )
    config.cache_config.kv_cache_layout = model.layout
    config.scheduler_config = SchedulerConfig.default_factory(
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        max_num_batched_tokens=max_batched_tokens,
        max_num_seqs=max_seqs,
    )
    config.scheduler_config.async_scheduling = async_scheduling
    config.parallel_config = copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = ranks
    if model.drafting:
        config.speculative_config = _speculation(model.drafting, model.scratch)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="StateFerryConnector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"host": "127.0.0.1", **connector_settings},
    )
    return config


def _speculation(method: str, tokens: int) -> Any:
    """As much of a SpeculativeConfig as the scheduler and the connector ask for."""
    layers = method == "mtp"
    return SimpleNamespace(
        method=method,
        model=None,
        draft_model_config=SimpleNamespace(architecture="Qwen3NextMTP") if layers else None,
        use_eagle=lambda: layers,
        use_eagle_block_drop=lambda: layers,
        num_speculative_tokens=tokens,
        num_speculative_tokens_per_batch_size=None,
        **dict.fromkeys(("use_dspark", "use_dflash"), lambda: False),
        uses_draft_model=lambda: False,
        uses_dynamic_speculative_decoding=lambda: False,
        use_multi_module_mtp=lambda: False,
        enable_adaptive_verification=False,
        max_num_new_slots_for_drafting=0,
    )


def make_cache(config: VllmConfig, model: CacheModel) -> tuple[KVCacheConfig, int, int]:
    """Cache config and the scheduler's two block sizes, resolved as the engine core does it."""
    cache = get_kv_cache_config_from_groups(config, _groups(model), 1 << 30)
    config.cache_config.num_gpu_blocks = cache.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    cache.kv_cache_layout = model.layout
    cache.hash_block_size = hash_block_size
    cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        cache, config, block_size, hash_block_size
    )
    return cache, block_size, hash_block_size


def make_rank(config: VllmConfig, cache: KVCacheConfig, rank: int, tap: Tap) -> tuple[Any, dict[str, Any]]:
    """A connector in the worker's role with its ferry running, and the tensors of its cache."""
    own = copy(config)
    own.parallel_config = copy(config.parallel_config)
    own.parallel_config.rank = rank
    layout = config.cache_config.get_resolved_kv_cache_layout()
    tensors = allocate_kv_cache(cache, torch.device("cpu"), layout)
    connector = KVConnectorFactory.create_connector(own, KVConnectorRole.WORKER, cache)
    with (
        patch.object(worker, "choose", lambda name, kind, rocm: "memory"),
        patch.object(worker, "create_transport", lambda name, options: SteeredTransport(tap)),
    ):
        connector.register_kv_caches(tensors)
    return connector, tensors


def _model_config(name: str, ranks: int) -> Any:
    """As much of a ModelConfig as the scheduler, the cache manager and the connector ask for."""
    hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
    return SimpleNamespace(
        model=name,
        revision=None,
        architecture="SimulatedForCausalLM",
        dtype=torch.bfloat16,
        hf_config=hf_config,
        hf_text_config=SimpleNamespace(mamba_n_groups=1),
        get_total_num_kv_heads=lambda: ranks,
        max_model_len=MAX_MODEL_LEN,
        original_max_model_len=MAX_MODEL_LEN,
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        enable_sleep_mode=False,
        runner_type="generate",
        supports_multimodal_inputs=False,
        multimodal_config=None,
        return_sampling_mask=False,
    )


def _groups(model: CacheModel) -> list[KVCacheGroupSpec]:
    attention = FullAttentionSpec(block_size=model.block, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=model.block if model.mode == "align" else MAX_MODEL_LEN,
        shapes=Shapes.gated_delta_net_state_shape(1, 1, 1, 4, 4, 2),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=attention.page_size_bytes,
        mamba_type=MambaType.GDN_ATTN,
        mamba_cache_mode=model.mode,
        num_speculative_blocks=model.scratch,
    )
    groups = [KVCacheGroupSpec([f"state{i}.0", f"state{i}.1"], state) for i in range(model.states)]
    if model.window:
        window = SlidingWindowSpec(
            block_size=model.block,
            num_kv_heads=1,
            head_size=16,
            dtype=torch.bfloat16,
            sliding_window=model.window,
        )
        groups.append(KVCacheGroupSpec(["window.0", "window.1"], window))
    drafts = model.drafting == "mtp"  # vLLM marks the group that a draft layer is in
    return [
        *groups,
        KVCacheGroupSpec(["attention.0", "attention.1"], attention, is_eagle_group=drafts),
    ]
