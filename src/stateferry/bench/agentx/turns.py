"""A session tree as turns that follow one another: what may be sent once what is over.

A turn follows the turn before it in its own agent's chain. A subagent's first turn also follows the main
agent's last turn that had ended when it started; it and every main turn also follow every subagent that had.
So subagents run beside each other and beside the main agent where they did, and are joined where they were.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stateferry.bench.agentx.trace import Request, Session

MAIN = ""
Recorded = tuple[float, float, Request]
"""When it started and ended, in seconds since the session began."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session tree."""

    number: int
    """By recorded start; every turn in `after` has a smaller one."""
    agent: str
    """MAIN, or a subagent's name."""
    start_s: float
    after: tuple[int, ...]
    """Numbers of the turns that must be over."""
    pause_s: float
    """From the end of the last of them to this turn, as recorded."""
    request: Request


def turns_of(session: Session) -> list[Turn]:
    """All turns of a session tree."""
    chains = _chains(session)
    ends = {agent: max(end for _, end, _ in chain) for agent, chain in chains.items()}
    left = {agent: len(chain) for agent, chain in chains.items()}
    last: dict[str, int] = {}
    turns: list[Turn] = []
    ended_s: list[float] = []
    joined: set[str] = set()
    """Subagents that a main turn has waited for: later ones need not."""
    starts = [(r[0], agent, place) for agent, chain in chains.items() for place, r in enumerate(chain)]
    for start, agent, place in sorted(starts):
        _, end, request = chains[agent][place]
        after = {last[agent]} if agent in last else set()
        if agent == MAIN or agent not in last:
            over = {a for a in ends if a != MAIN and not left[a] and ends[a] <= start} - joined
            after |= {last[other] for other in over}
            if agent == MAIN:
                joined |= over
            else:
                mains = [t.number for t in turns if t.agent == MAIN and ended_s[t.number] <= start]
                after |= {mains[-1]} if mains else set()
        pause = start - max((ended_s[number] for number in after), default=start)
        turns.append(Turn(len(turns), agent, start, tuple(sorted(after)), max(0.0, pause), request))
        ended_s.append(end)
        last[agent] = turns[-1].number
        left[agent] -= 1
    return turns


def shortened(turns: list[Turn], count: int) -> list[Turn]:
    """The first `count` turns: nothing in them follows a later one."""
    return turns[:count]


def _chains(session: Session) -> Mapping[str, list[Recorded]]:
    """Every agent's turns in order; agents without turns are left out."""
    chains: dict[str, list[Recorded]] = {MAIN: []}
    for number, entry in enumerate(session.requests):
        if entry.is_subagent:
            shift = _shift_s(entry)
            name = entry.agent_id or "subagent"
            chains[f"{name}#{number}"] = [
                (r.t + shift, r.t + shift + r.api_time, r) for r in entry.requests if not r.is_subagent
            ]
        else:
            chains[MAIN].append((entry.t, entry.t + entry.api_time, entry))
    return {agent: sorted(chain, key=lambda r: r[0]) for agent, chain in chains.items() if chain}


def _shift_s(entry: Request) -> float:
    """What makes session time of a subagent's times: some files count them from its start, some do not."""
    first = min((request.t for request in entry.requests), default=0.0)
    return 0.0 if first >= entry.t else entry.t
