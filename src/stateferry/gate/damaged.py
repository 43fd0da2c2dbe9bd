"""L3 and L2, the mutants' arms: every damage must show in the first token, and in the digests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stateferry.gate.cases import spaced
from stateferry.gate.clean import CleanResult, Reference, prepare_decode
from stateferry.gate.damages import DIGEST_MUTANTS, MUTANTS, Mutant
from stateferry.gate.engines import Engines, received
from stateferry.gate.judge import Answer, Judgement, Tally, Verdict, answer_of, compare, judge, tally
from stateferry.gate.prompts import PromptSource
from stateferry.stack import AnswerError, Completion


@dataclass(frozen=True, slots=True)
class Arms:
    """What both arms need."""

    engines: Engines
    source: PromptSource
    lacking: frozenset[str]
    """Features that the model may lack, see `damages`."""


def run_mutants(
    arms: Arms, clean: Sequence[CleanResult], prompts: int, step: Callable[[], None]
) -> list[Tally]:
    """Do every damage to `prompts` hand-offs whose good twins were exact, one token each. `step` is
    called after each."""
    return [_tried(arms, mutant, _judged, clean, prompts, step) for mutant in MUTANTS]


def run_digests(
    arms: Arms, clean: Sequence[CleanResult], prompts: int, step: Callable[[], None]
) -> list[Tally]:
    """The same with digests on: every damage must fail its hand-off, and the prompt be computed again."""
    return [_tried(arms, mutant, _verified, clean, prompts, step) for mutant in DIGEST_MUTANTS]


def _tried(
    arms: Arms,
    mutant: Mutant,
    judged: Callable[[Arms, Mutant, Reference], Judgement],
    clean: Sequence[CleanResult],
    prompts: int,
    step: Callable[[], None],
) -> Tally:
    judgements = []
    for reference in usable(arms, clean, mutant, prompts):
        judgements.append(judged(arms, mutant, reference)._replace(case=str(reference.case)))
        step()
    may_not_apply = mutant.feature in arms.lacking
    return tally(mutant.name, judgements, harmless=mutant.harmless, may_not_apply=may_not_apply)


def usable(arms: Arms, clean: Sequence[CleanResult], mutant: Mutant, prompts: int) -> list[Reference]:
    """Prompts on which the mutant can do its damage, evenly over the cases."""
    block_tokens = arms.engines.facts.block_tokens
    able = {
        r.reference.case.number: r.reference
        for r in clean
        if r.right
        and r.difference is None
        and r.reference.case.moves
        and mutant.shows(len(r.reference.case.prompt), block_tokens)
        and (mutant.other is None or mutant.other(r.reference, block_tokens, arms.source) is not None)
    }
    return [able[case.number] for case in spaced([r.case for r in able.values()], prompts)]


def _judged(arms: Arms, mutant: Mutant, reference: Reference) -> Judgement:
    with _damaged(arms, mutant, reference) as ask:
        try:
            completion = ask({})
        except AnswerError as e:
            return _error(e)
    return judge(reference.answer.part(0, 1), answer_of(completion), received(completion))


def _verified(arms: Arms, mutant: Mutant, reference: Reference) -> Judgement:
    """Caught: the hand-off failed by its digest, and the answer is right all the same."""
    with _damaged(arms, mutant, reference) as ask:
        try:
            completion = ask({"verify": "all"})
        except AnswerError as e:
            return _error(e)
    found, report = answer_of(completion), received(completion)
    if report.get("outcome") != "failed" or "digests" not in str(report.get("reason", "")):
        return judge(found, found, report)
    if not _recomputed(reference, found):
        return Judgement(Verdict.MISSED, reason="was computed again, and wrongly")
    return Judgement(Verdict.CAUGHT)


def _recomputed(reference: Reference, found: Answer) -> bool:
    """Whether an answer is what one engine says, by prefill or by continuation."""
    right = [a for a in (reference.plain, reference.answer.part(0, 1)) if a is not None]
    return any(compare(answer, found) is None for answer in right)


def _error(e: AnswerError) -> Judgement:
    if e.status == 0:
        raise e  # the engine is gone or stuck: nothing that follows could be judged
    return Judgement(Verdict.ERROR, reason=str(e)[:200])


@contextmanager
def _damaged(
    arms: Arms, mutant: Mutant, reference: Reference
) -> Iterator[Callable[[Mapping[str, Any]], Completion]]:
    """Make the hand-off, and the other one if pages of it are needed; yield what decodes one token."""
    engines, case = arms.engines, reference.case
    prepare_decode(engines, case)
    params = engines.offer(reference.prompt)
    order = mutant.order(case.number)
    other = mutant.other and mutant.other(reference, engines.facts.block_tokens, arms.source)
    if not other:
        yield lambda more: engines.decode(reference.prompt, params, 1, {**order, **more})
        return
    others_params = engines.offer(other)
    try:
        yield lambda more: engines.decode(
            reference.prompt, params, 1, {**order, **more, "other": others_params}
        )
    finally:
        # Whoever takes the other hand-off also gives its blocks back; else they stay for a lease.
        engines.decode(other, others_params, 1)
