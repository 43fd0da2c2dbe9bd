"""L1: the bytes that arrived against the bytes that should have, hand-off by hand-off.

The connector makes this comparison itself for every hand-off in production, group by group, against
its own description of the cache. Here it is made again from outside, against the prompt's length and
the model's config: the state has the same size every time, attention is so many blocks of one size.
"""

from collections.abc import Mapping
from typing import Any

from stateferry.gate.cases import Case
from stateferry.gate.sizes import Sizes


class Accounting:
    """Compares each hand-off with the ones before."""

    def __init__(self, block_tokens: int, sizes: Sizes | None = None) -> None:
        self.hand_offs = 0
        self.state_bytes = 0
        """Of one hand-off; 0 until one was seen."""
        self.block_bytes = 0
        """Of one attention block, all layers."""
        self.moved_bytes = 0
        self._block_tokens = block_tokens
        self._sizes = sizes

    def problems(self, case: Case, received: Mapping[str, Any]) -> list[str]:
        """What is wrong with what the decode engine says that it received."""
        outcome = received.get("outcome")
        if not case.moves:
            fine = outcome in (None, "unused", "abandoned") and not any(received.get("bytes", {}).values())
            return [] if fine else [f"hand-off {outcome}, though nothing had to move"]
        if outcome != "received":
            return [f"hand-off {outcome or 'not reported'}: {received.get('reason', '')}"]
        self.hand_offs += 1
        tokens, by_kind = received.get("tokens"), dict(received.get("bytes", {}))
        self.moved_bytes += sum(by_kind.values())
        length = len(case.prompt)
        found = [] if tokens == length else [f"{tokens} tokens handed off, {length} expected"]
        # Read ahead of vLLM's look into its cache, all of the prefix comes; what is held is then left aside.
        ahead = received.get("ahead") is True
        return found + self._state(by_kind.get("state", 0)) + self._attention(case, by_kind, ahead)

    def _state(self, size: int) -> list[str]:
        self.state_bytes = self.state_bytes or size
        if size == 0:
            return ["no recurrent state arrived"]
        if self._sizes is not None and size not in self._sizes.state_bytes:
            return [f"{size} bytes of state arrived, the model has {sorted(self._sizes.state_bytes)}"]
        if size != self.state_bytes:
            return [f"{size} bytes of state arrived, {self.state_bytes} did before"]
        return []

    def _attention(self, case: Case, by_kind: Mapping[str, int], ahead: bool) -> list[str]:
        size = by_kind.get("attention", 0)
        held = case.hit_tokens if case.hit.on_decode and not ahead else 0
        blocks = -(-len(case.prompt) // self._block_tokens) - held // self._block_tokens
        if size % blocks or size == 0:
            return [f"{size} bytes of attention arrived for {blocks} blocks"]
        expected = self._sizes.token_bytes * self._block_tokens if self._sizes is not None else 0
        self.block_bytes = self.block_bytes or expected or size // blocks
        if size != blocks * self.block_bytes:
            return [
                f"{size} bytes of attention arrived, {blocks} blocks of {self.block_bytes} bytes expected "
                f"({held} tokens were held already)"
            ]
        return []
