"""One request of MoRI's: how it stands, and when none of its bytes can land any more.

MoRI's own `TransferStatus` says how a request ended, not when it is quiet: it is FAILED at the first work
request that failed, or that could not be posted, while others of the same request may still be on their way
into our memory, and MoRI reports nothing of those. So a request is *over* when

- it succeeded: MoRI says so only after its last work request; or
- it failed, and a request that was posted later over the same session succeeded, where a session is one
  queue pair: work requests of a reliable connection complete in the order in which they were posted, so the
  earlier ones had completed, or had never been posted. Only then is that argument used (`ordered`); or
- it failed by the completion of a work request, its session is one queue pair, and `COMPLETED_QUIET_S` have
  passed. That completion is the last thing a queue pair does: it is in its error state then, flushes what
  waits behind, and drops what still arrives; the time is for writes on their way through the machine; or
- it failed, however, and `quiet_after_s` have passed since. By then every work request has completed or its
  queue pair has given it up (`mori_options`).

A request that is pending is never over, however long that takes. MoRI cannot cancel one.

The status object must live as long: MoRI writes to it from its own threads through a bare pointer. `Keeper`
holds it until its request is over, whoever else drops it.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from stateferry.transport.base import TransferState

FULL = "SQ full"
"""How MoRI begins to say that its send queue had no room. Nothing else that fails is worth posting again."""

COMPLETIONS = (
    "local length error",
    "local QP operation error",
    "local protection error",
    "Work Request Flushed Error",
    "bad response error",
    "local access error",
    "remote invalid request error",
    "remote access error",
    "remote operation error",
    "transport retry counter exceeded",
    "RNR retry counter exceeded",
    "remote aborted error",
)
"""What libibverbs says of a work request that completed with an error; MoRI passes it on in its message."""

COMPLETED_QUIET_S = 2.0


class Order:
    """Which requests of one session are known to be over because a later one succeeded."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered
        """Whether the session is one queue pair."""
        self._posted = 0
        self._succeeded = 0

    def next(self) -> int:
        """Number of a request that is posted now, from 1."""
        self._posted += 1
        return self._posted

    def succeeded(self, number: int) -> None:
        """That request succeeded."""
        self._succeeded = max(self._succeeded, number)

    def passed(self, number: int) -> bool:
        """Whether a later request than that succeeded, and says something about it."""
        return self.ordered and number < self._succeeded


class Request:
    """One posted batch over one session. Never raises."""

    def __init__(self, order: Order, clock: Callable[[], float], quiet_after_s: float) -> None:
        self.error = ""
        """Why it failed; empty otherwise."""
        self.state = TransferState.PENDING
        self.status: Any = None  # MoRI's TransferStatus; None where posting raised
        self.session: Any = None
        """MoRI's, which must not end before its requests."""
        self._order = order
        self._clock = clock
        self._quiet_after_s = quiet_after_s
        self._number = order.next()
        self._failed_s = 0.0

    @property
    def full(self) -> bool:
        """Whether it failed because MoRI's send queue was full."""
        return self.state is TransferState.FAILED and FULL in self.error

    @property
    def over(self) -> bool:
        """Whether no byte of it can land any more."""
        if self.state is TransferState.FAILED:
            late = self._clock() - self._failed_s >= self._patience_s
            return late or self._order.passed(self._number)
        return self.state is TransferState.DONE

    @property
    def _patience_s(self) -> float:
        """How long after its failure it may still write."""
        if self._order.ordered and any(text in self.error for text in COMPLETIONS):
            return min(COMPLETED_QUIET_S, self._quiet_after_s)
        return self._quiet_after_s

    def look(self) -> TransferState:
        """Where it stands, without waiting. Looking is what moves XGMI's requests on."""
        if self.state is TransferState.PENDING:
            try:
                if self.status.Succeeded():
                    self.state = TransferState.DONE
                    self._order.succeeded(self._number)
                elif self.status.Failed():
                    self.failed(f"{self.status.Message()} ({self.status.Code()})")
            except Exception as e:  # a C++ exception comes as one of many kinds
                self.failed(f"its status cannot be read: {e}")
        return self.state

    def failed(self, why: str) -> None:
        """It ended badly just now, as far as anybody knows."""
        self.state, self.error, self._failed_s = TransferState.FAILED, why, self._clock()


class Verdict(enum.Enum):
    """What several requests say together."""

    DONE = "done"
    FAILED = "failed"
    PENDING = "pending"


def verdict(requests: Sequence[Request]) -> Verdict:
    """Look at every request: FAILED if one failed, else PENDING if one is; DONE for none. Never waits."""
    states = [request.look() for request in requests]
    if TransferState.FAILED in states:
        return Verdict.FAILED
    return Verdict.PENDING if TransferState.PENDING in states else Verdict.DONE


class Keeper:
    """Holds requests until they are over."""

    def __init__(self) -> None:
        self._kept: list[Request] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: Request) -> None:
        """Hold one more, and let go of those that are over."""
        self.sweep()
        self._kept.append(request)

    def sweep(self) -> None:
        """Look at those that nobody else may look at any more; let go of what is over."""
        for request in self._kept:
            request.look()
        self._kept = [request for request in self._kept if not request.over]
