"""`stateferry bench footprint`: needs no engine, but vLLM's package."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stateferry.bench import footprint as open_handoffs
from stateferry.bench import probe
from stateferry.cli.bench_output import JsonOption, ReportOption, counting, finish, shown_spread
from stateferry.cli.offline import need_vllm
from stateferry.config import Config
from stateferry.ids import EngineId
from stateferry.layout.spec import CacheLayout

COUNTS = open_handoffs.COUNTS


def footprint(
    repeats: Annotated[int, typer.Option(help="Times that everything is measured.", min=1)] = 5,
    handoffs: Annotated[int, typer.Option(help="Hand-offs that the probe watches, per length.", min=1)] = 20,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """What an open hand-off costs: a scheduler half's step, memory, and how long other threads wait.

    Real scheduler halves and ferries in this process, no engine. Takes a minute or two, and 1 GB.
    """
    need_vllm()
    screen = Console(stderr=True)
    with counting(screen, "steps and memory", repeats) as done:
        found = open_handoffs.measure(_halves(), repeats, COUNTS, done).summary()
    with counting(screen, "hand-offs under the probe", handoffs * len(probe.LENGTHS)) as done:
        watched = probe.measure(lengths=probe.LENGTHS, handoffs=handoffs, on_handoff=done).summary()
    targets = {
        "step_us": open_handoffs.STEP_TARGET_US,
        "base_bytes": open_handoffs.BASE_TARGET_BYTES,
        "bytes_per_block_id": open_handoffs.ID_TARGET_BYTES,
        "probe_ms": probe.TARGET_MS,
    }
    kept = {"repeats": repeats, "targets": targets, **found, "probe": watched}
    finish("footprint", kept, _tables(found, watched), json_output, report)


def _halves() -> open_handoffs.Halves:
    from stateferry.vllm.compat import RequestStatus
    from stateferry.vllm.scheduler import SchedulerHalf

    def half(produces: bool) -> Any:
        def make(layout: CacheLayout) -> SchedulerHalf:
            config, name = Config(lease_s=open_handoffs.LEASE_S), EngineId("bench")
            return SchedulerHalf(config, name, layout.groups, None, produces=produces, consumes=not produces)

        return make

    return open_handoffs.Halves(half(True), half(False), RequestStatus.FINISHED_LENGTH_CAPPED)


def _tables(found: dict[str, Any], watched: list[dict[str, Any]]) -> list[Table]:
    steps = Table(title=f"Hooks of a step that brings nothing, µs (target: {open_handoffs.STEP_TARGET_US:g})")
    steps.add_column("open hand-offs", justify="right")
    for half in found["step_us"]:
        steps.add_column(half, justify="right")
    for count in found["step_us"]["producer"]:
        steps.add_row(count, *(shown_spread(rows[count]) for rows in found["step_us"].values()))
    memory = Table(
        title=f"Memory of an open hand-off (targets: {open_handoffs.BASE_TARGET_BYTES:,.0f} bytes and "
        f"{open_handoffs.ID_TARGET_BYTES:g} a block id)"
    )
    for column in ("where", "bytes", "and per block id"):
        memory.add_column(column, justify="left" if column == "where" else "right")
    for place, row in found["memory"].items():
        memory.add_row(place, shown_spread(row["base_bytes"]), shown_spread(row["bytes_per_block_id"]))
    delays = Table(title=f"How late a thread wakes that runs every ms, ms (target: {probe.TARGET_MS:g})")
    for column in (
        "tokens",
        "a hand-off takes",
        "worst in a hand-off: median",
        "90 %",
        "worst",
        "idle: median",
    ):
        delays.add_column(column, justify="right")
    for row in watched:
        names = ("during_p50_ms", "during_p90_ms", "during_p100_ms", "idle_p50_ms")
        figures = (f"{row['figures'][name]:.2f}" for name in names)
        delays.add_row(f"{row['tokens']:,}", shown_spread(row["took_ms"]), *figures)
    return [steps, memory, delays]
