"""Ctrl-C is answered at once, and whoever waits sees what still runs. Engines take seconds to end."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console

from stateferry.stack import ServersCallback
from stateferry.stack.guard import GRACE_S

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopping:
    """What was said so far about the end of a stack's servers."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: list[str] = []
        self._said = False
        self._ending = False

    def servers(self, names: Sequence[str], ending: bool) -> None:
        """See `ServersCallback`. Stacks may follow each other."""
        self._ending = ending and bool(names)
        if not ending:
            self._running = list(names)
            self._said = False
            return
        if len(names) >= len(self._running):
            self._running = list(names)
            self.say()
            return
        self._running = list(names)
        self._print(f"  {len(names)} to go: {', '.join(names)}" if names else "  all stopped")

    def heard(self) -> None:
        """A signal: servers will be stopped or, if they are being stopped already, killed."""
        if self._ending:
            self._print(f"  killing {', '.join(self._running)}")
        else:
            self.say()

    def say(self) -> None:
        """That servers are being stopped, once; nothing where none runs."""
        if self._running and not self._said:
            self._said = True
            number = len(self._running)
            what = "one server" if number == 1 else f"{number} servers"
            self._print(f"stopping {what}: {', '.join(self._running)}")
            self._print(
                f"  what has not ended after {GRACE_S:.0f} s is killed; Ctrl-C again kills it at once"
            )

    def _print(self, text: str) -> None:
        with suppress(RuntimeError):  # a signal may come while this very stream is being written to
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def said_while_stopping(console: Console) -> Iterator[ServersCallback]:
    """A callback for `Stack` that says on the console which servers are being stopped, and which still run.

    Inside, Ctrl-C and SIGTERM say so before they do what they did anyway: where a command waits for
    something else first, its user need not wonder. While servers end, they kill what is left of them, as
    `Stack.stop` has it. Main thread only.
    """
    stopping = _Stopping(console)
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def heard(number: int, frame: FrameType | None) -> None:
        stopping.heard()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number, handler in before.items():
        if callable(handler):  # a signal that is ignored, as under nohup, stays ignored
            signal.signal(number, heard)
    try:
        yield stopping.servers
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
