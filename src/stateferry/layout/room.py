"""The waiting room: memory beside a cache, laid out like it, where hand-offs wait until vLLM has blocks.

Its layout describes the same groups, layers and tensors over slots instead of blocks, so the planner lays
reads into it, and copies out of it, as it does between two engines.
"""

import math
from itertools import zip_longest

import msgspec

from stateferry.errors import LayoutError
from stateferry.layout.shard import check_layout
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, LayerCache, Loop


def slot_bytes(layout: CacheLayout) -> int:
    """Bytes of one slot: it holds one block of any group."""
    return sum(_lanes(layout))


def room_layout(layout: CacheLayout, size_bytes: int) -> CacheLayout:
    """The layout of a room of at most `size_bytes`: one more region behind those of `layout`.

    The n-th layers of all groups share a lane, as groups share blocks in the cache. Inside a lane slots
    follow each other without gaps, so blocks in a row stay one piece. Raises LayoutError where not one
    slot has room.
    """
    lanes = _lanes(layout)
    slots = size_bytes // max(1, sum(lanes))
    if not slots or not lanes:
        raise LayoutError(
            f"a waiting room of {size_bytes} bytes has no room for one block of {sum(lanes)} bytes: "
            "raise 'room_mib' in kv_connector_extra_config, or set 'load_mode' to 'async'"
        )
    room = msgspec.structs.replace(
        layout,
        groups=tuple(_group(group, lanes, slots, len(layout.region_sizes_bytes)) for group in layout.groups),
        region_sizes_bytes=(*layout.region_sizes_bytes, sum(lanes) * slots),
    )
    check_layout(room)
    return room


def slot_count(room: CacheLayout) -> int:
    """How many blocks a room holds."""
    layers = [layer for group in room.groups for layer in _layers(group)]
    return layers[0].tensors[0].block_count


def _lanes(layout: CacheLayout) -> list[int]:
    """Widths: of the n-th layer of whatever group has the largest there."""
    sizes = [[sum(t.block_bytes for t in layer.tensors) for layer in _layers(g)] for g in layout.groups]
    return [max(column) for column in zip_longest(*sizes, fillvalue=0)]


def _layers(group: Group) -> tuple[LayerCache, ...]:
    return group.layers if group.transfers else ()


def _group(group: Group, lanes: list[int], slots: int, region: int) -> Group:
    layers = []
    for n, layer in enumerate(_layers(group)):
        start, tensors = sum(lanes[:n]) * slots, []
        for tensor in layer.tensors:
            tensors.append(
                msgspec.structs.replace(
                    tensor,
                    region=region,
                    offset_bytes=start,
                    block_stride_bytes=lanes[n],
                    block_count=slots,
                    loops=_dense(tensor),
                )
            )
            start += tensor.block_bytes
        layers.append(msgspec.structs.replace(layer, tensors=tuple(tensors)))
    return msgspec.structs.replace(group, layers=tuple(layers)) if group.transfers else group


def _dense(tensor: CacheTensor) -> tuple[Loop, ...]:
    """The same loops without gaps, in the order in which they lie in memory."""
    inner = sorted(range(len(tensor.loops)), key=lambda d: (tensor.loops[d].stride_bytes, -d))
    counts = [tensor.loops[d].count for d in inner]
    strides = {d: tensor.unit_bytes * math.prod(counts[:i]) for i, d in enumerate(inner)}
    return tuple(
        msgspec.structs.replace(loop, stride_bytes=strides[d]) for d, loop in enumerate(tensor.loops)
    )
