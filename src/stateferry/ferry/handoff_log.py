"""One line for each hand-off that ends on a consumer rank: loud when it failed or was slow."""

import logging
from collections.abc import Iterable

from stateferry.ferry.peer_log import PeerLog
from stateferry.ids import shown
from stateferry.session import Clock, Outcome, Report

logger = logging.getLogger(__name__)


class HandoffLog:
    """Ferry thread only."""

    def __init__(self, clock: Clock, slow_s: float) -> None:
        self._clock = clock
        self._slow_s = slow_s
        self._peers = PeerLog()

    def ended(self, reports: Iterable[Report]) -> None:
        """Hand-offs ended. Of many that one peer's fault ended, the last are only counted (see `tick`)."""
        for report in reports:
            loud = report.total_s >= self._slow_s or report.retries > 0
            if report.reason and report.outcome is not Outcome.RECEIVED:
                now_s = self._clock.now_s()
                loud = self._peers.may_show(report.peer, report.cause.value, report.reason, now_s)
            logger.log(logging.INFO if loud else logging.DEBUG, "%s", _Line(report))

    def tick(self) -> None:
        """Say what was only counted."""
        for line in self._peers.summaries(self._clock.now_s()):
            logger.warning("hand-offs fail: %s", line)


class _Line:
    """Put together only if somebody reads it."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __str__(self) -> str:
        r = self._report
        times = {
            "queued": r.queued_s,
            "wait": r.waited_s,
            "plan": r.plan_s,
            "post": r.post_s,
            "wire": r.wire_s,
            "total": r.total_s,
        }
        return (
            f"hand-off {r.outcome.value} request={r.request_id} transfer={shown(r.transfer_id)} "
            f"rank={r.tp_rank} peer={r.peer or '-'} tokens={r.tokens} bytes={sum(r.bytes_by_group)} "
            f"pieces={r.pieces} retries={r.retries} "
            + " ".join(f"{name}_ms={seconds * 1e3:.2f}" for name, seconds in times.items())
            + f" cause={r.cause.value or '-'} reason={r.reason or '-'}"
        )
