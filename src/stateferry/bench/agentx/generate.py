"""Made-up agent sessions with the statistics of recorded ones, in the same format.

Sizes and times are drawn from tables of percentiles, straight lines between them on a logarithmic scale.
Where they come from: prompts, growth, outputs and times from the public traces of kv-cache-tester (710
sessions, published as measured); subagents, which those traces hardly have, from what is published of the
AgentX v1.0 corpus (44 % of sessions have some, 43 % of requests are theirs, 16 requests each at the median).
How subagents grow, run beside each other and are joined is our assumption: nothing is published.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from stateferry.bench.agentx.trace import BLOCK_TOKENS, Request, Session

Percentiles = Mapping[int, float]

MAIN_TURNS: Percentiles = {0: 2, 10: 7, 50: 45, 90: 156, 99: 330, 100: 514}
FIRST_PROMPT: Percentiles = {
    0: 8_000,
    10: 15_400,
    25: 18_500,
    50: 22_100,
    75: 89_500,
    90: 252_000,
    100: 600_000,
}
GROWTH: Percentiles = {0: 112, 10: 192, 25: 320, 50: 640, 75: 1_456, 90: 3_168, 99: 10_416, 100: 96_000}
"""New tokens of a turn that goes on where the last one was."""
LARGEST_PROMPT: Percentiles = {0: 60_000, 10: 110_000, 50: 172_000, 75: 200_000, 90: 349_000, 100: 894_000}
"""Where a session's prompt is cut back."""
OUTPUT: Percentiles = {0: 20, 10: 105, 50: 216, 90: 898, 99: 3_687, 100: 16_000}
THINK_S: Percentiles = {0: 0.5, 10: 4, 50: 10, 90: 162, 99: 3_015, 100: 20_000}
API_S: Percentiles = {0: 1, 10: 3.4, 50: 6.1, 90: 18.4, 99: 60.7, 100: 200}
SUBAGENT_TURNS: Percentiles = {0: 1, 10: 5, 50: 16, 90: 55, 99: 150, 100: 300}
SUBAGENT_FIRST_PROMPT: Percentiles = {0: 8_000, 10: 9_000, 50: 10_300, 90: 12_300, 100: 18_300}
SUBAGENT_PAUSE_S: Percentiles = {0: 0.1, 50: 1, 90: 5, 100: 30}

CUT_BACK_TO = (0.1, 0.7)
"""Shares of the prompt that a cut leaves, and then a third of that is shared with before."""
LOST_HALF, LOST_SOME = 0.013, 0.012
"""Shares of turns that find under half, and half to four fifths, of their prompt in the one before; turns
after a cut are on top."""
WITH_SUBAGENTS = 0.44
SUBAGENTS_PER_TURN = 0.068
"""In sessions that have some."""
AT_ONCE = (1, 1, 1, 2, 3)
"""Subagents started together, each as likely."""
JOINED = 0.8
"""How often the main agent waits for them."""


def draw(rng: random.Random, table: Percentiles) -> float:
    """A value whose percentiles are those of the table."""
    percent = rng.uniform(0, 100)
    points = sorted(table.items())
    for (low, least), (high, most) in pairwise(points):
        if percent <= high:
            share = (percent - low) / (high - low)
            return math.exp(math.log(least) + share * (math.log(most) - math.log(least)))
    return points[-1][1]


@dataclass(slots=True)
class _Names:
    """Block ids of one session: subagents share the space, so that equal ids mean equal blocks."""

    used: int = 0

    def fresh(self, count: int) -> list[int]:
        """Ids that were never used."""
        first = self.used + 1
        self.used += count
        return list(range(first, first + count))


class _Agent:
    """One chain of turns: what its prompt is made of. Token counts are scaled already."""

    def __init__(self, rng: random.Random, names: _Names, scale: float, first_tokens: float) -> None:
        self._rng, self._names, self._scale = rng, names, scale
        self._largest = draw(rng, LARGEST_PROMPT) / scale
        self._tokens = 0.0
        self._ids: list[int] = []
        self._first = first_tokens / scale

    def request(self, t: float, think_s: float) -> Request:
        """The next turn, sent at `t`."""
        rng = self._rng
        kept, tokens = self._tokens, self._tokens + draw(rng, GROWTH) / self._scale
        lost = rng.random()
        if not self._ids:
            kept, tokens = 0.0, self._first
        elif tokens > max(self._largest, self._first * 1.2):
            tokens = self._tokens * rng.uniform(*CUT_BACK_TO)
            kept = tokens / 3
        elif lost < LOST_HALF:
            kept = tokens * rng.uniform(0, 0.5)
        elif lost < LOST_HALF + LOST_SOME:
            kept = tokens * rng.uniform(0.5, 0.8)
        blocks = int(tokens) // BLOCK_TOKENS
        ids = self._ids[: min(int(kept) // BLOCK_TOKENS, blocks)]
        self._ids = ids + self._names.fresh(blocks - len(ids))
        self._tokens = tokens
        return Request(
            t=round(t, 3),
            type="s",
            model="made-up",
            input_tokens=max(1, int(tokens)),
            output_tokens=max(1, round(draw(rng, OUTPUT) / self._scale)),
            hash_ids=list(self._ids),
            api_time=round(draw(rng, API_S), 3),
            think_time=round(think_s, 3),
        )


def make_session(number: int, seed: int = 0, scale: float = 1.0) -> Session:
    """One session. Depends on the arguments alone. `scale` divides all token counts, as `coarsened` does."""
    rng = random.Random(f"{seed} {number}")
    names = _Names()
    main = _Agent(rng, names, scale, draw(rng, FIRST_PROMPT))
    count = max(2, round(draw(rng, MAIN_TURNS)))
    spawning = _spawning(rng, count)
    requests: list[Request] = []
    now_s = 0.0
    for turn in range(count):
        think_s = draw(rng, THINK_S) if turn else 0.0
        now_s += think_s
        requests.append(main.request(now_s, think_s))
        now_s += requests[-1].api_time
        started = [_subagent(rng, names, scale, now_s) for _ in range(spawning.get(turn, 0))]
        for offset, entry in enumerate(started):
            entry.agent_id = f"agent-{turn}-{offset}"
        requests += started
        if started and rng.random() < JOINED:
            now_s = max(entry.t + entry.duration_ms / 1000 for entry in started)
    return Session(id=f"made-up-{seed}-{number:04d}", models=["made-up"], requests=requests)


def _spawning(rng: random.Random, turns: int) -> dict[int, int]:
    """After which turns how many subagents start."""
    if rng.random() >= WITH_SUBAGENTS:
        return {}
    rate = SUBAGENTS_PER_TURN / (sum(AT_ONCE) / len(AT_ONCE))
    found = {turn: rng.choice(AT_ONCE) for turn in range(turns) if rng.random() < rate}
    return found or {rng.randrange(turns): 1}


def _subagent(rng: random.Random, names: _Names, scale: float, start_s: float) -> Request:
    """A subagent that starts with a context of its own. Times inside are the session's: all readers of the
    format agree on those; of times that count from its start AIPerf takes the late ones for the session's."""
    agent = _Agent(rng, names, scale, draw(rng, SUBAGENT_FIRST_PROMPT))
    inner: list[Request] = []
    t = 0.0
    for _ in range(max(1, round(draw(rng, SUBAGENT_TURNS)))):
        pause_s = draw(rng, SUBAGENT_PAUSE_S) if inner else 0.0
        inner.append(agent.request(start_s + t + pause_s, pause_s))
        t = inner[-1].t - start_s + inner[-1].api_time
    return Request(
        t=round(start_s, 3),
        type="subagent",
        subagent_type="made-up",
        models=["made-up"],
        duration_ms=round(t * 1000),
        status="completed",
        requests=inner,
    )
