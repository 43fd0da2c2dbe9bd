"""How many calls the kernel takes for a producer whose process hangs."""

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from stateferry.ferry.loop import BACKLOG

CALLS = 300
CHILD = """
import sys
from stateferry.ferry import loop
from stateferry.testing.peers import EngineRank
loop.BACKLOG = int(sys.argv[1])
with EngineRank("p") as producer:
    print(producer.address.port, flush=True)
    sys.stdin.read()
"""


def call_a_stopped_process(backlog: int, patience_s: float) -> None:
    """Many connections to a process that takes none up. Raises TimeoutError where the kernel does not."""
    command = [sys.executable, "-c", CHILD, str(backlog)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        ExitStack() as calls,
    ):
        calls.callback(child.kill)
        assert child.stdout is not None
        port = int(child.stdout.readline())
        child.send_signal(signal.SIGSTOP)
        for _ in range(CALLS):
            calls.enter_context(socket.create_connection(("127.0.0.1", port), patience_s))


def test_a_process_that_hangs_does_not_seem_to_have_ended_because_many_call_it() -> None:
    """Symptom: a prefill engine of many decode engines was called failed, not silent, when it had hung for a
    minute or two."""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    if most < CALLS:
        pytest.skip(f"net.core.somaxconn is {most}, which bounds what a process may ask for")
    call_a_stopped_process(BACKLOG, 20.0)


def test_a_backlog_that_is_too_short_is_noticed() -> None:
    with pytest.raises(TimeoutError):
        call_a_stopped_process(100, 0.3)
