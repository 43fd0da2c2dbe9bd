"""Reads into the waiting room, ahead of vLLM's blocks: how they begin and what becomes of them.

opened --room--> read ahead --all bytes proven, producer released--> waiting --placed | closed--> gone
   |                |
   no room          failed, late --------------------> apart: vLLM gives blocks, and its policy decides
"""

import logging
from dataclasses import dataclass, field, replace

from stateferry.errors import LayoutError
from stateferry.ferry.reading import Fence, Reading
from stateferry.ferry.reports import reason_of
from stateferry.ferry.room import Room
from stateferry.ids import RequestId
from stateferry.layout.spec import CacheLayout
from stateferry.session import Cause, Handoff, Load
from stateferry.transport.base import Peer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadAhead:
    """Ferry thread only. Without a room (`load_mode: async`) it never does anything."""

    room: Room | None
    _stuck: list[Reading] = field(default_factory=list)
    """Reads past their deadline that may still write into their slots. Their requests go on without them."""
    _arrived: list[Load] = field(default_factory=list)
    _apart: list[RequestId] = field(default_factory=list)

    @classmethod
    def into(cls, layout: CacheLayout | None) -> "ReadAhead":
        """A room of that layout; None: no room."""
        return cls(None if layout is None else Room(layout))

    @property
    def open_count(self) -> int:
        """Hand-offs that wait to be placed, and slots that a stuck read keeps."""
        return len(self._stuck) + (len(self.room.waiting) if self.room is not None else 0)

    @property
    def stuck_count(self) -> int:
        """Reads that may still write into their slots although nobody waits for them."""
        return len(self._stuck)

    def begin(
        self, handoff: Handoff, now_s: float, timeout_s: float, *, allowed: bool = True
    ) -> Reading | None:
        """Order a read of the whole offer into the room. None: it has no room, is not `allowed` there, or its
        tables do not fit, which is then the hand-off's failure."""
        if self.room is None or handoff.failure:
            return None
        try:
            found = self.room.admit(handoff.request_id, handoff.offer) if allowed else None
        except LayoutError as e:
            handoff.fail(str(e), Cause.TABLES)
            found = None
        if found is None:
            self._apart.append(handoff.request_id)
            return None
        load, fence = found
        handoff.order_load(load, now_s, timeout_s)
        return Reading(handoff, fence, now_s, ahead=True)

    def arrived(self, reading: Reading) -> None:
        """Every byte is in and proven: the slots are the hand-off's until it is placed or closed."""
        load = reading.handoff.load
        assert self.room is not None
        assert load is not None
        self.room.waiting[load.request_id] = load
        self._arrived.append(load)

    def gone(self, reading: Reading) -> None:
        """It ended otherwise, and is quiet."""
        load = reading.handoff.load
        assert self.room is not None
        assert load is not None
        self.room.leave(load)

    def fall_back(self, reading: Reading) -> Handoff:
        """It failed: its hand-off goes on without a load. Give vLLM's policy something to judge if bytes
        were to be read; before that the offer is merely worth nothing."""
        handoff = reading.handoff
        if reading.tried:
            self._apart.append(handoff.request_id)
        return replace(handoff, load=None, deadline_s=float("inf"), failure=reason_of(handoff, reading))

    def keep_stuck(self, reading: Reading) -> None:
        """Nobody waits for it any more; its slots must, unless it hears a cancel."""
        reading.cancel()
        self._stuck.append(reading)

    def look_after_stuck(self) -> None:
        """Free the slots of reads that have become quiet."""
        for reading in list(self._stuck):
            for part in reading.parts:
                part.transfer.poll()
            if not any(part.restless for part in reading.parts):
                self._stuck.remove(reading)
                self.gone(reading)
                logger.warning(
                    "quarantine of the waiting room over: request=%s: nothing can land any more",
                    reading.handoff.request_id,
                )

    def wind_down(self) -> None:
        """No ferry will read any more: what waits stays as it is, and whoever has it may place it."""
        self.look_after_stuck()
        if self.room is not None:
            self.room.waiting.clear()

    def cancel(self) -> None:
        """Stop stuck reads where the library can."""
        for reading in self._stuck:
            reading.cancel()

    def pending_peers(self) -> set[Peer]:
        """Connections over which stuck reads may still write."""
        return {part.peer for reading in self._stuck for part in reading.parts if part.restless}

    def placed(self, request_id: RequestId, used_until: Fence) -> None:
        """The worker half copied it out; its slots are free once `used_until` says True."""
        if self.room is not None and (load := self.room.waiting.pop(request_id, None)) is not None:
            self.room.leave(load, used_until)

    def close(self, request_id: RequestId) -> None:
        """Nobody will place it."""
        if self.room is not None and (load := self.room.waiting.pop(request_id, None)) is not None:
            self.room.leave(load)

    def take(self) -> tuple[list[Load], list[RequestId]]:
        """What arrived, and what does not wait here, since the last call."""
        news = self._arrived, self._apart
        self._arrived, self._apart = [], []
        return news
