"""What StateFerry promises holds in any order of events, and a machine that breaks a promise is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.session_machine import CLOCK, Together, run

from stateferry.session import Handoff, Ledger, Next, Outcome, ReadStatus, Recovery
from stateferry.session import producer as ledger_module
from stateferry.wire import Claim, ClaimAnswer, Renewal, RenewalAnswer

pytestmark = pytest.mark.timeout(300)  # seconds of work, but a crowded machine has others to serve


def test_promises_hold_over_ten_thousand_steps() -> None:
    before = (Together.steps, Together.received)
    run(800)
    assert Together.steps - before[0] >= 10_000
    assert Together.received - before[1] >= 100, "hardly anything was received: a test of nothing"


# -- mutants -------------------------------------------------------------------------------------------


def _claimed_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Handoff.claim_answered
    monkeypatch.setattr(
        Handoff, "claim_answered", lambda self, rank, answer, sent_s: right(self, rank, answer, CLOCK.now_s())
    )


def _renewed_from_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Handoff.renewed
    monkeypatch.setattr(
        Handoff, "renewed", lambda self, rank, sent_s, lease_s: right(self, rank, CLOCK.now_s(), lease_s)
    )


def _free_on_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ledger._claim

    def claim(self: Ledger, claim: Claim, now_s: float) -> ClaimAnswer:
        answer = right(self, claim, now_s)
        if not answer.reason:
            self._end(self._holdings[claim.transfer_id], "was claimed", released=False)
        return answer

    monkeypatch.setattr(Ledger, "_claim", claim)


def _report_before_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Handoff.settle

    def settle(self: Handoff, now_s: float, reads: ReadStatus | None, verified: bool) -> Outcome | None:
        return right(self, now_s, reads and ReadStatus(reads.done, True, reads.error), verified)

    monkeypatch.setattr(Handoff, "settle", settle)


def _try_again_before_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Recovery.after_failure

    def after_failure(self: Recovery, *, quiet: bool, usable: bool, hopeful: bool) -> Next:
        return right(self, quiet=True, usable=usable, hopeful=hopeful)

    monkeypatch.setattr(Recovery, "after_failure", after_failure)


def _serve_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_may_be_of", lambda holding, message: True)


def _ignore_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handoff, "lapsed", lambda self, now_s: "")


def _promise_without_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ledger.renew

    def renew(self: Ledger, renewal: Renewal, now_s: float) -> RenewalAnswer:
        before = {t: h.expires_s for t, h in self._holdings.items()}
        answer = right(self, renewal, now_s)
        for transfer_id, expires_s in before.items():
            self._holdings[transfer_id].expires_s = expires_s
        return answer

    monkeypatch.setattr(Ledger, "renew", renew)


def _free_with_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "releases_expected", lambda consumers, producers: 1)


def _look_only_at_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ledger.expire

    def expire(self: Ledger, now_s: float) -> Any:
        first = next(iter(self._holdings.values()), None)
        if first is not None and first.expires_s > now_s:
            return [], []
        behind = dict(list(self._holdings.items())[1:])
        for transfer_id in behind:
            del self._holdings[transfer_id]
        ended = right(self, now_s)
        self._holdings |= behind
        return ended

    monkeypatch.setattr(Ledger, "expire", expire)


def _free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ledger._end

    def end(self: Ledger, holding: Any, became: str, **how: bool) -> None:
        right(self, holding, became, **how)
        self._finished.append(holding.grant.request_id)

    monkeypatch.setattr(Ledger, "_end", end)


@pytest.mark.parametrize(
    ("mutate", "symptom"),
    [
        (_claimed_from_the_answer, "freed"),
        (_renewed_from_the_answer, "freed"),
        (_free_on_claim, "freed"),
        (_report_before_quiet, "may land"),
        (_try_again_before_quiet, "two reads write"),
        (_serve_everybody, "served|freed"),
        (_ignore_the_lease, "freed"),
        (_promise_without_keeping, "freed"),
        (_free_with_the_first_rank, "freed"),
        (_look_only_at_the_oldest, "left in the ledger"),
        (_free_twice, "freed twice"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_broken_promise_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None], symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        run(5000)
