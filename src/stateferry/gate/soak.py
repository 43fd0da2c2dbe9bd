"""Many hand-offs for long, one in twenty damaged on the way: nothing wrong, nothing stuck, nothing kept.

The engines run with `testing: true` over the `faults` transport and compare digests of everything, so
that a fault that says "all is well" is found, too. Each request brings its own fault, or none, so that
the table says what became of which.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from stateferry.gate.resources import Sample, growth, sample
from stateferry.models import RECALL_GDN, recall_prompt
from stateferry.stack import (
    START_TIMEOUT_S,
    AnswerError,
    Client,
    Engine,
    EngineSpec,
    ProgressCallback,
    Role,
    Stack,
    held,
)

CLEAN = "none"
GONE_BETWEEN = "client gone between the legs"
GONE_DURING = "client gone during the answer"
FAULTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "read fails once": ({"kind": "fail", "reads": [1]},),
    "read fails every time": ({"kind": "fail"},),
    "connection breaks": ({"kind": "break", "reads": [1]},),
    "fails while siblings write": ({"kind": "fail_writing", "reads": [1]},),
    "lands late": ({"kind": "land_late", "reads": [1], "polls": 200},),
    "a piece is dropped": ({"kind": "drop"},),
    "a piece is cut short": ({"kind": "truncate"},),
    "bytes are mixed up": ({"kind": "corrupt"},),
    "everything arrives twice": ({"kind": "duplicate"},),
    "read is slow": ({"kind": "delay", "polls": 500},),
    "read hangs": ({"kind": "hang"},),
}
MUST_FAIL = (
    "read fails every time",
    "a piece is dropped",
    "a piece is cut short",
    "bytes are mixed up",
    "read hangs",
)
FAULT_SHARE = 0.05
CANCEL_SHARE = 0.05
BLOCKS = 256
ONE_ARENA = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
    # oneDNN keeps the kernels of each new batch shape, 1,024 of them: minutes of growth that is no leak.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
}
"""With several arenas glibc keeps what vLLM's threads free: a plain engine's worker grew by 2 MB a second
under the same prompts, with and without a connector."""
PROMPTS = 48
LENGTHS = (20, 60, 130, 260, 400, 700, 900)
TOKENS = (1, 4, 12, 24)
WORKERS = 4
SAMPLE_S = 5.0
SETTLE_S = 40.0
TRANSFER_TIMEOUT_S = 10.0
LEASE_S = 15.0


@dataclass(slots=True)
class SoakReport:
    """What became of everything."""

    minutes: float
    requests: int = 0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Fault (or CLEAN, or how the client left) -> outcome -> how often."""
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from one engine's, and outcomes that a fault cannot have."""
    errors: list[str] = field(default_factory=list)
    """Requests that ended in an error although nobody cancelled them."""
    held: str = ""
    """What was still held when all was over; empty: nothing."""
    grown: list[str] = field(default_factory=list)
    """What grew between the second and the last third of the time."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Nothing wrong, no error, nothing held, nothing grown, and faults did happen."""
        return not self.problems()

    def problems(self) -> list[str]:
        """Why it did not pass, in words."""
        found = [*self.wrong, *self.errors, *([self.held] if self.held else []), *self.grown]
        if not self.outcomes.keys() & FAULTS.keys():
            found.append("no fault was tried: one request in twenty has one, so ask for more minutes")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values; of the samples the first and the last."""
        ends = {
            name: [found[0].to_json(), found[-1].to_json()] for name, found in self.samples.items() if found
        }
        return {
            "passed": self.passed,
            "minutes": self.minutes,
            "requests": self.requests,
            "outcomes": {name: dict(counts) for name, counts in self.outcomes.items()},
            "wrong": self.wrong,
            "errors": self.errors,
            "held": self.held,
            "grown": self.grown,
            "resources": ends,
        }


class Soak:
    """One run over two engines that are up."""

    def __init__(self, client: Client, prefill: Engine, decode: Engine, seed: int) -> None:
        self._client = client
        self._prefill, self._decode = prefill, decode
        self._seed = seed
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._expected: dict[int, tuple[int, ...]] = {}
        self._prompts = [
            recall_prompt(number, random.Random(number).choice(LENGTHS)).token_ids
            for number in range(PROMPTS)
        ]

    def run(self, minutes: float, on_second: Callable[[float, int], None] = lambda *_: None) -> SoakReport:
        """Ask for so long; `on_second` is told the share of the time that is over and the requests."""
        report = SoakReport(minutes)
        for number, prompt in enumerate(self._prompts):
            self._expected[number] = self._client.complete(self._decode.url, prompt, max(TOKENS)).token_ids
        start, end = time.monotonic(), time.monotonic() + minutes * 60
        self._stopped.clear()
        engines = {"prefill": self._prefill.pid, "decode": self._decode.pid}
        report.samples = {name: [] for name in engines}
        with ThreadPoolExecutor(WORKERS) as pool:
            workers = [pool.submit(self._work, report, number, end) for number in range(WORKERS)]
            next_sample = start
            try:
                while wait(workers, timeout=1.0).not_done:
                    now = time.monotonic()
                    if now >= next_sample and now < end:
                        for name, pid in engines.items():
                            report.samples[name].append(sample(pid))
                        next_sample = now + SAMPLE_S
                    on_second(min(1.0, (now - start) / (end - start)), report.requests)
                for worker in workers:
                    worker.result()
            finally:
                self._stopped.set()  # leaving the pool waits for its workers: Ctrl-C would too
        report.held = self._held()
        for name, samples in report.samples.items():
            report.grown += [f"{name}: {text}" for text in growth(samples)]
        return report

    def _work(self, report: SoakReport, worker: int, end: float) -> None:
        rng = random.Random(f"{self._seed}/{worker}")
        while time.monotonic() < end and not self._stopped.is_set():
            number, tokens = rng.randrange(PROMPTS), rng.choice(TOKENS)
            draw = rng.random()
            if draw < CANCEL_SHARE:
                self._leave(report, number, rng)
            elif draw < CANCEL_SHARE + FAULT_SHARE:
                self._ask(report, number, tokens, rng.choice(list(FAULTS)))
            else:
                self._ask(report, number, tokens, CLEAN)

    def _ask(self, report: SoakReport, number: int, tokens: int, fault: str) -> None:
        tamper = {"faults": [dict(rule) for rule in FAULTS[fault]]} if fault in FAULTS else None
        wrong = error = ""
        try:
            answer = self._client.handoff(
                self._prefill.url,
                self._decode.url,
                self._prompts[number],
                tokens,
                tamper=tamper,
                timeout_s=120.0,
            )
        except AnswerError as e:
            outcome, error = "error", f"prompt {number}, fault {fault}: {e}"
        else:
            received = answer.received
            outcome = str(received.get("outcome", "nothing handed off"))
            expected = self._expected[number][:tokens]
            if answer.decode.token_ids != expected:
                wrong = (
                    f"prompt {number}, fault {fault}, {outcome}: {answer.decode.token_ids}, not {expected}"
                )
            elif fault in MUST_FAIL and outcome == "received":
                wrong = f"prompt {number}, fault {fault}: received, which cannot be"
            if outcome == "received" and received.get("retries"):
                outcome = "received, read again"
        with self._lock:
            report.requests += 1
            report.outcomes.setdefault(fault, Counter())[outcome] += 1
            report.wrong += [wrong] if wrong else []
            report.errors += [error] if error else []

    def _leave(self, report: SoakReport, number: int, rng: random.Random) -> None:
        how = rng.choice((GONE_BETWEEN, GONE_DURING))
        try:
            if how == GONE_BETWEEN:
                self._client.handoff(
                    self._prefill.url, self._decode.url, self._prompts[number], 4, between=_hang_up
                )
            else:
                self._client.handoff(
                    self._prefill.url,
                    self._decode.url,
                    self._prompts[number],
                    400,
                    timeout_s=rng.uniform(0.01, 1.0),
                )
            outcome = "answered before"
        except (AnswerError, ConnectionAbortedError):
            outcome = "left"
        with self._lock:
            report.requests += 1
            report.outcomes.setdefault(how, Counter())[outcome] += 1

    def _held(self) -> str:
        """What an engine still holds after SETTLE_S; empty: nothing."""
        deadline = time.monotonic() + SETTLE_S
        engines = {"prefill": self._prefill, "decode": self._decode}
        while (found := held(self._client, engines)) and time.monotonic() < deadline:
            threading.Event().wait(0.5)
        return found


def _hang_up(params: dict[str, Any]) -> dict[str, Any]:
    raise ConnectionAbortedError


def start_engines(
    stack: Stack,
    transport: str = "auto",
    starting: ProgressCallback | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[Engine, Engine]:
    """A prefill and a decode engine as a soak needs them. Raises EngineError when one does not start."""
    extra = {
        "testing": True,
        "transport": "faults",
        "faults": {"transport": transport},
        "verify": "all",
        "lease_s": LEASE_S,
        "transfer_timeout_s": TRANSFER_TIMEOUT_S,
    }
    prefill, decode = (
        stack.start(
            EngineSpec(
                model=RECALL_GDN,
                role=role,
                extra_config=extra,
                prefix_caching=False,
                max_model_len=2048,
                # Few, so that soon all were touched: until then a cache's pages make a process grow.
                args=("--num-gpu-blocks-override", str(BLOCKS)),
                env=ONE_ARENA,
            )
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    stack.wait_ready(timeout_s, starting)
    return prefill, decode
