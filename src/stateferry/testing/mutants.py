"""Damage to a hand-off on purpose, so that a gate can show that it would notice.

The consumer of an engine started with `testing: true` reads `kv_transfer_params.stateferry.tamper`:

    {"nothing": true}
        no damage: what a judge must not object to
    {"withhold": "state" | "convolution" | "attention" | "last_block" | "drafts" | "layer:I" | "number:T"}
        these bytes are not read; their destination keeps zeros, as if they had never been sent.
        "drafts" are the layers of a drafter (MTP), which change no answer, but how many drafts are right.
        I counts the recurrent layers over all groups, round and round; T counts the tensors of the
        first of them, and one number in the middle of that tensor is withheld
    {"other": kv_transfer_params of another hand-off, "what": "state" | "attention" | "all"}
        these pages come from the other hand-off, position by position; past its end, its last block
    {"swap": "heads" | "layers" | "layers:I"}
        the first two heads of every recurrent matrix, or recurrent layers I and I + 1 (again counted
        over all groups, round and round), change places

`"verify": "all"` beside any of them makes this hand-off compare digests; `"faults": [rule, …]` makes its
reads go wrong, where the transport is `faults` (see `transport.faults`). Nothing here checks anything
else: a mutant must look like a good hand-off to every check but the gate's. A damage that would leave
every byte as it is raises ProtocolError with `DAMAGES_NOTHING` in its text, so that nobody judges by it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stateferry.errors import ProtocolError
from stateferry.layout.blocks import concatenate, take
from stateferry.layout.plan import Plan
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, Int64Array, Pieces
from stateferry.session import GroupLoad
from stateferry.wire import parse_offer

DAMAGES_NOTHING = "damages nothing here"
DRAFT_LAYERS = "mtp."
"""How vLLM's names of draft layers begin."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Share:
    """One group's part of a hand-off, before any damage. Arrays have one entry a piece."""

    group: Group
    load: GroupLoad
    pieces: Pieces
    layers: Int64Array
    tensors: Int64Array
    blocks: Int64Array
    """Index into the load's blocks."""

    @property
    def is_state(self) -> bool:
        return self.group.kind is GroupKind.STATE

    def tensor_of(self, piece: int) -> CacheTensor:
        return self.group.layers[int(self.layers[piece])].tensors[int(self.tensors[piece])]


def tamper(
    what: Mapping[str, Any], layout: CacheLayout, plan: Plan, loads: tuple[GroupLoad, ...]
) -> list[Pieces]:
    """Pieces per load, damaged as `what` says. `plan` has one tensor a strip.

    Raises ProtocolError for an order that is not in the table above, and for one that damages nothing.
    """
    orders = [name for name in _DAMAGES if name in what]
    if len(orders) != 1:
        raise ProtocolError(f"tamper {sorted(what)} must have one of {sorted(_DAMAGES)}")
    shares = [_share(layout, plan, load) for load in loads]
    damaged = _DAMAGES[orders[0]](what, shares, plan)
    if orders[0] != "nothing" and all(map(_same, damaged, (share.pieces for share in shares))):
        raise ProtocolError(f"tamper {orders[0]}: {what[orders[0]]!r:.80} {DAMAGES_NOTHING}")
    return damaged


def _share(layout: CacheLayout, plan: Plan, load: GroupLoad) -> _Share:
    count = len(load.local_block_ids)
    layers, tensors = plan.layer_of(load.group), plan.tensor_of(load.group)
    return _Share(
        group=layout.groups[load.group],
        load=load,
        pieces=plan.pieces(load.group, load.local_block_ids, load.remote_block_ids),
        layers=np.repeat(layers, count),
        tensors=np.repeat(tensors, count),
        blocks=np.tile(np.arange(count), len(layers)),
    )


def _same(ours: Pieces, theirs: Pieces) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(getattr(ours, name), getattr(theirs, name))
        for name in ("local_regions", "local_offsets", "remote_regions", "remote_offsets", "sizes")
    )


def _nothing(what: Mapping[str, Any], shares: list[_Share], plan: Plan) -> list[Pieces]:
    return [share.pieces for share in shares]


# -- pages that do not come ----------------------------------------------------------------------------


def _withheld(what: Mapping[str, Any], shares: list[_Share], plan: Plan) -> list[Pieces]:
    name, _, number = str(what["withhold"]).partition(":")
    if name == "number":
        return _without_one_number(int(number), shares)
    if name == "layer":
        chosen, layer = _recurrent_layer(shares, int(number))
        masks = [
            share.layers == layer if share is chosen else np.zeros(len(share.pieces), bool)
            for share in shares
        ]
    elif name in _WITHHOLD:
        masks = [_WITHHOLD[name](share) for share in shares]
    else:
        raise ProtocolError(f"tamper withhold {what['withhold']!r:.80} is unknown")
    return [take(share.pieces, np.flatnonzero(~mask)) for share, mask in zip(shares, masks, strict=True)]


def _all_if(share: _Share, chosen: bool) -> Mask:
    return np.full(len(share.pieces), chosen)


def _convolution(share: _Share) -> Mask:
    names = (share.tensor_of(piece).name for piece in range(len(share.pieces)))
    return np.array([share.is_state and name.startswith("conv") for name in names], bool)


def _of_layers(share: _Share, prefix: str) -> Mask:
    names = (share.group.layers[int(layer)].name for layer in share.layers)
    return np.array([name.startswith(prefix) for name in names], bool)


def _last_block(share: _Share) -> Mask:
    last: Mask = share.blocks == len(share.load.local_block_ids) - 1
    return _all_if(share, not share.is_state) & last


_WITHHOLD: Mapping[str, Callable[[_Share], Mask]] = {
    "state": lambda share: _all_if(share, share.is_state),
    "attention": lambda share: _all_if(share, not share.is_state),
    "convolution": _convolution,
    "last_block": _last_block,
    "drafts": lambda share: _of_layers(share, DRAFT_LAYERS),
}


def _without_one_number(tensor: int, shares: list[_Share]) -> list[Pieces]:
    chosen, layer = _recurrent_layer(shares, 0)
    where = np.flatnonzero((chosen.layers == layer) & (chosen.tensors == tensor))
    damaged = [share.pieces for share in shares]
    if len(where):
        piece = int(where[len(where) // 2])
        width = chosen.tensor_of(piece).element_bytes
        middle = int(chosen.pieces.sizes[piece]) // width // 2 * width
        kept = take(chosen.pieces, np.delete(np.arange(len(chosen.pieces)), piece))
        whole = take(chosen.pieces, np.array([piece]))
        parts = [kept, _stretch(whole, 0, 0, middle), _stretch(whole, middle + width, middle + width, None)]
        damaged[next(i for i, share in enumerate(shares) if share is chosen)] = concatenate(parts)
    return damaged


def _stretch(pieces: Pieces, local: int, remote: int, size: int | None) -> Pieces:
    """`size` bytes of every piece (None: the rest) from `remote` on, put at `local`; none if empty."""
    sizes = pieces.sizes - local if size is None else np.full(len(pieces), size, np.int64)
    moved = replace(
        pieces,
        local_offsets=pieces.local_offsets + local,
        remote_offsets=pieces.remote_offsets + remote,
        sizes=sizes,
    )
    return take(moved, np.flatnonzero(sizes > 0))


# -- pages of another hand-off -------------------------------------------------------------------------


def _from_another(what: Mapping[str, Any], shares: list[_Share], plan: Plan) -> list[Pieces]:
    wanted = what.get("what", "all")
    if wanted not in ("state", "attention", "all"):
        raise ProtocolError(f"tamper other: what {wanted!r:.80} is unknown")
    other = parse_offer(what["other"])
    damaged = []
    for share in shares:
        load = share.load
        table = other.block_ids[load.group]
        if not table or wanted not in ("all", "state" if share.is_state else "attention"):
            damaged.append(share.pieces)
            continue
        if share.is_state:
            remote = [table[-1]]  # the state on offer
        else:
            start = load.first_block - other.first_blocks[load.group]
            positions = range(start, start + len(load.local_block_ids))
            remote = [table[min(max(i, 0), len(table) - 1)] for i in positions]
        damaged.append(plan.pieces(load.group, load.local_block_ids, remote))
    return damaged


# -- pages that change places --------------------------------------------------------------------------


def _swapped(what: Mapping[str, Any], shares: list[_Share], plan: Plan) -> list[Pieces]:
    name, _, number = str(what["swap"]).partition(":")
    if name == "heads":
        return [_with_heads_swapped(share) for share in shares]
    if name == "layers":
        return _with_layers_swapped(int(number or 0), shares)
    raise ProtocolError(f"tamper swap {what['swap']!r:.80} is unknown")


def _with_heads_swapped(share: _Share) -> Pieces:
    parts = []
    for piece in range(len(share.pieces)):
        one = take(share.pieces, np.array([piece]))
        head = _head_bytes(share.tensor_of(piece), int(one.sizes[0])) if share.is_state else 0
        if not head:
            parts.append(one)
            continue
        parts += [_stretch(one, 0, head, head), _stretch(one, head, 0, head)]
        parts.append(_stretch(one, 2 * head, 2 * head, None))
    return concatenate(parts)


def _head_bytes(tensor: CacheTensor, piece_bytes: int) -> int:
    """Bytes of one head of a recurrent matrix; 0 where it has no two heads, or is not in one piece."""
    whole = piece_bytes == tensor.block_bytes and tensor.axis in (None, 0)
    if tensor.name.startswith("conv") or not whole or not tensor.loops or tensor.loops[0].count < 2:
        return 0
    return tensor.block_bytes // tensor.loops[0].count


def _with_layers_swapped(number: int, shares: list[_Share]) -> list[Pieces]:
    places = [_recurrent_layer(shares, n) for n in (number, number + 1)]
    chosen = [np.flatnonzero(share.layers == layer) for share, layer in places]
    sources = [take(share.pieces, where) for (share, _), where in zip(places, chosen, strict=True)]
    if not np.array_equal(sources[0].sizes, sources[1].sizes):
        raise ProtocolError(f"tamper swap: recurrent layers {number} and {number + 1} differ in size")
    damaged = []
    for share in shares:
        regions, offsets = share.pieces.remote_regions.copy(), share.pieces.remote_offsets.copy()
        for (owner, _), where, source in zip(places, chosen, reversed(sources), strict=True):
            if owner is share:
                regions[where], offsets[where] = source.remote_regions, source.remote_offsets
        damaged.append(replace(share.pieces, remote_regions=regions, remote_offsets=offsets))
    return damaged


def _recurrent_layer(shares: list[_Share], number: int) -> tuple[_Share, int]:
    """The `number`-th recurrent layer of the hand-off (again from the start past the last)."""
    found = [(s, layer) for s in shares if s.is_state for layer in range(len(s.group.layers))]
    if not found:
        raise ProtocolError(f"tamper: there is no recurrent layer, so it {DAMAGES_NOTHING}")
    return found[number % len(found)]


_DAMAGES: Mapping[str, Callable[[Mapping[str, Any], list[_Share], Plan], list[Pieces]]] = {
    "nothing": _nothing,
    "withhold": _withheld,
    "other": _from_another,
    "swap": _swapped,
}
