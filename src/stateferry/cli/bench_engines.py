"""The benches that start pairs of engines: interference, agentx, handoff."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stateferry.bench import agentx as agents
from stateferry.bench import arm_specs
from stateferry.bench import handoff as pairs
from stateferry.bench import interference as running
from stateferry.cli.bench_arms import running_arms
from stateferry.cli.bench_output import JsonOption, ReportOption, counting, figure_table, finish
from stateferry.cli.files import LogFolderOption, made_folder
from stateferry.cli.starting import StartTimeoutOption
from stateferry.errors import ConfigError
from stateferry.models import RECALL_GDN
from stateferry.stack import START_TIMEOUT_S

ARMS = ["cma", "cma-sync", "in-tree"]
LEASE_S = 300.0
"""Prompts are computed ahead of their hand-offs; their blocks must still be there on a slow machine."""

ARM_HELP = (
    "cma, nixl or another transport; `-sync` behind it for load_mode sync, `-at-once` for legs that are sent "
    "together (no router); in-tree: vLLM's NixlConnector. `-shipped` behind any: vLLM's processes wait for "
    "each other as shipped, without a pause. May be repeated."
)
ArmOption = Annotated[list[str] | None, typer.Option("--arm", help=ARM_HELP, show_default=", ".join(ARMS))]
ModelOption = Annotated[
    Path, typer.Option(help="A folder with a checkpoint.", show_default="the bundled model")
]
OneEngineOption = Annotated[
    bool, typer.Option("--one-engine/--no-one-engine", help="An arm with one engine doing both.")
]


def interference(
    arm: ArmOption = None,
    repeats: Annotated[int, typer.Option(help="Times that every arm runs.", min=1)] = 5,
    decodes: Annotated[int, typer.Option(help="Answers that run on the decode engine.", min=1)] = 8,
    handoffs: Annotated[int, typer.Option(help="Hand-offs that arrive in a repeat.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Of every arriving prompt.", min=2)] = 1000,
    alone_s: Annotated[float, typer.Option(help="How long the answers run alone.", min=0.1)] = 3.0,
    interval_s: Annotated[float, typer.Option(help="From one arrival to the next.", min=0.0)] = 0.1,
    one_engine: OneEngineOption = True,
    model: ModelOption = RECALL_GDN,
    seed: Annotated[int, typer.Option(help="Of prompts and of the order of the arms.")] = 0,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Time from token to token of running answers, alone and while hand-offs arrive.

    The prefill engine computes all prompts of a repeat first, in a window of its own that is not compared.
    Starts two engines per arm; nothing else should run on the machine.
    """
    load = running.Load(decodes, handoffs, tokens, alone_s, interval_s)
    specs = arm_specs(arm or ARMS, lease_s=LEASE_S)
    if any(spec.at_once for spec in specs):
        raise ConfigError("-at-once changes nothing here: prompts are computed before their hand-offs begin")
    screen = Console(stderr=True)
    with (
        running_arms(screen, model, specs, log_folder, timeout_s) as arms,
        counting(screen, "repeats", repeats) as done,
    ):
        result = running.measure(arms, repeats, load, seed, done, one_engine)
    summary = result.summary()
    rows = {
        "alone_p50_s": "alone: median, s",
        "arriving_p50_s": "while hand-offs arrive: median, s",
        "arriving_over_alone_p50": "ratio of medians",
        "alone_mean_s": "alone: mean, s",
        "arriving_mean_s": "while hand-offs arrive: mean, s",
        "arriving_over_alone_mean": "ratio of means",
        "alone_p99_s": "alone: 99th percentile, s",
        "arriving_p99_s": "while hand-offs arrive: 99th percentile, s",
        "arriving_over_alone_p99": "ratio of 99th percentiles",
        "arriving_over_alone_engine_mean": "ratio of means by the engine core's clock",
        "arriving_over_alone_engine_p99": "… of 99th percentiles",
        "refused_over_alone_p99": "ratio of 99th percentiles while such prompts come and are refused",
        "short_over_alone_p99": "… while requests of one token come",
        "first_token_p50_s": "first token of those that arrive: median, s",
        "first_token_p90_s": "… 90th percentile, s",
    }
    title = f"From token to token of {decodes} answers, {handoffs} hand-offs of {tokens} tokens arriving"
    table = figure_table(title, summary, rows)
    table.add_row("errors", *(str(found["errors"]) for found in summary.values()))
    kept = {"load": asdict(load), "seed": seed, "arms": summary}
    finish("interference", kept, [table], json_output, report)


def agentx(
    arm: ArmOption = None,
    sessions: Annotated[
        Path | None,
        typer.Option(help="Sessions in the Weka format.", show_default="made-up ones"),
    ] = None,
    count: Annotated[int, typer.Option(help="How many sessions.", min=1)] = 12,
    lanes: Annotated[int, typer.Option(help="Sessions that run at a time.", min=1)] = 4,
    scale: Annotated[int, typer.Option(help="Divides all token counts of the sessions.", min=1)] = 64,
    longest_turns: Annotated[
        int, typer.Option(help="Of every session, replay only so many turns; 0: all.", min=0)
    ] = 16,
    seconds: Annotated[float, typer.Option(help="A replay sends nothing new after it.", min=1.0)] = 1800.0,
    time_scale: Annotated[float, typer.Option(help="Multiplies pauses between turns.", min=0.0)] = 0.02,
    repeats: Annotated[int, typer.Option(help="Replays of every arm.", min=1)] = 5,
    one_engine: OneEngineOption = True,
    router: Annotated[bool, typer.Option(help="Ask vllm-router; else the client does both legs.")] = False,
    model: ModelOption = RECALL_GDN,
    seed: Annotated[int, typer.Option(help="Of made-up sessions, lanes and the order of arms.")] = 0,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Replay agent sessions in a closed loop: turns that grow, shared prefixes, pauses, subagents.

    Lengths, sharing and order are those of the sessions; speed is this machine's. Fails if any request had an
    error, no answer or one of another length.
    """
    if sessions is None:
        found = [agents.make_session(number, seed, scale) for number in range(count)]
    else:
        found = [agents.coarsened(session, scale) for session in agents.read_sessions(sessions)[:count]]
    settings = agents.Settings(
        lanes=lanes, time_scale=time_scale, longest_turns=longest_turns, longest_s=seconds, seed=seed
    )
    specs = arm_specs(arm or ARMS)
    screen = Console(stderr=True)
    total = repeats * (len(specs) + one_engine)
    with (
        running_arms(screen, model, specs, log_folder, timeout_s, router=router) as arms,
        counting(screen, "replays", total) as done,
    ):
        result = agents.measure(arms, found, repeats, settings, done, one_engine)
    summary = result.summary()
    table = figure_table(f"{len(found)} sessions in {lanes} lanes, scale 1/{scale}", summary, AGENTX_ROWS)
    kept = {
        "dialect": agents.DIALECT,
        "sessions": "made-up" if sessions is None else "recorded",
        "count": len(found),
        "scale": scale,
        "router": router,
        "settings": asdict(settings),
        "arms": summary,
    }
    finish("agentx", kept, [table], json_output, report)
    wrong = agents.verdict(summary)
    for text in wrong:
        screen.print(text, style="red", markup=False, highlight=False)
    raise typer.Exit(1 if wrong else 0)


def handoff(
    arm: ArmOption = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Of the prompts. May be repeated.", show_default="64, 512, 2000", min=1),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="Requests at a time. May be repeated.", show_default="1, 4, 16", min=1),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times that every arm runs.", min=1)] = 5,
    router: Annotated[
        bool, typer.Option("--router/--no-router", help="vllm-router before each pair; else two-leg client.")
    ] = True,
    model: ModelOption = RECALL_GDN,
    seed: Annotated[int, typer.Option(help="Of prompts and of the order of arms and cells.")] = 0,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: JsonOption = False,
    report: ReportOption = None,
) -> None:
    """Time to the first token through a router and two engines, over one engine's.

    By prompt length and number of requests at a time. Starts two engines and a router per arm; nothing else
    should run on the machine.
    """
    specs = arm_specs(arm or ARMS)
    lengths = list(dict.fromkeys(tokens or pairs.LENGTHS))
    at_a_time = list(dict.fromkeys(concurrency or pairs.CONCURRENCIES))
    screen = Console(stderr=True)
    with (
        running_arms(screen, model, specs, log_folder, timeout_s, router=router) as arms,
        counting(screen, "turns of arms", repeats * len(specs)) as done,
    ):
        result = pairs.measure(arms, lengths, at_a_time, repeats, seed, done)
    cells = result.summary()
    tables = []
    for length in lengths:
        for number in at_a_time:
            here = {c["arm"]: c for c in cells if (c["tokens"], c["concurrency"]) == (length, number)}
            table = figure_table(f"{length:,} tokens, {number} at a time", here, HANDOFF_ROWS)
            table.add_row("errors", *(str(found["errors"]) for found in here.values()))
            tables.append(table)
    kept = {
        "cells": cells,
        "time_lines": result.time_lines(),
        "without_time_line": result.not_looked_at,
        "router": router,
        "seed": seed,
    }
    finish("handoff", kept, tables, json_output, report)


HANDOFF_ROWS = {
    "one_engine_p50_s": "one engine: median, s",
    "first_token_p50_s": "pair: median, s",
    "added_p50_s": "added: medians, s",
    "added_p90_s": "added: 90th percentiles, s",
}
AGENTX_ROWS = {
    "requests": "requests",
    "errors": "errors",
    "empty": "empty answers",
    "first_token_p50_s": "first token: median, s",
    "first_token_p90_s": "first token: 90th percentile, s",
    "inter_token_p50_s": "token to token: median, s",
    "inter_token_p90_s": "token to token: 90th percentile, s",
    "interactivity_p90_tokens_per_s": "interactivity, slow tenth, tokens/s",
    "input_tokens_per_s": "input tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "ideal_prefix_hit": "prefix hit, ideal",
    "served_prefix_hit": "prefix hit, served (prefill engine)",
    "decode_prefix_hit": "prefix hit on the decode engine, own cache",
    "bytes_per_request_attention": "attention bytes moved per request",
    "bytes_per_request_state": "state bytes moved per request",
    "bytes_per_request": "bytes moved per request",
    "transfer_share_of_first_token": "share of moving in first tokens",
}


def agentx_sessions(
    folder: Annotated[
        Path, typer.Argument(callback=made_folder, help="Where the files go; made if missing.")
    ],
    count: Annotated[int, typer.Option(help="How many sessions.", min=1)] = 12,
    scale: Annotated[int, typer.Option(help="Divides all token counts.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="The same seed makes the same sessions.")] = 0,
) -> None:
    """Write made-up agent sessions in the Weka format, for this bench and other clients of the format."""
    for number in range(count):
        agents.write_session(agents.make_session(number, seed, scale), folder)
    Console().print(f"{count} sessions in {folder}", markup=False)
