"""What to do about a read that failed, as a decision without I/O.

    failed --quiet?--no--> wait (no try begins while a byte of the last one may land)
              | yes
              +-- tries left, connection works --> post it again
              +-- last try, or the connection broke --> over a fresh connection, once
              +-- nothing left, or the hand-off cannot succeed any more --> give up

Giving up fails the request; vLLM's policy then computes its prompt here, or answers with an error.
"""

import enum
from dataclasses import dataclass


class Next(enum.Enum):
    """What follows from a failed read."""

    WAIT = "wait"
    REPOST = "repost"
    RECONNECT = "reconnect"
    GIVE_UP = "give up"


@dataclass(slots=True)
class Recovery:
    """How far one producer rank's part of a read has got in being tried again."""

    budget: int
    """How many tries there are after the first."""
    retries: int = 0
    """How many of them were posted."""
    reconnected: bool = False

    def after_failure(self, *, quiet: bool, usable: bool, hopeful: bool) -> Next:
        """Decide. After REPOST, and after RECONNECT once there is a connection, post and call `posted`.

        `quiet`: no byte of the failed try can land any more. `usable`: its connection can be posted
        on. `hopeful`: with these bytes the hand-off would still succeed (deadline, lease, nobody gave up).
        """
        if not hopeful:
            return Next.GIVE_UP
        if not quiet:
            return Next.WAIT
        if self.reconnected or self.retries >= self.budget:
            return Next.GIVE_UP
        if usable and self.retries + 1 < self.budget:
            return Next.REPOST
        self.reconnected = True
        return Next.RECONNECT

    def posted(self) -> None:
        """The next try was posted."""
        self.retries += 1
