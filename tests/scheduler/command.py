"""Runs the command line in this process: importing vLLM anew for every call takes too long."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from stateferry.cli.main import main


@dataclass(frozen=True)
class Result:
    """What a shell would see."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The last line of the output as JSON."""
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Result]


@contextmanager
def command_here(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """A function that runs the command; environment and signal handler are put back."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> Result:
        code: Any = 0
        with patch.object(sys, "argv", ["stateferry", *arguments]), patch.dict(os.environ):
            try:
                main()
            except SystemExit as e:
                code = e.code
        return Result(int(code or 0), *capsys.readouterr())

    try:
        yield call
    finally:
        signal.signal(signal.SIGTERM, handler)
