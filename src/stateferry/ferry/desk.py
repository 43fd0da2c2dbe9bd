"""Where vLLM's threads and the ferry thread meet: orders go one way, results and numbers the other."""

import os
import threading
from collections import deque

from stateferry.ferry.link import LinkState
from stateferry.ferry.outbox import Outbox
from stateferry.ferry.reading import Fence
from stateferry.session import Counters, Orders, refused


class Desk:
    """Any thread, unless said. Nothing here waits."""

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is something for the ferry thread."""
        self.stopping = threading.Event()
        self.outbox = Outbox()
        self.defect = ""
        """Why the ferry takes no more orders, although nobody stopped it."""
        self.counters = Counters()
        """What happened on this rank as a producer."""
        self.peers: dict[LinkState, int] = {}
        self.quarantined_count = 0
        self._inbox: deque[tuple[Orders, Fence]] = deque()
        self._open_count = 0
        self._in_hand = 0
        """Orders that this turn took and has not counted as open yet."""

    @property
    def open_count(self) -> int:
        """Orders that are not taken yet, and hand-offs that are open."""
        # In this order: orders move from the inbox into hand and then count as open, and each is counted
        # where it goes before it is taken from where it was.
        return len(self._inbox) + self._in_hand + self._open_count

    def put(self, orders: Orders, fence: Fence) -> None:
        """Orders for the ferry thread, which `ring` wakes."""
        self._inbox.append((orders, fence))

    def ring(self) -> None:
        """Wake the ferry thread."""
        os.eventfd_write(self.wake, 1)

    def refuse_orders(self) -> None:
        """Answer orders that nobody will carry out. By the ferry thread; by another once that has ended."""
        reason = self.defect or "the ferry of this rank was stopped"
        while self._inbox:
            orders, _ = self._inbox.popleft()
            self.outbox.add(refused(orders, reason))

    def close(self) -> None:
        """Once the ferry thread has ended."""
        os.close(self.wake)

    # -- ferry thread ----------------------------------------------------------------------------

    def woken(self) -> None:
        """`wake` was readable."""
        os.eventfd_read(self.wake)

    def next_orders(self) -> tuple[Orders, Fence] | None:
        """The oldest orders that nobody took; None: there are none."""
        if not self._inbox:
            return None
        self._in_hand += 1
        return self._inbox.popleft()

    def count_open(self, count: int) -> None:
        """So many hand-offs are open, those among them that were in hand."""
        self._open_count = count
        self._in_hand = 0
