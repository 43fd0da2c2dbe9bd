"""A run of the gate: structure, then for each model two engines, the clean arm, mutants, digests."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from stateferry.errors import EngineError
from stateferry.gate.accounting import Accounting
from stateferry.gate.cases import make_cases
from stateferry.gate.clean import run_clean
from stateferry.gate.damaged import Arms, run_digests, run_mutants
from stateferry.gate.damages import DIGEST_MUTANTS, MUTANTS
from stateferry.gate.engines import Engines, RealEngines, check_ready, facts_of, served
from stateferry.gate.report import GateReport, ModelReport, summarise_clean, summarise_plain
from stateferry.gate.speculation import drafts_of
from stateferry.gate.structure import check_structure
from stateferry.gate.subjects import Subject, refuse_to_start
from stateferry.stack import (
    START_TIMEOUT_S,
    AnswerError,
    Client,
    EngineSpec,
    ProgressCallback,
    Role,
    Stack,
)
from stateferry.stack.host import commit, host_facts

CHUNK_TOKENS = 1024
"""Of the engines that the gate starts, so that chunk borders come at lengths that are quick to compute."""
MAX_MODEL_LEN = 4096
ONE_STEP_TOKENS = 1536
"""Of engines that must not compute a prompt in several steps: what a request, and a step, may have."""
LEASE_S = 120.0
"""Longer than in production: on a busy machine a lease that ends is no wrong answer, but no answer either."""
PATIENCE_S = 300.0
"""For the same reason: the gate asks whether answers are right, not how soon."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is tried."""

    prompts: int
    tokens: int
    mutant_prompts: int
    digest_prompts: int


SMALL = Size(prompts=64, tokens=16, mutant_prompts=16, digest_prompts=2)
FULL = Size(prompts=256, tokens=64, mutant_prompts=64, digest_prompts=4)


Step = Callable[[], None]


class Watcher(Protocol):
    """Is told how a run goes."""

    def stage(self, name: str, steps: int) -> AbstractContextManager[Step]:
        """Something that takes so many steps; what is yielded is called after each."""

    def starting(self, name: str) -> AbstractContextManager[ProgressCallback | None]:
        """Engines start; what is yielded is told how far they are."""

    def servers(self, names: Sequence[str], ending: bool) -> None:
        """See `stack.ServersCallback`."""


class Silent:
    """A watcher that does not look."""

    def stage(self, name: str, steps: int) -> AbstractContextManager[Step]:
        """See Watcher."""
        return nullcontext(lambda: None)

    def starting(self, name: str) -> AbstractContextManager[ProgressCallback | None]:
        """See Watcher."""
        return nullcontext(None)

    def servers(self, names: Sequence[str], ending: bool) -> None:
        """See Watcher."""


@dataclass(frozen=True, slots=True)
class Running:
    """Engines that someone else started."""

    prefill_url: str
    decode_url: str
    chunk_tokens: int
    """Their max_num_batched_tokens; no endpoint tells it."""


class _Stages:
    """Seconds by stage of one model's run."""

    def __init__(self, watcher: Watcher) -> None:
        self.seconds: dict[str, float] = {}
        self._watcher = watcher

    @contextmanager
    def stage(self, key: str, name: str, steps: int) -> Iterator[Step]:
        start = time.monotonic()
        with self._watcher.stage(name, steps) as step:
            yield step
        self.seconds[key] = round(time.monotonic() - start, 1)

    @contextmanager
    def starting(self, name: str) -> Iterator[ProgressCallback | None]:
        start = time.monotonic()
        with self._watcher.starting(name) as progress:
            yield progress
        self.seconds["start"] = round(time.monotonic() - start, 1)


def run_gate(
    subjects: list[Subject],
    size: Size,
    *,
    full: bool = False,
    transport: str = "auto",
    load_mode: str = "async",
    running: Running | None = None,
    watcher: Watcher | None = None,
    log_folder: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> GateReport:
    """Try every subject; `start_timeout_s` is what its engines get to start.

    Raises EngineError where engines do not start or die, ConfigError where running ones cannot be judged.
    """
    watcher = watcher or Silent()
    start = time.monotonic()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    structure = check_structure()
    models = [
        _running(subject, size, running, transport, watcher)
        if running is not None
        else _started(subject, size, transport, load_mode, watcher, log_folder, start_timeout_s)
        for subject in subjects
    ]
    return GateReport(
        full=full,
        date=date,
        commit=commit(),
        host=host_facts(),
        structure=structure,
        models=tuple(models),
        seconds=round(time.monotonic() - start, 1),
        load_mode=load_mode,
    )


def _started(
    subject: Subject,
    size: Size,
    transport: str,
    load_mode: str,
    watcher: Watcher,
    log_folder: Path | None,
    start_timeout_s: float,
) -> ModelReport:
    refuse_to_start(subject)
    stages = _Stages(watcher)
    with (
        tempfile.TemporaryDirectory(prefix="stateferry-gate-") as scratch,
        Stack(log_folder, watch=watcher.servers) as stack,
    ):
        with stages.starting(subject.name) as progress:
            model = subject.write(Path(scratch))
            extra: dict[str, Any] = {
                "testing": True,
                "transport": transport,
                "load_mode": load_mode,
                "lease_s": LEASE_S,
                "transfer_timeout_s": PATIENCE_S,
                "handshake_timeout_s": PATIENCE_S,
            }
            longest, chunk = (MAX_MODEL_LEN, CHUNK_TOKENS) if subject.chunked else (ONE_STEP_TOKENS,) * 2
            prefill, decode = (
                stack.start(
                    EngineSpec(
                        model=model,
                        role=role,
                        name=f"{subject.name}-{role.name.lower()}",
                        extra_config=extra,
                        prefix_caching=subject.caching,
                        max_model_len=longest,
                        args=("--max-num-batched-tokens", str(chunk), *_speculating(subject)),
                    )
                )
                for role in (Role.PREFILL, Role.DECODE)
            )
            stack.wait_ready(start_timeout_s, progress)
        running = Running(prefill.url, decode.url, chunk)
        try:
            return _with_urls(subject, size, running, transport, stages)
        except AnswerError as e:
            stack.check_alive()  # says why a dead engine died, which is worth more than this
            raise EngineError(f"the gate could not go on: {e}") from e


def _speculating(subject: Subject) -> tuple[str, ...]:
    return subject.speculation.arguments if subject.speculation is not None else ()


def _running(subject: Subject, size: Size, running: Running, transport: str, watcher: Watcher) -> ModelReport:
    return _with_urls(subject, size, running, transport, _Stages(watcher))


def _with_urls(
    subject: Subject, size: Size, running: Running, transport: str, stages: _Stages
) -> ModelReport:
    names = [served(url) for url in (running.prefill_url, running.decode_url)]
    with Client(timeout_s=120.0, model=names[0][0]) as client:
        if names[0][0] != names[1][0]:
            raise EngineError(f"the engines serve different models: {names[0][0]!r} and {names[1][0]!r}")
        longest = min(length for _, length in names)
        facts = facts_of(client.metrics(running.prefill_url), running.chunk_tokens, longest)
        engines = RealEngines(client, running.prefill_url, running.decode_url, facts)
        if subject.speculation is None:
            return judge_engines(engines, subject, size, transport, stages)
        urls = {"prefill": running.prefill_url, "decode": running.decode_url}
        before = {name: drafts_of(client.metrics(url)) for name, url in urls.items()}
        report = judge_engines(engines, subject, size, transport, stages)
        drafts = {name: drafts_of(client.metrics(url)).since(before[name]) for name, url in urls.items()}
        return replace(report, speculation=str(subject.speculation), drafts=drafts)


def judge_engines(
    engines: Engines, subject: Subject, size: Size, transport: str, stages: _Stages | None = None
) -> ModelReport:
    """All arms on two engines."""
    stages = stages or _Stages(Silent())
    facts = engines.facts
    check_ready(engines, subject.source(0, 8))
    accounting = Accounting(facts.block_tokens, subject.sizes)
    cases = make_cases(
        size.prompts,
        block_tokens=facts.block_tokens,
        chunk_tokens=facts.chunk_tokens,
        longest=facts.longest - size.tokens - 2,
        caching=facts.caching,
        source=subject.source,
        drops=int(subject.speculation is not None and subject.speculation.has_layers),
        drafts=subject.speculation.tokens if subject.speculation is not None else 0,
    )
    name = f"{subject.name}: {len(cases)} prompts, {size.tokens} tokens each"
    with stages.stage("clean", name, len(cases)) as step:
        results = run_clean(engines, cases, size.tokens, accounting, step)
    arms = Arms(engines, subject.source, subject.lacking)
    name = f"{subject.name}: {len(MUTANTS)} mutants, {size.mutant_prompts} prompts each"
    with stages.stage("mutants", name, len(MUTANTS) * size.mutant_prompts) as step:
        mutants = run_mutants(arms, results, size.mutant_prompts, step)
    name = f"{subject.name}: {len(DIGEST_MUTANTS)} mutants against digests"
    with stages.stage("digests", name, len(DIGEST_MUTANTS) * size.digest_prompts) as step:
        digests = run_digests(arms, results, size.digest_prompts, step)
    leak = ""
    try:
        engines.forget(prefill=True, decode=True)
    except AnswerError as e:
        leak = str(e)  # vLLM empties no cache of which a block is in use
    return ModelReport(
        model=subject.name,
        transport=transport,
        facts=facts,
        clean=summarise_clean(results, size.tokens, accounting),
        plain=summarise_plain(results),
        mutants=tuple(mutants),
        digests=tuple(digests),
        leak=leak,
        seconds=dict(stages.seconds),
    )
