"""What an open hand-off costs the engine that waits to be read: processor time, against the engine at rest.

vLLM steps an engine without a pause while its connector holds blocks for somebody, so that it hears when
they are free; nothing else makes it step. Each repeat watches the prefill engine at rest, and then with one
offer open that nobody claims. All processes of the engine count.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateferry.bench.arms import REST_S
from stateferry.bench.figures import spread
from stateferry.stack import PREFILL_PARAMS, Client, Engine
from stateferry.stack.guard import session_members

PROMPT_TOKENS = 512


@dataclass(slots=True)
class Result:
    """Seconds of processor time a second, per repeat."""

    idle: list[float] = field(default_factory=list)
    open: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians with their extremes, and what an open hand-off adds."""
        added = [after - before for before, after in zip(self.idle, self.open, strict=True)]
        rows = {"idle": self.idle, "open": self.open, "added": added}
        return {name: spread(values, 3) for name, values in rows.items()}


def lease_needed_s(watch_s: float) -> float:
    """So long must the engine keep an unclaimed offer for `measure`."""
    return watch_s + 2 * REST_S


def measure(
    engine: Engine,
    lease_s: float,
    repeats: int = 5,
    watch_s: float = 5.0,
    seed: int = 0,
    on_repeat: Callable[[int], None] = lambda done: None,
) -> Result:
    """Watch `engine`, a prefill engine whose offers live for `lease_s`. Raises AnswerError if it fails."""
    rng = random.Random(seed)
    result = Result()
    with Client() as client:
        for number in range(-1, repeats):
            threading.Event().wait(REST_S)
            idle = _load(engine, watch_s)
            start = time.monotonic()
            prompt = [rng.randrange(16, 250) for _ in range(PROMPT_TOKENS)]
            client.complete(engine.url, prompt, 1, kv_transfer_params=PREFILL_PARAMS)
            threading.Event().wait(REST_S)
            held = _load(engine, watch_s)
            # Nobody claims it: the next repeat begins once its lease is over and vLLM has its blocks back.
            threading.Event().wait(max(0.0, lease_s + REST_S - (time.monotonic() - start)))
            if number >= 0:
                result.idle.append(idle)
                result.open.append(held)
                on_repeat(number + 1)
    return result


def _load(engine: Engine, watch_s: float) -> float:
    members = session_members(engine.pid)
    before_s, begin = _processor_s(members), time.monotonic()
    threading.Event().wait(watch_s)
    return (_processor_s(members) - before_s) / (time.monotonic() - begin)


def _processor_s(pids: Sequence[int]) -> float:
    """Processor time of these processes so far, user and system (fields 14 and 15 of proc(5) stat)."""
    ticks = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The command stands in parentheses and may contain anything; field 3 follows the last one.
        fields = stat[stat.rfind(b")") + 2 :].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
