"""Each way in which the `mori` transport could be wrong is caught by the scenario that is there for it."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.mori_scenarios import SCENARIOS

from stateferry.testing.conformance import CHECKS
from stateferry.testing.mori_rig import MoriRig
from stateferry.transport import TransferState, mori, mori_engine, mori_request, mori_transfer

Patch = pytest.MonkeyPatch
Mutate = Callable[[Patch], None]


def attribute(owner: Any, name: str, value: Any) -> Mutate:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


def failed_is_over(self: mori_request.Request) -> bool:
    return self.state is not TransferState.PENDING


def only_pending_is_not_over(self: mori_request.Request) -> bool:
    return True


def what_is_not_running_has_failed(self: mori_request.Request) -> TransferState:
    if self.state is TransferState.PENDING:
        code = self.status.Code().name
        if code == "SUCCESS":
            self.state = TransferState.DONE
        elif code != "IN_PROGRESS":
            self.failed(code)
    return self.state


def init_is_done(self: mori_request.Request) -> TransferState:
    if self.state is TransferState.PENDING and self.status.Code() < 2:
        self.state = TransferState.DONE
    return self.state


def terminal_is_quiet(self: mori_transfer.MoriTransfer) -> bool:
    return self._state is not TransferState.PENDING


def no_failures_left(self: mori_transfer.MoriTransfer) -> bool:
    return True


def session_a_read(self: mori_transfer.Link, regions: tuple[int, int]) -> Any:
    return self.engine.session(self.local[regions[0]], self.remote[regions[1]])


def looks_by_waiting(self: mori_transfer.MoriTransfer) -> None:
    """Asks MoRI's `wait_all`, once."""
    statuses = [request.status for request, _ in self._active]
    if statuses:
        self._link.engine.native.wait_all(statuses, timeout_ms=0)
    unpatched_look(self)


def drop_what_is_terminal(self: mori_request.Keeper) -> None:
    self._kept = [r for r in self._kept if r.look() is TransferState.PENDING]


def breaks_and_fails(self: mori_transfer.MoriTransfer, why: str) -> None:
    self._link.broken = True
    unpatched_fail(self, why)


def what_is_posted_has_arrived(self: mori_transfer.MoriTransfer) -> None:
    self._arrived += sum(part.size_bytes for _, part in self._active)
    self._active = []


unpatched_fail = mori_transfer.MoriTransfer._fail
unpatched_look = mori_transfer.MoriTransfer._look

MUTANTS: dict[str, tuple[Mutate, str]] = {
    "a full queue is a failure": (
        attribute(mori_request.Request, "full", False),
        "full_queue_is_posted_again",
    ),
    "no pause": (attribute(mori_transfer, "LONGEST_PAUSE_S", 0.0001), "full_queue_is_posted_again"),
    "pauses without end": (attribute(mori_transfer, "LONGEST_PAUSE_S", 9.0), "full_queue_is_posted_again"),
    "a full queue breaks the connection": (
        attribute(mori_transfer.MoriTransfer, "_fail", breaks_and_fails),
        "full_queue_ends_with_the_read",
    ),
    "every failure is posted again": (
        attribute(mori_request.Request, "full", property(lambda self: self.state is TransferState.FAILED)),
        "other_failures_are_kept",
    ),
    "failed is quiet": (
        attribute(mori_request.Request, "over", property(failed_is_over)),
        "failed_is_not_quiet",
    ),
    "all is quiet": (
        attribute(mori_request.Request, "over", property(only_pending_is_not_over)),
        "never_ends_is_never_quiet",
    ),
    "done before the refused part is over": (
        attribute(mori_transfer.MoriTransfer, "_failures_over", property(no_failures_left)),
        "partly_posted_is_waited_for_although_the_next_try_is_done",
    ),
    "any later success proves it": (
        attribute(mori_request.Order, "passed", lambda self, number: number < self._succeeded),
        "partly_posted_is_waited_for_although_the_next_try_is_done",
    ),
    "order proves nothing": (
        attribute(mori_request.Order, "passed", lambda self, number: False),
        "one_queue_pair_proves_it_over",
    ),
    "a failed completion ends all queue pairs": (
        attribute(mori_request.Request, "_patience_s", mori_request.COMPLETED_QUIET_S),
        "a_failed_completion_is_the_end_of_its_queue_pair",
    ),
    "statuses are dropped": (
        attribute(mori_request.Keeper, "keep", lambda self, request: None),
        "never_ends_is_never_quiet",
    ),
    "sessions end with their peer": (
        attribute(mori_request.Request, "session", property(lambda self: None, lambda self, value: None)),
        "never_ends_is_never_quiet",
    ),
    "statuses are kept until they are terminal": (
        attribute(mori_request.Keeper, "sweep", drop_what_is_terminal),
        "a_dropped_failure_keeps_its_status",
    ),
    "INIT is a failure": (
        attribute(mori_request.Request, "look", what_is_not_running_has_failed),
        "init_is_pending",
    ),
    "INIT is success": (attribute(mori_request.Request, "look", init_is_done), "init_is_pending"),
    "pieces are not cut": (
        attribute(mori, "cut", lambda spans, limit: spans),
        "pieces_above_32_bits_are_split",
    ),
    "a session a read": (
        attribute(mori_transfer.Link, "session", session_a_read),
        "one_session_a_pair_of_regions",
    ),
    "cookies are not compared": (
        attribute(mori_transfer.CookieCheck, "wrong", lambda self: ""),
        "the_wrong_memory_is_noticed",
    ),
    "looking waits": (
        attribute(mori_transfer.MoriTransfer, "_look", looks_by_waiting),
        "reading_never_waits_in_mori",
    ),
    "the first failure is the end of all": (
        attribute(
            mori_transfer.MoriTransfer,
            "quiet",
            property(lambda self: self._state is not TransferState.PENDING),
        ),
        "failed_posts_stay_in_order",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_transport_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, scenario = MUTANTS[mutant]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        SCENARIOS[scenario]()


def offsets_from_the_page(self: mori_engine.MoriSession, local: Any, remote: Any, sizes: Any) -> Any:
    return unpatched_read(self, local, [0] * len(remote), sizes)


def last_piece_is_dropped(self: mori_engine.MoriSession, local: Any, remote: Any, sizes: Any) -> Any:
    keep = max(1, len(sizes) - 1)
    return unpatched_read(self, local[:keep], remote[:keep], sizes[:keep])


unpatched_read = mori_engine.MoriSession.read

CONFORMANCE_MUTANTS: dict[str, tuple[Mutate, str]] = {
    "reads from the start": (
        attribute(mori_engine.MoriSession, "read", offsets_from_the_page),
        "exact_bytes",
    ),
    "drops the last piece": (
        attribute(mori_engine.MoriSession, "read", last_piece_is_dropped),
        "many_pieces",
    ),
    "done when posted": (
        attribute(mori_transfer.MoriTransfer, "_look", what_is_posted_has_arrived),
        "exact_bytes",
    ),
    "all bytes count while pending": (
        attribute(mori_transfer.MoriTransfer, "bytes_done", property(lambda self: self._total)),
        "pending_is_not_quiet",
    ),
}


@pytest.mark.parametrize("mutant", CONFORMANCE_MUTANTS)
def test_the_conformance_suite_catches_it(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, check = CONFORMANCE_MUTANTS[mutant]
    mutate(monkeypatch)
    with pytest.raises(AssertionError), MoriRig(timeout_s=0.5) as rig:
        CHECKS[check](rig)
