"""`stateferry bench`: numbers, with the arms interleaved in one run."""

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stateferry.bench import MAX_TOKENS, MIN_TOKENS, ONE_ENGINE, measure, started_arms
from stateferry.cli.starting import shown_progress
from stateferry.errors import ConfigError
from stateferry.models import RECALL_GDN
from stateferry.stack.host import commit, host_facts

bench_app = typer.Typer(no_args_is_help=True, help="Measure, with every arm in the same run.")

TRANSPORTS = ("cma", "nixl")


@bench_app.callback()
def _several_benches() -> None:
    """Keeps the name of a bench part of the command while there is only one."""


@bench_app.command("added-latency")
def added_latency(
    requests: Annotated[int, typer.Option(help="Rounds; each asks every arm once.", min=1)] = 40,
    transport: Annotated[
        list[str] | None, typer.Option(help=f"Arms of ours: {', '.join(TRANSPORTS)}. May be repeated.")
    ] = None,
    in_tree: Annotated[
        bool, typer.Option("--in-tree/--no-in-tree", help="An arm with vLLM's own NixlConnector.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of lengths and prompts.")] = 0,
    log_folder: Annotated[Path | None, typer.Option(help="Keep the engines' logs here.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Time that two engines add to one engine's first token, at 20 to 1,200 prompt tokens.

    Starts two engines per arm with the bundled model; nothing else should run on the machine.
    """
    names = transport or list(TRANSPORTS)
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown:
        raise ConfigError(f"unknown transport {unknown[0]!r}; known: {', '.join(TRANSPORTS)}")
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        shown_progress(screen) as starting,
        started_arms(RECALL_GDN, names, in_tree, log_folder, starting) as arms,
        Progress(*columns, console=screen) as progress,
    ):
        task = progress.add_task("rounds", total=requests)
        result = measure(arms, requests, seed, lambda done: progress.update(task, completed=done))
    summary = result.summary()
    table = Table(title=f"Seconds added to one engine's first token ({MIN_TOKENS} to {MAX_TOKENS} tokens)")
    for column in ("arm", "requests", "median", "90th percentile", "worst"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, row in summary.items():
        label = "one engine: its own time" if name == ONE_ENGINE else name
        figures = (f"{row[key]:.3f}" for key in ("median_s", "p90_s", "worst_s"))
        table.add_row(label, str(row["requests"]), *figures)
    (Console(stderr=True) if json_output else Console()).print(table)
    if json_output:
        facts = {
            "host": host_facts(),
            "commit": commit(),
            "date": date.today().isoformat(),
            "seed": seed,
        }
        rounds = {"lengths": result.lengths, **{name: asdict(t) for name, t in result.arms.items()}}
        print(json.dumps({"bench": "added-latency", "arms": summary, "rounds": rounds, **facts}))
