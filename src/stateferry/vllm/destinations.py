"""Which blocks a hand-off is read into, or placed in, and which of the producer's blocks go there.

Under `load_mode: sync` vLLM has put its hashes on all of a request's blocks already, because the request runs
in the step in which it gets them; under `async` only blocks of the local prefix have one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stateferry.block_ids import BlockIds
from stateferry.errors import LayoutError
from stateferry.layout.blocks import needed_blocks, pair
from stateferry.layout.spec import Group, GroupKind
from stateferry.session import GroupLoad
from stateferry.wire import Offer


def group_loads(
    groups: Sequence[Group], offer: Offer, blocks: Any, hashed_from: int | None
) -> tuple[GroupLoad, ...]:
    """Destinations and sources, given vLLM's `blocks` of a request. Raises LayoutError if they do not pair.

    `hashed_from`: vLLM has put its hashes on all blocks from this token on; None: cached blocks are those
    that have one.
    """
    loads = []
    for index, group in enumerate(groups):
        table = blocks.blocks[index]
        positions = needed_blocks(group, 0, offer.num_tokens) if group.transfers else range(0)
        if group.kind is not GroupKind.STATE:
            positions = (
                not_cached(positions, table)
                if hashed_from is None
                else not_held(group, positions, table, hashed_from)
            )
        if not positions:
            continue
        local_table = [b.block_id for b in table]  # vLLM's blocks are objects: each must be asked
        ours, theirs = pair(group, positions, local_table, offer.block_ids[index], offer.first_blocks[index])
        destinations = table[positions.start : positions.stop]
        hashed = hashed_from is None
        taken = next((b.block_id for b in destinations if b.ref_cnt > 1 or (hashed and b.block_hash)), None)
        if taken is not None:
            raise LayoutError(f"group {index}: block {taken} is cached or shared with another request")
        if hashed_from is not None and group.kind is GroupKind.STATE:
            ours = np.append(ours, np.asarray(later_columns(group, positions, table), np.int64))
            theirs = np.repeat(theirs, len(ours))
        loads.append(GroupLoad(index, positions.start, BlockIds(ours), BlockIds(theirs)))
    return tuple(loads)


def not_cached(positions: range, table: Sequence[Any]) -> range:
    """Those of `positions` that follow the last block of `table` found in the local prefix cache.

    Groups hit differently far, and vLLM counts the attention group's hit only, so the count of local tokens
    does not tell what a window group has.
    """
    cached = [i for i in positions if i < len(table) and table[i].block_hash is not None]
    return range(cached[-1] + 1, positions.stop) if cached else positions


def not_held(group: Group, positions: range, table: Sequence[Any], local_tokens: int) -> range:
    """Those of `positions` past the local prefix, where hashes do not tell which blocks that is.

    Attention holds the prefix that vLLM counted. A window group may hold less of it, and its few blocks are
    placed anew unless another request has them, too.
    """
    if group.kind is GroupKind.ATTENTION:
        return range(max(positions.start, local_tokens // group.block_tokens), positions.stop)
    shared = [i for i in positions if i < len(table) and table[i].ref_cnt > 1]
    return range(shared[-1] + 1, positions.stop) if shared else positions


def later_columns(group: Group, positions: range, table: Sequence[Any]) -> list[int]:
    """Columns behind the state's own that this step may run in. vLLM moves a state there before the hook in
    which we place it, so it must be placed there, too: at a block's border, or where a chunk ends in a
    later block."""
    last = len(table) - group.scratch_slots
    return [b.block_id for b in table[positions.stop : last] if not b.is_null]
