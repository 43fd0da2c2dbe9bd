"""Sends what the lanes say, when they say it, and keeps what came back."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from stateferry.bench.agentx.lanes import Lanes, Sent
from stateferry.bench.agentx.prompts import Prompts
from stateferry.bench.streams import Pair, Streamed
from stateferry.stack import AtOnce

DIALECT = "end-to-start pauses, each capped"
"""Which reading of recorded times this is: InferenceX' own client reads them otherwise."""


class Asks(Protocol):
    """As much of `Streams` as a replay needs."""

    async def ask(
        self,
        where: str | Pair | AtOnce,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Streamed:
        """An answer of exactly `max_tokens`, or with its error."""
        ...


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn and its answer."""

    sent: Sent
    answer: Streamed


@dataclass(slots=True)
class Replayed:
    """One replay."""

    warm_ups: list[Answered] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)
    """In the order in which they were sent."""
    seconds: float = 0.0
    cut_short: bool = False
    """Turns were left when the time was over."""


async def replay(
    lanes: Lanes,
    prompts: Mapping[int, Prompts],
    client: Asks,
    where: str | Pair | AtOnce,
    longest_s: float = float("inf"),
) -> Replayed:
    """Run all lanes to their end, or until `longest_s`: then what is in flight is waited for.

    `prompts` by the trees' numbers. Every conversation carries a stable id for routers.
    """
    result = Replayed()

    async def send(sent: Sent) -> Answered:
        turn = sent.turn
        headers = {"X-Correlation-ID": f"tree-{sent.tree.number}-{turn.agent or 'main'}"}
        answer = await client.ask(
            where,
            prompts[sent.tree.number].tokens(turn),
            max(1, turn.request.output_tokens),
            headers=headers,
        )
        return Answered(sent, answer)

    result.warm_ups = list(await asyncio.gather(*(send(sent) for sent in lanes.warm_ups())))
    begun_s = monotonic()
    lanes.begin(begun_s)
    running: set[asyncio.Task[Answered]] = set()
    order: list[asyncio.Task[Answered]] = []
    while not lanes.done:
        over = monotonic() - begun_s >= longest_s
        if over and not running:
            result.cut_short = True
            break
        started = [] if over else [asyncio.create_task(send(sent)) for sent in lanes.take(monotonic())]
        running.update(started)
        order += started
        next_s = None if over else lanes.next_s
        if running:
            wait_s = None if next_s is None else max(0.0, next_s - monotonic())
            ended, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                lanes.ended(task.result().sent, monotonic())
        elif next_s is not None:
            await asyncio.sleep(max(0.0, min(next_s, begun_s + longest_s) - monotonic()))
    result.seconds = monotonic() - begun_s
    result.answered = [task.result() for task in order]
    return result
