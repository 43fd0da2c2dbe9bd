"""Prompts of token ids for requests that are only described: lengths and shared prefixes are exact.

Every block id of a session stands for a fixed run of tokens; recorded answers of the model are part of the
blocks that follow them. What a prompt has beyond its last whole block belongs to it alone.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stateferry.bench.agentx.trace import Session
from stateferry.bench.agentx.turns import Turn

MARKER_TOKENS = 8
"""At the head of every prompt of a session tree, in place of its first tokens."""
LOWEST, HIGHEST = 16, 250
"""Token ids that every bundled model has, without its special ones."""


class Prompts:
    """The prompts of one replay of one session. No two replays share a prefix: each has another marker."""

    def __init__(self, session: Session, replay: int) -> None:
        self._name = zlib.crc32(session.id.encode())
        self._block_tokens = session.block_size
        self._marker = self._run(MARKER_TOKENS, 1, replay)
        self._blocks: dict[int, npt.NDArray[np.int64]] = {}

    def tokens(self, turn: Turn) -> list[int]:
        """The prompt: as long as the request says, at least one token."""
        length = max(1, turn.request.input_tokens)
        whole = min(len(turn.request.hash_ids), length // self._block_tokens)
        parts = [self._block(name) for name in turn.request.hash_ids[:whole]]
        parts.append(self._run(length - whole * self._block_tokens, 2, turn.number))
        tokens = np.concatenate(parts)
        head = min(length, MARKER_TOKENS)
        tokens[:head] = self._marker[:head]
        found: list[int] = tokens.tolist()
        return found

    def _block(self, name: int) -> npt.NDArray[np.int64]:
        if name not in self._blocks:
            self._blocks[name] = self._run(self._block_tokens, 3, name)
        return self._blocks[name]

    def _run(self, length: int, kind: int, number: int) -> npt.NDArray[np.int64]:
        rng = np.random.default_rng([self._name, kind, number])
        return rng.integers(LOWEST, HIGHEST, length, np.int64)


def ideal_hits(sent: Sequence[tuple[Sequence[int], int]], block_tokens: int) -> list[int]:
    """Tokens of each prompt that a cache which forgets nothing would have; prompts of one session, as sent.

    A prompt is its block ids and its length. At least one token is always left to compute.
    """
    seen: set[int] = set()
    hits = []
    for ids, length in sent:
        shared, prefix, still = 0, 0, True
        for name in ids[: length // block_tokens]:
            prefix = hash((prefix, name))
            still = still and prefix in seen
            shared += still
            seen.add(prefix)
        hits.append(max(0, min(shared * block_tokens, length - 1)))
    return hits
