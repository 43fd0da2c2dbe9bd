"""`stateferry soak`: two engines under load and faults for as long as you like."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stateferry.cli.files import LogFolderOption
from stateferry.cli.starting import StartTimeoutOption, shown_progress
from stateferry.cli.stopping import said_while_stopping
from stateferry.cli.transport_names import TRANSPORT_NAMES
from stateferry.config import parse_config
from stateferry.errors import EngineError
from stateferry.gate.soak import Soak, SoakReport, start_engines
from stateferry.stack import START_TIMEOUT_S, Client, Stack

SHOWN = 20
"""Problems."""


def soak(
    minutes: Annotated[
        float, typer.Option(help="How long, without the start of the engines.", min=0.1)
    ] = 30.0,
    seed: Annotated[int, typer.Option(help="Of prompts, faults and cancellations.")] = 0,
    transport: Annotated[
        str, typer.Option(help=f"What moves the bytes underneath: {TRANSPORT_NAMES}.")
    ] = "auto",
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Hand off for a long time with clients that leave and one fault in twenty reads.

    Passes when every answer is what one engine says, every hand-off ended in a named way, nothing is held
    at the end, and memory, threads and file descriptors do not grow.
    """
    parse_config({"transport": transport})
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[asked]} requests"))
    try:
        with (
            said_while_stopping(screen) as watch,
            Stack(log_folder, watch=watch) as stack,
            Client(timeout_s=120.0) as client,
        ):
            with shown_progress(screen) as starting:
                prefill, decode = start_engines(stack, transport, starting, timeout_s)
            with Progress(*columns, TimeRemainingColumn(), console=screen) as progress:
                task = progress.add_task("soaking", total=1.0, asked=0)
                report = Soak(client, prefill, decode, seed).run(
                    minutes, lambda share, asked: progress.update(task, completed=share, asked=asked)
                )
            stack.check_alive()
    except EngineError as e:
        if json_output:
            print(json.dumps({"passed": False, "errors": [str(e)]}))
        raise
    show(Console(stderr=True) if json_output else Console(), report)
    if json_output:
        print(json.dumps(report.to_json()))
    raise typer.Exit(0 if report.passed else 1)


def show(console: Console, report: SoakReport) -> None:
    """Faults against outcomes, then what is wrong."""
    outcomes = sorted({outcome for counts in report.outcomes.values() for outcome in counts})
    table = Table(title=f"{report.requests} requests in {report.minutes:g} minutes")
    table.add_column("what went wrong on purpose")
    for outcome in outcomes:
        table.add_column(outcome, justify="right")
    for fault, counts in sorted(report.outcomes.items()):
        table.add_row(fault, *(str(counts[outcome] or "") for outcome in outcomes))
    console.print(table)
    for name, samples in report.samples.items():
        if samples:
            first, last = samples[0], samples[-1]
            console.print(
                f"{name}: {first.resident_bytes >> 20} to {last.resident_bytes >> 20} MiB, "
                f"{first.threads} to {last.threads} threads, "
                f"{first.file_descriptors} to {last.file_descriptors} file descriptors"
            )
    for text in report.problems()[:SHOWN]:
        console.print(text, style="red", markup=False, highlight=False)
    console.print("[green]Passed.[/green]" if report.passed else "[red]Failed.[/red]")
