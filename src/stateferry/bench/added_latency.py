"""How much later the first token comes from two engines than from one.

Every round takes one prompt length and asks all arms one after the other, so that whatever else the
machine does hits all of them. Each arm gets its own random prompt of that length: nobody has a prefix
of it cached. An arm's figure is its time to first token, prefill leg included, minus the single
engine's in the same round.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateferry.stack import NIXL, Client, EngineSpec, ProgressCallback, Role, Stack

MIN_TOKENS, MAX_TOKENS = 20, 1200
START_TIMEOUT_S = 900.0
IN_TREE = "in-tree NixlConnector"
ONE_ENGINE = "one engine"


@dataclass(frozen=True, slots=True)
class Arm:
    """A pair of engines behind the same two-leg client."""

    name: str
    prefill_url: str
    decode_url: str


@dataclass(slots=True)
class Result:
    """What every arm took, per round, in seconds; same index, same round."""

    lengths: list[int] = field(default_factory=list)
    one_engine_s: list[float] = field(default_factory=list)
    arms_s: dict[str, list[float]] = field(default_factory=dict)

    def summary(self) -> dict[str, dict[str, float]]:
        """Per arm: seconds added to the single engine's first token; the single engine's own time."""
        rows = {ONE_ENGINE: self.one_engine_s}
        for name, times in self.arms_s.items():
            rows[name] = [t - one for t, one in zip(times, self.one_engine_s, strict=True)]
        return {
            name: {
                "requests": len(values),
                "median_s": round(percentile(values, 50), 4),
                "p90_s": round(percentile(values, 90), 4),
                "worst_s": round(max(values), 4),
            }
            for name, values in rows.items()
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed."""
    if not values:
        raise ValueError("no values to take a percentile of")
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(rank, 1) - 1]


@contextmanager
def started_arms(
    model: Path,
    transports: Sequence[str],
    in_tree: bool,
    log_folder: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[list[Arm]]:
    """Two engines per arm, all up at once; ended when the block is left."""
    with Stack(log_folder) as stack:
        specs = [(name, {"transport": name}, "StateFerryConnector") for name in transports]
        if in_tree:
            specs.append((IN_TREE, {}, NIXL))
        pairs = []
        for name, extra, connector in specs:
            tag = name.split()[0]
            common: dict[str, Any] = {"model": model, "connector": connector, "extra_config": extra}
            prefill = stack.start(EngineSpec(role=Role.PREFILL, name=f"{tag}-prefill", **common))
            decode = stack.start(EngineSpec(role=Role.DECODE, name=f"{tag}-decode", **common))
            pairs.append((name, prefill, decode))
        stack.wait_ready(START_TIMEOUT_S, progress)
        yield [Arm(name, prefill.url, decode.url) for name, prefill, decode in pairs]


def measure(
    arms: Sequence[Arm],
    requests: int,
    seed: int = 0,
    on_round: Callable[[int], None] | None = None,
) -> Result:
    """Ask `requests` rounds of prompts, lengths spread evenly over 20 to 1,200 tokens, in random order.

    The single engine is the first arm's prefill engine, asked without hand-off. Two rounds before the
    first are not counted. Raises AnswerError when an engine answers with an error.
    """
    rng = random.Random(seed)
    step = (MAX_TOKENS - MIN_TOKENS) / max(1, requests - 1)
    lengths = [round(MIN_TOKENS + i * step) for i in range(requests)]
    rng.shuffle(lengths)
    result = Result(arms_s={arm.name: [] for arm in arms})
    with Client() as client:
        for number, length in enumerate([MAX_TOKENS, MIN_TOKENS, *lengths], start=-2):
            one_s = _first_token_s(
                client.complete(arms[0].prefill_url, _prompt(rng, length), 2, stream=True).first_token_s
            )
            times = {}
            for arm in rng.sample(list(arms), len(arms)):
                handoff = client.handoff(
                    arm.prefill_url, arm.decode_url, _prompt(rng, length), 2, stream=True
                )
                times[arm.name] = _first_token_s(handoff.first_token_s)
            if number < 0:
                continue
            result.lengths.append(length)
            result.one_engine_s.append(one_s)
            for name, seconds in times.items():
                result.arms_s[name].append(seconds)
            if on_round is not None:
                on_round(number + 1)
    return result


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, 250) for _ in range(tokens)]


def _first_token_s(seconds: float | None) -> float:
    if seconds is None:
        raise ValueError("a streamed answer had no token")
    return seconds
