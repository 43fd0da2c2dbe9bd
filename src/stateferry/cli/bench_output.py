"""What every bench does with its result: a table for people, one JSON object, a page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stateferry.bench.report import page
from stateferry.cli.files import writable_file
from stateferry.stack.host import commit, host_facts

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        callback=writable_file,
        help="Write a page with plots to this file.",
        show_default=False,
    ),
]


def finish(
    bench: str, result: Mapping[str, Any], tables: Sequence[Table], json_output: bool, report: Path | None
) -> None:
    """Show the tables, print the JSON, write the page; `result` gets host, commit and date."""
    console = Console(stderr=True) if json_output else Console()
    for table in tables:
        console.print(table)
    facts = {"host": host_facts(), "commit": commit(), "date": date.today().isoformat()}
    whole = {"bench": bench, **result, **facts}
    if json_output:
        print(json.dumps(whole))
    if report is not None:
        report.write_text(page([whole]))
        console.print(f"Page written: {report}", markup=False)


@contextmanager
def counting(console: Console, what: str, total: int) -> Iterator[Any]:
    """A bar; what it yields is called with how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def figure_table(title: str, arms: Mapping[str, Mapping[str, Any]], rows: Mapping[str, str]) -> Table:
    """Figures of `spread` by arm: the median, and the extremes of the repeats in parentheses.

    `rows`: name of the figure -> what to call it, with its unit; names that end in `_s` are seconds.
    """
    table = Table(title=title)
    table.add_column("median (least to most) of the repeats")
    for name in arms:
        table.add_column(name, justify="right")
    for key, label in rows.items():
        found = [arm["figures"].get(key) for arm in arms.values()]
        if any(found):
            table.add_row(label, *(shown_spread(value) for value in found))
    return table


def shown_spread(value: Mapping[str, float] | None) -> str:
    """A figure of `spread` as text."""
    if value is None:
        return "-"
    median, least, most = (_short(value[key]) for key in ("median", "least", "most"))
    return median if least == most else f"{median} ({least} to {most})"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 or number == int(number) else f"{number:.4g}"
