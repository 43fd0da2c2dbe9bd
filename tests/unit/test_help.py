"""Every command's help ends with examples, and each of them can be typed as it stands."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from tests.documented import refused
from typer.main import get_command
from typer.testing import CliRunner

from stateferry.cli.app import app
from stateferry.cli.examples import examples
from stateferry.config import parse_config
from stateferry.transport import transport_names

STARTS_ENGINES = (
    "demo",
    "gate",
    "soak",
    "bench added-latency",
    "bench open",
    "bench interference",
    "bench handoff",
    "bench agentx",
)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command and group, by what one types after `stateferry`."""
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


COMMANDS = dict(walk(get_command(app)))


def help_text(name: str, of: typer.Typer = app) -> str:
    result = CliRunner().invoke(of, [*name.split(), "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def shown(text: str) -> list[list[str]]:
    """The examples at the end of a help text, as words; empty if it does not end with any."""
    found = re.search(r"^ *Examples?:\n((?: +stateferry .*\n?)+)\s*\Z", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found[1].splitlines()] if found else []


def problems(name: str, text: str) -> list[str]:
    """What is wrong with a command's examples."""
    lines = shown(text)
    found = [] if lines else ["the help does not end with examples"]
    for words in lines:
        if words[1 : 1 + len(name.split())] != name.split():
            found.append(f"{shlex.join(words)} is another command")
        if why := refused(words):
            found.append(f"{shlex.join(words)}: {why}")
    return found


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name or "stateferry")
def test_help_ends_with_examples_that_can_be_typed(name: str) -> None:
    assert problems(name, help_text(name)) == []


def test_no_group_of_commands_cuts_off_what_they_are_for() -> None:
    """Symptom: `Time that two engines add to one engine's first token,...`"""
    for name in ("", "bench", "serve"):
        lines = help_text(name).partition("Commands:")[2].splitlines()
        assert lines
        assert not [line for line in lines if line.rstrip().endswith("...")], name


def test_there_are_commands_at_all() -> None:
    assert {"", "serve", "serve decode", "demo", "bench", "bench agentx-sessions", "version"} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stateferry top --rooter http://r", "No such option"),
        ("stateferry key", "another command"),
        ("stateferry top --every soon", "Invalid value"),
        ("make top", "does not end"),
    ],
)
def test_a_bad_example_is_noticed(line: str, says: str) -> None:
    (found, *_) = problems("top", f"Usage: x\n\nOptions:\n  --help\n\n  Examples:\n    {line}\n")
    assert says in found


def test_examples_before_the_options_are_not_at_the_end() -> None:
    other = typer.Typer(rich_markup_mode=None)
    other.command("a")(lambda: None)

    @other.command("top", help=examples("stateferry top http://h"))
    def top() -> None: ...

    assert problems("top", help_text("top", other)) == ["the help does not end with examples"]


@pytest.mark.parametrize("name", STARTS_ENGINES)
def test_whatever_starts_engines_takes_the_same_time_out(name: str) -> None:
    options = {opt: p for p in COMMANDS[name].params for opt in p.opts}
    demo = {opt: p for p in COMMANDS["demo"].params for opt in p.opts}
    assert options["--timeout-s"].help == demo["--timeout-s"].help
    assert options["--timeout-s"].default == demo["--timeout-s"].default
    assert "--log-folder" in options


def test_only_commands_that_start_engines_take_it() -> None:
    """`serve` becomes vLLM's process; the others start nothing."""
    assert {name for name, c in COMMANDS.items() if any("--timeout-s" in p.opts for p in c.params)} == set(
        STARTS_ENGINES
    )


@pytest.mark.parametrize("name", ["serve prefill", "serve decode", "demo", "gate", "soak"])
def test_every_transport_that_may_be_asked_for_is_in_the_help(name: str) -> None:
    """Symptom: `mori` could be asked for, and no help named it."""
    (option,) = [p for p in COMMANDS[name].params if "--transport" in p.opts]
    named = option.help.partition(": ")[2].rstrip(".").split(", ")
    assert set(named) == {"auto", *transport_names()} - {"faults", "memory"}
    for transport in named:
        assert parse_config({"transport": transport}).transport.value == transport
