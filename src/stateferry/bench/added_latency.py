"""How much later the first token comes from two engines than from one.

Every round takes one prompt length and asks all arms one after the other, so that whatever else the
machine does hits all of them. An arm's turn is two questions of that length, its prefill engine by
itself and the pair; its figure is the second's time to first token, prefill leg included, minus the
first's. All prompts are random: nobody has a prefix of one cached. Every timed question meets engines that
have come to rest: vLLM's processes spin on each other for a second after a step, and on few cores what was
asked before, by whichever arm, would be timed along.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stateferry.bench.arms import ONE_ENGINE, REST_S, Arm
from stateferry.bench.figures import percentile
from stateferry.stack import Client

MIN_TOKENS, MAX_TOKENS = 20, 1200


@dataclass(slots=True)
class Times:
    """Times to the first token of one arm, in seconds; same index, same round."""

    one_engine_s: list[float] = field(default_factory=list)
    pair_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """What every arm took, per round; same index, same round."""

    lengths: list[int] = field(default_factory=list)
    arms: dict[str, Times] = field(default_factory=dict)

    def summary(self) -> dict[str, dict[str, float]]:
        """Per arm: seconds added to the single engine's first token; the single engines' own time."""
        rows = {ONE_ENGINE: [seconds for times in self.arms.values() for seconds in times.one_engine_s]}
        for name, times in self.arms.items():
            rows[name] = [pair - one for pair, one in zip(times.pair_s, times.one_engine_s, strict=True)]
        return {
            name: {
                "requests": len(values),
                "median_s": round(percentile(values, 50), 4),
                "p90_s": round(percentile(values, 90), 4),
                "worst_s": round(max(values), 4),
            }
            for name, values in rows.items()
        }


def measure(
    arms: Sequence[Arm],
    requests: int,
    seed: int = 0,
    on_round: Callable[[int], None] | None = None,
) -> Result:
    """Ask `requests` rounds of prompts, lengths spread evenly over 20 to 1,200 tokens, in random order.

    Two rounds before the first are not counted. Raises AnswerError when an engine answers with an error.
    """
    rng = random.Random(seed)
    step = (MAX_TOKENS - MIN_TOKENS) / max(1, requests - 1)
    lengths = [round(MIN_TOKENS + i * step) for i in range(requests)]
    rng.shuffle(lengths)
    result = Result(arms={arm.name: Times() for arm in arms})
    with Client() as client:
        for number, length in enumerate([MAX_TOKENS, MIN_TOKENS, *lengths], start=-2):
            for arm in rng.sample(list(arms), len(arms)):
                arm.go_on()
                one_s, pair_s = _turn(client, arm, length, rng)
                if len(arms) > 1:
                    arm.stop()
                if number >= 0:
                    result.arms[arm.name].one_engine_s.append(one_s)
                    result.arms[arm.name].pair_s.append(pair_s)
            if number >= 0:
                result.lengths.append(length)
            if number >= 0 and on_round is not None:
                on_round(number + 1)
    return result


def _turn(client: Client, arm: Arm, length: int, rng: random.Random) -> tuple[float, float]:
    """Seconds to the first token: of the prefill engine by itself, and of the pair."""
    prefill, decode = arm.urls
    # Not timed: wakes what slept while the pair was stopped, the engines and then what links them.
    for url in (prefill, decode):
        client.complete(url, _prompt(rng, MIN_TOKENS), 2)
    arm.handed_off(client, _prompt(rng, MIN_TOKENS), 2)

    def one_engine() -> float:
        threading.Event().wait(REST_S)
        return _first_token_s(client.complete(prefill, _prompt(rng, length), 2, stream=True).first_token_s)

    def pair() -> float:
        threading.Event().wait(REST_S)
        answer = arm.handed_off(client, _prompt(rng, length), 2, stream=True)
        return _first_token_s(answer.first_token_s)

    if rng.random() < 0.5:
        one_s = one_engine()
        return one_s, pair()
    pair_s = pair()
    return one_engine(), pair_s


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(16, 250) for _ in range(tokens)]


def _first_token_s(seconds: float | None) -> float:
    if seconds is None:
        raise ValueError("a streamed answer had no token")
    return seconds
