"""Which units of a sharded axis a rank holds, and which producer rank a consumer rank reads them from.

All three rules are one: a part has `granules` runs of units; `copies` neighbouring ranks hold the
same run. SPLIT has a granule per unit and one copy; REPLICATED one granule and a copy per rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from stateferry.errors import LayoutError
from stateferry.layout.spec import CacheLayout, CacheTensor, Part, PartRule

WHOLE = (Part(name="whole", size=1, rule=PartRule.REPLICATED),)
"""The parts of a tensor that no axis splits: one unit, on every rank."""

LIMIT = 1 << 48
"""No size, count or place in a layout is above this, so that products with block numbers stay in int64."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What one rank holds of one part. Units of the axis."""

    start: int
    """First unit, counted inside the part as the unsharded model has it."""
    size: int
    local: int
    """Where the first unit lies on this rank's axis."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Units that one consumer rank reads from one producer rank."""

    local: int
    """First unit, on the consumer rank's axis."""
    remote: int
    """First unit, on the producer rank's axis."""
    size: int


class Turn(NamedTuple):
    """Where a layer stands among the others: decides which of several copies it is read from."""

    layer: int = 0
    layers: int = 1
    """How many there are in its group."""
    group: int = 0

    def among(self, copies: int) -> int:
        """Which of so many. Neighbouring layers take the same one, so that their pages stay one read;
        groups begin with different ones, so that groups of few layers do not all ask the first."""
        return (self.layer * copies // self.layers + self.group) % copies


FIRST = Turn()


def _granules(part: Part) -> int:
    if part.rule is PartRule.SPLIT:
        return part.size
    return part.granules if part.rule is PartRule.GROUPED else 1


def copies(part: Part, tp_size: int) -> int:
    """How many neighbouring ranks hold the same units of `part`.

    Raises LayoutError when the part cannot be laid over that many ranks.
    """
    granules = _granules(part)
    if part.size < 1 or granules < 1 or part.size % granules:
        raise LayoutError(
            f"axis part {part.name!r}: {part.size} units cannot be cut into {granules} equal granules"
        )
    if granules % tp_size == 0:
        return 1
    if tp_size % granules == 0 and part.rule is not PartRule.SPLIT:
        return tp_size // granules
    what = (
        f"{granules} granules of {part.size // granules} units"
        if granules < part.size
        else f"{part.size} units"
    )
    raise LayoutError(
        f"axis part {part.name!r} ({part.rule.value}): {what} do not divide over {tp_size} ranks. "
        f"Choose a tensor-parallel size that divides, or is a multiple of, {granules}."
    )


@lru_cache(maxsize=4096)
def intervals(parts: tuple[Part, ...], rank: int, tp_size: int) -> tuple[Interval, ...]:
    """What rank `rank` of `tp_size` holds of each part, in the order in which it lies there.

    Raises LayoutError naming the part, its size and the rank count when it does not divide.
    """
    if not 0 <= rank < tp_size:
        raise LayoutError(f"tensor-parallel rank {rank} is outside 0..{tp_size - 1}")
    found: list[Interval] = []
    local = 0
    for part in parts:
        distinct = tp_size // copies(part, tp_size)
        size = part.size // distinct
        start = rank // (tp_size // distinct) * size
        found.append(Interval(start=start, size=size, local=local))
        local += size
    return tuple(found)


def _chosen_copy(consumer_rank: int, readers: int, holders: int, turn: Turn) -> int:
    """Which of `holders` copies the consumer rank reads, when `readers` neighbouring consumer ranks
    want the same units. The same position among both at equal counts; else as even as can be."""
    position = consumer_rank % readers
    first = position * holders // readers
    return first + turn.among(max(1, (position + 1) * holders // readers - first))


@lru_cache(maxsize=65536)
def overlaps(
    parts: tuple[Part, ...],
    consumer_rank: int,
    consumer_size: int,
    producer_rank: int,
    producer_size: int,
    turn: Turn = FIRST,
) -> tuple[Overlap, ...]:
    """What the consumer rank reads from this producer rank, in the order of the parts.

    Over all producer ranks, each unit that the consumer rank holds comes up exactly once. `turn` picks
    among producer ranks that hold copies, so that none is the only source.
    """
    ours = intervals(parts, consumer_rank, consumer_size)
    theirs = intervals(parts, producer_rank, producer_size)
    found: list[Overlap] = []
    for part, mine, its in zip(parts, ours, theirs, strict=True):
        readers, holders = copies(part, consumer_size), copies(part, producer_size)
        if producer_rank % holders != _chosen_copy(consumer_rank, readers, holders, turn):
            continue
        start = max(mine.start, its.start)
        end = min(mine.start + mine.size, its.start + its.size)
        if start < end:
            found.append(
                Overlap(
                    local=mine.local + start - mine.start,
                    remote=its.local + start - its.start,
                    size=end - start,
                )
            )
    return tuple(found)


def tensor_parts(tensor: CacheTensor) -> tuple[Part, ...]:
    """The parts of the tensor's sharded axis; one replicated unit where no axis is split."""
    return WHOLE if tensor.axis is None else tensor.parts


def iter_tensors(layout: CacheLayout) -> Iterator[tuple[int, str, CacheTensor]]:
    """Every tensor that transfers, as (group index, layer name, tensor)."""
    for index, group in enumerate(layout.groups):
        if group.transfers:
            for layer in group.layers:
                for tensor in layer.tensors:
                    yield index, layer.name, tensor


def producer_ranks_to_read(consumer: CacheLayout, producer_size: int) -> tuple[int, ...]:
    """The producer ranks that this consumer rank reads at least one byte from, ascending.

    Raises LayoutError when an axis does not divide over `producer_size` ranks.
    """
    mine, size = consumer.tp_rank, consumer.tp_size
    if producer_size == size:
        return (mine,)
    ranks: set[int] = set()
    for index, group in enumerate(consumer.groups):
        for number, layer in enumerate(group.layers if group.transfers else ()):
            turn = Turn(number, len(group.layers), index)
            for parts in {tensor_parts(tensor) for tensor in layer.tensors}:
                ranks.update(
                    rank
                    for rank in range(producer_size)
                    if overlaps(parts, mine, size, rank, producer_size, turn)
                )
    return tuple(sorted(ranks))


def check_layout(layout: CacheLayout) -> None:
    """Raise LayoutError unless the layout is sound in itself: sizes positive, every axis as long as
    its parts say for this rank, every block of every tensor inside its region."""
    if layout.tp_size < 1 or not 0 <= layout.tp_rank < layout.tp_size:
        raise LayoutError(f"tensor-parallel rank {layout.tp_rank} of {layout.tp_size} is impossible")
    for index, group in enumerate(layout.groups):
        if group.block_tokens < 1 or group.window_tokens < 0 or group.scratch_slots < 0:
            raise LayoutError(
                f"group {index}: block_tokens {group.block_tokens} must be at least 1; window_tokens "
                f"{group.window_tokens} and scratch_slots {group.scratch_slots} must not be negative"
            )
    if not all(0 < size <= LIMIT for size in layout.region_sizes_bytes) or layout.tp_size > LIMIT:
        raise LayoutError(f"regions of {layout.region_sizes_bytes} bytes are impossible (at most {LIMIT})")
    for index, layer, tensor in iter_tensors(layout):
        where = f"group {index}, layer {layer!r}, tensor {tensor.name!r}"
        _check_tensor(layout, tensor, where)


def _check_tensor(layout: CacheLayout, tensor: CacheTensor, where: str) -> None:
    counts = (tensor.unit_bytes, tensor.element_bytes, tensor.block_count, *(lp.count for lp in tensor.loops))
    strides = (tensor.offset_bytes, tensor.block_stride_bytes, *(lp.stride_bytes for lp in tensor.loops))
    if min(counts) < 1 or min(strides) < 0 or max(*counts, *strides) > LIMIT:
        raise LayoutError(
            f"{where}: counts and sizes must be at least 1, offsets and strides not negative, and "
            f"all at most {LIMIT}; found {tensor!r}"
        )
    if tensor.unit_bytes % tensor.element_bytes:
        raise LayoutError(f"{where}: unit_bytes must be a multiple of element_bytes; found {tensor!r}")
    if not 0 <= tensor.region < len(layout.region_sizes_bytes):
        raise LayoutError(
            f"{where}: region {tensor.region} of {len(layout.region_sizes_bytes)} does not exist"
        )
    end = tensor.offset_bytes + (tensor.block_count - 1) * tensor.block_stride_bytes + tensor.unit_bytes
    end += sum((lp.count - 1) * lp.stride_bytes for lp in tensor.loops)
    if end > layout.region_sizes_bytes[tensor.region]:
        raise LayoutError(
            f"{where}: ends at byte {end} of a region of {layout.region_sizes_bytes[tensor.region]} bytes"
        )
    if tensor.axis is None:
        if tensor.parts:
            raise LayoutError(f"{where}: has parts but no axis")
        return
    if tensor.opaque or not 0 <= tensor.axis < len(tensor.loops):
        raise LayoutError(
            f"{where}: axis {tensor.axis} of {len(tensor.loops)} loops (opaque: {tensor.opaque})"
        )
    held = sum(i.size for i in intervals(tensor.parts, layout.tp_rank, layout.tp_size))
    if held != tensor.loops[tensor.axis].count:
        raise LayoutError(
            f"{where}: its axis has {tensor.loops[tensor.axis].count} units here, but its parts give rank "
            f"{layout.tp_rank} of {layout.tp_size} {held} units"
        )
