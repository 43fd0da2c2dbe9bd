"""What besides shapes must be equal on two engines, as text: the `facts` of a CacheLayout."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, iter_layer_specs

from stateferry import __version__

_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
_NOT_IDENTITY = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "_attn_implementation"})
"""Keys of a model's config that say where it lies or who wrote it, not what it computes."""
LONGEST_VALUE = 64
"""Characters of one of its values that peers are told as they are."""
_GROUP_KEYS = ("n_groups", "mamba_n_groups", "mamba_ngroups")


def attention_backend(config: VllmConfig, layer: str) -> str:
    """Dotted path of the layer's backend class; `unknown` when the layer cannot be asked.

    Names are not enough: two classes call themselves FLASH_ATTN.
    """
    module = config.compilation_config.static_forward_context.get(layer)
    if module is None or not hasattr(module, "get_attn_backend"):
        return "unknown"
    backend = module.get_attn_backend()
    return f"{backend.__module__}.{backend.__qualname__}"


def mamba_groups(config: VllmConfig) -> int | None:
    """Groups of B and C in the whole model as its config says; None when it does not, or not clearly."""
    text = config.model_config.hf_text_config
    found = {value for key in _GROUP_KEYS if isinstance(value := getattr(text, key, None), int)}
    return found.pop() if len(found) == 1 else None


def collect_facts(config: VllmConfig, kv_cache_config: KVCacheConfig, device: str) -> dict[str, str]:
    """Everything that two engines must agree on before their caches mean the same.

    `device`: where the cache is, as torch names device types.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    layers = [
        name
        for group in kv_cache_config.kv_cache_groups
        if group.enable_kv_transfer
        for name in group.layer_names
    ]
    backends = sorted({attention_backend(config, name) for name in layers})
    facts = {
        "model": PurePath(str(model.model)).name,
        "model_revision": str(model.revision or "none"),
        "architecture": str(model.architecture),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "attention_backends": ", ".join(backends),
        "kv_cache_layout": cache.get_resolved_kv_cache_layout().name,
        "dcp": f"{parallel.decode_context_parallel_size} ranks, interleave "
        f"{parallel.cp_kv_cache_interleave_size}",
        "device": device,
        "speculative": _speculative(config),
        "vllm_version": str(vllm_version),
        "stateferry_version": __version__,
        "prompt_cut": "none",
    }
    if kv_cache_config.has_mamba_layers:
        facts["conv_layout"] = get_conv_state_layout()
        facts["mamba_cache_mode"] = str(cache.mamba_cache_mode)
        facts["prompt_cut"] = "the producer computes all tokens but the last"
    facts |= {f"hf_config.{key}": text for key, text in _config_facts(model.hf_config.to_dict())}
    if "cpu" in device:
        facts["cpu_packing"] = _cpu_packing(config, kv_cache_config)
    return facts


def _speculative(config: VllmConfig) -> str:
    speculative = config.speculative_config
    if speculative is None:
        return "none"
    draft = PurePath(str(speculative.model or "")).name
    return f"{speculative.method}, {speculative.num_speculative_tokens} tokens, draft {draft or 'none'}"


def _cpu_packing(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """How vLLM's CPU kernels pack a page here: instruction sets, and vLLM's own choice per group."""
    features = {
        "amx": torch.cpu._is_amx_tile_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    words = [name for name, present in features.items() if present]
    words += [
        _cpu_attention_kernel(config, spec, group.layer_names[0])
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if isinstance(spec, AttentionSpec) and group.enable_kv_transfer
    ]
    return ", ".join(dict.fromkeys(words)) or "plain"


def _cpu_attention_kernel(config: VllmConfig, spec: AttentionSpec, layer: str) -> str:
    if attention_backend(config, layer) != _CPU_ATTENTION:
        return "no CPU attention"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    return f"attention {_get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype)}"


def _config_facts(config: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """What a model's config says key by key, without the keys that do not change what it computes; a long
    value by its hash."""
    for key, value in config.items():
        if key in _NOT_IDENTITY:
            continue
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", text) for inner, text in _config_facts(value))
            continue
        text = json.dumps(_plain(value), sort_keys=True)
        if len(text) > LONGEST_VALUE:
            text = f"{len(text)} characters, hash {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        yield str(key), text


def _plain(value: Any) -> Any:  # any JSON value in, one without run-dependent parts out
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NOT_IDENTITY}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__
