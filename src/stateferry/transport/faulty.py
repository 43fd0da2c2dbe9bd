"""Transfers that go wrong in one way each: the parts that `faults` is made of.

Time is counted in looks (`poll`), so that a test sees the same on every machine. Whatever lands, lands
inside a look: nothing here has a thread.
"""

from collections.abc import Callable, Sequence

from stateferry.transport.base import Transfer, TransferState


class FailedAtOnce(Transfer):
    """Never began."""

    bytes_done = 0
    quiet = True

    def __init__(self, why: str) -> None:
        self.error = f"faults: {why}"

    def poll(self) -> TransferState:
        return TransferState.FAILED


class Hanging(Transfer):
    """Never ends by itself."""

    bytes_done = 0

    def __init__(self, *, deaf: bool) -> None:
        """`deaf`: a cancel changes nothing."""
        self._deaf = deaf

    @property
    def quiet(self) -> bool:
        return bool(self.error)

    def poll(self) -> TransferState:
        return TransferState.FAILED if self.error else TransferState.PENDING

    def cancel(self) -> None:
        if not self._deaf:
            self.error = "faults: cancelled"


class Delayed(Transfer):
    """Begins at a later look; as good as any other then."""

    def __init__(self, post: Callable[[], Transfer], polls: int) -> None:
        self._post = post
        self._polls_left = polls
        self._inner: Transfer | None = None

    @property
    def bytes_done(self) -> int:
        return self._inner.bytes_done if self._inner is not None else 0

    @property
    def quiet(self) -> bool:
        return self._inner.quiet if self._inner is not None else bool(self.error)

    def poll(self) -> TransferState:
        if self._inner is None:
            if self.error:
                return TransferState.FAILED
            if self._polls_left > 0:
                self._polls_left -= 1
                return TransferState.PENDING
            self._inner = self._post()
        state = self._inner.poll()
        self.error = self._inner.error
        return state

    def cancel(self) -> None:
        if self._inner is not None:
            self._inner.cancel()
        else:
            self.error = "faults: cancelled"


class LateLanding(Transfer):
    """Fails, and its bytes arrive after that. A cancel comes too late."""

    bytes_done = 0

    def __init__(self, post: Callable[[], Transfer], fails_after: int, lands_after: int) -> None:
        """`lands_after` counts looks from the first one on, as `fails_after` does."""
        self._post = post
        self._fails_after = fails_after
        self._lands_after = lands_after
        self._polls = 0
        self._inner: Transfer | None = None

    @property
    def quiet(self) -> bool:
        return self._inner is not None and self._inner.quiet and bool(self.error)

    def poll(self) -> TransferState:
        self._polls += 1
        if self._polls > self._fails_after:
            self.error = "faults: failed while it was still writing"
        if self._inner is None and self._polls > self._lands_after:
            self._inner = self._post()
        if self._inner is not None:
            self._inner.poll()
        return TransferState.FAILED if self.error else TransferState.PENDING


class Several(Transfer):
    """Some transfers as one: fails with the first that fails, is quiet with the last."""

    def __init__(self, transfers: Sequence[Transfer], copies: int = 1) -> None:
        """`copies`: how often the same bytes are among them."""
        self._transfers = transfers
        self._copies = copies

    @property
    def bytes_done(self) -> int:
        return sum(t.bytes_done for t in self._transfers) // self._copies

    @property
    def quiet(self) -> bool:
        return all(t.quiet for t in self._transfers)

    def poll(self) -> TransferState:
        states = [t.poll() for t in self._transfers]
        if not self.error:
            self.error = next((t.error for t in self._transfers if t.error), "")
        if self.error:
            return TransferState.FAILED
        done = all(state is TransferState.DONE for state in states)
        return TransferState.DONE if done else TransferState.PENDING

    def cancel(self) -> None:
        for transfer in self._transfers:
            transfer.cancel()
