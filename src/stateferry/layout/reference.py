"""What a plan must do, written again slowly: byte by byte, with no arithmetic shared with the planner.

Never imports plan, blocks or shard. Every byte of a block is given its meaning (which unit of the
unsharded model it belongs to); a read is right when each destination byte is written exactly once,
from a byte of the same meaning.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stateferry.errors import LayoutError
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, Part, PartRule, Pieces

Place = tuple[int, int]
"""A byte of an engine's memory: region, offset."""

Meaning = tuple[object, ...]
"""Which byte of the unsharded model: position, layer, tensor, indices of its loops, byte of the unit."""


def units_held(part: Part, rank: int, tp_size: int) -> list[int]:
    """The units of `part` that the rank holds, in the order in which they lie there.

    Raises LayoutError when they do not come out the same number on every rank.
    """

    def held_by(holder: int) -> list[int]:
        units = range(part.size)
        if part.rule is PartRule.REPLICATED:
            return list(units)
        runs = part.size if part.rule is PartRule.SPLIT else part.granules
        if runs < tp_size and part.rule is PartRule.GROUPED:
            return [u for u in units if u * runs // part.size == holder * runs // tp_size]
        return [u for u in units if (u * runs // part.size) * tp_size // runs == holder]

    counts = {len(held_by(holder)) for holder in range(tp_size)}
    runs = {PartRule.SPLIT: part.size, PartRule.REPLICATED: 1, PartRule.GROUPED: part.granules}[part.rule]
    copied = part.rule is not PartRule.SPLIT and tp_size % runs == 0
    if len(counts) != 1 or part.size % runs or not (runs % tp_size == 0 or copied):
        raise LayoutError(f"axis part {part.name!r}: {part.size} units do not divide over {tp_size} ranks")
    return held_by(rank)


def _axis_meanings(tensor: CacheTensor, rank: int, tp_size: int) -> list[object]:
    return [(part.name, unit) for part in tensor.parts for unit in units_held(part, rank, tp_size)]


def _tensor_bytes(
    layout: CacheLayout, tensor: CacheTensor, block: int
) -> Iterator[tuple[Place, tuple[object, ...]]]:
    """Every byte of one block of one tensor, with the indices of its loops in the unsharded model."""
    indices: list[Sequence[object]] = [range(loop.count) for loop in tensor.loops]
    if tensor.axis is not None:
        indices[tensor.axis] = _axis_meanings(tensor, layout.tp_rank, layout.tp_size)
    start = tensor.offset_bytes + block * tensor.block_stride_bytes
    for steps in itertools.product(*(range(loop.count) for loop in tensor.loops)):
        offset = start + sum(step * loop.stride_bytes for step, loop in zip(steps, tensor.loops, strict=True))
        meaning = tuple(index[step] for index, step in zip(indices, steps, strict=True))
        for byte in range(tensor.unit_bytes):
            # Under an unknown inside, ranks are told apart: only the same rank holds the same thing.
            owner = (layout.tp_rank, layout.tp_size) if tensor.opaque else ()
            yield (tensor.region, offset + byte), (*owner, *meaning, byte)


def meanings(layout: CacheLayout, group: int, blocks: Iterable[int]) -> dict[Place, Meaning]:
    """What every byte of these blocks means. The i-th block holds position i of the request."""
    found: dict[Place, Meaning] = {}
    for position, block in enumerate(blocks):
        for layer in layout.groups[group].layers:
            for tensor in layer.tensors:
                for place, meaning in _tensor_bytes(layout, tensor, block):
                    if place in found:
                        raise LayoutError(f"layer {layer.name!r}: two tensors share byte {place}")
                    found[place] = (position, layer.name, tensor.name, *meaning)
    return found


def faults(
    consumer: CacheLayout,
    producers: Sequence[CacheLayout],
    group: int,
    local_blocks: Sequence[int],
    remote_blocks: Sequence[int],
    reads: Mapping[int, Pieces],
) -> list[str]:
    """What is wrong with reading `reads[rank]` from each producer rank; empty when all is right."""
    wanted = meanings(consumer, group, local_blocks)
    written: dict[Place, int] = {}
    found: list[str] = []
    for producer in producers:
        held = meanings(producer, group, remote_blocks)
        for place, source in _copied_bytes(reads[producer.tp_rank]):
            written[place] = written.get(place, 0) + 1
            if place not in wanted:
                found.append(f"byte {place} is written, but belongs to no destination block")
            elif source not in held:
                found.append(f"byte {place} comes from rank {producer.tp_rank} {source}: outside its blocks")
            elif held[source] != wanted[place]:
                found.append(
                    f"byte {place} should be {wanted[place]}, but rank {producer.tp_rank} {source} is "
                    f"{held[source]}"
                )
    found += [
        f"byte {place} ({meaning}) is written {written.get(place, 0)} times"
        for place, meaning in wanted.items()
        if written.get(place, 0) != 1
    ]
    return found


def _copied_bytes(pieces: Pieces) -> Iterator[tuple[Place, Place]]:
    """(local byte, remote byte) of every byte that the pieces move."""
    for i in range(len(pieces)):
        local = int(pieces.local_regions[i]), int(pieces.local_offsets[i])
        remote = int(pieces.remote_regions[i]), int(pieces.remote_offsets[i])
        for byte in range(int(pieces.sizes[i])):
            yield (local[0], local[1] + byte), (remote[0], remote[1] + byte)


def positions_needed(group: Group, local_tokens: int, total_tokens: int) -> list[int]:
    """Positions in the group's table that must come from the producer, token by token."""
    if group.kind is GroupKind.STATE:
        for column in range(total_tokens):
            if (column + 1) * group.block_tokens >= total_tokens:
                return [column]
        return []
    needed = set()
    for token in range(local_tokens, total_tokens):
        seen = total_tokens - token < group.window_tokens  # by the token at position total_tokens
        if group.kind is GroupKind.ATTENTION or seen:
            needed.add(token // group.block_tokens)
    return sorted(needed)
