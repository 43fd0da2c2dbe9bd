"""Arithmetic on pieces (merge, join) and on block positions (which, and which pairs with which)."""

from collections.abc import Sequence

import numpy as np

from stateferry.errors import LayoutError
from stateferry.layout.spec import Group, GroupKind, Int64Array, Pieces

NULL_BLOCK = 0
"""vLLM's block 0: stands in a table where there is no block."""


def adjacent(
    regions: tuple[Int64Array, ...], local_offsets: Int64Array, remote_offsets: Int64Array, sizes: Int64Array
) -> Int64Array:
    """Where runs start, `int64[runs]`: entry i continues entry i-1 when all `regions` labels are equal
    and both offsets go on where the entry before ended."""
    if not len(sizes):
        return np.empty(0, np.int64)
    goes_on = local_offsets[1:] == local_offsets[:-1] + sizes[:-1]
    goes_on &= remote_offsets[1:] == remote_offsets[:-1] + sizes[:-1]
    for label in regions:
        goes_on &= label[1:] == label[:-1]
    return np.concatenate(([0], np.flatnonzero(~goes_on) + 1))


def take(pieces: Pieces, index: Int64Array) -> Pieces:
    """The pieces at `index`, `int64[n]` or a boolean mask, in that order."""
    return Pieces(
        local_regions=pieces.local_regions[index],
        local_offsets=pieces.local_offsets[index],
        remote_regions=pieces.remote_regions[index],
        remote_offsets=pieces.remote_offsets[index],
        sizes=pieces.sizes[index],
    )


def merge(pieces: Pieces) -> Pieces:
    """The same bytes in fewer pieces: sorted by local offset, runs adjacent on both sides joined."""
    order = np.lexsort((pieces.local_offsets, pieces.local_regions))
    ordered = take(pieces, order)
    starts = adjacent(
        (ordered.local_regions, ordered.remote_regions),
        ordered.local_offsets,
        ordered.remote_offsets,
        ordered.sizes,
    )
    if len(starts) == len(ordered):
        return ordered
    joined = take(ordered, starts)
    return Pieces(
        local_regions=joined.local_regions,
        local_offsets=joined.local_offsets,
        remote_regions=joined.remote_regions,
        remote_offsets=joined.remote_offsets,
        sizes=np.add.reduceat(ordered.sizes, starts),
    )


def concatenate(parts: Sequence[Pieces]) -> Pieces:
    """All pieces of `parts`, one after the other."""
    empty = np.empty(0, np.int64)
    return Pieces(
        local_regions=np.concatenate([empty, *(p.local_regions for p in parts)]),
        local_offsets=np.concatenate([empty, *(p.local_offsets for p in parts)]),
        remote_regions=np.concatenate([empty, *(p.remote_regions for p in parts)]),
        remote_offsets=np.concatenate([empty, *(p.remote_offsets for p in parts)]),
        sizes=np.concatenate([empty, *(p.sizes for p in parts)]),
    )


def group_text(group: Group) -> str:
    """How messages name a group: its kind and, where known, its first layer."""
    if not group.layers:
        return f"{group.kind.value} group"
    return f"{group.kind.value} group of {group.layers[0].name}"


def needed_blocks(group: Group, local_tokens: int, total_tokens: int) -> range:
    """Positions in the group's table that must come from the producer.

    The consumer holds tokens [0, local_tokens) itself, and goes on with the token at position
    `total_tokens`. ATTENTION: every block that holds a token of [local, total). WINDOW: of those, the
    ones that the token at `total` still sees (the last window - 1 tokens before it). STATE: the column
    that holds the state after `total_tokens` tokens, whatever is held locally.
    """
    if not 0 <= local_tokens <= total_tokens:
        raise ValueError(f"local_tokens {local_tokens} is outside 0..total_tokens {total_tokens}")
    if total_tokens == 0:
        return range(0)
    size = group.block_tokens
    if group.kind is GroupKind.STATE:
        column = (total_tokens - 1) // size
        return range(column, column + 1)
    first_token = local_tokens
    if group.kind is GroupKind.WINDOW:
        first_token = max(local_tokens, total_tokens - group.window_tokens + 1)
    if first_token >= total_tokens:
        return range(0)
    return range(first_token // size, -(-total_tokens // size))


def pair(
    group: Group,
    positions: range,
    local_table: Sequence[int],
    remote_table: Sequence[int],
    remote_first_block: int,
) -> tuple[Int64Array, Int64Array]:
    """The block ids at `positions` on both sides, `int64[positions]` each.

    `local_table` starts at position 0; `remote_table` at position `remote_first_block`. Raises
    LayoutError when a position has no block on one side.
    """
    local = _ids_at(group, positions, local_table, 0, "this engine")
    remote = _ids_at(group, positions, remote_table, remote_first_block, "the producer")
    return local, remote


def _ids_at(group: Group, positions: range, table: Sequence[int], first: int, side: str) -> Int64Array:
    if not len(positions):
        return np.empty(0, np.int64)
    start, stop = positions.start - first, positions.stop - first
    if start < 0 or stop > len(table):
        missing = positions.start if start < 0 else max(positions.start, first + len(table))
        raise LayoutError(
            f"{group_text(group)}: position {missing} is needed, but {side}'s table covers positions "
            f"{first} to {first + len(table) - 1}"
        )
    ids = np.asarray(table[start:stop], dtype=np.int64)
    nulls = np.flatnonzero(ids == NULL_BLOCK)
    if len(nulls):
        raise LayoutError(
            f"{group_text(group)}: position {positions.start + int(nulls[0])} is needed, but {side}'s "
            f"table has the null block there"
        )
    return ids
