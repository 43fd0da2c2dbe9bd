"""`stateferry demo`: the bundled model over one engine, over two, and over two without its state."""

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stateferry.cli.files import LogFolderOption
from stateferry.cli.showcase import ROUNDS, Asked, ask_all
from stateferry.cli.starting import StartTimeoutOption, shown_progress
from stateferry.cli.stopping import said_while_stopping
from stateferry.cli.transport_names import TRANSPORT_NAMES
from stateferry.config import LoadMode, parse_config
from stateferry.errors import EngineError
from stateferry.stack import START_TIMEOUT_S, Client, EngineSpec, Role, Stack

QUESTIONS = ((1, 60), (2, 150), (3, 400), (4, 900))
"""Seed and length in tokens of each prompt."""


def demo(
    transport: Annotated[
        str, typer.Option("--transport", help=f"What moves the bytes: {TRANSPORT_NAMES}.")
    ] = "auto",
    load_mode: Annotated[
        str, typer.Option("--load-mode", help="When the decode engine reads: async, sync.")
    ] = LoadMode.ASYNC.value,
    log_folder: LogFolderOption = None,
    timeout_s: StartTimeoutOption = START_TIMEOUT_S,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line; the rest to stderr.")
    ] = False,
) -> None:
    """Start two engines and a router, ask the bundled model, show what moved, stop everything.

    Takes about a minute on two cores. Exit code 0 if two engines answer exactly as one does, and
    right, and if they are wrong when the recurrent state is withheld.
    """
    extra = {"transport": transport, "load_mode": load_mode, "testing": True}
    parse_config(extra)
    from stateferry.models import RECALL_GDN, recall_prompt

    console = Console(stderr=json_output)
    console.print("StateFerry demo: a prefill engine, a decode engine and a router on this machine.\n")
    started = time.monotonic()
    try:
        with (
            said_while_stopping(console) as watch,
            Stack(log_folder, watch=watch) as stack,
            Client() as client,
        ):
            prefill = stack.start(EngineSpec(model=RECALL_GDN, role=Role.PREFILL, extra_config=extra))
            decode = stack.start(EngineSpec(model=RECALL_GDN, role=Role.DECODE, extra_config=extra))
            with shown_progress(console) as progress:
                stack.wait_ready(timeout_s, progress)
                router = stack.start_router([prefill], [decode])
                stack.wait_ready(60.0, progress)
            start_s = time.monotonic() - started
            questions = [recall_prompt(seed, length) for seed, length in QUESTIONS]
            with console.status("asking") as status:
                asked = ask_all(client, prefill, decode, router, questions, status.update)
            stack.check_alive()
            console.print()
    except EngineError as e:
        if json_output:
            print(json.dumps({"passed": False, "problems": [str(e)]}))
        raise
    problems = [f"{one.question}: {text}" for one in asked for text in one.problems()]
    _show(console, asked)
    _verdict(console, problems)
    if json_output:
        print(json.dumps(_as_json(asked, problems, transport, start_s)))
    raise typer.Exit(1 if problems else 0)


def _show(console: Console, asked: list[Asked]) -> None:
    console.print("\n[bold]The first prompt[/bold]")
    console.print(f"  {asked[0].prompt}", markup=False)
    console.print(
        "\nThe model names the place, then goes on with questions about the others. An answer is right "
        "if every word of that is."
    )
    answers = Table(title="\nAnswers", title_justify="left", show_lines=True)
    for heading in ("question", "right", "one engine", "two engines", "two, state withheld"):
        answers.add_column(heading, overflow="fold")
    for one in asked:
        answers.add_row(
            f"… {one.question} ?\n[dim]{one.prompt_tokens} tokens[/dim]",
            _short(one.expected),
            _judged(one.one_engine.text or one.one_engine.error, one.expected),
            _judged(one.two_engines.text or one.two_engines.error, one.expected),
            _judged(one.withheld.text or one.withheld.error, one.expected),
        )
    console.print(answers)
    moved = Table(title="\nMoved from prefill to decode engine", title_justify="left")
    for heading in ("prompt", "attention KV", "state", "read in", "waiting", "first token: one", "two"):
        moved.add_column(heading, justify="right")
    for one in asked:
        received = one.two_engines.received
        sizes = received.get("bytes") or {}
        moved.add_row(
            f"{one.prompt_tokens} tokens",
            _bytes(sizes.get("attention")),
            _bytes(sizes.get("state")),
            _read_in(received.get("milliseconds")),
            _read_in(received.get("wait_milliseconds")),
            _milliseconds(one.one_engine.first_token_s),
            _milliseconds(one.two_engines.first_token_s),
        )
    console.print(moved)
    console.print(
        f"Medians of {ROUNDS} requests. Those 'read in' are others than those whose first token is timed, "
        "for an answer that streams does not say what was read. 'Waiting' is the part of reading that passes "
        "until the prefill engine is met and earlier work on the blocks is done.",
        style="dim",
    )


def _verdict(console: Console, problems: list[str]) -> None:
    if not problems:
        console.print(
            "\n[bold green]Passed.[/bold green] Two engines answer exactly as one does; without the "
            "recurrent state the same engines answer wrongly."
        )
        return
    console.print("\n[bold red]Failed.[/bold red]")
    for problem in problems:
        console.print(f"  {problem}", markup=False)


def _as_json(asked: list[Asked], problems: list[str], transport: str, start_s: float) -> dict[str, Any]:
    return {
        "passed": not problems,
        "problems": problems,
        "transport": transport,
        "start_s": round(start_s, 1),
        "questions": [asdict(one) for one in asked],
    }


def _judged(text: str, expected: str) -> str:
    mark = "[green]✓[/green]" if text == expected else "[red]✗[/red]"
    return f"{mark} {_short(text)}"


def _short(text: str, words: int = 6) -> str:
    """The first words, safe for rich's markup."""
    parts = text.split()
    return " ".join(parts[:words]).replace("[", "\\[") + (" …" if len(parts) > words else "")


def _bytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1024:,.0f} KiB"


def _read_in(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f} ms"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
