"""The judge: exact or not, and what a mutant's verdicts add up to."""

import math

import pytest

from stateferry.errors import StateFerryError
from stateferry.gate.judge import (
    NO_EFFECT,
    Answer,
    Difference,
    Judgement,
    Verdict,
    answer_of,
    compare,
    judge,
    tally,
)
from stateferry.stack import Completion, Logprobs
from stateferry.testing.mutants import DAMAGES_NOTHING

GOOD = Answer((5, 7), ({5: -0.1, 6: -2.0}, {7: -0.5, 8: -1.5}))
CAUGHT, MISSED = Judgement(Verdict.CAUGHT, 0.25), Judgement(Verdict.MISSED)
ERROR, VOID = Judgement(Verdict.ERROR), Judgement(Verdict.NOT_JUDGED, reason=NO_EFFECT)
LATE = Judgement(Verdict.NOT_JUDGED, reason="hand-off failed: late")
RECEIVED = {"outcome": "received"}


def test_the_same_answer_is_the_same() -> None:
    assert compare(GOOD, Answer(GOOD.token_ids, tuple(dict(top) for top in GOOD.top))) is None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Answer((5, 7), ({5: -0.1, 6: -2.0}, {7: -0.5, 8: -1.25})), Difference(1, True, 0.25)),
        (Answer((5, 8), ({5: -0.1, 6: -2.0}, {7: -0.5, 8: -0.5})), Difference(1, False, 1.0)),
        (Answer((6, 7), GOOD.top), Difference(0, False, 0.0)),
        (Answer((5,), GOOD.top[:1]), Difference(1, False, math.inf)),
        (Answer((5, 7), ({5: -0.1, 9: -2.0}, GOOD.top[1])), Difference(0, True, 0.0)),
        (Answer((5, 7), ({5: math.nan, 6: -2.0}, GOOD.top[1])), Difference(0, True, math.inf)),
        (Answer((5, 7), ({1: -0.1, 2: -2.0}, GOOD.top[1])), Difference(0, True, math.inf)),
        (Answer((5, 7), ({}, GOOD.top[1])), Difference(0, True, math.inf)),
    ],
)
def test_any_difference_is_found_and_measured_where_it_begins(other: Answer, expected: Difference) -> None:
    assert compare(GOOD, other) == expected


def test_two_answers_of_nan_are_not_the_same() -> None:
    broken = Answer((5,), ({5: math.nan},))
    assert compare(broken, broken) == Difference(0, True, math.inf)


def test_an_answer_without_log_probabilities_is_refused() -> None:
    def completion(logprobs: Logprobs | None) -> Completion:
        return Completion("", (1, 2), "length", 3, None, logprobs, 0.0, None)

    with pytest.raises(StateFerryError, match="log-probabilities"):
        answer_of(completion(None))
    with pytest.raises(StateFerryError, match="log-probabilities"):
        answer_of(completion(Logprobs((-1.0,), ({1: -1.0},))))


def test_a_damaged_hand_off_is_judged_by_its_answer() -> None:
    other = Answer((5, 7), ({5: -0.125, 6: -2.0}, GOOD.top[1]))
    assert judge(GOOD, GOOD, RECEIVED).verdict is Verdict.MISSED
    assert judge(GOOD, other, RECEIVED) == Judgement(Verdict.CAUGHT, pytest.approx(0.025))


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        ({}, "hand-off nothing reported: "),
        ({"outcome": "unused"}, "hand-off unused: "),
        ({"outcome": "failed", "reason": "late"}, "hand-off failed: late"),
        ({"outcome": "failed", "reason": f"could not post: swap {DAMAGES_NOTHING}"}, NO_EFFECT),
    ],
)
def test_a_hand_off_that_did_not_arrive_is_not_judged(received: dict[str, str], reason: str) -> None:
    assert judge(GOOD, GOOD, received) == Judgement(Verdict.NOT_JUDGED, reason=reason)


@pytest.mark.parametrize(
    ("judgements", "passed"),
    [
        ([CAUGHT] * 16, True),
        ([CAUGHT] * 19 + [MISSED], True),  # 95 %
        ([CAUGHT] * 15 + [MISSED], False),
        ([MISSED] * 16, False),
        ([ERROR] * 16, True),
        ([CAUGHT] * 12 + [VOID] * 4, True),
        ([CAUGHT] * 11 + [VOID] * 5, False),  # judged on too few
        ([VOID] * 16, False),
        ([LATE] * 16, False),
        ([], False),
    ],
)
def test_a_mutant_passes_only_if_it_is_caught_and_was_judged(
    judgements: list[Judgement], passed: bool
) -> None:
    assert tally("m", judgements).passed is passed


@pytest.mark.parametrize(
    ("judgements", "passed"),
    [
        ([MISSED] * 16, True),
        ([MISSED] * 15 + [CAUGHT], False),
        ([MISSED] * 15 + [ERROR], False),
        ([MISSED] * 15 + [LATE], False),
        ([CAUGHT] * 16, False),
        ([], False),
    ],
)
def test_no_damage_must_never_be_objected_to(judgements: list[Judgement], passed: bool) -> None:
    assert tally("none", judgements, harmless=True).passed is passed


def test_a_mutant_that_cannot_apply_is_excused_only_if_it_never_did() -> None:
    excused = tally("m", [VOID] * 4, may_not_apply=True)
    assert excused.passed
    assert not excused.applies
    assert not tally("m", [VOID] * 3 + [MISSED], may_not_apply=True).passed
    assert not tally("m", [VOID] * 3 + [LATE], may_not_apply=True).passed
    assert not tally("m", [], may_not_apply=True).passed


def test_a_tally_says_how_far_the_caught_answers_were() -> None:
    found = tally("m", [Judgement(Verdict.CAUGHT, d) for d in (0.5, 0.1, 2.0)] + [ERROR, VOID])
    assert (found.asked, found.judged, found.caught, found.errors) == (5, 4, 3, 1)
    assert (found.smallest_difference, found.median_difference) == (0.1, 0.5)
    assert found.not_judged == {NO_EFFECT: 1}


@pytest.mark.parametrize(("harmless", "expected"), [(False, ("case 1",)), (True, ("case 0", "case 2"))])
def test_a_tally_names_the_prompts_that_went_wrong(harmless: bool, expected: tuple[str, ...]) -> None:
    judgements = [j._replace(case=f"case {i}") for i, j in enumerate([CAUGHT, MISSED, ERROR, VOID])]
    assert tally("m", judgements, harmless=harmless).wrong == expected
