"""Which blocks a hand-off is placed in, where vLLM has put its hashes on all of them already.

It does that under `load_mode: sync`, because the request runs in the step in which it gets its blocks.
"""

from collections.abc import Sequence
from typing import Any

from stateferry.layout.spec import Group, GroupKind


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
