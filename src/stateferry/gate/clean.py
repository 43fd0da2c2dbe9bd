"""L3, the clean arm: two engines must continue exactly as one engine does.

    one engine                 q -> g0 g1 g2 …
    two engines           q + [g0] -> g1 g2 …       same tokens, same top log-probabilities
    one engine, printed   q + [g0] -> g1            prefill kernels where the others decode: differs

A continuation runs the same kernels on both arms, so it needs no tolerance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stateferry.gate.accounting import Accounting
from stateferry.gate.cases import Case
from stateferry.gate.engines import Engines, received
from stateferry.gate.judge import Answer, Difference, answer_of, compare
from stateferry.gate.prompts import Tokens
from stateferry.stack import AnswerError

LOOKS = 100
"""At a metrics page that may be late."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What is right for a case."""

    case: Case
    prompt: Tokens
    """What the two engines are asked: q + [g0]."""
    given: Tokens
    """g0 and g1 (nothing before the prompt of a case that runs alone)."""
    answer: Answer
    """g1 and on."""
    plain: Answer | None
    """g1 by one engine that prefills q + [g0]."""


@dataclass(frozen=True, slots=True)
class CleanResult:
    """One case of the clean arm."""

    reference: Reference
    difference: Difference | None
    problems: tuple[str, ...]
    """Everything that is wrong, in words; the difference is one of them."""
    answered: bool = True
    """False: the decode engine answered with an error."""

    @property
    def right(self) -> bool:
        """Whether the answer was exact and the bytes were all there."""
        return not self.problems

    @property
    def plain_difference(self) -> Difference | None:
        """How far the plain prefill of the same prompt is from the continuation."""
        plain, answer = self.reference.plain, self.reference.answer
        return None if plain is None else compare(answer.part(0, 1), plain)


def run_clean(
    engines: Engines, cases: Sequence[Case], tokens: int, accounting: Accounting, step: Callable[[], None]
) -> list[CleanResult]:
    """Try every case, `tokens` tokens each. `step` is called after each."""
    results = []
    for case in cases:
        results.append(_run_case(engines, case, tokens, accounting))
        step()
    return results


def _run_case(engines: Engines, case: Case, tokens: int, accounting: Accounting) -> CleanResult:
    engines.forget(prefill=True, decode=True)
    reference = _reference(engines, case, tokens)
    if not case.hit.on_prefill:
        engines.forget(prefill=True)
    prepare_decode(engines, case)
    hits_before = engines.prefill_hit_tokens() if case.hit.on_prefill else 0
    params = engines.offer(reference.prompt)
    problems = []
    if case.hit.on_prefill:
        hit = _hit_tokens(engines, hits_before, case.hit_tokens)
        if hit != case.hit_tokens:
            problems.append(f"the prefill engine held {hit} tokens, not {case.hit_tokens}")
    try:
        completion = engines.decode(reference.prompt, params, tokens)
    except AnswerError as e:
        return CleanResult(reference, None, (*problems, f"error: {e}"), answered=False)
    problems += accounting.problems(case, received(completion))
    difference = compare(reference.answer, answer_of(completion))
    if difference is not None and not (case.reshaped and difference.same_tokens):
        problems.append(describe(difference))
        problems += _second_opinion(engines, reference, tokens)
    if not case.alone:
        engines.forget(prefill=True)
        plain = answer_of(engines.alone(reference.prompt, 1))
        reference = Reference(case, reference.prompt, reference.given, reference.answer, plain)
    return CleanResult(reference, difference, tuple(problems))


def prepare_decode(engines: Engines, case: Case) -> None:
    """Empty the decode engine's cache, then let it hold what the case says."""
    engines.forget(decode=True)
    if case.hit.on_decode:
        # A token more than it shall hold, as the prompt itself has: vLLM then ends a chunk at the same
        # place in both. Other chunks mean other shapes, and other last digits.
        engines.hold_on_decode(case.prompt[: case.held_tokens + 1])


def _reference(engines: Engines, case: Case, tokens: int) -> Reference:
    if case.alone:
        answer = answer_of(engines.alone(case.prompt, tokens))
        return Reference(case, case.prompt, (), answer, None)
    answer = answer_of(engines.alone(case.prompt, tokens + 1))
    first, second = answer.token_ids[:2]
    return Reference(case, (*case.prompt, first), (first, second), answer.part(1, tokens + 1), None)


def _hit_tokens(engines: Engines, before: int, expected: int) -> int:
    """Tokens found in the prefill engine's cache since `before`. It counts after it has answered, so a
    number that is too small is looked at again."""
    hit = 0
    for _ in range(LOOKS):
        hit = engines.prefill_hit_tokens() - before
        if hit >= expected:
            break
    return hit


def _second_opinion(engines: Engines, reference: Reference, tokens: int) -> list[str]:
    """Whether one engine agrees with itself: if not, nothing can be compared with it."""
    engines.forget(prefill=True)
    again = _reference(engines, reference.case, tokens)
    if again.given == reference.given and compare(reference.answer, again.answer) is None:
        return []
    return ["one engine, asked twice, does not agree with itself: make it deterministic first"]


def describe(difference: Difference) -> str:
    """A difference in words."""
    what = "log-probabilities" if difference.same_tokens else "tokens"
    return f"{what} differ from token {difference.token} on, there by {difference.logprob:.3g}"
