"""`stateferry bench transport`: what moves the bytes of a hand-off, without engines."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stateferry.bench import PROMPT_TOKENS
from stateferry.bench.transport import TRANSPORTS, connected, result, room_for
from stateferry.bench.transport_cases import made_up, planned
from stateferry.cli.bench_output import JsonOption, ReportOption, finish
from stateferry.errors import ConfigError, TransportError
from stateferry.transport import MemoryKind

COLUMNS = {
    "post_ms": "post",
    "done_ms": "done",
    "held_ms": "held",
    "longest_call_ms": "longest call",
    "gb_per_s": "GB/s",
    "share_of_limit": "of the limit",
    "cpu_ms": "CPU",
    "peer_cpu_ms": "peer's CPU",
}


def transport(
    arm: Annotated[
        list[str] | None, typer.Option(help="A transport; may be repeated. All that fit, unless said.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="A prompt length; may be repeated.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Reads of every arm and hand-off.", min=5)] = 5,
    memory: Annotated[MemoryKind, typer.Option(help="Where the bytes lie.")] = MemoryKind.CPU,
    equal_pieces: Annotated[
        bool, typer.Option("--equal-pieces", help="Made-up hand-offs of equal pieces, too.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of block ids and of the order of the arms.")] = 0,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Time that hand-offs of Kimi-Linear and Kimi-K3 take from process to process, over every transport.

    Per arm: until the post returned, until all bytes were there, how long the calling thread was held in all
    and by the longest call, and the processor time of both processes. The limit is one plain copy of as many
    bytes. Needs about 5 GB of memory for the longest prompts; nothing
    else should run on the machine.
    """
    names = list(dict.fromkeys(arm or TRANSPORTS[memory]))
    unknown = [name for name in names if name not in TRANSPORTS[memory]]
    if unknown:
        known = ", ".join(TRANSPORTS[memory])
        raise ConfigError(f"unknown arm {unknown[0]!r} for {memory.value} memory; known: {known}")
    handoffs = planned(prompts=list(dict.fromkeys(tokens or PROMPT_TOKENS)), seed=seed) + (
        made_up() if equal_pieces else []
    )
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        connected(memory, room_for(handoffs), names) as bench,
        Progress(*columns, console=screen) as progress,
    ):
        if not bench.arms:
            why = "; ".join(f"{name}: {reason}" for name, reason in bench.left_out.items())
            raise TransportError(f"no transport that was asked for works here: {why}")
        reads = len(handoffs) * (rounds + 1) * (len(bench.arms) + 1)
        task = progress.add_task("reads", total=reads)
        measured = bench.measure(handoffs, rounds, seed, lambda: progress.advance(task))
    found = result(bench, measured, rounds, memory)
    for name, why in bench.left_out.items():
        screen.print(f"{name} takes no part: {why}", markup=False)
    finish("transport", {**found, "seed": seed}, tables(found), json_output, report)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One for each hand-off: medians, times in milliseconds."""
    made = []
    for case in found["cases"]:
        tokens = f", {case['tokens']:,} tokens" if case["tokens"] else ""
        size = f"{case['bytes'] / 1e6:,.0f} MB in {case['pieces']:,} pieces"
        table = Table(title=f"{case['case']}{tokens}: {size}, times in ms")
        table.add_column("arm", no_wrap=True)
        for label in COLUMNS.values():
            table.add_column(label, justify="right")
        for name, figures in case["arms"].items():
            table.add_row(name, *(_median(figures.get(key), key) for key in COLUMNS))
        made.append(table)
    return made


def _median(figure: Mapping[str, float] | None, key: str) -> str:
    if figure is None:
        return "1" if key == "share_of_limit" else "-"
    return f"{figure['median']:.2f}"
