"""The mutants: which damage is done to a hand-off, and which other hand-off it may need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stateferry.gate.clean import Reference
from stateferry.gate.prompts import PromptSource, Tokens

OTHER_SEED = 1_000_000
"""Added to a case's number for the prompt of an unrelated request."""

PAST_WINDOW = 8
"""Tokens after which no number of a convolution window is zero because nothing was there yet."""
ENOUGH_KV = 16
"""Tokens whose KV must be in a block, unless it is all there is. Measured: with the KV of one token among
a thousand gone, the change may be too small for bfloat16 logits to show."""

Other = Callable[[Reference, int, PromptSource], Tokens | None]
"""(case, tokens a block, source of prompts) -> the other prompt; None where there is no such prompt."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to damage a hand-off."""

    name: str
    order: Callable[[int], dict[str, Any]]
    """From the case's number: what `stateferry.testing.mutants` is told."""
    other: Other | None = None
    """Where the damaged pages come from, if not from nowhere."""
    feature: str = ""
    """What a model may lack so that this cannot be done to it."""
    shows: Callable[[int, int], bool] = lambda length, block_tokens: True
    """Whether a prompt of this length is one in which the damage can be seen at all."""

    @property
    def harmless(self) -> bool:
        """Whether this is no damage at all: the judge's own test."""
        return "nothing" in self.order(0)


def _one_token_less(reference: Reference, block_tokens: int, source: PromptSource) -> Tokens | None:
    """Cut at N-2. The prefill engine itself takes the last token off."""
    prompt = reference.case.prompt
    return prompt if len(prompt) > 1 else None


def _one_token_more(reference: Reference, block_tokens: int, source: PromptSource) -> Tokens | None:
    """Cut at N, so that the decode engine applies the last token once more."""
    return (*reference.prompt, reference.given[1])


def _block_border(reference: Reference, block_tokens: int, source: PromptSource) -> Tokens | None:
    prompt = reference.case.prompt
    border = (len(prompt) - 1) // block_tokens * block_tokens
    return prompt[: border + 1] if border else None


def _stranger(reference: Reference, block_tokens: int, source: PromptSource) -> Tokens | None:
    return source(OTHER_SEED + reference.case.number, len(reference.prompt))


def _past_window(length: int, block_tokens: int) -> bool:
    return length >= PAST_WINDOW


def _enough_in_last_block(length: int, block_tokens: int) -> bool:
    return length <= block_tokens or (length - 1) % block_tokens + 1 >= ENOUGH_KV


def _fixed(**order: Any) -> Callable[[int], dict[str, Any]]:
    return lambda number: dict(order)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("none", _fixed(nothing=True)),
    Mutant("state one token early", _fixed(what="state"), _one_token_less),
    Mutant("state one token late", _fixed(what="state"), _one_token_more),
    Mutant("state of the last block border", _fixed(what="state"), _block_border),
    Mutant("another prompt's pages", _fixed(what="all"), _stranger),
    Mutant("another prompt's state", _fixed(what="state"), _stranger),
    Mutant("another prompt's attention", _fixed(what="attention"), _stranger),
    Mutant("state withheld", _fixed(withhold="state")),
    Mutant("convolution withheld", _fixed(withhold="convolution"), feature="convolution"),
    Mutant("one layer's state withheld", lambda number: {"withhold": f"layer:{number}"}),
    Mutant("last attention block withheld", _fixed(withhold="last_block"), shows=_enough_in_last_block),
    Mutant("heads swapped", _fixed(swap="heads"), feature="heads"),
    Mutant("two layers swapped", lambda number: {"swap": f"layers:{number}"}, feature="layers"),
)
"""All of them, in every run. Where pages of the same prompt come, only the state does: its attention KV
is right then, which makes it the hardest to notice."""

DIGEST_MUTANTS: tuple[Mutant, ...] = (
    *MUTANTS,
    Mutant("one number of the first state", _fixed(withhold="number:0"), shows=_past_window),
    Mutant(
        "one number of the second state",
        _fixed(withhold="number:1"),
        feature="second state",
        shows=_past_window,
    ),
)
"""What digests must catch: all of the above, and what only they can see."""

LACKING: dict[str, frozenset[str]] = {
    "qwen3_next": frozenset(),
    "granitemoehybrid": frozenset(),
    "falcon_h1": frozenset(),
    "lfm2": frozenset({"heads", "second state"}),
    "kimi_linear": frozenset(),
}
"""By `model_type`: which features a model does not have. What is not listed may lack any."""

ANY_FEATURE = frozenset({"convolution", "heads", "layers", "second state"})


def lacking(model_type: str) -> frozenset[str]:
    """The features that a model of this type may lack."""
    return LACKING.get(model_type, ANY_FEATURE)
