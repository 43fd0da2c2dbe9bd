"""A layout on the wire, and the field-by-field comparison that lets two engines exchange data."""

from typing import NoReturn

import msgspec

from stateferry.errors import LayoutError, LayoutMismatch, ProtocolError
from stateferry.layout.shard import check_layout
from stateferry.layout.spec import CacheLayout, CacheTensor, Group

MAX_LAYOUT_BYTES = 8 << 20
"""Largest encoded layout that is read. A thousand layers of four states are well under 1 MiB."""

FACTS_THAT_MAY_DIFFER: frozenset[str] = frozenset()
"""Facts that are told to the peer but need not be equal. None so far: law 9."""

_SAME_MODEL = "Start both engines with the same model folder and the same --dtype and --hf-overrides."
_SAME_SPECULATION = "Start both engines with the same --speculative-config (or none)."
_SAME_BACKEND = "Start both engines with the same --attention-backend."
_SAME_FLAGS = "Start both engines with the same flags and the same versions."
_ADVICE = {
    "tp_size": "The inside of this page is unknown, so it can only go between equal sizes: give both engines "
    "the same --tensor-parallel-size, or an attention backend and cache layout that can be cut.",
    "block_tokens": "Start both engines with the same --block-size, --mamba-block-size, --max-model-len and "
    "--mamba-cache-mode, and prefix caching on (or off) on both.",
    "scratch_slots": _SAME_SPECULATION,
    "dtype": "Start both engines with the same --dtype, --kv-cache-dtype and --mamba-cache-dtype.",
    "facts.model": _SAME_MODEL,
    "facts.architecture": _SAME_MODEL,
    "facts.hf_config": _SAME_MODEL,
    "facts.kv_cache_dtype": "Start both engines with the same --kv-cache-dtype.",
    "facts.attention_backends": _SAME_BACKEND,
    "facts.kv_cache_layout": "Set VLLM_KV_CACHE_LAYOUT to the same value for both engines.",
    "facts.conv_layout": "Set VLLM_SSM_CONV_STATE_LAYOUT to the same value (SD or DS) for both engines.",
    "facts.mamba_cache_mode": "Start both engines with the same --mamba-cache-mode, and prefix caching on "
    "(or off) on both.",
    "facts.vllm_version": "Install the same version of vLLM for both engines.",
    "facts.stateferry_version": "Install the same version of StateFerry for both engines.",
    "facts.cpu_packing": "Run both engines on processors with the same AVX512 and AMX features: the CPU "
    "attention page is packed for them.",
    "facts.speculative": _SAME_SPECULATION,
    "facts.dcp": "Start both engines with the same --decode-context-parallel-size and the same "
    "--dcp-kv-cache-interleave-size.",
}


def encode_layout(layout: CacheLayout) -> bytes:
    """The layout as a peer reads it."""
    data = msgspec.msgpack.encode(layout)
    if len(data) > MAX_LAYOUT_BYTES:
        raise LayoutError(f"this layout takes {len(data)} bytes; at most {MAX_LAYOUT_BYTES} can be sent")
    return data


def decode_layout(data: bytes) -> CacheLayout:
    """A peer's layout. Raises ProtocolError when it cannot be read or contradicts itself."""
    if len(data) > MAX_LAYOUT_BYTES:
        raise ProtocolError(f"the peer's layout has {len(data)} bytes; at most {MAX_LAYOUT_BYTES} are read")
    try:
        layout: CacheLayout = msgspec.msgpack.decode(data, type=CacheLayout)
        check_layout(layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the peer's layout cannot be read: {error}") from error
    except LayoutError as error:
        raise ProtocolError(f"the peer's layout contradicts itself: {error}") from error
    return layout


def _advice(field: str) -> str:
    """What to change: by the whole name first, then by its first words, then by its last."""
    words = field.split(".")
    names = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    return next((_ADVICE[name] for name in (*names, words[-1]) if name in _ADVICE), _SAME_FLAGS)


def _differ(field: str, ours: object, theirs: object) -> NoReturn:
    raise LayoutMismatch(field, ours, theirs, _advice(field))


def _equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        _differ(field, ours, theirs)


def compare(ours: CacheLayout, theirs: CacheLayout) -> None:
    """Raise LayoutMismatch unless the two engines may exchange data.

    Engine ids, epochs, ranks, block counts, offsets, strides and region sizes may differ, and the
    tensor-parallel sizes where every tensor can be cut. Everything else must be equal.
    """
    for name in sorted((ours.facts.keys() | theirs.facts.keys()) - FACTS_THAT_MAY_DIFFER):
        mine, its = ours.facts.get(name, "(missing)"), theirs.facts.get(name, "(missing)")
        _equal(f"facts.{name}", mine, its)
    compare_shapes(ours, theirs)


def compare_shapes(ours: CacheLayout, theirs: CacheLayout) -> None:
    """The part of `compare` that a plan needs: groups, layers and tensors, but no facts."""
    _equal("groups.count", len(ours.groups), len(theirs.groups))
    for index, (mine, its) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        name = f"groups[{index}]"
        _compare_group(name, mine, its)
        for layer, peer in zip(mine.layers, its.layers, strict=True):
            where = f"{name}.{layer.name}"
            if ours.tp_size != theirs.tp_size:
                for tensor in (*layer.tensors, *peer.tensors):
                    if tensor.opaque:  # before names and sizes, which differ for this very reason
                        _differ(f"{where}.{tensor.name}.tp_size", ours.tp_size, theirs.tp_size)
            _equal(f"{where}.tensors", [t.name for t in layer.tensors], [t.name for t in peer.tensors])
            for tensor, other in zip(layer.tensors, peer.tensors, strict=True):
                if tensor.opaque and other.opaque:
                    # First: at unequal sizes a page's bytes differ too, which no flag but the size mends.
                    _equal(f"{where}.{tensor.name}.tp_size", ours.tp_size, theirs.tp_size)
                _compare_tensor(f"{where}.{tensor.name}", tensor, other, ours.tp_size == theirs.tp_size)


def _compare_group(name: str, ours: Group, theirs: Group) -> None:
    _equal(f"{name}.kind", ours.kind.value, theirs.kind.value)
    _equal(f"{name}.block_tokens", ours.block_tokens, theirs.block_tokens)
    _equal(f"{name}.window_tokens", ours.window_tokens, theirs.window_tokens)
    _equal(f"{name}.scratch_slots", ours.scratch_slots, theirs.scratch_slots)
    _equal(f"{name}.transfers", ours.transfers, theirs.transfers)
    _equal(f"{name}.layers", [layer.name for layer in ours.layers], [layer.name for layer in theirs.layers])


def _compare_tensor(name: str, ours: CacheTensor, theirs: CacheTensor, equal_ranks: bool) -> None:
    _equal(f"{name}.dtype", ours.dtype, theirs.dtype)
    _equal(f"{name}.element_bytes", ours.element_bytes, theirs.element_bytes)
    _equal(f"{name}.opaque", ours.opaque, theirs.opaque)
    _equal(f"{name}.axis", ours.axis, theirs.axis)
    _equal(f"{name}.parts", ours.parts, theirs.parts)
    _equal(f"{name}.unit_bytes", ours.unit_bytes, theirs.unit_bytes)
    _equal(f"{name}.loops.count", len(ours.loops), len(theirs.loops))
    for depth, (mine, its) in enumerate(zip(ours.loops, theirs.loops, strict=True)):
        if equal_ranks or depth != ours.axis:
            _equal(f"{name}.loops[{depth}].count", mine.count, its.count)
    if equal_ranks:
        _equal(f"{name}.block_bytes", ours.block_bytes, theirs.block_bytes)
