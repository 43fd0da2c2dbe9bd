"""What a run of the gate found, as values and as JSON."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stateferry.gate.accounting import Accounting
from stateferry.gate.clean import CleanResult
from stateferry.gate.engines import Facts
from stateferry.gate.judge import Tally
from stateferry.gate.speculation import Drafts

SHOWN_FAILURES = 20


@dataclass(frozen=True, slots=True)
class CleanSummary:
    """The clean arm and the bytes of its hand-offs."""

    prompts: int
    tokens: int
    """Decoded per prompt."""
    exact: int
    same_tokens: int
    """Exact, or with other log-probabilities of the same tokens."""
    right: int
    """Exact (or the same tokens, where a step had another shape), and every byte accounted for."""
    kinds: dict[str, int]
    """How many prompts of which kind."""
    hits: dict[str, int]
    """How many prompts of which a prefix was held, by whom."""
    max_logprob_difference: float
    hand_offs: int
    state_bytes: int
    """Of every hand-off."""
    attention_block_bytes: int
    moved_bytes: int
    failures: tuple[str, ...]
    """The first few, in words."""

    @property
    def passed(self) -> bool:
        """Whether every prompt was right, and state moved at all."""
        return self.right == self.prompts > 0 and self.state_bytes > 0


@dataclass(frozen=True, slots=True)
class PlainSummary:
    """The first token against a plain prefill of the same prompt: printed, never judged."""

    prompts: int
    same: int
    same_token: int
    max_logprob_difference: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One pair of engines."""

    model: str
    transport: str
    facts: Facts
    clean: CleanSummary
    plain: PlainSummary
    mutants: tuple[Tally, ...]
    digests: tuple[Tally, ...]
    leak: str
    """Why caches could not be emptied at the end: blocks are still held. Empty: none is."""
    seconds: dict[str, float]
    """By stage."""
    speculation: str = "none"
    """How both engines speculate."""
    drafts: dict[str, Drafts] | None = None
    """Of the prefill engine, as the one engine, and of the decode engine; None: they do not speculate."""

    @property
    def passed(self) -> bool:
        """Whether the clean arm is exact, every mutant is caught by both arms, and no block is held."""
        tallies = (*self.mutants, *self.digests)
        fine = self.clean.passed and not self.leak and not self.untried
        return fine and len(tallies) > 0 and all(t.passed for t in tallies)

    @property
    def untried(self) -> list[str]:
        """Engines that speculate, but had no draft accepted, or none rejected."""
        return [name for name, drafts in (self.drafts or {}).items() if not drafts.tried]

    def failures(self) -> list[str]:
        """Why it did not pass, in words."""
        found = [f"{self.model}: {text}" for text in self.clean.failures]
        for arm, tallies in (("answers", self.mutants), ("digests", self.digests)):
            for tally in (t for t in tallies if not t.passed):
                reasons = [f"{count} times {reason}" for reason, count in tally.not_judged.items()]
                reasons += tally.wrong
                why = f" ({'; '.join(reasons)})" if reasons else ""
                found.append(f"{self.model}: damage {tally.name!r}, {arm}: {tally.verdict}{why}")
        for name in self.untried:
            drafts = (self.drafts or {})[name]
            found.append(
                f"{self.model}: {drafts.accepted} of {drafts.proposed} drafts of the {name} engine were "
                "accepted; where none is accepted, or none rejected, speculation is not tried"
            )
        if self.leak:
            found.append(f"{self.model}: blocks are still held: {self.leak}")
        return found


@dataclass(frozen=True, slots=True)
class GateReport:
    """A whole run."""

    full: bool
    date: str
    commit: str
    host: dict[str, Any]
    structure: dict[str, Any]
    models: tuple[ModelReport, ...]
    seconds: float
    load_mode: str = "async"
    """Of the decode engines that were started."""

    @property
    def passed(self) -> bool:
        """The verdict."""
        return (
            bool(self.structure.get("passed")) and len(self.models) > 0 and all(m.passed for m in self.models)
        )

    def failures(self) -> list[str]:
        """Why it did not pass, in words."""
        return [
            *(f"structure: {text}" for text in self.structure.get("faults", ())),
            *(text for model in self.models for text in model.failures()),
        ]

    def to_json(self) -> dict[str, Any]:
        """One object, fit for JSON (an infinite difference is the text "inf")."""
        value = asdict(self)
        for model, entry in zip(self.models, value["models"], strict=True):
            entry["passed"] = model.passed
            entry["clean"]["passed"] = model.clean.passed
            for arm in ("mutants", "digests"):
                entry[arm] = {tally.pop("name"): tally for tally in entry[arm]}
        cleaned: dict[str, Any] = _finite({"passed": self.passed, **value, "failures": self.failures()})
        return cleaned


def summarise_clean(results: Sequence[CleanResult], tokens: int, accounting: Accounting) -> CleanSummary:
    """Add the clean arm up."""
    cases = [r.reference.case for r in results]
    wrong = [r for r in results if not r.right]
    return CleanSummary(
        prompts=len(results),
        tokens=tokens,
        exact=sum(r.difference is None and r.answered for r in results),
        same_tokens=sum((r.difference is None or r.difference.same_tokens) and r.answered for r in results),
        right=len(results) - len(wrong),
        kinds=dict(Counter(case.kind for case in cases)),
        hits=dict(Counter(case.hit.value for case in cases)),
        max_logprob_difference=max((r.difference.logprob for r in results if r.difference), default=0.0),
        hand_offs=accounting.hand_offs,
        state_bytes=accounting.state_bytes,
        attention_block_bytes=accounting.block_bytes,
        moved_bytes=accounting.moved_bytes,
        failures=tuple(f"{r.reference.case}: {'; '.join(r.problems)}" for r in wrong[:SHOWN_FAILURES]),
    )


def summarise_plain(results: Sequence[CleanResult]) -> PlainSummary:
    """Add the printed arm up."""
    compared = [r for r in results if r.reference.plain is not None]
    differences = [r.plain_difference for r in compared]
    return PlainSummary(
        prompts=len(compared),
        same=sum(d is None for d in differences),
        same_token=sum(d is None or d.same_tokens for d in differences),
        max_logprob_difference=max((d.logprob for d in differences if d), default=0.0),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
