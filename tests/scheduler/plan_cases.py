"""Layers as vLLM specifies them, and as the unsharded model has them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from kv_caches import (
    BF16,
    CPU,
    FLASH,
    torch,
)
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as MambaType
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.rocm_segmented_attn import RocmSegmentedAttentionBackend
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from stateferry.testing import unsharded
from stateferry.testing.unsharded import Attention, Layer, Recurrent, Slots

PAIRS = ((1, 2), (2, 1), (4, 2), (2, 8), (3, 6), (4, 4))
FP32, FP8 = torch.float32, torch.float8_e4m3fn
MLA = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


@dataclass(frozen=True)
class Case:
    """A layer as vLLM specifies it on one of `size` ranks, and as the unsharded model has it."""

    spec: Callable[[int], KVCacheSpec]
    layer: Callable[[], Layer]
    """Called once vLLM's convolution layout is chosen."""
    backend: str = ""
    total_kv_heads: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    kernel_tokens: int | None = None
    sides: Callable[[Any, int], tuple[Any, Any]] | None = None
    """K and V of a layer's tensor and so many heads, each `[kernel blocks, heads, …]`, as the backend
    views them; None: the tensor is `[kernel blocks, heads, tokens, content]`."""


def state(
    mamba_type: MambaType,
    shapes: Callable[[int], Any],
    layer: Callable[[bool], Recurrent],
    dtypes: tuple[Any, ...] = (BF16, FP32),
    n_groups: int = 1,
    replicated: bool = False,
) -> Case:
    """A recurrent layer. `shapes`: vLLM's calculator at so many ranks."""

    def spec(size: int) -> MambaSpec:
        return MambaSpec(
            block_size=4,
            shapes=shapes(size),
            dtypes=dtypes,
            mamba_type=mamba_type,
            mamba_cache_mode="align",
            tp_replicated=replicated,
        )

    hf = SimpleNamespace(mamba_n_groups=n_groups)
    return Case(spec, lambda: layer(is_conv_state_dim_first()), config={"model_config__hf_text_config": hf})


def mamba2_with_ring(size: int) -> Any:
    base = Shapes.mamba2_state_shape(size, 48, 24, 24, 2, 3, 4)
    return Shapes.append_replayssm_ring(base, 24, size, 5, MambaBackendEnum.TRITON)


def kda_with_records(size: int) -> Any:
    base = Shapes.kda_state_shape(size, 24, 2, conv_kernel_size=4, num_spec=2)
    return Shapes.append_kda_recoverssm_record(base, 24, 2, size, spec_query_len=3)


def kda_in_four(size: int) -> Any:
    conv = Shapes._orient_conv_shape(48 // size, 3)
    return (conv, conv, conv, (24 // size, 2, 2))


STATES = {
    "mamba 1": state(
        MambaType.MAMBA1,
        lambda size: Shapes.mamba1_state_shape(size, 48, 5, 4),
        lambda first: unsharded.mamba1(48, 5, 3, first, (2, 4)),
    ),
    "mamba 2, one group": state(
        MambaType.MAMBA2,
        lambda size: Shapes.mamba2_state_shape(size, 48, 1, 24, 2, 5, 4),
        lambda first: unsharded.mamba2(24, 2, 1, 5, 3, first, (2, 4)),
    ),
    "mamba 2, groups split": state(
        MambaType.MAMBA2,
        lambda size: Shapes.mamba2_state_shape(size, 96, 24, 48, 2, 3, 4, num_spec=2),
        lambda first: unsharded.mamba2(48, 2, 24, 3, 5, first, (2, 2)),
        (BF16, BF16),
        n_groups=24,
    ),
    "mamba 2 with a replay ring": state(
        MambaType.MAMBA2,
        mamba2_with_ring,
        lambda first: unsharded.mamba2(24, 2, 24, 3, 3, first, (2, 4), ring=5),
        (BF16, FP32, BF16, FP32, BF16),
        n_groups=24,
    ),
    "gated delta net": state(
        MambaType.GDN_ATTN,
        lambda size: Shapes.gated_delta_net_state_shape(size, 24, 48, 2, 3, 4),
        lambda first: unsharded.gated_delta(24, 48, 2, 3, 3, first, (2, 4)),
    ),
    "kda": state(
        MambaType.GDN_ATTN,
        lambda size: Shapes.kda_state_shape(size, 24, 2, conv_kernel_size=4),
        lambda first: unsharded.gated_delta(24, 24, 2, 2, 3, first, (2, 4)),
    ),
    "kda with records": state(
        MambaType.GDN_ATTN,
        kda_with_records,
        lambda first: unsharded.gated_delta(24, 24, 2, 2, 5, first, (2, 4), record=3),
        (BF16, FP32, FP32, BF16),
    ),
    "kda in four tensors": state(
        MambaType.GDN_ATTN,
        kda_in_four,
        lambda first: unsharded.gated_delta(24, 24, 2, 2, 3, first, (2, 4), apart=True),
        (BF16, BF16, BF16, FP32),
    ),
    "short convolution": state(
        MambaType.SHORT_CONV,
        lambda size: Shapes.short_conv_state_shape(size, 48, 4),
        lambda first: unsharded.short_convolution(48, 3, first, 2),
        (BF16,),
    ),
    "linear attention": state(
        MambaType.LINEAR,
        lambda size: Shapes.linear_attention_state_shape(24, size, 3),
        lambda first: unsharded.linear_attention(24, 3, 4),
        (FP32,),
    ),
    "state on every rank": state(
        MambaType.SHORT_CONV,
        lambda size: Shapes.short_conv_state_shape(1, 10, 4),
        lambda first: unsharded.replicated(10, 3, first, 2),
        (BF16,),
        replicated=True,
    ),
}


def attention(kind: type = FullAttentionSpec, heads: int = 24, tokens: int = 4, **more: Any) -> Case:
    """Heads of 3 numbers of K and 3 of V (or as `more` says), split or copied as QKVParallelLinear does."""
    backend, kernel_tokens = more.pop("backend", FLASH), more.pop("kernel_tokens", None)
    sizes = {"head_size": 3, "dtype": BF16, **more}

    def spec(size: int) -> KVCacheSpec:
        return kind(block_size=tokens, num_kv_heads=max(1, heads // size), **sizes)

    content = more.get("state_content_bytes")
    if content is None:
        content = (3 + sizes.get("head_size_v", 3)) * sizes["dtype"].itemsize
    layer = Attention(heads, tokens, content)
    return Case(spec, lambda: layer, backend, heads, kernel_tokens=kernel_tokens)


def latents(
    kind: type = MLAAttentionSpec, dtype: Any = BF16, content: int | None = None, **more: Any
) -> Case:
    def spec(size: int) -> KVCacheSpec:
        return kind(
            block_size=4,
            num_kv_heads=1,
            head_size=9,
            dtype=dtype,
            max_tp_shards=1,
            state_content_bytes=content,
            **more,
        )

    layer = unsharded.latent_attention(4, content or 9 * dtype.itemsize, 1)
    return Case(spec, lambda: layer, MLA)


def packed_sides(tensor: Any, heads: int) -> tuple[Any, Any]:
    """As RocmAttentionImpl reads the cache: a head's tile is packed by 16 bytes."""
    return PagedAttention.split_kv_cache(tensor.transpose(0, 1), heads, tensor.shape[3] // heads)


def rows_of_sides(tensor: Any, heads: int) -> tuple[Any, Any]:
    """As b12x and the segmented backend read it: `[tokens, heads, head size]` on each side."""
    key, value = (side.unflatten(-1, (heads, -1)).swapaxes(1, 2) for side in tensor.unbind(1))
    return key, value


def apart(backend: Any, slots: Slots, sides: Any, heads: int = 24, **more: Any) -> Case:
    """K and V in head slots of their own, specified by the backend itself. Heads of 8 numbers."""
    path = f"{backend.__module__}.{backend.__name__}"
    case = attention(heads=heads, backend=path, head_size=8, head_size_v=8, **more)
    layer = Attention(heads, more.get("tokens", 4), 16, slots=slots, backend=path)
    return replace(
        case, spec=lambda size: backend.customize_spec(case.spec(size)), layer=lambda: layer, sides=sides
    )


ROCM = (RocmAttentionBackend, Slots.SIDES_PACKED, packed_sides)
SEGMENTED = (RocmSegmentedAttentionBackend, Slots.SIDES_ROWS, rows_of_sides)
B12X = (B12xPagedAttentionBackend, Slots.SIDES_ROWS, rows_of_sides)

ATTENTION = {
    "heads split": attention(),
    "one head on all ranks": attention(heads=1),
    "two heads on more ranks": attention(heads=2),
    "fp8": attention(dtype=FP8),
    "one byte and scales in each token's run": attention(
        dtype=torch.uint8, state_content_bytes=14, backend=TRITON
    ),
    "K and V of different sizes": attention(head_size_v=2),
    "sliding window": attention(SlidingWindowSpec, sliding_window=7),
    "packed per head": attention(backend=CPU),
    "kernel blocks": attention(tokens=8, kernel_tokens=2),
    "kernel blocks, packed per head": attention(tokens=8, kernel_tokens=4, backend=CPU),
    "K and V apart, packed per head": apart(*ROCM),
    "K and V apart, packed per head, kernel blocks": apart(*ROCM, tokens=8, kernel_tokens=2),
    "K and V apart, two heads on more ranks": apart(*ROCM, heads=2),
    "K and V apart, token by token": apart(*SEGMENTED),
    "K and V apart, one head on all ranks": apart(*SEGMENTED, heads=1),
    "K and V apart, token by token, kernel blocks": apart(*B12X, tokens=8, kernel_tokens=4),
    "latents": latents(),
    "fp8 latents": latents(dtype=FP8),
    "latents with scales": latents(dtype=torch.uint8, content=13),
    "latents in a window": latents(SlidingWindowMLASpec, sliding_window=6),
}
