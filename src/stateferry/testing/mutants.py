"""Damage to a hand-off on purpose, so that a gate can show that it would notice.

The consumer of an engine started with `testing: true` reads `kv_transfer_params.stateferry.tamper`:

    {"withhold": "state" | "convolution" | "attention" | "last_block" | "layer:NAME"}
        these pages are not read; their destination keeps zeros, as if the state had never been sent
    {"other": kv_transfer_params of another hand-off, "what": "state" | "attention" | "all"}
        these pages come from the other hand-off, position by position from the end
    {"swap": "heads" | "layers"}
        the first two heads, or the first two recurrent layers, change places

Nothing here checks anything: a mutant must look like a good hand-off to every check but the gate's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stateferry.errors import ProtocolError
from stateferry.layout.blocks import concatenate, take
from stateferry.layout.plan import Plan
from stateferry.layout.spec import CacheLayout, Group, GroupKind, Pieces
from stateferry.session import GroupLoad


def tamper(
    what: Mapping[str, Any], layout: CacheLayout, plan: Plan, loads: tuple[GroupLoad, ...]
) -> list[Pieces]:
    """Pieces per load, damaged as `what` says. `plan` has one tensor a strip.

    Raises ProtocolError for an order that is not in the table above.
    """
    loads = _from_another(what, layout, loads) if "other" in what else loads
    damaged = []
    for load in loads:
        pieces = plan.pieces(load.group, load.local_block_ids, load.remote_block_ids)
        group = layout.groups[load.group]
        if "withhold" in what:
            pieces = take(pieces, ~_withheld(str(what["withhold"]), group, plan, load))
        elif "swap" in what:
            pieces = _swapped(str(what["swap"]), group, plan, load, pieces)
        elif "other" not in what:
            raise ProtocolError(f"tamper {dict(what)!r} is none of withhold, other, swap")
        damaged.append(pieces)
    return damaged


def _labels(plan: Plan, load: GroupLoad) -> tuple[Any, Any, Any]:
    """Layer, tensor and block index of every piece, `int64[strips * blocks]` each."""
    count = len(load.local_block_ids)
    layers = np.repeat(plan.layer_of(load.group), count)
    tensors = np.repeat(plan.tensor_of(load.group), count)
    blocks = np.tile(np.arange(count), len(plan.layer_of(load.group)))
    return layers, tensors, blocks


def _withheld(what: str, group: Group, plan: Plan, load: GroupLoad) -> Any:
    layers, tensors, blocks = _labels(plan, load)
    everything = np.ones(len(layers), bool)
    state = group.kind is GroupKind.STATE
    if what == "state":
        return everything & state
    if what == "attention":
        return everything & (not state)
    if what == "convolution":
        return (tensors == 0) & state
    if what == "last_block":
        return (blocks == len(load.local_block_ids) - 1) & (not state)
    if what.startswith("layer:"):
        names = np.array([what[6:] == layer.name for layer in group.layers])
        return names[layers] & state
    if what == "first_layer":
        return everything & state & (layers == 0)
    raise ProtocolError(f"tamper withhold {what!r} is unknown")


def _from_another(
    what: Mapping[str, Any], layout: CacheLayout, loads: tuple[GroupLoad, ...]
) -> tuple[GroupLoad, ...]:
    """The same destinations, fed from another hand-off's blocks; the last of its list where short."""
    tables = what["other"]["remote_block_ids"]
    replaced = []
    for load in loads:
        state = layout.groups[load.group].kind is GroupKind.STATE
        wanted = what.get("what", "all")
        table = [b for b in tables[load.group] if b]
        if not table or wanted not in ("all", "state" if state else "attention"):
            replaced.append(load)
            continue
        count = len(load.local_block_ids)
        remote = tuple(int(table[min(i, len(table) - 1)]) for i in range(count))
        replaced.append(GroupLoad(load.group, load.first_block, load.local_block_ids, remote))
    return tuple(replaced)


def _swapped(what: str, group: Group, plan: Plan, load: GroupLoad, pieces: Pieces) -> Pieces:
    """Exchange sources: two layers of a state group, or the halves of every recurrent tensor."""
    if what not in ("heads", "layers"):
        raise ProtocolError(f"tamper swap {what!r} is unknown")
    if group.kind is not GroupKind.STATE:
        return pieces
    layers, tensors, _ = _labels(plan, load)
    if what == "layers":
        if len(group.layers) < 2:
            return pieces
        first, second = np.flatnonzero(layers == 0), np.flatnonzero(layers == 1)
        order = np.arange(len(pieces))
        order[first], order[second] = second, first
        return _with_sources(pieces, order)
    last = tensors == max(len(layer.tensors) for layer in group.layers) - 1
    kept, moved = take(pieces, ~last), take(pieces, last)
    half = moved.sizes // 2
    upper = Pieces(
        moved.local_regions, moved.local_offsets, moved.remote_regions, moved.remote_offsets + half, half
    )
    lower = Pieces(
        moved.local_regions, moved.local_offsets + half, moved.remote_regions, moved.remote_offsets, half
    )
    return concatenate([kept, upper, lower])


def _with_sources(pieces: Pieces, order: Any) -> Pieces:
    return Pieces(
        pieces.local_regions,
        pieces.local_offsets,
        pieces.remote_regions[order],
        pieces.remote_offsets[order],
        pieces.sizes,
    )
