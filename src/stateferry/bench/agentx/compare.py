"""Whether a client that replayed sessions asked what was recorded: pure, for any client of the format.

A client's requests are those that one server saw, by conversation. Compared are the conversations of a
session tree, the lengths of prompts and answers, whole blocks of shared prefix between any two requests, and
what was waited for.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from stateferry.bench.agentx.trace import Request, Session
from stateferry.bench.agentx.turns import Turn, turns_of


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a server saw it."""

    prompt: Sequence[Hashable]
    """Its tokens, in whatever form that can be compared."""
    output_tokens: int
    came: int
    """Place of its arrival in all that happened on the server."""
    ended: int
    """Place of the end of its answer."""


Placed = Mapping[int, Asked]
"""Turn number -> what was asked for it."""


def differences(
    session: Session, conversations: Sequence[Sequence[Asked]], *, whole: bool = True, slack_tokens: int = 0
) -> list[str]:
    """What a client asked otherwise than `session` has it; conversations as they came.

    `whole`: from the first turn on, where it may otherwise have begun inside. `slack_tokens`: how much
    longer or shorter a prompt may be.
    """
    turns = turns_of(session)
    placed, found = _placed(turns, conversations, whole)
    for number, asked in sorted(placed.items()):
        expected = max(1, turns[number].request.input_tokens)
        if abs(len(asked.prompt) - expected) > slack_tokens:
            found.append(f"turn {number}: a prompt of {len(asked.prompt)} tokens, recorded are {expected}")
    return found + _not_shared(session, turns, placed) + _not_waited(turns, placed)


def belongs(session: Session, asked: Sequence[Asked], whole: bool = True) -> bool:
    """Whether a conversation may be one of this session's agents, by the lengths of its answers."""
    return bool(_fitting(_chains(turns_of(session)), asked, whole))


def _placed(
    turns: Sequence[Turn], conversations: Sequence[Sequence[Asked]], whole: bool
) -> tuple[dict[int, Asked], list[str]]:
    """Which turn each request is, by the lengths of answers in its conversation; and what has no place."""
    chains = _chains(turns)
    placed: dict[int, Asked] = {}
    found = []
    for asked in sorted(conversations, key=lambda requests: (-len(requests), requests[0].came)):
        fitting = _fitting(chains, asked, whole)
        if not fitting:
            outputs = [one.output_tokens for one in asked]
            found.append(f"a conversation that asks for {outputs} tokens was not recorded")
            continue
        nearest = min(fitting, key=lambda agent: _distance(chains[agent], asked))
        chain = chains.pop(nearest)
        placed |= {turn.number: one for turn, one in zip(chain[-len(asked) :], asked, strict=True)}
    if whole:
        found += [f"agent {agent!r}: its {len(c)} turns were not asked" for agent, c in chains.items()]
    return placed, found


def _chains(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """Every agent's turns."""
    chains: dict[str, list[Turn]] = {}
    for turn in turns:
        chains.setdefault(turn.agent, []).append(turn)
    return chains


def _fitting(chains: Mapping[str, Sequence[Turn]], asked: Sequence[Asked], whole: bool) -> list[str]:
    """Agents that a conversation may be of."""
    outputs = [one.output_tokens for one in asked]
    return [
        agent
        for agent, chain in chains.items()
        if outputs == [_out(turn) for turn in chain][-len(asked) :]
        and (not whole or len(chain) == len(asked))
    ]


def _out(turn: Turn) -> int:
    return max(1, turn.request.output_tokens)


def _distance(chain: Sequence[Turn], asked: Sequence[Asked]) -> int:
    pairs = zip(chain[-len(asked) :], asked, strict=True)
    return sum(abs(len(one.prompt) - turn.request.input_tokens) for turn, one in pairs)


def _not_shared(session: Session, turns: Sequence[Turn], placed: Placed) -> list[str]:
    size, found = session.block_size, []
    for one, other in combinations(sorted(placed), 2):
        recorded = _common(_blocks(turns[one].request, size), _blocks(turns[other].request, size))
        asked = _common(placed[one].prompt, placed[other].prompt) // size
        if asked != recorded:
            found.append(f"turns {one} and {other} share {asked} blocks, recorded are {recorded}")
    return found


def _blocks(request: Request, size: int) -> Sequence[int]:
    return request.hash_ids[: request.input_tokens // size]


def _common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Length of what two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _not_waited(turns: Sequence[Turn], placed: Placed) -> list[str]:
    return [
        f"turn {number} was asked before turn {before}, which it follows, was answered"
        for number in sorted(placed)
        for before in turns[number].after
        if before in placed and placed[before].ended > placed[number].came
    ]
