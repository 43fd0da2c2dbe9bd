"""Waiting for many requests at once, with one deadline and the GIL released where MoRI can.

MoRI has `wait_all` from 1.2.0 on; whether it is there is asked once. Without it, the requests are looked at
every millisecond. XGMI's requests only move when somebody looks at them, and a bounded wait of MoRI's looks
once and then sleeps to its deadline: there the wait is cut into slices of a millisecond.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from stateferry.errors import TransportError, TransportTimeout
from stateferry.transport.base import TransferState
from stateferry.transport.mori_engine import MoriEngine
from stateferry.transport.mori_options import MoriBackend
from stateferry.transport.mori_request import Request, Verdict, verdict

logger = logging.getLogger(__name__)

SLICE_MS = 1
POLL_S = 0.001


class Waiter:
    """Made once for an engine, so that MoRI is asked once what it can do."""

    def __init__(self, engine: MoriEngine, pause: Callable[[float], object] | None = None) -> None:
        """`pause` is replaced in tests."""
        self._engine = engine
        self._pause = pause or threading.Event().wait
        # Both: the engine's method is worth nothing without the codes that it answers with.
        codes: Any = getattr(engine.io, "StatusCode", None)
        self.native = codes is not None and hasattr(engine.native, "wait_all")
        self._success = codes.SUCCESS if self.native else None
        self._sliced = engine.backend is MoriBackend.XGMI
        logger.info("mori: %s", "waits with wait_all" if self.native else "no wait_all; looks every ms")

    def wait(
        self, requests: Sequence[Request], timeout_s: float, setting: str = "transfer_timeout_s"
    ) -> None:
        """Wait until all are done. An empty list is, at once. `setting` is where `timeout_s` comes from.

        Raises TransportError when one failed, without waiting for the others where MoRI lets us;
        TransportTimeout when one is still pending after `timeout_s`. Both say which.
        """
        if not requests:
            return
        deadline_s = self._engine.clock() + timeout_s
        code: object = None
        while verdict(requests) is Verdict.PENDING:
            left_s = deadline_s - self._engine.clock()
            if left_s <= 0:
                break
            # Terminal requests stay in the list: one call is for the whole batch.
            waitable = [r.status for r in requests if r.status is not None]
            if not self.native:
                self._pause(POLL_S)
                continue
            # 0 would mean "look once". A whole wait is one call.
            whole_ms = max(round(left_s * 1000), 1)
            code = self._engine.native.wait_all(waitable, timeout_ms=SLICE_MS if self._sliced else whole_ms)
            if code == self._success:
                break
            if not self._sliced and verdict(requests) is Verdict.PENDING:
                # It may come back early for a request that has not begun; there is no other sign of that.
                self._pause(POLL_S)
        self._judge(requests, f"{timeout_s:g} s ({setting})", code)

    def _judge(self, requests: Sequence[Request], waited: str, code: object) -> None:
        outcome = verdict(requests)
        if outcome is Verdict.DONE:
            return
        failed = [r.error for r in requests if r.state is TransferState.FAILED]
        pending = sum(r.state is TransferState.PENDING for r in requests)
        answer = "" if code is None else f"; wait_all answered {code}"
        head = f"mori: {len(failed)}/{len(requests)} requests failed"
        if failed:
            raise TransportError(f"{head}: {'; '.join(failed)}{answer}")
        raise TransportTimeout(f"{head}, {pending} timed out after {waited}{answer}")
