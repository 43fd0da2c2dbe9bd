"""What the scheduler half knows of the KV-cache groups: kinds and block tokens, no tensors."""

from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from stateferry.layout.spec import Group, GroupKind


def describe_groups(kv_cache_config: Any, vllm_config: Any) -> tuple[Group, ...]:
    """All of vLLM's groups in vLLM's order, without layers. Raises LayoutError as `describe` does."""
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.first_spec
        dcp = vllm_config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1
        kind = GroupKind.ATTENTION
        if isinstance(spec, MambaSpec):
            kind = GroupKind.STATE
        elif isinstance(spec, SlidingWindowSpec):
            kind = GroupKind.WINDOW
        groups.append(
            Group(
                kind=kind,
                block_tokens=max(1, spec.block_size * dcp),
                layers=(),
                window_tokens=spec.sliding_window + spec.extra_retained_tokens
                if kind is GroupKind.WINDOW
                else 0,
                scratch_slots=spec.num_speculative_blocks if kind is GroupKind.STATE else 0,
                transfers=group.enable_kv_transfer,
            )
        )
    return tuple(groups)
