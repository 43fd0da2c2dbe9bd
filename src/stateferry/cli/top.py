"""`stateferry top`: engines and their hand-offs, live."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from stateferry.cli.top_tables import engine_table, failure_table, silent_table, slow_table, trouble_table
from stateferry.errors import ConfigError, EngineError
from stateferry.watch import Engines, Figures, Found, discover

FILE_WIDTH = 1000
"""Of tables that nobody looks at in a terminal: nothing is left out or cut. They use what they need."""


def top(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Engines to look at.", show_default=False)
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            "--router", metavar="URL", help="Look at the engines of this vllm-router.", show_default=False
        ),
    ] = None,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look: totals since each engine's start.")] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each look, one a line.")
    ] = False,
) -> None:
    """Show engines, their peers, hand-offs a second, bytes by kind, and which hand-offs were slow or failed.

    Reads what the engines serve on /metrics, and nothing else: it needs no access to them but HTTP, and costs
    them as much as Prometheus does. Which requests were slow or failed is told by exemplars, one of each
    cause and each step of time; docs/metrics.md says when there are none. Median and 95 % are bounds: a page
    says how many hand-offs took at most 5 ms, 10 ms, 20 ms and so on, and nothing in between.

    A narrow terminal shows the most important columns, and names the others; --json has everything. Without
    a terminal, each look is printed below the one before.

    Exit codes: 0 all right · 2 bad arguments · 3 an engine did not answer (with --once, and what the others
    said is printed all the same; without, it is shown and asked again), or the router does not say which
    it has · 130 Ctrl-C.
    """
    engines = [Found(url) for url in dict.fromkeys(url.rstrip("/") for url in urls or ())]
    if router is not None:
        known = {engine.url for engine in engines}
        engines += [engine for engine in discover(router) if engine.url not in known]
    if not engines:
        raise ConfigError("which engines? Give their URLs, or --router URL to ask a vllm-router")
    for engine in engines:
        if not engine.url.startswith(("http://", "https://")):
            raise ConfigError(f"{engine.url!r} is no URL of an engine; expected http://HOST:PORT")
    with Engines(engines) as looked_at:
        if once or json_output or not Console().is_terminal:
            _print(looked_at, every, once, json_output)
        else:
            _watch(looked_at, every)


def _print(engines: Engines, every_s: float, once: bool, json_output: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    while True:
        figures, silent = engines.look(time.monotonic())
        if json_output:
            look = {"engines": [f.as_json() for f in figures], "silent": silent, "unix_s": time.time()}
            print(json.dumps(look), flush=True)
        else:
            console.print(_shown(engines.engines, figures, silent))
        if once:
            _complain(silent, len(engines.engines))
            return
        threading.Event().wait(every_s)


def _watch(engines: Engines, every_s: float) -> None:
    with Live(Group(), auto_refresh=False, screen=True) as live:
        while True:
            live.update(_shown(engines.engines, *engines.look(time.monotonic())), refresh=True)
            threading.Event().wait(every_s)


def _complain(silent: Mapping[str, str], asked: int) -> None:
    """Raise EngineError where an engine did not answer: a script that looks must notice."""
    if silent:
        who = "no engine" if len(silent) == asked else f"only {asked - len(silent)} of {asked} engines"
        raise EngineError(f"{who} answered: {'; '.join(f'{url}: {why}' for url, why in silent.items())}")


def _shown(engines: Sequence[Found], figures: Sequence[Figures], silent: Mapping[str, str]) -> Group:
    now_unix_s = time.time()
    tables = [
        engine_table(engines, figures, silent),
        silent_table(silent),
        trouble_table(figures),
        failure_table(figures, now_unix_s),
        slow_table(figures, now_unix_s),
    ]
    return Group(*(table for table in tables if table is not None))
