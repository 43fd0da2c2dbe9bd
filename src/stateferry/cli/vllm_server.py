"""vLLM's server, with another Ctrl-C: `python -m stateferry.cli.vllm_server` is
`python -m vllm.entrypoints.openai.api_server`, whose first process hears it for all."""

import importlib
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from stateferry.cli.interrupts import block_interrupts, hear_interrupts

MODULE = "stateferry.cli.vllm_server"
SERVER = "vllm.entrypoints.openai.api_server"
NEVER_S = 3600.0
"""How long one of our threads may run before another one gets a turn."""


def main() -> None:
    """Become vLLM's server, with this process's arguments."""
    hear_interrupts(kill_descendants, tell_descendants)
    importlib.import_module(SERVER)
    # It is to run as a program, and runpy warns of a program that somebody has imported before. What took
    # the time, everything that it imports in turn, stays.
    del sys.modules[SERVER]
    # Python's helper for multiprocessing lets the signal through again where it is started, as of 3.11; vLLM
    # starts it with its first child, which would be the first to hear.
    resource_tracker.ensure_running()
    block_interrupts()
    # With its own name in the place of ours, because vLLM's child processes look there what to import.
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def kill_descendants() -> None:
    """Every process that this one has started, and those that they have. Before a server is up there is no
    other way: an engine core that is set up does not end by SIGTERM, and vLLM forgets one that came to
    itself. No other thread of this process runs afterwards: it would have a word to say of it."""
    stopped: set[int] = set()
    while found := [pid for pid in _descendants(os.getpid()) if pid not in stopped]:
        for pid in found:
            _send(pid, signal.SIGSTOP)  # it starts no more of them
        stopped.update(found)
    sys.setswitchinterval(NEVER_S)
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def tell_descendants() -> None:
    """What Ctrl-C says to all processes of a server that is up: it expects them to end by themselves."""
    for pid in list(_descendants(os.getpid())):
        _send(pid, signal.SIGTERM)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(ancestor: int) -> Iterator[int]:
    """From /proc; without zombies and without Python's helper, which gives back what others leave behind."""
    spared = getattr(resource_tracker, "_resource_tracker")._pid  # noqa: B009
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                # The command stands in parentheses and may contain anything; state and parent follow.
                state, parent, *_ = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    parents[int(entry.name)] = int(parent)
    generation = {ancestor}
    while generation := {pid for pid, parent in parents.items() if parent in generation}:
        yield from generation - {spared}


if __name__ == "__main__":
    main()
