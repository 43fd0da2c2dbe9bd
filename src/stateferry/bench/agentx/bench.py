"""The bench: the same sessions through every arm, in turn, several times."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateferry.bench.agentx.lanes import Lanes, Tree
from stateferry.bench.agentx.prompts import Prompts
from stateferry.bench.agentx.replay import Replayed, replay
from stateferry.bench.agentx.report import Counted, summary
from stateferry.bench.agentx.trace import Session
from stateferry.bench.agentx.turns import shortened, turns_of
from stateferry.bench.arms import ONE_ENGINE, Arm
from stateferry.bench.streams import Pair, Streams
from stateferry.stack import AtOnce, Client

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How sessions are replayed."""

    lanes: int = 4
    time_scale: float = 0.02
    """Multiplies pauses."""
    longest_pause_s: float = 10.0
    """Of recorded pauses, before they are scaled."""
    longest_turns: int = 0
    """Of every session, only so many are replayed; 0: all."""
    longest_s: float = float("inf")
    """A replay sends nothing new after it."""
    seed: int = 0


@dataclass(slots=True)
class Result:
    """All replays, by arm."""

    settings: Settings
    replays: dict[str, list[tuple[Replayed, Counted]]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Per arm."""
        return {name: summary(replays) for name, replays in self.replays.items()}


def measure(
    arms: Sequence[Arm],
    sessions: Sequence[Session],
    repeats: int,
    settings: Settings,
    on_replay: Callable[[int], None] = lambda done: None,
    one_engine: bool = True,
) -> Result:
    """Every arm once a repeat, in random order. In one repeat lanes begin at the same place for all arms.

    `one_engine`: also the first arm's prefill engine by itself.
    """
    rng = random.Random(settings.seed)
    result = Result(settings)
    turns: dict[str, tuple[Arm, bool]] = {ONE_ENGINE: (arms[0], True)} if one_engine else {}
    turns |= {arm.name: (arm, False) for arm in arms}
    result.replays = {name: [] for name in turns}
    number = 0
    with Client() as client:
        for repeat in range(repeats):
            for name in rng.sample(list(turns), len(turns)):
                arm, alone = turns[name]
                arm.go_on()
                before = counted(client, arm)
                where = arm.urls[0] if alone else arm.where
                replayed = asyncio.run(_replay(sessions, settings, repeat, number, where))
                result.replays[name].append((replayed, counted(client, arm).since(before)))
                if len(arms) > 1:
                    arm.stop()
                number += 1
                on_replay(number)
    return result


def counted(client: Client, arm: Arm) -> Counted:
    """What a pair's engines count. Asks each for one token first: engines that step tell what is new."""
    for url in arm.urls:
        client.complete(url, [1, 2, 3], 1)
    return Counted.of(*(client.metrics(url) for url in arm.urls))


async def _replay(
    sessions: Sequence[Session], settings: Settings, repeat: int, number: int, where: str | Pair | AtOnce
) -> Replayed:
    """`number` is in the marker of every prompt: nothing of an earlier replay is cached."""
    trees = [
        Tree(i, shortened(turns_of(s), settings.longest_turns) if settings.longest_turns else turns_of(s))
        for i, s in enumerate(sessions)
    ]
    lanes = Lanes(
        trees,
        settings.lanes,
        settings.seed + repeat,
        time_scale=settings.time_scale,
        longest_pause_s=settings.longest_pause_s,
    )
    prompts = {i: Prompts(session, number) for i, session in enumerate(sessions)}
    for tree in trees:
        for turn in tree.turns:
            # Built before the measurement: later it would hold the loop that stamps tokens, 6 ms for 32,000.
            prompts[tree.number].tokens(turn)
    async with Streams(REQUEST_TIMEOUT_S) as streams:
        return await replay(lanes, prompts, streams, where, settings.longest_s)
