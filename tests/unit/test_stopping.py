"""What somebody who pressed Ctrl-C sees, and when."""

import io
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from rich.console import Console

from stateferry.cli.starting import shown_progress
from stateferry.cli.stopping import said_while_stopping
from stateferry.stack import Progress, ServersCallback

PATIENCE = "  what has not ended after 10 s is killed; Ctrl-C again kills it at once"


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that came through to the handlers that were there before."""
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, old in before.items():
        signal.signal(number, old)


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=100)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def end(watch: ServersCallback, *names: str) -> None:
    """As a stack ends servers, the first one first."""
    for number in range(len(names) + 1):
        watch(names[number:], True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_before_anything_has_ended(
    screen: Console, heard: list[int], number: signal.Signals
) -> None:
    with said_while_stopping(screen) as watch:
        watch(["prefill"], False)
        watch(["prefill", "decode"], False)
        signal.raise_signal(number)
        assert lines(screen) == ["stopping 2 servers: prefill, decode", PATIENCE]
        assert heard == [number]
        signal.raise_signal(number)
        end(watch, "prefill", "decode")
    assert lines(screen) == [
        "stopping 2 servers: prefill, decode",
        PATIENCE,
        "  1 to go: decode",
        "  all stopped",
    ]


def test_an_end_without_a_signal_says_the_same(screen: Console, heard: list[int]) -> None:
    with said_while_stopping(screen) as watch:
        watch(["router"], False)
        end(watch, "router")
    assert lines(screen) == ["stopping one server: router", PATIENCE, "  all stopped"]
    assert heard == []


def test_a_second_pair_is_told_of_like_the_first(screen: Console) -> None:
    with said_while_stopping(screen) as watch:
        for name in ("one", "two"):
            watch([name], False)
            end(watch, name)
    assert [line for line in lines(screen) if "stopping" in line] == [
        "stopping one server: one",
        "stopping one server: two",
    ]


def test_a_signal_while_servers_end_says_which_are_killed(screen: Console, heard: list[int]) -> None:
    with said_while_stopping(screen) as watch:
        watch(["prefill", "decode"], False)
        watch(["prefill", "decode"], True)
        watch(["decode"], True)
        signal.raise_signal(signal.SIGINT)
        watch([], True)
        signal.raise_signal(signal.SIGINT)
    assert lines(screen)[2:] == ["  1 to go: decode", "  killing decode", "  all stopped"]
    assert heard == [signal.SIGINT, signal.SIGINT]


def test_what_is_shown_while_servers_start_has_no_raw_markup() -> None:
    """Symptom: `[green]ready[/green]`, from the moment on at which something was said about stopping."""
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with said_while_stopping(screen) as watch, shown_progress(screen) as progress:
        watch(["prefill"], False)
        progress(Progress("prefill", 3.0, True, ""))
        watch(["prefill"], True)
    shown = "\n".join(lines(screen))
    assert "stopping one server" in shown
    assert "ready" in shown
    assert "[green]" not in shown


def test_nothing_is_said_where_nothing_runs(screen: Console, heard: list[int]) -> None:
    with said_while_stopping(screen):
        signal.raise_signal(signal.SIGINT)
    assert lines(screen) == []
    assert heard == [signal.SIGINT]


def test_signals_are_as_before_afterwards_and_ignored_ones_stay_ignored(
    screen: Console, heard: list[int]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with said_while_stopping(screen) as watch:
        watch(["prefill"], False)
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert lines(screen) == []
    assert heard == []
