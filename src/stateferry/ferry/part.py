"""What one producer rank contributes to a read: one transfer, and its next try when that failed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from stateferry.errors import StateFerryError
from stateferry.ferry.link import Link, LinkState
from stateferry.layout.spec import Pieces
from stateferry.session import Next, Recovery
from stateferry.transport.base import Peer, Transfer, TransferState

logger = logging.getLogger(__name__)

Poster = Callable[[Peer, Pieces, int], Transfer]
"""Posts a batch over a connection as read number so and so (from 1) of its hand-off."""


@dataclass(slots=True)
class Part:
    """Ferry thread only. Its blocks are its transfer's until that is quiet; there is never a second
    transfer before."""

    rank: int
    batch: Pieces
    peer: Peer
    connection: int
    """Which of its link's connections `peer` is."""
    transfer: Transfer
    recovery: Recovery
    state: TransferState = TransferState.PENDING
    error: str = ""
    """Set once there is no next try."""
    waits: bool = False
    """For a fresh connection."""

    @property
    def reads(self) -> int:
        """Tries so far, the first included."""
        return 1 + self.recovery.retries

    @property
    def done(self) -> bool:
        """Whether every byte is in."""
        return self.state is TransferState.DONE and not self._why()

    @property
    def restless(self) -> bool:
        """Whether a byte may still land."""
        return not self.transfer.quiet

    def advance(self, link: Link | None, hopeful: bool, greet_again: Callable[[Link], None]) -> bool:
        """Look at the transfer, and decide about the next try. True: post it now (see `post_again`).

        `hopeful`: with these bytes the hand-off would still succeed.
        """
        self.state = self.transfer.poll()
        why = self._why()
        if not why or self.error:
            return False
        if self.waits:
            return self._fresh(link, why, hopeful)
        quiet = self.transfer.quiet
        usable = link is not None and link.connections == self.connection and self.peer.usable
        step = self.recovery.after_failure(quiet=quiet, usable=usable, hopeful=hopeful)
        if step is Next.WAIT:
            self.transfer.cancel()
        elif step is Next.GIVE_UP:
            self._give_up(why)
        elif step is Next.REPOST:
            logger.debug("read of producer rank %d failed and is posted again: %s", self.rank, why)
            return True
        elif link is not None:
            logger.debug("read of producer rank %d failed; over a fresh connection: %s", self.rank, why)
            self.waits = True
            if link.connections == self.connection:
                greet_again(link)
            return self._fresh(link, why, hopeful)
        return False

    def post_again(self, link: Link, post: Poster) -> None:
        """The next try, over whatever connection the link has now."""
        assert link.peer is not None
        self.waits = False
        self.recovery.posted()
        self.peer, self.connection = link.peer, link.connections
        try:
            self.transfer = post(self.peer, self.batch, self.reads)
            self.state = TransferState.PENDING
        except (ValueError, StateFerryError) as e:
            self.error = f"could not be posted again: {e}"

    def _fresh(self, link: Link | None, why: str, hopeful: bool) -> bool:
        if not hopeful or link is None or link.state is not LinkState.READY:
            self._give_up(why)
        elif link.connections != self.connection:
            return True
        elif not link.greeting_again:
            self._give_up(f"{why}; no fresh connection: {link.reason}")
        return False

    def _give_up(self, why: str) -> None:
        tries = f" (the last of {self.reads} tries)" if self.reads > 1 else ""
        self.error = f"{why}{tries}"

    def _why(self) -> str:
        """Why the transfer cannot be used; empty: it can, or is not over."""
        if self.state is TransferState.FAILED:
            return self.transfer.error or "the transport gave no reason"
        arrived, expected = self.transfer.bytes_done, self.batch.total_bytes
        if self.state is TransferState.DONE and arrived != expected:
            return f"{arrived} bytes arrived, {expected} were expected"
        return ""
