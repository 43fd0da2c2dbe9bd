"""What one consumer rank reads from one producer rank: strips inside a block, laid over block ids.

A plan is made once per pair of ranks; per request its strips are broadcast over the block ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from stateferry.errors import LayoutError
from stateferry.layout.blocks import adjacent, concatenate
from stateferry.layout.fingerprint import compare_shapes
from stateferry.layout.shard import Overlap, Turn, overlaps, tensor_parts
from stateferry.layout.spec import CacheLayout, CacheTensor, Int64Array, Pieces

SEVERAL = -1
"""Label of a strip that was merged from more than one layer or tensor."""

_Offsets = tuple[Int64Array, Int64Array, Int64Array]
"""Local offsets, remote offsets and sizes inside one tensor's block."""


@dataclass(frozen=True, slots=True)
class GroupStrips:
    """The strips of one group, `int64[strips]` each. Offsets are those of block 0 in the region."""

    local_regions: Int64Array
    local_offsets: Int64Array
    local_strides: Int64Array
    """From a block to the next, in bytes."""
    remote_regions: Int64Array
    remote_offsets: Int64Array
    remote_strides: Int64Array
    sizes: Int64Array
    layers: Int64Array
    """Index into the group's layers, or SEVERAL."""
    tensors: Int64Array
    """Index into that layer's tensors, or SEVERAL."""
    local_block_count: int
    remote_block_count: int

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def fill_blocks(self) -> npt.NDArray[np.bool_]:
        """`bool[strips]`: reaches from block to block on both sides, so blocks in a row are one piece."""
        fill: npt.NDArray[np.bool_] = (self.sizes == self.local_strides) & (self.sizes == self.remote_strides)
        return fill

    def take(self, mask: npt.NDArray[np.bool_]) -> "GroupStrips":
        """The strips where `mask`, `bool[strips]`, is set."""
        arrays = (f.name for f in fields(self) if not f.name.endswith("_count"))
        return replace(self, **{name: getattr(self, name)[mask] for name in arrays})


class Plan:
    """What one consumer rank reads from one producer rank."""

    def __init__(self, groups: tuple[GroupStrips, ...]) -> None:
        self.groups = groups
        self._by_gaps = tuple(map(_by_gaps, groups))

    def group_bytes(self, group: int) -> int:
        """Bytes that this pair of ranks exchanges per block of the group."""
        return int(self.groups[group].sizes.sum())

    def layer_of(self, group: int) -> Int64Array:
        """`int64[strips]`: the strip's index into the group's layers; SEVERAL where merged."""
        return self.groups[group].layers

    def tensor_of(self, group: int) -> Int64Array:
        """`int64[strips]`: the strip's index into its layer's tensors; SEVERAL where merged."""
        return self.groups[group].tensors

    def pieces(
        self,
        group: int,
        local_blocks: Int64Array | Sequence[int],
        remote_blocks: Int64Array | Sequence[int],
    ) -> Pieces:
        """One piece per strip and block, strip-major: piece `s * blocks + b`, not merged.

        Raises ValueError naming the group when the lists differ in length or an id is out of range.
        """
        strips = self.groups[group]
        local = _checked_ids(group, "local", local_blocks, strips.local_block_count)
        remote = _checked_ids(group, "remote", remote_blocks, strips.remote_block_count)
        if len(local) != len(remote):
            raise ValueError(f"group {group}: {len(local)} local blocks for {len(remote)} remote blocks")
        return _pieces_of(strips, local, remote, np.ones_like(local))

    def merged_pieces(
        self,
        group: int,
        local_blocks: Int64Array | Sequence[int],
        remote_blocks: Int64Array | Sequence[int],
    ) -> Pieces:
        """As `pieces`, with blocks that follow each other on both sides read as one where the strip
        fills its block. Costs time by blocks, not by layers. The order of the pieces is not the
        canonical one.
        """
        strips = self.groups[group]
        local = _checked_ids(group, "local", local_blocks, strips.local_block_count)
        remote = _checked_ids(group, "remote", remote_blocks, strips.remote_block_count)
        fill, leave_gaps = self._by_gaps[group]
        if len(local) != len(remote) or len(local) < 2 or not len(fill):
            return self.pieces(group, local, remote)
        order = np.argsort(local, kind="stable")
        local, remote = local[order], remote[order]
        starts = adjacent((), local, remote, np.ones_like(local))
        lengths = np.diff(np.append(starts, len(local)))
        runs = _pieces_of(fill, local[starts], remote[starts], lengths)
        if not len(leave_gaps):
            return runs
        return concatenate([runs, _pieces_of(leave_gaps, local, remote, np.ones_like(local))])


def _by_gaps(strips: GroupStrips) -> tuple[GroupStrips, GroupStrips]:
    """Strips that reach from block to block on both sides, and those that do not."""
    fill = strips.fill_blocks
    return strips.take(fill), strips.take(~fill)


def _pieces_of(strips: GroupStrips, local: Int64Array, remote: Int64Array, lengths: Int64Array) -> Pieces:
    """A piece per strip and run of blocks, strip-major. `local`, `remote`: first block of each run."""
    count = len(local)
    return Pieces(
        local_regions=np.repeat(strips.local_regions, count),
        local_offsets=_laid_out(strips.local_offsets, strips.local_strides, local),
        remote_regions=np.repeat(strips.remote_regions, count),
        remote_offsets=_laid_out(strips.remote_offsets, strips.remote_strides, remote),
        sizes=(strips.sizes[:, None] * lengths[None, :]).ravel(),
    )


def _laid_out(offsets: Int64Array, strides: Int64Array, blocks: Int64Array) -> Int64Array:
    return (offsets[:, None] + strides[:, None] * blocks[None, :]).ravel()


def _checked_ids(group: int, side: str, blocks: Int64Array | Sequence[int], block_count: int) -> Int64Array:
    ids = np.asarray(blocks, dtype=np.int64).reshape(-1)
    outside = np.flatnonzero((ids < 0) | (ids >= block_count))
    if len(outside):
        raise ValueError(
            f"group {group}: {side} block id {int(ids[outside[0]])} is outside 0..{block_count - 1}"
        )
    return ids


def make_plan(consumer: CacheLayout, producer: CacheLayout, merge: bool = True) -> Plan:
    """Plan what the consumer rank reads from the producer rank.

    With `merge`, strips that are adjacent on both sides in every block are one, whatever tensors and
    layers they belong to. Without, every strip belongs to one tensor and they come in the order
    layer, tensor, place. Raises LayoutMismatch when the two do not describe the same cache, LayoutError
    when this pair of tensor-parallel sizes cannot be planned.
    """
    compare_shapes(consumer, producer)
    return Plan(
        tuple(_group_strips(consumer, producer, index, merge) for index in range(len(consumer.groups)))
    )


def _group_strips(consumer: CacheLayout, producer: CacheLayout, group: int, merge: bool) -> GroupStrips:
    ours, theirs = consumer.groups[group], producer.groups[group]
    rows: list[Int64Array] = []
    local_counts, remote_counts = [], []
    pairs = zip(ours.layers, theirs.layers, strict=True) if ours.transfers else ()
    for layer, (our_layer, their_layer) in enumerate(pairs):
        for index, (mine, its) in enumerate(zip(our_layer.tensors, their_layer.tensors, strict=True)):
            where = f"layer {our_layer.name!r}, tensor {mine.name!r}"
            shared = _tensor_overlaps(consumer, producer, mine, where, Turn(layer, len(ours.layers), group))
            local, remote, sizes = tensor_strips(mine, its, shared)
            labels = (
                mine.region,
                mine.block_stride_bytes,
                its.region,
                its.block_stride_bytes,
                layer,
                index,
            )
            row = np.empty((9, len(sizes)), np.int64)
            row[0], row[1], row[2] = local + mine.offset_bytes, remote + its.offset_bytes, sizes
            row[3:] = np.array(labels, np.int64)[:, None]
            rows.append(row)
            local_counts.append(mine.block_count)
            remote_counts.append(its.block_count)
    table = np.concatenate(rows, axis=1) if rows else np.empty((9, 0), np.int64)
    if merge:
        table = _merged(table)
    return GroupStrips(
        local_offsets=table[0],
        remote_offsets=table[1],
        sizes=table[2],
        local_regions=table[3],
        local_strides=table[4],
        remote_regions=table[5],
        remote_strides=table[6],
        layers=table[7],
        tensors=table[8],
        local_block_count=min(local_counts, default=0),
        remote_block_count=min(remote_counts, default=0),
    )


def _tensor_overlaps(
    consumer: CacheLayout, producer: CacheLayout, tensor: CacheTensor, where: str, turn: Turn
) -> tuple[Overlap, ...]:
    try:
        return overlaps(
            tensor_parts(tensor),
            consumer.tp_rank,
            consumer.tp_size,
            producer.tp_rank,
            producer.tp_size,
            turn,
        )
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from error


def tensor_strips(local: CacheTensor, remote: CacheTensor, shared: tuple[Overlap, ...]) -> _Offsets:
    """Strips of one tensor inside a block, as they lie there, joined where adjacent on both sides."""
    if not shared:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    strips = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([local.unit_bytes], np.int64)
    # From the innermost loop in memory outwards, whatever their order: so neighbours meet and are joined.
    for depth in sorted(range(len(local.loops)), key=lambda d: (local.loops[d].stride_bytes, -d)):
        ours, theirs = local.loops[depth], remote.loops[depth]
        whole = (Overlap(local=0, remote=0, size=ours.count),)
        parts = [
            _repeated(strips, span, ours.stride_bytes, theirs.stride_bytes)
            for span in (shared if depth == local.axis else whole)
        ]
        strips = _joined(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return strips


def _repeated(strips: _Offsets, span: Overlap, our_stride: int, their_stride: int) -> _Offsets:
    """`strips` for each unit of `span` of the loop around them."""
    local, remote, sizes = strips
    if len(sizes) == 1 and our_stride == their_stride == int(sizes[0]):
        # The loop is dense around one run: stay at one run, however many units it has.
        return local + span.local * our_stride, remote + span.remote * their_stride, sizes * span.size
    step = np.arange(span.size, dtype=np.int64)[:, None]
    return (
        ((span.local + step) * our_stride + local).ravel(),
        ((span.remote + step) * their_stride + remote).ravel(),
        np.tile(sizes, span.size),
    )


def _joined(local: Int64Array, remote: Int64Array, sizes: Int64Array) -> _Offsets:
    starts = adjacent((), local, remote, sizes)
    if len(starts) == len(sizes):
        return local, remote, sizes
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)


def _merged(table: Int64Array) -> Int64Array:
    """Sort strips by place and join those adjacent on both sides; blocks must be equally far apart."""
    table = table[:, np.lexsort((table[0], table[6], table[4], table[5], table[3]))]
    starts = adjacent((table[3], table[4], table[5], table[6]), table[0], table[1], table[2])
    if len(starts) == table.shape[1]:
        return table
    joined = table[:, starts]
    joined[2] = np.add.reduceat(table[2], starts)
    for row in (7, 8):
        low, high = np.minimum.reduceat(table[row], starts), np.maximum.reduceat(table[row], starts)
        joined[row] = np.where(low == high, low, SEVERAL)
    return joined
