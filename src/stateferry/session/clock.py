"""Where the ferry's time comes from: leases and deadlines are counted on it, so tests run on their own time.

Transports that wait for their library count with clocks of their own, which tests replace, too."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and the date."""

    def now_s(self) -> float:
        """Seconds since some fixed point of this process."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970, for what other processes read. Nothing is decided by it."""
        ...


class SystemClock:
    """The machine's clock since it was started. It runs on while the machine sleeps, as its peers' leases do;
    Linux's monotonic clock does not."""

    def now_s(self) -> float:
        """Seconds; never goes back."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix_s(self) -> float:
        """The machine's idea of the date."""
        return time.time()


class VirtualClock:
    """A clock that tests move by hand."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """The time that was set."""
        return self._now_s

    def unix_s(self) -> float:
        """The same: this clock's days began when its process did."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        self._now_s += seconds
