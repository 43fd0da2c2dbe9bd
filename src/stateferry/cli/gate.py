"""`stateferry gate`: arguments, progress and tables of the accuracy gate."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stateferry.cli.files import LogFolderOption, make_folder
from stateferry.cli.starting import StartTimeoutOption, shown_progress
from stateferry.cli.stopping import said_while_stopping
from stateferry.cli.transport_names import TRANSPORT_NAMES
from stateferry.config import LoadMode, parse_config
from stateferry.errors import ConfigError, StateFerryError
from stateferry.gate import (
    FULL,
    SMALL,
    GateReport,
    ModelReport,
    Running,
    Speculation,
    Subject,
    Tally,
    bundled,
    in_folder,
    parse_speculation,
    run_gate,
    seeded,
)
from stateferry.models import FAMILIES
from stateferry.stack import START_TIMEOUT_S, ProgressCallback, ServersCallback

FULL_FAMILIES = ("mamba2", "short_conv")
"""Random models that `--full` judges beside the bundled one."""


def gate(
    full: Annotated[
        bool, typer.Option("--full", help="256 prompts of 64 tokens, every kind of state: most of an hour.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; the rest to stderr.")
    ] = False,
    prefill_url: Annotated[
        str | None, typer.Option("--prefill-url", help="An engine that runs already.", show_default=False)
    ] = None,
    decode_url: Annotated[
        str | None, typer.Option("--decode-url", help="Its partner, with testing: true.", show_default=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help=f"Folder of a checkpoint, or a seeded random one: {', '.join(FAMILIES)}. May be repeated. "
            "Default: the bundled model.",
            show_default=False,
        ),
    ] = None,
    transport: Annotated[
        str, typer.Option("--transport", help=f"What moves the bytes: {TRANSPORT_NAMES}.")
    ] = "auto",
    load_mode: Annotated[
        str, typer.Option("--load-mode", help="Of the decode engine that is started: async, sync.")
    ] = LoadMode.ASYNC.value,
    speculate: Annotated[
        str | None,
        typer.Option(
            "--speculate",
            help="Both engines draft: mtp or ngram, and how many tokens a step, as in mtp:2. Running engines "
            "must have been started so.",
            show_default=False,
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=16, help="max_num_batched_tokens of running engines.")
    ] = 2048,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for the result of --full.", show_default="benchmarks/results"),
    ] = None,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
) -> None:
    """Prove that two engines answer exactly as one does, and that lost state would show.

    Starts a prefill and a decode engine, or takes two by their URLs. Compares tokens and top-20
    log-probabilities without any tolerance, then damages hand-offs on purpose: the gate passes only if
    every good one is exact and every damage is caught. docs/gate.md says what each line means.
    """
    parse_config({"transport": transport, "load_mode": load_mode, "testing": True})
    running = _running(prefill_url, decode_url, chunk_tokens)
    speculation = parse_speculation(speculate) if speculate is not None else None
    subjects = [_subject(name, speculation) for name in model] if model else [bundled(speculation)]
    if full and not model and running is None and speculation is None:
        subjects += [seeded(family) for family in FULL_FAMILIES]
    if speculation is not None and load_mode != LoadMode.ASYNC.value:
        raise ConfigError("--speculate: engines that speculate load with --load-mode async only")
    if running is not None and load_mode != LoadMode.ASYNC.value:
        raise ConfigError("--load-mode is for engines that the gate starts; running ones have theirs")
    if running is not None and len(subjects) > 1:
        raise ConfigError("--model may be given once with --prefill-url: what those engines serve")
    if running is not None and transport != "auto":
        raise ConfigError("--transport is for engines that the gate starts; running ones have theirs")
    results = output or Path("benchmarks/results")
    if full:
        make_folder(results, "--output")
    console = Console(stderr=json_output)
    if not console.is_terminal:
        console = Console(stderr=json_output, width=140)  # a log is not folded at 80
    try:
        with said_while_stopping(console) as servers:
            report = run_gate(
                subjects,
                FULL if full else SMALL,
                full=full,
                transport=transport,
                load_mode=load_mode,
                running=running,
                watcher=_Shown(console, servers),
                log_folder=log_folder,
                start_timeout_s=timeout_s,
            )
    except StateFerryError as e:
        if json_output:
            print(json.dumps({"passed": False, "failures": [str(e)]}))
        raise
    _show(console, report)
    result = report.to_json()
    if full:
        console.print(f"Written to {_write(report, results)}", markup=False, highlight=False)
    if json_output:
        print(json.dumps(result))
    raise typer.Exit(0 if report.passed else 1)


def _running(prefill_url: str | None, decode_url: str | None, chunk_tokens: int) -> Running | None:
    if prefill_url is None and decode_url is None:
        return None
    if prefill_url is None or decode_url is None:
        raise ConfigError("--prefill-url and --decode-url belong together: give both, or neither")
    return Running(prefill_url.rstrip("/"), decode_url.rstrip("/"), chunk_tokens)


def _subject(name: str, speculation: Speculation | None) -> Subject:
    return seeded(name, speculation) if name in FAMILIES else in_folder(Path(name), speculation)


def _write(report: GateReport, folder: Path) -> Path:
    first = report.models[0]
    drafts = "" if first.drafts is None else f"-{first.speculation.split(',')[0]}"
    path = folder / f"gate-full-{first.transport}-{report.load_mode}{drafts}-{report.date[:10]}.json"
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return path


class _Shown:
    """Shows a run's stages on a console: bars on a terminal, lines elsewhere."""

    def __init__(self, console: Console, servers: ServersCallback) -> None:
        self._console = console
        self._servers = servers

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Callable[[], None]]:
        start = time.monotonic()
        if self._console.is_terminal:
            columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True) as bars:
                task = bars.add_task(name, total=steps)
                yield lambda: bars.advance(task)
        else:
            yield lambda: None
        self._console.print(f"  {name}: {time.monotonic() - start:.0f} s", markup=False, highlight=False)

    def starting(self, name: str) -> AbstractContextManager[ProgressCallback]:
        self._console.print(f"{name}: starting a prefill and a decode engine", markup=False)
        return shown_progress(self._console)

    def servers(self, names: Sequence[str], ending: bool) -> None:
        self._servers(names, ending)


def _show(console: Console, report: GateReport) -> None:
    plans, size = report.structure["plans"], report.structure["bytes"]
    if report.load_mode != LoadMode.ASYNC.value:
        console.print(f"\nLoad mode: {report.load_mode}")
    console.print(f"\nStructure: {size:,} bytes of {plans} plans, each planned exactly once", highlight=False)
    for model in report.models:
        _show_model(console, model)
    for text in report.failures():
        console.print(f"  {text}", markup=False, highlight=False)
    word = "[bold green]Passed.[/bold green]" if report.passed else "[bold red]Failed.[/bold red]"
    console.print(f"\n{word} {report.seconds:.0f} s")


def _show_model(console: Console, model: ModelReport) -> None:
    clean, plain, facts = model.clean, model.plain, model.facts
    console.print(
        f"\n{model.model} over {model.transport}: blocks of {facts.block_tokens} tokens, chunks of "
        f"{facts.chunk_tokens}\n"
        f"  two engines as one: {clean.exact} of {clean.prompts} prompts exact over {clean.tokens} tokens, "
        f"largest log-probability difference {clean.max_logprob_difference:.3g}\n"
        f"  bytes: {clean.right} of {clean.prompts} right; {clean.state_bytes:,} of state a hand-off, "
        f"{clean.attention_block_bytes:,} a block of attention, {clean.moved_bytes:,} in all\n"
        f"  for comparison, one engine that prefills the same prompt: {plain.same} of {plain.prompts} exact, "
        f"{plain.same_token} same first token, largest difference {plain.max_logprob_difference:.3g}",
        markup=False,
        highlight=False,
    )
    if clean.same_tokens > clean.exact:
        console.print(
            f"  {clean.same_tokens - clean.exact} more with the same tokens, after a step of another shape",
            highlight=False,
        )
    for name, drafts in (model.drafts or {}).items():
        console.print(
            f"  {model.speculation} of the {name} engine: {drafts.accepted:,} of {drafts.proposed:,} drafts "
            "accepted",
            highlight=False,
        )
    table = Table(caption="differences: of log-probabilities of the first token", caption_justify="left")
    table.add_column("damage", no_wrap=True)
    for heading in ("judged", "caught", "errors", "least difference", "median", "digests"):
        table.add_column(heading, justify="right")
    table.add_column("")
    digests = {tally.name: tally for tally in model.digests}
    for name in [tally.name for tally in model.digests]:
        tokens = next((tally for tally in model.mutants if tally.name == name), None)
        table.add_row(name, *_cells(tokens), *_digest_cells(digests[name], tokens))
    console.print(table)


def _cells(tally: Tally | None) -> tuple[str, ...]:
    if tally is None:
        return ("-",) * 5
    numbers = (tally.smallest_difference, tally.median_difference)
    return (
        str(tally.judged),
        str(tally.caught),
        str(tally.errors),
        *("-" if number is None else f"{number:.2g}" for number in numbers),
    )


def _digest_cells(digests: Tally, tokens: Tally | None) -> tuple[str, str]:
    passed = digests.passed and (tokens is None or tokens.passed)
    verdict = (tokens or digests).verdict
    return (
        f"{digests.caught} of {digests.judged}",
        f"[green]{verdict}[/green]" if passed else f"[red]{verdict}[/red]",
    )
