"""What the ferry thread has to say to vLLM, until somebody takes it."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stateferry.ids import RequestId, TransferId
from stateferry.session import Answered, Kept, Load, Outcome, Report, Results


@dataclass(slots=True)
class Ended:
    """What became of a hand-off."""

    report: Report
    had_blocks: bool
    """Whether vLLM waits to hear of it."""


class Outbox:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = Results()
        self._news = threading.Event()

    def put(
        self,
        sent: Iterable[RequestId],
        ended: Sequence[Ended],
        lost: Iterable[RequestId],
        kept: Iterable[Kept] = (),
        waiting: Iterable[Load] = (),
        apart: Iterable[RequestId] = (),
        answered: Iterable[Answered] = (),
        renounced: Iterable[TransferId] = (),
    ) -> None:
        """Add what happened."""
        with_blocks = [e.report for e in ended if e.had_blocks]
        self.add(
            Results(
                sent=frozenset(sent),
                received=frozenset(r.request_id for r in with_blocks),
                failed=frozenset(r.request_id for r in with_blocks if r.outcome is not Outcome.RECEIVED),
                lost=frozenset(lost),
                waiting=tuple(waiting),
                apart=frozenset(apart),
                answered=tuple(answered),
                reports=tuple(e.report for e in ended),
                kept=tuple(kept),
                renounced=tuple(renounced),
            )
        )

    def add(self, new: Results) -> None:
        """Add what happened."""
        with self._lock:
            self._results = self._results.and_then(new)
            self._news.set()

    def take(self) -> Results:
        """Everything since the last call; returns at once."""
        with self._lock:
            results, self._results = self._results, Results()
            self._news.clear()
        return results

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take."""
        return self._news.wait(timeout_s)
