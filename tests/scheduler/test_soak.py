"""Everything at once, by seed: hand-offs that share prefixes, fail, are aborted, repeated or forgotten."""

import random
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, HYBRID_FINE, HYBRID_UNCACHED, Engine, Pair
from simulated_model import answer

pytestmark = pytest.mark.scheduler

MODELS = {
    "align": HYBRID,
    "fine": HYBRID_FINE,
    "none": HYBRID_UNCACHED,
    "attention": ATTENTION,
    "window and states": CacheModel(states=2, window=6),
}
LEASE_S = 0.4


class Soak:
    """One run."""

    def __init__(self, model: CacheModel, seed: int, *, async_scheduling: bool, rounds: int) -> None:
        self.dice = random.Random(seed)
        self.rounds = rounds
        self.stems = [self.dice.choices(range(1000), k=24) for _ in range(4)]
        self.expected: dict[tuple[int, str], list[int]] = {}
        self.prefills: dict[str, list[int]] = {}
        """Prompts of prefill legs whose response has not been forwarded yet."""
        self.pair = Pair(
            model,
            lease_s=LEASE_S,
            async_scheduling=async_scheduling,
            producer={"blocks": 70, "max_batched_tokens": 24, "max_seqs": 8},
            consumer={"blocks": 50, "max_batched_tokens": 32, "max_seqs": 6},
        )

    def run(self) -> None:
        """Do things in any order, then let everything end and look."""
        with self.pair as pair:
            actions = [
                self.start,
                self.start,
                self.forward,
                self.forward,
                self.plain,
                self.disturb,
                self.abort,
            ]
            for _ in range(self.rounds):
                self.dice.choice(actions)()
                for _ in range(self.dice.randrange(4)):
                    self.dice.choice([pair.producer.step, pair.consumer.step, pair.step])()
            pair.consumer.tap.held = False
            pair.run()
            for (side, request_id), tokens in self.expected.items():
                engine = (pair.producer, pair.consumer)[side]
                assert engine.finished[request_id].tokens == tokens
            pair.check_idle()
            assert not pair.producer.worker.wrong

    def prompt(self) -> list[int]:
        """Some of a stem and some of its own."""
        stem = self.dice.choice(self.stems)
        own = self.dice.choices(range(1000), k=self.dice.randrange(8))
        return [*stem[: self.dice.randrange(25)], *own, self.dice.randrange(1000)]

    def start(self) -> None:
        prompt = self.prompt()
        request = self.pair.producer.add(prompt, params={"do_remote_decode": True})
        self.prefills[request.request_id] = prompt

    def forward(self) -> None:
        """What the router does with a response, well or badly."""
        finished = self.pair.producer.finished
        ready = [i for i in self.prefills if finished[i].params is not None]
        if not ready:
            return
        request_id = self.dice.choice(ready)
        prompt, params = self.prefills[request_id], finished[request_id].params
        mood = self.dice.random()
        if mood < 0.1:
            prompt = self.prompt()
        elif mood < 0.2:
            prompt = [*prompt, *self.dice.choices(range(1000), k=self.dice.randrange(1, 6))]
        if mood > 0.15:
            del self.prefills[request_id]  # otherwise it is used again, or never
        self.decode(self.pair.consumer, prompt, params)

    def plain(self) -> None:
        self.decode(self.dice.choice([self.pair.producer, self.pair.consumer]), self.prompt(), None)

    def decode(self, engine: Engine, prompt: list[int], params: Any) -> None:
        count = self.dice.choice([1, 2, 5, 20])
        request = engine.add(prompt, params=params, max_tokens=count)
        self.expected[engine is self.pair.consumer, request.request_id] = answer(prompt, count)

    def disturb(self) -> None:
        tap = self.pair.consumer.tap
        if self.dice.random() < 0.3:
            tap.failing += 1
        tap.held = not tap.held
        tap.deaf = self.dice.random() < 0.5

    def abort(self) -> None:
        side = self.dice.randrange(2)
        engine = (self.pair.producer, self.pair.consumer)[side]
        if engine.scheduler.requests:
            request_id = self.dice.choice(list(engine.scheduler.requests))
            engine.abort(request_id)
            self.expected.pop((side, request_id), None)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", MODELS)
def test_anything_in_any_order(model: str, async_scheduling: bool) -> None:
    Soak(MODELS[model], 1, async_scheduling=async_scheduling, rounds=120).run()
