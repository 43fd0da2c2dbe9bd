"""What the ferry thread has to say to vLLM, until somebody takes it."""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stateferry.ids import RequestId, shown
from stateferry.session import Kept, Outcome, Report, Results

logger = logging.getLogger(__name__)


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
    ) -> None:
        """Add what happened, and log how hand-offs ended."""
        with_blocks = [e.report for e in ended if e.had_blocks]
        for e in ended:
            _log(e.report)
        self.add(
            Results(
                sent=frozenset(sent),
                received=frozenset(r.request_id for r in with_blocks),
                failed=frozenset(r.request_id for r in with_blocks if r.outcome is not Outcome.RECEIVED),
                lost=frozenset(lost),
                reports=tuple(e.report for e in ended),
                kept=tuple(kept),
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


def _log(report: Report) -> None:
    """One line per hand-off: loud when it failed."""
    level = logging.WARNING if report.outcome is Outcome.FAILED else logging.DEBUG
    logger.log(
        level,
        "hand-off %s request=%s transfer=%s tokens=%d bytes=%s pieces=%d waited_ms=%.1f post_ms=%.1f "
        "wire_ms=%.1f total_ms=%.1f reason=%s",
        report.outcome.value,
        report.request_id,
        shown(report.transfer_id),
        report.tokens,
        report.bytes_by_group,
        report.pieces,
        report.waited_s * 1e3,
        report.post_s * 1e3,
        report.wire_s * 1e3,
        report.total_s * 1e3,
        report.reason or "-",
    )
