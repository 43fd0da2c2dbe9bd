"""Engines that speculate: what they are told, and what became of their drafts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stateferry.errors import ConfigError
from stateferry.stack import Metrics

METHODS: Mapping[str, Mapping[str, Any]] = {
    "mtp": {},
    "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
}
"""Methods that a gate can ask for, and what vLLM is told besides."""
MOST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Speculation:
    """How both engines speculate."""

    method: str
    tokens: int
    """Drafts a step."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """For vLLM's server."""
        settings = {"method": self.method, "num_speculative_tokens": self.tokens, **METHODS[self.method]}
        return "--speculative-config", json.dumps(settings)

    @property
    def has_layers(self) -> bool:
        """Whether layers of their own draft. vLLM then takes a block less from a prefix cache than it finds:
        the drafter needs what the model made of the tokens before."""
        return self.method == "mtp"

    def __str__(self) -> str:
        return f"{self.method}, {self.tokens} tokens"


def parse_speculation(text: str) -> Speculation:
    """From METHOD or METHOD:TOKENS. Raises ConfigError."""
    method, _, tokens = text.partition(":")
    tokens = tokens or "2"
    if method not in METHODS or not tokens.isdecimal() or not 1 <= int(tokens) <= MOST_TOKENS:
        raise ConfigError(
            f"--speculate {text!r} must be METHOD or METHOD:TOKENS, with {' or '.join(METHODS)} and 1 to "
            f"{MOST_TOKENS} tokens: mtp:2"
        )
    return Speculation(method, int(tokens))


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of one engine."""

    proposed: int
    accepted: int

    def since(self, before: "Drafts") -> "Drafts":
        """Those that came after `before`."""
        return Drafts(self.proposed - before.proposed, self.accepted - before.accepted)

    @property
    def tried(self) -> bool:
        """Whether some were accepted and some were not: else nothing ever had to be taken back, or kept."""
        return 0 < self.accepted < self.proposed


def drafts_of(metrics: Metrics) -> Drafts:
    """All that an engine's metrics page counts."""
    return Drafts(
        int(metrics.total("vllm:spec_decode_num_draft_tokens_total")),
        int(metrics.total("vllm:spec_decode_num_accepted_tokens_total")),
    )
