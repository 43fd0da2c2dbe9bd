"""Describe one layer's cache tensor: where its states, or its heads, lie inside a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from stateferry.errors import LayoutError
from stateferry.layout.spec import CacheTensor, LayerCache
from stateferry.vllm.kv_facts import attention_backend, mamba_groups
from stateferry.vllm.kv_tables import (
    Axis,
    StateShapes,
    attention_axis,
    inner_loops,
    side_loops,
    state_axes,
    total_kv_heads,
)


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """One stretch of this process's memory that holds cache tensors."""

    address: int
    size_bytes: int
    device: str
    """As torch names its type: `cpu`, or `cuda` (also on ROCm)."""
    device_index: int
    storage: torch.Tensor
    """`uint8[size_bytes]` over all of it; keeps it alive."""


class Regions:
    """Numbers storages in the order in which they are met; each is one region."""

    def __init__(self) -> None:
        self.memory: list[RegionMemory] = []
        self._numbers: dict[int, int] = {}

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The tensor's region and the byte at which it starts there."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._numbers:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._numbers[address] = len(self.memory)
            self.memory.append(
                RegionMemory(address, storage.nbytes(), tensor.device.type, tensor.device.index or 0, flat)
            )
        return self._numbers[address], tensor.storage_offset() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Engine:
    """What describing a layer needs besides its spec and tensor."""

    config: VllmConfig
    num_blocks: int
    tp_size: int
    regions: Regions


def describe_layer(name: str, spec: KVCacheSpec, tensor: torch.Tensor, engine: Engine) -> LayerCache:
    """Describe one layer from its spec and the tensor that vLLM registered for it.

    Raises LayoutError when the two do not fit each other, or the layer's kind is not known.
    """
    where = f"layer {name!r}"
    if tensor.ndim != 4 or tensor.shape[0] % engine.num_blocks:
        raise LayoutError(
            f"{where}: expected a cache tensor [blocks, heads, states, content] of {engine.num_blocks} "
            f"blocks, found {tuple(tensor.shape)}"
        )
    if isinstance(spec, MambaSpec):
        return LayerCache(name=name, tensors=_states(where, spec, tensor, engine))
    return LayerCache(name=name, tensors=(_attention(name, spec, tensor, engine),))


def _tensor(
    axis: Axis,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    run_bytes: int,
    **placed: Any,  # the fields of CacheTensor that say where it lies
) -> CacheTensor:
    loops, unit_bytes, number = inner_loops(shape, strides_bytes, run_bytes, axis)
    return CacheTensor(
        name=axis.name,
        unit_bytes=unit_bytes,
        loops=loops,
        axis=number,
        parts=axis.parts,
        opaque=axis.opaque,
        **placed,
    )


def _states(where: str, spec: MambaSpec, tensor: torch.Tensor, engine: Engine) -> tuple[CacheTensor, ...]:
    """A packed page `[blocks, 1, 1, bytes]`: the states one after the other, each row-major."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    packed = (engine.num_blocks, 1, 1)
    if tuple(tensor.shape[:3]) != packed or tensor.stride(3) != 1 or tensor.element_size() != 1:
        raise LayoutError(
            f"{where}: expected a packed state page {[*packed, sum(sizes)]} of single bytes, found "
            f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
        )
    if sum(sizes) > tensor.shape[3]:
        raise LayoutError(f"{where}: states take {sum(sizes)} bytes, but its page has {tensor.shape[3]}")
    known = StateShapes(
        shapes=tuple(tuple(shape) for shape in spec.shapes),
        tp_size=engine.tp_size,
        conv_dim_first=is_conv_state_dim_first(),
        n_groups=mamba_groups(engine.config),
    )
    try:
        axes = state_axes(spec.mamba_type.name, spec.tp_replicated, known)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from error
    region, offset = engine.regions.place(tensor)
    found = []
    for axis, shape, dtype, size in zip(axes, known.shapes, spec.dtypes, sizes, strict=True):
        strides = [prod(shape[depth + 1 :]) * dtype.itemsize for depth in range(len(shape))]
        found.append(
            _tensor(
                axis,
                shape,
                strides,
                dtype.itemsize,
                region=region,
                offset_bytes=offset,
                block_stride_bytes=tensor.stride(0),
                block_count=engine.num_blocks,
                element_bytes=dtype.itemsize,
                dtype=str(dtype).removeprefix("torch."),
            )
        )
        offset += size
    return tuple(found)


def _attention(name: str, spec: AttentionSpec, tensor: torch.Tensor, engine: Engine) -> CacheTensor:
    """A page `[kernel blocks per block, heads, states, content]` of one layer."""
    where = f"layer {name!r}"
    width = tensor.element_size()
    ratio = tensor.shape[0] // engine.num_blocks
    heads, states, content = tensor.shape[1:]
    found = ratio * heads * states * content * width
    if tensor.stride(3) != 1 or found != spec.unpadded_page_size_bytes or heads != spec.num_heads:
        raise LayoutError(
            f"{where}: expected {spec.num_heads} heads and {spec.unpadded_page_size_bytes} bytes a block, "
            f"found {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
        )
    axis = _attention_layout(name, spec, engine)
    kernel, per_head, per_state, _ = (stride * width for stride in tensor.stride())
    if axis.dim is not None and not axis.strided and per_state != content * width:
        axis = Axis("page", opaque=True)  # packed, but not head by head: never seen, so never cut
    region, offset = engine.regions.place(tensor)
    return _tensor(
        axis,
        *side_loops(
            axis, spec.num_kv_heads, ((ratio, heads, states), (kernel, per_head, per_state), content * width)
        ),
        region=region,
        offset_bytes=offset,
        block_stride_bytes=kernel * ratio,
        block_count=engine.num_blocks,
        element_bytes=width,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _attention_layout(name: str, spec: AttentionSpec, engine: Engine) -> Axis:
    parallel = engine.config.parallel_config
    if spec.dcp_sharded and parallel.decode_context_parallel_size > 1:
        return Axis("page", opaque=True)  # each rank holds other tokens: equal ranks only
    configured = None
    if engine.config.speculative_config is None:  # a draft model's layers are not in the model's config
        configured = engine.config.model_config.get_total_num_kv_heads()
    return attention_axis(
        attention_backend(engine.config, name),
        spec.num_kv_heads,
        spec.num_head_slots,
        total_kv_heads(spec.num_kv_heads, engine.tp_size, configured),
        isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec),
    )
