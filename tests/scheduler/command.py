"""Runs the command line in this process: importing vLLM anew for every call takes too long."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.command import exit_code


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

    def call(*arguments: str) -> Result:
        code = exit_code(*arguments)
        return Result(code, *capsys.readouterr())

    yield call
