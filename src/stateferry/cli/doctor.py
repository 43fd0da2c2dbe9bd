"""`stateferry doctor`: what may keep engines from handing off, on this machine and between two of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stateferry.cli import doctor_standing as standing
from stateferry.cli.doctor_sides import Match, Side
from stateferry.cli.inspect import survey_json
from stateferry.cli.interrupts import ends_on_interrupt
from stateferry.cli.layout_tables import show_groups, show_moves, show_pairs
from stateferry.cli.offline import offline_vllm
from stateferry.doctor import (
    Finding,
    Verdict,
    ask_engine,
    examine_machine,
    far_from_loopback,
    query_url,
    why_not_told,
    why_roles_do_not_fit,
)
from stateferry.errors import ConfigError, EngineError, StateFerryError
from stateferry.layout.spec import CacheLayout
from stateferry.layout.survey import survey
from stateferry.wire import RankAddress

TOKENS = (128, 1024, 8192)
"""Prompt lengths for which the moves between two engines are shown."""
LOG_WIDTH = 140
_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}


def doctor(
    urls: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    prefill_url: Annotated[
        str | None, typer.Option("--prefill-url", help="A running prefill engine.", show_default=False)
    ] = None,
    decode_url: Annotated[
        str | None, typer.Option("--decode-url", help="A running decode engine.", show_default=False)
    ] = None,
    prefill_config: Annotated[
        Path | None,
        typer.Option(
            "--prefill-config",
            help="Config file (YAML or JSON, as for `vllm serve --config`) of a prefill engine to be.",
            show_default=False,
        ),
    ] = None,
    decode_config: Annotated[
        Path | None,
        typer.Option("--decode-config", help="The same of a decode engine.", show_default=False),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; the rest to stderr.")
    ] = False,
) -> None:
    """Say what may keep engines from handing off, and what to do about it.

    Looks at this machine: libraries, memory limits, whether one process may read another's memory. Given two
    engines, by URL or by config file, it also compares their caches as the engines would themselves when they
    shake hands, and shows what a hand-off would move. A running engine is asked with a prompt of one or two
    tokens. Exit code 1: there is a problem.
    """
    if urls:
        raise ConfigError(
            f"an engine's role decides what is looked at: --prefill-url {urls[0]} --decode-url "
            f"{urls[1] if len(urls) > 1 else 'URL'}"
        )
    prefill = _source("prefill", prefill_url, prefill_config)
    decode = _source("decode", decode_url, decode_config)
    if (prefill is None) != (decode is None):
        raise ConfigError("a hand-off has two sides: give a URL or config file for both engines, or for none")
    console = Console(stderr=json_output)
    if not console.is_terminal:
        console = Console(stderr=json_output, width=LOG_WIDTH)
    with ends_on_interrupt():  # it imports torch
        findings = examine_machine()
    _show_findings(console, findings)
    match = None if prefill is None or decode is None else _match(prefill, decode)
    if match is not None:
        _show_match(console, match)
    problems = [f"{f.name}: {f.found}" for f in findings if f.verdict is Verdict.PROBLEM]
    warnings = {f.name: f.found for f in findings if f.verdict is Verdict.WARNING}
    if match is not None:
        problems += match.problems
        if match.warning:
            warnings["the prefill engine's address"] = match.warning
        if match.untold:
            warnings["what routers are told"] = match.untold
        warnings |= {f"{side.source} now": side.amiss for side in match.sides if side.amiss}
    _show_verdict(console, problems, list(warnings), match is not None and bool(match.misfit))
    if json_output:
        texts = [f"{name}: {text}" for name, text in warnings.items()]
        print(json.dumps(_as_json(findings, match, problems, texts)))
    raise typer.Exit(1 if problems else 0)


def _source(role: str, url: str | None, config: Path | None) -> str | Path | None:
    if url is not None and config is not None:
        raise ConfigError(f"--{role}-url and --{role}-config name two engines for one side: give one of them")
    return url if url is not None else config


def _match(prefill: str | Path, decode: str | Path) -> Match:
    """Ask or lay out both sides and compare them; an error becomes the reason why they cannot exchange."""
    ours, theirs = _side(decode), _side(prefill)
    if ours.unknown or theirs.unknown:
        return Match(theirs, ours, None)
    roles = why_roles_do_not_fit(theirs.kv_role, ours.kv_role)
    warning = _unreachable(prefill, decode, theirs.ranks)
    untold = why_not_told(theirs.query, theirs.ranks) if theirs.query else ""
    try:
        return Match(theirs, ours, survey(theirs.layouts, ours.layouts, TOKENS), "", roles, warning, untold)
    except StateFerryError as e:
        return Match(theirs, ours, None, str(e), roles, warning, untold)


def _unreachable(prefill: str | Path, decode: str | Path, ranks: Sequence[RankAddress]) -> str:
    if isinstance(prefill, str) and isinstance(decode, str):
        return far_from_loopback(prefill, decode, ranks)
    return ""


def _side(source: str | Path) -> Side:
    """What is known of one engine, or why nothing is."""
    try:
        return _known_side(source)
    except StateFerryError as e:
        return Side(str(source), (), unknown=str(e))


def _known_side(source: str | Path) -> Side:
    if isinstance(source, str):
        if hangs := standing.why_not_asked(source):
            raise EngineError(hangs)
        answer = ask_engine(source)
        query = query_url(source, answer.bootstrap_port) if answer.bootstrap_port else ""
        now = standing.amiss(source)
        return Side(source, answer.layouts, answer.ranks, answer.kv_role, query, now)
    with offline_vllm() as offline, offline.arguments_of_file(source) as arguments:
        try:
            engine = offline.lay_out(arguments)
        except StateFerryError as e:
            raise ConfigError(f"{source}: {e}") from e
        return Side(str(source), engine.layouts, kv_role=engine.kv_role)


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    table = Table(title="This machine", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("what", "found", "do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        table.add_row(
            f"[{colour}]{finding.verdict.value}[/{colour}]",
            finding.name,
            _plain(finding.found),
            _plain(finding.cure),
        )
    console.print(table)


def _show_match(console: Console, match: Match) -> None:
    table = Table(title="\nThe two engines", title_justify="left")
    for heading in ("", "engine", "role", "rank", "listens on", "epoch", "blocks"):
        table.add_column(heading, overflow="fold")
    for role, side in (("prefill", match.prefill), ("decode", match.decode)):
        if side.unknown:
            table.add_row(
                role, _plain(side.source), "-", "-", "[bold red]not known: see below[/bold red]", "-", "-"
            )
        for number, layout in enumerate(side.layouts):
            address = side.ranks[number] if side.ranks else None
            table.add_row(
                role if number == 0 else "",
                _plain(side.source) if number == 0 else "",
                (_plain(side.kv_role) or "not told") if number == 0 else "",
                f"{layout.tp_rank} of {layout.tp_size}",
                f"{address.host}:{address.port}" if address else "not running",
                str(address.epoch) if address else "-",
                f"{_block_count(layout):,}" if address else "-",
            )
    console.print(table)
    if match.prefill.query:
        say = match.untold or f"Routers that send both legs at once are answered at {match.prefill.query}."
        console.print(f"\n{say}", markup=False, highlight=False)
    if match.warning:
        console.print(f"\n{match.warning}", markup=False, highlight=False)
    for side in match.sides:
        if side.amiss:
            say = f"{side.source} has {side.amiss} now: docs/operations.md, and its log."
            console.print(f"\n{say}", markup=False, highlight=False)
    if match.survey is None:
        return
    layout = match.decode.layouts[0]
    show_groups(console, layout)
    show_moves(console, [match.survey], layout)
    show_pairs(console, [match.survey], layout)
    if not match.wrong_roles:
        console.print("\nThey can exchange: the hand-shake compares the same fields.", highlight=False)


def _show_verdict(console: Console, problems: Sequence[str], warned: Sequence[str], refused: bool) -> None:
    """As many problems and warnings as the tables show. `warned`: of what. `refused`: caches do not fit."""
    if problems:
        console.print("\n[bold red]Problems:[/bold red]")
        for problem in problems:
            console.print(f"  {problem}", markup=False, highlight=False, soft_wrap=True)
        if refused:
            console.print("  (In the decode engine's words: it is the one that reads, and that refuses.)")
    else:
        console.print("\n[bold green]No problem found.[/bold green]")
    if warned:
        number = "One warning" if len(warned) == 1 else f"{len(warned)} warnings"
        console.print(
            f"[yellow]{number}[/yellow]: {_plain(', '.join(warned))}.", highlight=False, soft_wrap=True
        )


def _plain(text: str) -> str:
    """Safe for rich's markup."""
    return text.replace("[", "\\[")


def _block_count(layout: CacheLayout) -> int:
    return min(
        (t.block_count for group in layout.groups for layer in group.layers for t in layer.tensors), default=0
    )


def _as_json(
    findings: Sequence[Finding], match: Match | None, problems: Sequence[str], warnings: Sequence[str]
) -> dict[str, Any]:
    return {
        "passed": not problems,
        "problems": list(problems),
        "warnings": list(warnings),
        "findings": [
            {"name": f.name, "verdict": f.verdict.value, "found": f.found, "cure": f.cure} for f in findings
        ],
        "engines": None if match is None else _match_json(match),
    }


def _match_json(match: Match) -> dict[str, Any]:
    return {
        "can_exchange": not match.problems,
        "problem": match.misfit or match.prefill.unknown or match.decode.unknown,
        "wrong_roles": match.wrong_roles,
        "warning": match.warning,
        "untold": match.untold,
        "prefill": _side_json(match.prefill),
        "decode": _side_json(match.decode),
        **(survey_json(match.survey) if match.survey is not None else {}),
    }


def _side_json(side: Side) -> dict[str, Any] | None:
    if side.unknown:
        return None
    return {
        "source": side.source,
        "engine_id": side.layouts[0].engine_id,
        "kv_role": side.kv_role,
        "query": side.query,
        "facts": side.layouts[0].facts,
        "ranks": [
            {"host": r.host, "port": r.port, "epoch": r.epoch, "blocks": _block_count(layout)}
            for r, layout in zip(side.ranks, side.layouts, strict=False)
        ],
    }
