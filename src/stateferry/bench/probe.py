"""How long a hand-off keeps another thread of its process waiting: one that wants to run every millisecond.

That thread stands for vLLM's engine thread, which shares Python's lock with the ferry. Both ends of the
hand-offs run in this process, so what is found is more than one engine's share.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import msgspec

from stateferry.bench.figures import percentile, quantiles, spread
from stateferry.config import Config
from stateferry.errors import TransportError
from stateferry.ids import EngineId, new_epoch
from stateferry.layout.blocks import needed_blocks
from stateferry.layout.spec import CacheLayout
from stateferry.testing.kimi import KIMI_LINEAR
from stateferry.testing.packed import Packing
from stateferry.testing.peers import EngineRank

LENGTHS = (1_024, 8_192, 32_768)
PERIOD_S = 0.001
TARGET_MS = 1.0
PATIENCE_S = 60.0
IDLE_S = 0.2
"""Watched before every hand-off, for comparison."""


class Probe:
    """A thread that notes how late it wakes. Use as a context manager."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._news = threading.Condition()
        self._waits: list[tuple[float, float]] = []
        """(when it began, when it ended) of every wait for a millisecond."""
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()

    def worst_s(self, begin_s: float, end_s: float) -> float:
        """The latest that it woke, of all waits that were going on in between; waits for the last of them.

        Raises TransportError if the thread does not run at all any more.
        """
        with self._news:
            if not self._news.wait_for(lambda: self._waits and self._waits[-1][0] > end_s, PATIENCE_S):
                raise TransportError(f"the probe did not wake for {PATIENCE_S:g} s")
            found = [end - begin for begin, end in self._waits if begin <= end_s and end >= begin_s]
            self._waits = self._waits[-1:]
        return max(0.0, max(found, default=0.0) - PERIOD_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            start = perf_counter()
            ended = self._ending.wait(PERIOD_S)
            with self._news:
                self._waits.append((start, perf_counter()))
                self._news.notify_all()


@dataclass(slots=True)
class Result:
    """Per length; one entry a hand-off, in seconds."""

    during_s: dict[int, list[float]] = field(default_factory=dict)
    idle_s: dict[int, list[float]] = field(default_factory=dict)
    took_s: dict[int, list[float]] = field(default_factory=dict)

    def summary(self) -> list[dict[str, Any]]:
        """Milliseconds: of the worst delay in a hand-off, and of the worst in an idle time before it."""
        return [
            {
                "tokens": tokens,
                "handoffs": len(self.during_s[tokens]),
                "took_ms": spread([s * 1e3 for s in self.took_s[tokens]], 3),
                "figures": {
                    f"{name}_p{percent}_ms": round(percentile(values[tokens], percent) * 1e3, 3)
                    for name, values in (("during", self.during_s), ("idle", self.idle_s))
                    for percent in (50, 90, 100)
                },
                "distributions": {"during": quantiles(self.during_s[tokens])},
            }
            for tokens in sorted(self.during_s)
        ]


def measure(
    transport: str = "cma",
    lengths: Sequence[int] = LENGTHS,
    handoffs: int = 20,
    on_handoff: Callable[[int], None] = lambda done: None,
) -> Result:
    """Hand off prompts of every length in turn, lengths in random order; the first of each is not counted.

    Raises TransportError for a hand-off that fails.
    """
    rng = random.Random(0)
    result = Result()
    blocks = _blocks_needed(_layout("p", 2), max(lengths))
    config = Config()
    with (
        EngineRank("p", config=config, layout=_layout("p", blocks), transport=transport) as producer,
        EngineRank("d", config=config, layout=_layout("d", blocks), transport=transport) as consumer,
        Probe() as probe,
    ):
        producer.write_tags(1)
        done = 0
        for number in range(-1, handoffs):
            for tokens in rng.sample(list(lengths), len(lengths)):
                begin = perf_counter()
                threading.Event().wait(IDLE_S)
                idle_s = probe.worst_s(begin, perf_counter())
                tables = _tables(producer.layout, tokens)
                offer = producer.grant(tokens, tables, f"prefill-{number}-{tokens}")
                start = perf_counter()
                results = consumer.read(f"decode-{number}-{tokens}", offer, tables, timeout_s=60.0)
                end = perf_counter()
                if results.failed:
                    raise TransportError(f"a hand-off failed: {results.reports[0].reason}")
                if number >= 0:
                    done += 1
                    result.idle_s.setdefault(tokens, []).append(idle_s)
                    result.during_s.setdefault(tokens, []).append(probe.worst_s(start, end))
                    result.took_s.setdefault(tokens, []).append(end - start)
                    on_handoff(done)
    return result


def _layout(name: str, blocks: int) -> CacheLayout:
    """One rank's cache of Kimi-Linear, unsharded."""
    layout = KIMI_LINEAR.packed((1,)).layout(0, 1, Packing(blocks=blocks, block_outermost=True))
    return msgspec.structs.replace(layout, engine_id=EngineId(name), epoch=new_epoch())


def _blocks_needed(layout: CacheLayout, tokens: int) -> int:
    return 2 + sum(len(needed_blocks(group, 0, tokens)) for group in layout.groups)


def _tables(layout: CacheLayout, tokens: int) -> list[list[int]]:
    """Blocks of a request, none used twice."""
    tables, used = [], 1
    for group in layout.groups:
        count = len(needed_blocks(group, 0, tokens))
        tables.append(list(range(used, used + count)))
        used += count
    return tables
