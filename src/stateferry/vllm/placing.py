"""Out of the waiting room into the cache: what `load_mode: sync` does before a step's forward.

A copy inside this process, of bytes that are proven: nothing here waits for anybody, and no peer can make it
fail. On a device it is queued on the stream that the forward runs on, so it is also before a graph that is
replayed, whether or not vLLM calls the hook inside its forward context.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from stateferry.block_ids import BlockIds
from stateferry.errors import LayoutError, StateFerryError
from stateferry.ids import RequestId
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.spec import CacheLayout, Int64Array
from stateferry.session import GroupLoad, Load
from stateferry.vllm.memory import TorchMemory


class Placer:
    """One per worker that reads ahead. vLLM's worker thread only."""

    def __init__(self, layout: CacheLayout, room: CacheLayout, memory: TorchMemory) -> None:
        self._memory = memory
        self._plan = _whole_plan(layout, room)
        self._waiting: dict[RequestId, Load] = {}

    def arrived(self, loads: Iterable[Load]) -> None:
        """The ferry has these in the room; they stay until `placed` or closed."""
        self._waiting |= {load.request_id: load for load in loads}

    def has(self, request_id: RequestId) -> bool:
        """Whether this request's hand-off waits here."""
        return request_id in self._waiting

    def forget(self, request_id: RequestId) -> None:
        """Nobody will ask for it."""
        self._waiting.pop(request_id, None)

    def place(self, request_id: RequestId, groups: Sequence[GroupLoad], problem: str = "") -> None:
        """Copy a hand-off into its blocks; it waits no more.

        Raises StateFerryError where that cannot be done: a defect, and the request is already part of the
        step, so a forward after this would answer from bytes that nobody wrote.
        """
        waiting = self._waiting.pop(request_id, None)
        if problem or waiting is None:
            raise StateFerryError(
                f"request {request_id} was admitted although its hand-off cannot be placed: "
                f"{problem or 'it does not wait here'}. This step must not run; please report it"
            )
        arrived = {part.group: part for part in waiting.groups}
        for part in groups:
            sources = _slots_of(arrived[part.group], part.remote_block_ids)
            self._memory.copy(self._plan.merged_pieces(part.group, part.local_block_ids, sources))


def _slots_of(arrived: GroupLoad, blocks: BlockIds) -> Int64Array:
    """Where the producer's `blocks` lie in the room, `int64[blocks]`. Raises StateFerryError for one that is
    not there."""
    there, wanted = np.asarray(arrived.remote_block_ids), np.asarray(blocks)
    order = np.argsort(there, kind="stable")
    at = order[np.minimum(np.searchsorted(there, wanted, sorter=order), len(there) - 1)]
    missing = np.flatnonzero(there[at] != wanted)
    if len(missing):
        raise StateFerryError(
            f"group {arrived.group}: the producer's block {int(wanted[missing[0]])} is to be placed, but it "
            "is not in the waiting room. This step must not run; please report it"
        )
    slots: Int64Array = np.asarray(arrived.local_block_ids)[at]
    return slots


def _whole_plan(layout: CacheLayout, room: CacheLayout) -> Plan:
    """Room to cache. Raises LayoutError unless it fills every byte of every block."""
    plan = make_plan(layout, room)
    for index, group in enumerate(layout.groups):
        if group.transfers:
            expected = sum(t.block_bytes for layer in group.layers for t in layer.tensors)
            if plan.group_bytes(index) != expected:
                raise LayoutError(
                    f"group {index}: {plan.group_bytes(index)} bytes of a block would be placed, it holds "
                    f"{expected}"
                )
    return plan
