"""Runs the command line in this process: starting Python and importing the command takes most of a second."""

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from stateferry.cli.main import main


def exit_code(*arguments: str) -> int:
    """What a shell would get. Output goes where it goes; environment and signal handler are put back.

    What `main` does not turn into an exit code is raised.
    """
    handler, code = signal.getsignal(signal.SIGTERM), None
    with patch.object(sys, "argv", ["stateferry", *arguments]), patch.dict(os.environ):
        try:
            main()
        except SystemExit as e:
            code = e.code
        finally:
            signal.signal(signal.SIGTERM, handler)
    return int(code or 0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As if the command were a process of its own, whose output nobody sees."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, {"COLUMNS": "80"}):
        code = exit_code(*arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
