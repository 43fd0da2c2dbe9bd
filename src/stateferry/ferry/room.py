"""Who waits in the waiting room: slots, and hand-offs that have arrived there and are not placed yet."""

from dataclasses import dataclass, field

from stateferry.block_ids import BlockIds
from stateferry.errors import LayoutError
from stateferry.ferry.reading import Fence
from stateferry.ids import RequestId
from stateferry.layout.blocks import needed_blocks, pair
from stateferry.layout.room import slot_count
from stateferry.layout.spec import CacheLayout
from stateferry.session import GroupLoad, Load
from stateferry.wire import Offer


@dataclass(slots=True)
class Room:
    """Ferry thread only. Every slot is free, being read into, or waiting to be placed."""

    layout: CacheLayout
    waiting: dict[RequestId, Load] = field(default_factory=dict)
    """Arrived, proven, and released by their producers: nothing can go wrong with them any more."""
    free: list[int] = field(init=False)
    _used_until: dict[int, Fence] = field(default_factory=dict)
    """Until when a device may still copy what was last placed out of a slot, whoever has the slot now."""

    def __post_init__(self) -> None:
        self.free = list(range(slot_count(self.layout)))

    def admit(self, request_id: RequestId, offer: Offer) -> tuple[Load, Fence] | None:
        """A load of everything the offer has into free slots, and when they may be written; None: no room.

        Raises LayoutError for tables that do not fit.
        """
        parts: list[tuple[int, range, BlockIds]] = []
        for index, group in enumerate(self.layout.groups):
            positions = needed_blocks(group, 0, offer.num_tokens) if group.transfers else range(0)
            if positions:
                table = offer.block_ids[index]
                _, remote = pair(group, positions, [1] * positions.stop, table, offer.first_blocks[index])
                parts.append((index, positions, BlockIds(remote)))
        count = sum(len(positions) for _, positions, _ in parts)
        if not parts:
            raise LayoutError("the offer has no block that needs reading")
        if count > len(self.free):
            return None
        self.free.sort()
        taken, self.free = self.free[:count], self.free[count:]
        # They stay the slots' own: this read may end unposted before they are passed, and the next one begin.
        fences = {self._used_until[slot] for slot in taken if slot in self._used_until}
        loads, start = [], 0
        for index, positions, ids in parts:
            slots = BlockIds(taken[start : start + len(ids)])
            start += len(ids)
            loads.append(GroupLoad(index, positions.start, slots, ids))
        return Load(request_id, 0, tuple(loads)), lambda: all(f() for f in fences)

    def leave(self, load: Load, used_until: Fence | None = None) -> None:
        """Its slots are free, once `used_until` says True, which is after what was said of them before."""
        slots = [slot for part in load.groups for slot in part.local_block_ids]
        if used_until is not None:
            self._used_until.update(dict.fromkeys(slots, used_until))
        self.free += slots
