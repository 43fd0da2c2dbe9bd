"""What decodes that run notice when hand-offs arrive: the time from token to token, alone and meanwhile.

A repeat of one arm has windows over the same running answers of its decode engine: *alone*; *prefill*, in
which the prefill engine computes the prompts that will arrive (on a small machine it takes cores from the
decodes, and is no part of a hand-off); *arriving*, from the first decode leg to the last answer; and two
controls without hand-offs: *refused*, in which requests with such prompts come that the API server reads and
turns down, so that the engine core never hears of them; *short*, in which requests of one token come and are
answered. The arm `one engine` does all of it by itself: there the prompts arrive as plain requests. What
arrives is sent by another process, and each window has the engine core's own gaps beside the client's.
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
from stateferry.bench.arrivals import Arrival, Arrivals
from stateferry.bench.engine_gaps import EngineGaps, to_json
from stateferry.bench.figures import percentile, quantiles, spread
from stateferry.bench.running import GIVEN_UP_S, Running, Windows
from stateferry.bench.streams import Streamed, Streams, stopped

ALONE, PREFILL, ARRIVING, REFUSED, SHORT = WINDOWS = ("alone", "prefill", "arriving", "refused", "short")
ENDLESS_TOKENS = 8000
"""Of the running answers, which are cancelled when the repeat is over."""
ANSWER_TOKENS = 4
DECODE_PROMPT_TOKENS = 32
SHORT_TOKENS = 1
"""What is computed of a hand-off on its decode engine is one token, too."""

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

    windows_s: Mapping[str, tuple[float, float]]
    """When each of WINDOWS began and ended."""
    decodes: list[Streamed]
    arrivals: list[Streamed]
    engine: Mapping[str, EngineGaps] = field(default_factory=dict)
    """Gaps of all requests of the decode engine in each window, by its own clock."""
    control_errors: Sequence[str] = ()

    def gaps_s(self) -> dict[str, list[float]]:
        """Every gap between two tokens of a running answer, by the window in which it ended."""
        return gaps_by_window([decode.token_s for decode in self.decodes], self.windows_s)

    @property
    def first_tokens_s(self) -> list[float]:
        """Of the arriving requests: from the decode leg's sending (one engine: from sending) on."""
        return [answer.first_token_s for answer in self.arrivals if answer.first_token_s is not None]

    @property
    def errors(self) -> list[str]:
        """What went wrong, of both kinds of requests."""
        answers = [answer.error for answer in (*self.decodes, *self.arrivals) if answer.error]
        return [*answers, *self.control_errors]


def gaps_by_window(
    tokens_s: Sequence[Sequence[float]], windows_s: Mapping[str, tuple[float, float]]
) -> dict[str, list[float]]:
    """Gaps between tokens, per window in which they ended."""
    found: dict[str, list[float]] = {name: [] for name in WINDOWS}
    for moments in tokens_s:
        for before, after in pairwise(moments):
            for name, (begin, end) in windows_s.items():
                if begin < after <= end:
                    found[name].append(after - before)
    return found


def summary(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """One arm's figures: medians over repeats with their extremes, errors, distributions, a time line."""
    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    gaps: dict[str, list[float]] = {name: [] for name in WINDOWS}
    engine: dict[str, EngineGaps] = {}
    for repeat in repeats:
        by_client = {}
        for window, values in repeat.gaps_s().items():
            gaps[window] += values
            by_client[window] = {name: figure(values) for name, figure in FIGURES.items() if values}
        for window, counted in repeat.engine.items():
            engine[window] = engine.get(window, EngineGaps()).plus(counted)
        by_engine = {window: counted.figures() for window, counted in repeat.engine.items()}
        for clock, found in (("", by_client), ("engine_", by_engine)):
            alone = found.get(ALONE, {})
            for window, figures in found.items():
                for name, value in figures.items():
                    note(f"{window}_{clock}{name}_s", value)
                    if window != ALONE and name in alone:
                        ratio = value / max(alone[name], 1e-6)
                        note(f"{window}_over_alone_{clock}{name}", ratio)
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
        "engine_gaps": to_json(engine),
        "distributions": {**{name: quantiles(values) for name, values in gaps.items()}}
        | {"first_token": quantiles(firsts)},
        "time_line": time_line(repeats[-1]) if repeats else None,
    }


def time_line(repeat: Repeat) -> dict[str, Any]:
    """One repeat to look at, in seconds since it began: a running answer's tokens, and the arrivals."""
    start_s = repeat.windows_s[ALONE][0]
    return {
        "windows_s": {
            name: [round(moment - start_s, 4) for moment in moments]
            for name, moments in repeat.windows_s.items()
        },
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
    with Arrivals() as arrivals:
        for number in range(-1, repeats):
            for name in rng.sample(list(turns), len(turns)):
                arm, alone = turns[name]
                arm.go_on()
                load = light if number < 0 else result.load
                found = asyncio.run(_repeat(arm, alone, load, rng, arrivals))
                if len(arms) > 1:
                    arm.stop()
                if number >= 0:
                    result.repeats[name].append(found)
            if number >= 0:
                on_repeat(number + 1)
    return result


async def _repeat(arm: Arm, alone: bool, load: Load, rng: random.Random, arrivals: Arrivals) -> Repeat:
    prefill, decode = arm.urls
    watched = prefill if alone else decode
    async with Streams(GIVEN_UP_S) as streams:
        # Wakes what slept while the pair was stopped.
        await streams.ask(prefill, _prompt(rng, DECODE_PROMPT_TOKENS), 2)
        await streams.ask(prefill if alone else arm.urls, _prompt(rng, DECODE_PROMPT_TOKENS), 2)
        running = Running()
        tasks = [
            asyncio.create_task(
                streams.ask(
                    watched,
                    _prompt(rng, DECODE_PROMPT_TOKENS),
                    ENDLESS_TOKENS,
                    on_token=running.token_came,
                )
            )
            for _ in range(load.decodes)
        ]
        running.watch(tasks)
        windows = Windows(running, arrivals, watched)
        seeds = [rng.randrange(1 << 32) for _ in range(load.handoffs)]
        try:
            await running.each_had_one_more()
            await arrivals.prepare(seeds, load.tokens)
            await windows.during(ALONE, asyncio.sleep(load.alone_s))
            offers: Sequence[tuple[Mapping[str, Any] | None, str]] = [(None, "")] * len(seeds)
            if not alone:
                offers = await windows.during(PREFILL, arrivals.prefill(prefill, seeds, load.tokens))
            coming = [
                Arrival(watched, seed, load.tokens, ANSWER_TOKENS, offer)
                for seed, (offer, error) in zip(seeds, offers, strict=True)
                if not error
            ]
            arrived = await windows.during(ARRIVING, arrivals.send(coming, load.interval_s))
            refusing = arrivals.refuse(watched, seeds, load.tokens, load.interval_s)
            not_refused = await windows.during(REFUSED, refusing)
            short = [Arrival(watched, seed, SHORT_TOKENS, ANSWER_TOKENS) for seed in seeds]
            answered = await windows.during(SHORT, arrivals.send(short, load.interval_s))
        finally:
            await stopped(tasks)
    failed = [Streamed(monotonic(), load.tokens, error=error) for _, error in offers if error]
    control_errors = [*not_refused, *(answer.error for answer in answered if answer.error)]
    return Repeat(windows.seconds, running.all_answers(), [*arrived, *failed], windows.engine, control_errors)


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, 250) for _ in range(tokens)]
