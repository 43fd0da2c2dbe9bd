"""Which prompts are tried: lengths around every border, and prefix hits on either engine.

A case has K = `len(prompt)` tokens q. One engine continues q with g0, g1, …; then the two engines get
q + [g0], so what is handed off is h(K) and the KV of K tokens.
"""

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stateferry.gate.prompts import PromptSource, Tokens

WINDOW = (1, 2, 3, 4, 5)
"""Lengths around the width of a convolution window."""


class Hit(enum.Enum):
    """Which engine holds a prefix of the prompt already."""

    NONE = "none"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def on_prefill(self) -> bool:
        """Whether the prefill engine holds it."""
        return self in (Hit.PREFILL, Hit.BOTH)

    @property
    def on_decode(self) -> bool:
        """Whether the decode engine holds it."""
        return self in (Hit.DECODE, Hit.BOTH)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and what the engines hold of it beforehand."""

    number: int
    kind: str
    """What is special about it, for reports."""
    prompt: Tokens
    hit: Hit = Hit.NONE
    hit_tokens: int = 0
    """How much of the prompt the hit covers, in tokens; whole blocks."""
    alone: bool = False
    """The prompt itself goes to both engines: one token has no prefix to hand off."""
    held_tokens: int = 0
    """How much of the prompt an engine must hold for the hit."""
    reshaped: bool = False
    """Whether two engines compute one of its tokens in a step of another shape than one engine does: other
    shapes round otherwise."""

    @property
    def moves(self) -> bool:
        """Whether anything is handed off."""
        return not self.alone and not (self.hit.on_decode and self.hit_tokens >= len(self.prompt))

    def __str__(self) -> str:
        held = "" if self.hit is Hit.NONE else f", {self.hit_tokens} of them held by {self.hit.value}"
        return f"case {self.number} ({self.kind}, {len(self.prompt)} tokens{held})"


Shape = tuple[str, int, Hit, bool]
"""Kind, length, hit, and whether a hit covers all of the prompt (else all but its last block)."""


def make_cases(
    count: int,
    *,
    block_tokens: int,
    chunk_tokens: int,
    longest: int,
    caching: bool,
    source: PromptSource,
    drops: int = 0,
    drafts: int = 0,
) -> list[Case]:
    """`count` cases. `longest`: the most tokens that a prompt may have. `caching`: hits are possible.
    `drops`: blocks at the end of a hit that an engine computes all the same. `drafts`: tokens drafted a step.
    """
    borders = list(_borders(block_tokens, chunk_tokens))
    shapes: list[Shape] = []
    while len(shapes) < count:
        rest = count - len(shapes)
        shapes += borders[:rest] if rest >= len(borders) or not shapes else []
        shapes += _spread(min(len(borders), count - len(shapes)), len(shapes), block_tokens, chunk_tokens)
    cases = []
    for number, (kind, length, hit, whole) in enumerate(shapes):
        length = min(length, longest)
        prompt = source(number, length)
        held = (length if whole or drops else length - 1) // block_tokens * block_tokens
        covered = max(0, held - drops * block_tokens)
        if kind == "one token":
            cases.append(Case(number, kind, prompt, alone=True))
        elif covered and caching:
            found = (covered, held) if hit is not Hit.NONE else (0, 0)
            cases.append(Case(number, kind, prompt, hit, found[0], held_tokens=found[1]))
        else:
            cases.append(Case(number, kind, prompt))
    if not (drafts and caching):
        return cases
    return [replace(case, reshaped=_reshaped(case, block_tokens, drafts)) for case in cases]


def _reshaped(case: Case, block_tokens: int, drafts: int) -> bool:
    """vLLM fills up a request's first step to as many rows as a step with drafts has; with cached prefixes
    not where those rows would cross a block. And of what a hit leaves, it computes a single token like a
    first step, or like a prompt's end."""
    length = len(case.prompt)
    crosses = length % block_tokens > 0 and length // block_tokens < (length + drafts) // block_tokens
    left = length - case.hit_tokens
    return crosses or (case.hit.on_prefill and left == 1) or (case.hit.on_decode and left == 0)


def _borders(block: int, chunk: int) -> Iterator[Shape]:
    """Every special length once."""
    yield "one token", 1, Hit.NONE, False
    for length in WINDOW:
        yield "convolution window", length, Hit.NONE, False
    for length in (block - 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1):
        yield "block border", length, Hit.NONE, False
    for length in (chunk - 1, chunk, chunk + 1):
        yield "chunk border", length, Hit.NONE, False
    for hit in (Hit.PREFILL, Hit.DECODE, Hit.BOTH):
        for length in (block + 1, block + block // 2, 2 * block, 2 * block + 1):
            yield "prefix hit", length, hit, False
    yield "whole prompt held", 2 * block, Hit.DECODE, True


def _spread(count: int, seed: int, block: int, chunk: int) -> Iterator[Shape]:
    """Lengths without a meaning, half of them with a hit where they are long enough."""
    rng = random.Random(f"spread:{seed}")
    hits = (Hit.NONE, Hit.PREFILL, Hit.NONE, Hit.DECODE, Hit.NONE, Hit.BOTH)
    for i in range(count):
        yield (
            "any length",
            rng.randint(WINDOW[-1] + 1, max(2 * block, chunk // 2)),
            hits[i % len(hits)],
            False,
        )


def spaced(cases: Sequence[Case], count: int) -> list[Case]:
    """At most `count` of the cases, evenly over the list."""
    if len(cases) <= count:
        return list(cases)
    return [cases[i * len(cases) // count] for i in range(count)]
