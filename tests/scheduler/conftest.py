"""What the tests of this folder share: the simulated engine beside them, a clock, a logger as it was."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stateferry.session import SystemClock

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def our_logger_as_it_was() -> Iterator[None]:
    """A connector gives our logger vLLM's handlers for good; the next test's log lines would be lost."""
    ours = logging.getLogger("stateferry")
    before = ours.level, ours.propagate, list(ours.handlers)
    yield
    ours.setLevel(before[0])
    ours.propagate, ours.handlers = before[1:]


@pytest.fixture
def leap(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass at once for every half and every ferry of the test.

    So a time limit may be long, and is over when the test says and not when a machine is slow.
    """
    leapt_s = 0.0
    now_s = SystemClock.now_s

    def leap(seconds: float) -> None:
        nonlocal leapt_s
        leapt_s += seconds

    monkeypatch.setattr(SystemClock, "now_s", lambda clock: now_s(clock) + leapt_s)
    return leap
