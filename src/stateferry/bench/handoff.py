"""Time to the first token of a pair behind its router over one engine's, by prompt length and concurrency.

A cell is one arm, one length and one number of requests at a time. In each repeat it asks that many prompts
at once of the arm's prefill engine by itself, and of the pair; what is added is the difference of the two
medians. All prompts are random: nobody has a prefix of one cached.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateferry.bench.arms import Arm
from stateferry.bench.figures import percentile, quantiles, spread
from stateferry.bench.streams import Pair, Streamed, Streams
from stateferry.stack import AnswerError, AtOnce, Client, Handoff

LENGTHS = (64, 512, 2000)
CONCURRENCIES = (1, 4, 16)
ANSWER_TOKENS = 2
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Cell:
    """One arm at one length and concurrency; the lists have one entry a repeat."""

    arm: str
    tokens: int
    concurrency: int
    one_engine: list[list[Streamed]] = field(default_factory=list)
    pair: list[list[Streamed]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians over the repeats with their extremes, errors, and the pair's distribution."""
        rows: dict[str, list[float]] = {}
        for alone, together in zip(self.one_engine, self.pair, strict=True):
            ones, pairs = _first_tokens_s(alone), _first_tokens_s(together)
            for name, values in (("one_engine", ones), ("first_token", pairs)):
                for percent in (50, 90) if values else ():
                    rows.setdefault(f"{name}_p{percent}_s", []).append(percentile(values, percent))
            for percent in (50, 90) if ones and pairs else ():
                added = percentile(pairs, percent) - percentile(ones, percent)
                rows.setdefault(f"added_p{percent}_s", []).append(added)
        errors = [a.error for batch in (*self.one_engine, *self.pair) for a in batch if a.error]
        return {
            "arm": self.arm,
            "tokens": self.tokens,
            "concurrency": self.concurrency,
            "repeats": len(self.pair),
            "errors": len(errors),
            "error_texts": sorted(set(errors))[:5],
            "figures": {name: spread(values) for name, values in rows.items()},
            "distributions": {"first_token": quantiles([s for b in self.pair for s in _first_tokens_s(b)])},
        }


@dataclass(slots=True)
class Result:
    """All cells, and one request at a time looked at closely."""

    cells: list[Cell]
    looked_at: dict[tuple[str, int], list[Handoff]] = field(default_factory=dict)
    """By arm and length; not streamed, one token."""
    not_looked_at: list[str] = field(default_factory=list)
    """Why some could not be."""

    def summary(self) -> list[dict[str, Any]]:
        """Per cell."""
        return [cell.summary() for cell in self.cells]

    def time_lines(self) -> list[dict[str, Any]]:
        """Per arm and length, in milliseconds: bars (what, from, to), of the medians over the repeats.

        Where inside the decode leg its read lies is not told: it is drawn first, its engine's steps after it.
        """
        found = []
        for (arm, tokens), handoffs in self.looked_at.items():
            parts = [parts_ms(one) for one in handoffs]
            bars, at = [], 0.0
            for name in parts[0]:
                took = percentile([part.get(name, 0.0) for part in parts], 50)
                bars.append((name, round(at, 3), round(at + took, 3)))
                at += took
            found.append({"row": f"{arm}, {tokens:,}", "bars": bars})
        return found


def parts_ms(handoff: Handoff) -> dict[str, float]:
    """What a hand-off's time to the first token is made of, in the order in which a time line shows it."""
    received = handoff.received
    whole = float(received.get("milliseconds", 0.0))
    post = float(received.get("post_milliseconds", 0.0))
    wire = float(received.get("wire_milliseconds", 0.0))
    found = {"prefill leg": handoff.prefill.total_s * 1e3}
    if whole:
        found |= {"waiting to read": max(0.0, whole - post - wire), "post": post, "wire": wire}
    # Of the time that is left when the prefill leg is over: legs sent at once overlap.
    left = (handoff.total_s - handoff.prefill.total_s) * 1e3
    found["the rest of the decode leg"] = max(0.0, left - whole)
    return found


def measure(
    arms: Sequence[Arm],
    lengths: Sequence[int] = LENGTHS,
    concurrencies: Sequence[int] = CONCURRENCIES,
    repeats: int = 5,
    seed: int = 0,
    on_turn: Callable[[int], None] = lambda done: None,
) -> Result:
    """Every arm once a repeat, in random order, with all its cells in random order.

    One repeat before the first, of the shortest prompts one at a time, is not counted. Requests that fail are
    counted, in cells and in `not_looked_at`: an arm that does badly must not hide what the others did.
    """
    rng = random.Random(seed)
    cells = [Cell(arm.name, tokens, c) for arm in arms for tokens in lengths for c in concurrencies]
    result = Result(cells)
    done = 0
    with Client(TIMEOUT_S) as client:
        for number in range(-1, repeats):
            for arm in rng.sample(list(arms), len(arms)):
                arm.go_on()
                for tokens in lengths:
                    try:
                        look = arm.handed_off(client, _prompt(rng, tokens), 1)
                    except AnswerError as e:
                        result.not_looked_at.append(f"{arm.name}, {tokens} tokens: {e}")
                        continue
                    if number >= 0:
                        result.looked_at.setdefault((arm.name, tokens), []).append(look)
                mine = [cell for cell in cells if cell.arm == arm.name]
                chosen = mine[:1] if number < 0 else rng.sample(mine, len(mine))
                for cell, one, pair in asyncio.run(_turn(arm, chosen, rng)):
                    if number >= 0:
                        cell.one_engine.append(one)
                        cell.pair.append(pair)
                if len(arms) > 1:
                    arm.stop()
                if number >= 0:
                    done += 1
                    on_turn(done)
    return result


async def _turn(
    arm: Arm, cells: Sequence[Cell], rng: random.Random
) -> list[tuple[Cell, list[Streamed], list[Streamed]]]:
    """Per cell: what the prefill engine by itself and the pair answered."""
    places: tuple[str | Pair | AtOnce, ...] = (arm.urls[0], arm.where)
    found = []
    async with Streams(TIMEOUT_S, ids=False) as streams:
        for cell in cells:
            answers: dict[int, list[Streamed]] = {}
            for which in rng.sample((0, 1), 2):
                prompts = [_prompt(rng, cell.tokens) for _ in range(cell.concurrency)]
                asked = (streams.ask(places[which], prompt, ANSWER_TOKENS) for prompt in prompts)
                answers[which] = list(await asyncio.gather(*asked))
            found.append((cell, answers[0], answers[1]))
    return found


def _first_tokens_s(answers: Sequence[Streamed]) -> list[float]:
    return [a.first_token_s for a in answers if a.first_token_s is not None and not a.error]


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, 250) for _ in range(tokens)]
