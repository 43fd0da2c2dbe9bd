"""`stateferry bench open`: one prefill engine and an offer that nobody claims."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stateferry.bench import open_cost
from stateferry.cli.bench_output import JsonOption, ReportOption, counting, finish, shown_spread
from stateferry.cli.files import LogFolderOption
from stateferry.cli.starting import StartTimeoutOption, shown_progress
from stateferry.cli.stopping import said_while_stopping
from stateferry.models import RECALL_GDN
from stateferry.stack import START_TIMEOUT_S, EngineSpec, Role, Stack


def open_handoff(
    repeats: Annotated[int, typer.Option(help="Times at rest, and with an offer open.", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="How long the engine is watched, each time.", min=1)] = 5.0,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Processor time of a prefill engine that does nothing while one of its hand-offs is open.

    Starts one engine with the bundled model; nothing else should run on the machine.
    """
    screen = Console(stderr=True)
    lease_s = open_cost.lease_needed_s(seconds)
    spec = EngineSpec(model=RECALL_GDN, role=Role.PREFILL, extra_config={"lease_s": lease_s})
    with said_while_stopping(screen) as watch, Stack(log_folder, watch=watch) as stack:
        engine = stack.start(spec)
        with shown_progress(screen) as starting:
            engine.wait_ready(timeout_s, starting)
        with counting(screen, "repeats", repeats) as done:
            result = open_cost.measure(engine, lease_s, repeats, seconds, on_repeat=done)
    summary = result.summary()
    table = Table(title="Processor seconds a second, all processes of the prefill engine")
    table.add_column("")
    table.add_column("median (least to most) of the repeats", justify="right")
    for name, label in (("idle", "at rest"), ("open", "with one hand-off open"), ("added", "added")):
        table.add_row(label, shown_spread(summary[name]))
    finish("open", {"repeats": repeats, "watched_s": seconds, "load": summary}, [table], json_output, report)
