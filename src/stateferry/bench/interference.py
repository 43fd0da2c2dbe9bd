"""What decodes that run notice when hand-offs arrive: the time from token to token, alone and meanwhile.

A repeat of one arm has three windows over the same running answers of its decode engine: *alone*; *prefill*,
in which the prefill engine computes the prompts that will arrive (on a small machine it takes cores from the
decodes, and is no part of a hand-off); *arriving*, from the first decode leg to the last one's first token.
The arm `one engine` does all of it by itself: there the prompts arrive as plain requests.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from time import monotonic
from typing import Any

from stateferry.bench.arms import ONE_ENGINE, Arm
from stateferry.bench.figures import percentile, quantiles, spread
from stateferry.bench.streams import Streamed, Streams, stopped
from stateferry.errors import EngineError

ALONE, PREFILL, ARRIVING = "alone", "prefill", "arriving"
ENDLESS_TOKENS = 8000
"""Of the running answers, which are cancelled when the repeat is over."""
ANSWER_TOKENS = 4
DECODE_PROMPT_TOKENS = 32
GIVEN_UP_S = 120.0
"""Longest wait for any one thing of a repeat."""


FIGURES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda gaps: percentile(gaps, 50),
    "mean": fmean,
    "p99": lambda gaps: percentile(gaps, 99),
}
"""Of gaps. On a crowded machine tokens reach the client several at a time: then only the mean tells of
speed."""


@dataclass(frozen=True, slots=True)
class Load:
    """What runs and what arrives."""

    decodes: int = 8
    handoffs: int = 16
    tokens: int = 1000
    """Of every arriving prompt."""
    alone_s: float = 3.0
    interval_s: float = 0.1
    """From one arrival to the next."""


@dataclass(slots=True)
class Repeat:
    """One arm once. Moments in seconds of one clock."""

    marks_s: tuple[float, float, float, float]
    """Alone begins; prefill begins; arriving begins; it ends."""
    decodes: list[Streamed]
    arrivals: list[Streamed]

    def gaps_s(self) -> dict[str, list[float]]:
        """Every gap between two tokens of a running answer, by the window in which it ended."""
        return gaps_by_window([decode.token_s for decode in self.decodes], self.marks_s)

    @property
    def first_tokens_s(self) -> list[float]:
        """Of the arriving requests: from the decode leg's sending (one engine: from sending) on."""
        return [answer.first_token_s for answer in self.arrivals if answer.first_token_s is not None]

    @property
    def errors(self) -> list[str]:
        """What went wrong, of both kinds of requests."""
        return [answer.error for answer in (*self.decodes, *self.arrivals) if answer.error]


def gaps_by_window(tokens_s: Sequence[Sequence[float]], marks_s: Sequence[float]) -> dict[str, list[float]]:
    """Gaps between tokens, per window (`alone`, `prefill`, `arriving`) in which they ended."""
    found: dict[str, list[float]] = {ALONE: [], PREFILL: [], ARRIVING: []}
    windows = list(zip(found.values(), marks_s, marks_s[1:], strict=False))
    for moments in tokens_s:
        for before, after in pairwise(moments):
            for gaps, begin, end in windows:
                if begin < after <= end:
                    gaps.append(after - before)
    return found


def summary(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """One arm's figures: medians over repeats with their extremes, errors, distributions, a time line."""
    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    gaps: dict[str, list[float]] = {ALONE: [], PREFILL: [], ARRIVING: []}
    for repeat in repeats:
        found = repeat.gaps_s()
        for window, values in found.items():
            gaps[window] += values
            for name, figure in FIGURES.items() if values else ():
                note(f"{window}_{name}_s", figure(values))
        for name, figure in FIGURES.items() if found[ALONE] and found[ARRIVING] else ():
            note(f"arriving_over_alone_{name}", figure(found[ARRIVING]) / max(figure(found[ALONE]), 1e-6))
        if repeat.first_tokens_s:
            note("first_token_p50_s", percentile(repeat.first_tokens_s, 50))
            note("first_token_p90_s", percentile(repeat.first_tokens_s, 90))
    errors = [text for repeat in repeats for text in repeat.errors]
    firsts = [seconds for repeat in repeats for seconds in repeat.first_tokens_s]
    return {
        "repeats": len(repeats),
        "errors": len(errors),
        "error_texts": sorted(set(errors))[:5],
        "figures": {name: spread(values) for name, values in rows.items()},
        "distributions": {**{name: quantiles(values) for name, values in gaps.items()}}
        | {"first_token": quantiles(firsts)},
        "time_line": time_line(repeats[-1]) if repeats else None,
    }


def time_line(repeat: Repeat) -> dict[str, Any]:
    """One repeat to look at, in seconds since its first mark: a running answer's tokens, and the arrivals."""
    start_s = repeat.marks_s[0]
    return {
        "marks_s": [round(mark - start_s, 4) for mark in repeat.marks_s],
        "tokens_s": [round(s - start_s, 4) for s in repeat.decodes[0].token_s if s >= start_s],
        "arrivals_s": [
            [round(a.sent_s - start_s, 4), round(a.token_s[0] - start_s, 4)]
            for a in repeat.arrivals
            if a.token_s
        ],
    }


@dataclass(slots=True)
class Result:
    """All repeats, by arm."""

    load: Load
    repeats: dict[str, list[Repeat]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Per arm."""
        return {name: summary(repeats) for name, repeats in self.repeats.items()}


def measure(
    arms: Sequence[Arm],
    repeats: int = 5,
    load: Load | None = None,
    seed: int = 0,
    on_repeat: Callable[[int], None] = lambda done: None,
    one_engine: bool = True,
) -> Result:
    """Every arm once a repeat, in random order; one repeat with a light load before the first is not counted.

    `one_engine`: also the first arm's prefill engine by itself.
    """
    rng = random.Random(seed)
    result = Result(load or Load())
    turns: Mapping[str, tuple[Arm, bool]] = {arm.name: (arm, False) for arm in arms}
    if one_engine:
        turns = {ONE_ENGINE: (arms[0], True), **turns}
    result.repeats = {name: [] for name in turns}
    light = Load(decodes=2, handoffs=2, tokens=result.load.tokens, alone_s=0.5)
    for number in range(-1, repeats):
        for name in rng.sample(list(turns), len(turns)):
            arm, alone = turns[name]
            arm.go_on()
            found = asyncio.run(_repeat(arm, alone, light if number < 0 else result.load, rng))
            if len(arms) > 1:
                arm.stop()
            if number >= 0:
                result.repeats[name].append(found)
        if number >= 0:
            on_repeat(number + 1)
    return result


async def _repeat(arm: Arm, alone: bool, load: Load, rng: random.Random) -> Repeat:
    prefill, decode = arm.urls
    async with Streams(GIVEN_UP_S) as streams:
        # Wakes what slept while the pair was stopped.
        await streams.ask(prefill, _prompt(rng, DECODE_PROMPT_TOKENS), 2)
        await streams.ask(prefill if alone else arm.urls, _prompt(rng, DECODE_PROMPT_TOKENS), 2)
        running = _Running()
        tasks = [
            asyncio.create_task(
                streams.ask(
                    prefill if alone else decode,
                    _prompt(rng, DECODE_PROMPT_TOKENS),
                    ENDLESS_TOKENS,
                    on_token=running.token_came,
                )
            )
            for _ in range(load.decodes)
        ]
        running.watch(tasks)
        try:
            await running.each_had_one_more()
            marks = [monotonic()]
            await asyncio.sleep(load.alone_s)
            marks.append(monotonic())
            prompts = [_prompt(rng, load.tokens) for _ in range(load.handoffs)]
            params = [(None, "") if alone else await streams.prefill(prefill, prompt) for prompt in prompts]
            marks.append(monotonic())
            arrivals = []
            for prompt, (offer, error) in zip(prompts, params, strict=True):
                if error:
                    arrivals.append(asyncio.create_task(_failed(prompt, error)))
                    continue
                where = prefill if alone else decode
                arrivals.append(asyncio.create_task(streams.ask(where, prompt, ANSWER_TOKENS, params=offer)))
                await asyncio.sleep(load.interval_s)
            arrived = list(await asyncio.gather(*arrivals))
            await running.each_had_one_more()
            marks.append(monotonic())
        finally:
            await stopped(tasks)
    begin, prefilling, arriving, end = marks
    return Repeat((begin, prefilling, arriving, end), running.all_answers(), arrived)


async def _failed(prompt: Sequence[int], error: str) -> Streamed:
    return Streamed(monotonic(), len(prompt), error=error)


class _Running:
    """The answers that run all the time."""

    def __init__(self) -> None:
        self._answers: dict[int, Streamed] = {}
        self._tasks: Sequence[asyncio.Task[Streamed]] = ()
        self._news = asyncio.Event()

    def watch(self, tasks: Sequence["asyncio.Task[Streamed]"]) -> None:
        """These are the answers."""
        self._tasks = tasks
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())

    def token_came(self, answer: Streamed) -> None:
        """One of them has a new token."""
        self._answers[id(answer)] = answer
        self._news.set()

    def all_answers(self) -> list[Streamed]:
        """Those that have tokens, and those that ended without."""
        ended = [task.result() for task in self._tasks if task.done() and not task.cancelled()]
        return [*self._answers.values(), *(a for a in ended if id(a) not in self._answers)]

    async def each_had_one_more(self) -> None:
        """Wait until every answer that has not ended has a token more than now. Raises EngineError."""
        before = {key: len(answer.token_s) for key, answer in self._answers.items()}

        def waiting() -> bool:
            grown = sum(len(a.token_s) > before.get(key, 0) for key, a in self._answers.items())
            return grown < sum(not task.done() for task in self._tasks)

        try:
            async with asyncio.timeout(GIVEN_UP_S):
                while waiting():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as e:
            raise EngineError(f"a running answer had no token for {GIVEN_UP_S:g} s: cannot measure") from e


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, 250) for _ in range(tokens)]
