"""Who is right, without asking anyone: pure functions from answers to verdicts.

Two answers are the same when their tokens and their top log-probabilities are equal, exactly. No
tolerance: the arms that are compared run the same kernels on the same shapes.
"""

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from stateferry.errors import StateFerryError
from stateferry.stack import Completion
from stateferry.testing.mutants import DAMAGES_NOTHING

CATCH_SHARE = 0.95
"""A mutant must be caught on at least this share of the prompts that it is judged on."""
JUDGED_SHARE = 0.75
"""… and judged on at least this share of those it is tried on, all of which it should damage."""

SHOWN = 5


class Answer(NamedTuple):
    """What one arm said: one entry a token."""

    token_ids: tuple[int, ...]
    top: tuple[Mapping[int, float], ...]
    """The most likely tokens' log-probabilities."""

    def part(self, start: int, stop: int) -> "Answer":
        """Some of its tokens."""
        return Answer(self.token_ids[start:stop], self.top[start:stop])


class Difference(NamedTuple):
    """Where two answers part."""

    token: int
    """The first token, counted from 0, whose choice or log-probabilities differ."""
    same_tokens: bool
    logprob: float
    """The largest difference of a log-probability that both have, at that token; infinite for NaN, and
    where they have none in common or one of the answers ends there."""


def answer_of(completion: Completion) -> Answer:
    """The comparable part of a completion that was asked with log-probabilities."""
    tops = completion.logprobs.top if completion.logprobs is not None else ()
    if len(tops) != len(completion.token_ids) or not tops:
        raise StateFerryError(
            f"an engine answered {len(completion.token_ids)} tokens with log-probabilities for {len(tops)}"
        )
    return Answer(completion.token_ids, tops)


def compare(expected: Answer, found: Answer) -> Difference | None:
    """Where `found` first differs from `expected`; None: they are the same."""
    same_tokens = expected.token_ids == found.token_ids
    longest = max(len(expected.token_ids), len(found.token_ids))
    for token in range(longest):
        if token >= min(len(expected.top), len(found.top)):
            return Difference(token, same_tokens, math.inf)
        ours, theirs = expected.top[token], found.top[token]
        equal_choice = expected.token_ids[token] == found.token_ids[token]
        if not equal_choice or ours != theirs or any(math.isnan(value) for value in ours.values()):
            return Difference(token, same_tokens, _distance(ours, theirs))
    return None


def _distance(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    found = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    return math.inf if not found or any(math.isnan(value) for value in found) else max(found)


class Verdict(enum.Enum):
    """What became of one damaged hand-off."""

    CAUGHT = "caught"
    MISSED = "missed"
    ERROR = "error"
    """The engine answered with an error: nobody was misled, so it counts as caught."""
    NOT_JUDGED = "not judged"


class Judgement(NamedTuple):
    """One damaged hand-off, judged."""

    verdict: Verdict
    difference: float | None = None
    """Of log-probabilities, where they gave it away."""
    reason: str = ""
    """Why it is not judged, or what the error said."""
    case: str = ""
    """Which prompt it was."""


NO_EFFECT = "no damaged byte moved"


def judge(expected: Answer, found: Answer, received: Mapping[str, Any]) -> Judgement:
    """Judge one answer after a damaged hand-off by what the decode engine says it received."""
    outcome, reason = received.get("outcome", "nothing reported"), str(received.get("reason", ""))
    if outcome != "received":
        why = NO_EFFECT if DAMAGES_NOTHING in reason else f"hand-off {outcome}: {reason}"
        return Judgement(Verdict.NOT_JUDGED, reason=why)
    difference = compare(expected, found)
    if difference is None:
        return Judgement(Verdict.MISSED)
    return Judgement(Verdict.CAUGHT, difference.logprob)


@dataclass(frozen=True, slots=True)
class Tally:
    """One mutant on all its prompts."""

    name: str
    asked: int
    judged: int
    caught: int
    """Without `errors`."""
    errors: int
    not_judged: Mapping[str, int]
    """How many for which reason."""
    wrong: tuple[str, ...]
    """The first few prompts on which it was missed (or, if harmless, objected to)."""
    smallest_difference: float | None
    """Over caught answers."""
    median_difference: float | None
    applies: bool
    """False: this model has nothing that this mutant could damage."""
    passed: bool
    verdict: str
    """In words, for a reader."""


def tally(
    name: str, judgements: Sequence[Judgement], *, harmless: bool = False, may_not_apply: bool = False
) -> Tally:
    """Sum up one mutant. `harmless`: no damage at all, which must never be caught. `may_not_apply`: a
    model may lack what it damages."""
    count = Counter(judgement.verdict for judgement in judgements)
    not_judged = Counter(j.reason for j in judgements if j.verdict is Verdict.NOT_JUDGED)
    judged = len(judgements) - count[Verdict.NOT_JUDGED]
    applies = not (may_not_apply and judgements and set(not_judged) == {NO_EFFECT} and not judged)
    wrong = {Verdict.CAUGHT, Verdict.ERROR} if harmless else {Verdict.MISSED}
    differences = [j.difference for j in judgements if j.difference is not None]
    caught = count[Verdict.CAUGHT] + count[Verdict.ERROR]
    if not applies:
        passed, verdict = True, "this model has nothing to damage so"
    elif not judgements or judged < JUDGED_SHARE * len(judgements):
        passed, verdict = False, f"judged on {judged} of {len(judgements)} only: proves nothing"
    elif harmless:
        passed = caught == 0 and judged == len(judgements)
        verdict = "left alone" if passed else "good hand-offs were objected to"
    else:
        passed = caught >= CATCH_SHARE * judged
        verdict = "caught" if passed else "would go unnoticed"
    return Tally(
        name=name,
        asked=len(judgements),
        judged=judged,
        caught=count[Verdict.CAUGHT],
        errors=count[Verdict.ERROR],
        not_judged=dict(not_judged),
        wrong=tuple(j.case for j in judgements if j.verdict in wrong)[:SHOWN],
        smallest_difference=min(differences, default=None),
        median_difference=median(differences) if differences else None,
        applies=applies,
        passed=passed,
        verdict=verdict,
    )
