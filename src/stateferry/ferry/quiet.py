"""Log lines that a peer can cause: some of them, and how many were left out."""

from dataclasses import dataclass

INTERVAL_S = 10.0


@dataclass(slots=True)
class LogLimit:
    """At most one line every `INTERVAL_S`, so that nobody can fill a disk from outside."""

    next_s: float = float("-inf")
    skipped: int = 0

    def may_log(self, now_s: float) -> bool:
        """Whether it is time for a line again."""
        if now_s < self.next_s:
            self.skipped += 1
            return False
        self.next_s = now_s + INTERVAL_S
        return True

    def left_out(self) -> str:
        """How many were left out since the last line, for the end of this one."""
        skipped, self.skipped = self.skipped, 0
        return f" ({skipped} more like this since the last line)" if skipped else ""
