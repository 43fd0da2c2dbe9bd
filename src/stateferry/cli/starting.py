"""Showing what servers do while they start: a live line each on a terminal, a line per step elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stateferry.stack import Progress, ProgressCallback

StartTimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout-s", min=1.0, help="Longest wait for what is started; a loaded machine needs more."
    ),
]
"""For every command that starts engines; the default is START_TIMEOUT_S."""

STEPS = (
    ("api_server --model", "importing vLLM"),
    ("vllm-router", "starting"),
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights loaded"),
    ("Warming up model", "warming up (the first time on a machine takes a minute)"),
    ("Registering KV", "registering the KV cache"),
    ("init engine", "engine ready, starting the HTTP server"),
    ("Waiting for application startup", "starting the HTTP server"),
)
"""Words in the log, and what to tell people."""


def step(line: str) -> str:
    """What a log line means to somebody who waits; an empty string if nothing."""
    return next((meaning for words, meaning in STEPS if words in line), "")


@contextmanager
def shown_progress(console: Console) -> Iterator[ProgressCallback]:
    """A callback for `Stack.wait_ready` that shows every server's step on the console."""
    rows: dict[str, tuple[str, float, bool]] = {}

    def table() -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, (text, seconds, ready) in rows.items():
            # No markup: what is said while this is shown may be printed without it, and this along with it.
            mark = Text("ready", "green") if ready else Text(text)
            grid.add_row(f"  {name}", f"{seconds:5.1f} s", mark)
        return grid

    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=False) as live:

            def update(progress: Progress) -> None:
                before = rows.get(progress.name, ("starting", 0.0, False))[0]
                rows[progress.name] = (step(progress.line) or before, progress.seconds, progress.ready)
                live.update(table(), refresh=True)

            yield update
        return

    def report(progress: Progress) -> None:
        before = rows.get(progress.name, ("", 0.0, False))[0]
        text = "ready" if progress.ready else step(progress.line) or before or "starting"
        if text != before:
            console.print(f"  {progress.name:8} {progress.seconds:5.1f} s  {text}", markup=False)
        rows[progress.name] = (text, progress.seconds, progress.ready)

    yield report
