"""`stateferry bench`: numbers, with the arms interleaved in one run."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stateferry.bench import (
    APPLY_TARGET_MS,
    FIRST_PLAN_TARGET_MS,
    IN_A_ROW,
    MAX_TOKENS,
    MIN_TOKENS,
    ONE_ENGINE,
    SCATTERED,
    UNMERGED,
    Measured,
    arm_specs,
    measure,
    measure_plans,
)
from stateferry.cli.bench_arms import running_arms
from stateferry.cli.bench_engines import ARM_HELP, agentx, agentx_sessions, handoff, interference
from stateferry.cli.bench_footprint import footprint
from stateferry.cli.bench_open import open_handoff
from stateferry.cli.bench_output import JsonOption, ReportOption, counting, finish
from stateferry.cli.bench_transport import transport as bench_transport
from stateferry.cli.examples import examples
from stateferry.cli.files import LogFolderOption
from stateferry.cli.starting import StartTimeoutOption
from stateferry.models import RECALL_GDN
from stateferry.stack import START_TIMEOUT_S

bench_app = typer.Typer(
    no_args_is_help=True,
    help="Measure, with every arm in the same run.",
    epilog=examples("stateferry bench plan", "stateferry bench handoff --arm cma --report handoff.html"),
)

bench_app.command(
    "transport",
    short_help="How fast transports move the pieces of hand-offs between two processes.",
    epilog=examples("stateferry bench transport --arm cma --arm nixl --tokens 8192 --json"),
)(bench_transport)

LATENCY_ARMS = ("cma", "nixl", "in-tree")


@bench_app.command(
    "added-latency",
    short_help="What two engines add to one engine's first token.",
    epilog=examples(
        "stateferry bench added-latency",
        "stateferry bench added-latency --arm cma --arm in-tree-shipped --requests 60 --json",
    ),
)
def added_latency(
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help=ARM_HELP, show_default=", ".join(LATENCY_ARMS))
    ] = None,
    requests: Annotated[int, typer.Option(help="Rounds; each asks every arm once.", min=1)] = 40,
    seed: Annotated[int, typer.Option(help="Of lengths and prompts.")] = 0,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Time that two engines add to one engine's first token, at 20 to 1,200 prompt tokens.

    Starts two engines per arm with the bundled model; nothing else should run on the machine.
    """
    specs = arm_specs(arm or LATENCY_ARMS)
    screen = Console(stderr=True)
    with (
        running_arms(screen, RECALL_GDN, specs, log_folder, timeout_s) as arms,
        counting(screen, "rounds", requests) as done,
    ):
        result = measure(arms, requests, seed, done)
    summary = result.summary()
    table = Table(title=f"Seconds added to one engine's first token ({MIN_TOKENS} to {MAX_TOKENS} tokens)")
    for column in ("arm", "requests", "median", "90th percentile", "worst"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, row in summary.items():
        label = "one engine: its own time" if name == ONE_ENGINE else name
        figures = (f"{row[key]:.3f}" for key in ("median_s", "p90_s", "worst_s"))
        table.add_row(label, str(row["requests"]), *figures)
    rounds = {"lengths": result.lengths, **{name: asdict(t) for name, t in result.arms.items()}}
    kept = {"arms": summary, "rounds": rounds, "seed": seed}
    finish("added-latency", kept, [table], json_output, report)


@bench_app.command(
    "plan",
    short_help="What planning costs.",
    epilog=examples("stateferry bench plan --rounds 30 --report plan.html"),
)
def plan(
    rounds: Annotated[int, typer.Option(help="Times that every arm runs.", min=5)] = 15,
    seed: Annotated[int, typer.Option(help="Of block ids and of the order of the arms.")] = 0,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Time to plan a pair of ranks, and to lay the plan over a request, for Kimi-Linear and Kimi-K3.

    Needs no engine and no memory for caches. Takes seconds.
    """
    with counting(Console(stderr=True), "rounds", rounds) as done:
        measured = measure_plans(rounds=rounds, seed=seed, on_round=done)
    targets = {"apply_ms": APPLY_TARGET_MS, "first_plan_ms": FIRST_PLAN_TARGET_MS}
    cases = [result.summary() for result in measured]
    kept = {"rounds": rounds, "targets": targets, "cases": cases, "seed": seed}
    finish("plan", kept, _plan_tables(measured), json_output, report)


bench_app.command(
    "footprint",
    short_help="What an open hand-off costs in memory and time.",
    epilog=examples("stateferry bench footprint --repeats 7 --json"),
)(footprint)
bench_app.command(
    "open",
    short_help="What an open hand-off costs an idle prefill engine.",
    epilog=examples("stateferry bench open --repeats 7 --json"),
)(open_handoff)
bench_app.command(
    "handoff",
    short_help="First tokens through a router, by prompt length and requests at a time.",
    epilog=examples("stateferry bench handoff --arm cma --arm nixl --tokens 512 --concurrency 4 --repeats 7"),
)(handoff)
bench_app.command(
    "interference",
    short_help="What running answers notice of hand-offs that arrive.",
    epilog=examples(
        "stateferry bench interference --arm cma --arm cma-sync",
        "stateferry bench interference --decodes 4 --handoffs 8 --tokens 500 --report interference.html",
    ),
)(interference)
bench_app.command(
    "agentx",
    short_help="How agent sessions fare: prompts that grow, shared prefixes, subagents.",
    epilog=examples(
        "stateferry bench agentx --arm cma --count 4 --router",
        "stateferry bench agentx --sessions recorded/ --scale 64 --json",
    ),
)(agentx)
bench_app.command(
    "agentx-sessions",
    short_help="Write made-up agent sessions in the Weka format.",
    epilog=examples("stateferry bench agentx-sessions made-up --count 24 --seed 7"),
)(agentx_sessions)


def _plan_tables(measured: Sequence[Measured]) -> list[Table]:
    first = Table(title=f"First plan of a pair of ranks, ms (target: {FIRST_PLAN_TARGET_MS:g})")
    for column in ("engines", "registered regions", "tensors", "median", "90th percentile", "worst"):
        first.add_column(column, justify="left" if column == "engines" else "right")
    applied = Table(title=f"One request on one consumer rank, ms (target at 131,072: {APPLY_TARGET_MS:g})")
    columns = ("engines", "tokens", "pieces unmerged", "scattered", "in a row")
    for column in (*columns, "unmerged", "scattered", "in a row", "worst merged"):
        applied.add_column(column, justify="left" if column == "engines" else "right")
    for result in measured:
        summary = result.summary()
        figures = (f"{summary['first_plan_ms'][name]:.2f}" for name in ("median", "p90", "worst"))
        first.add_row(result.case.name, str(result.regions), str(result.tensors), *figures)
        rows = {(row["tokens"], row["arm"]): row for row in summary["apply"]}
        for tokens in dict.fromkeys(tokens for tokens, _ in rows):
            arms = [rows[tokens, arm] for arm in (UNMERGED, SCATTERED, IN_A_ROW)]
            pieces = (f"{row['pieces']:,}" for row in arms)
            medians = (f"{row['ms']['median']:.3f}" for row in arms)
            worst = max(row["ms"]["worst"] for row in arms[1:])
            applied.add_row(result.case.name, f"{tokens:,}", *pieces, *medians, f"{worst:.3f}")
    return [first, applied]
