"""What our pages and deploy files tell people to type, as lists of words."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("", "sh", "bash", "console")
"""Languages of fenced blocks that may hold commands."""
SEPARATORS = frozenset({"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "<"})
STARTS = ("stateferry", "vllm-router", "make")
SYNOPSIS = re.compile(r"[…\[\]<>]|\.\.\.")
"""A line that shows a command's form: nobody types it."""


def code_lines(page: str) -> Iterator[str]:
    """Lines of code of a page, continuation lines joined: fenced, or indented by four spaces."""
    fence, pending = None, ""
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            fence = line.strip().strip("`") if fence is None else None
            continue
        if not (fence in SHELL if fence is not None else line.startswith("    ")):
            continue
        text = pending + line.strip()
        pending = text[:-1] + " " if text.endswith("\\") else ""
        if not pending and text:
            yield text


def commands(line: str) -> Iterator[list[str]]:
    """The commands of one shell line that are ours to check, as words. Redirections and comments are gone."""
    line = line.removeprefix("$ ")
    if not any(start in line for start in STARTS):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        if words and words[0] in STARTS:
            yield words
        words = ["(redirected)"] if word in (">", ">>", "<") else []


def typed(path: Path) -> Iterator[list[str]]:
    """All commands of a page that somebody may type as they stand."""
    for line in code_lines(path.read_text()):
        if any(line.removeprefix("$ ").startswith(f"{start} ") for start in STARTS):
            shown = SYNOPSIS.search(line.partition(" #")[0].partition(" > ")[0])
            if not shown:
                yield from commands(line)


def refused(words: list[str]) -> str:
    """Why one of our commands would not take these arguments; empty if it would. Runs nothing.

    Options of vLLM's server after `stateferry serve` are not looked at: `vllm_options` gives them.
    """
    from typer.main import get_command

    from stateferry.cli.app import app

    command: Any = get_command(app)
    arguments = list(words[1:])
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    if "--help" in arguments:
        return ""
    try:
        command.make_context(words[0], arguments)
    except Exception as e:  # typer brings its own click, whose errors have no public name
        return e.format_message() if hasattr(e, "format_message") else repr(e)
    return ""


def vllm_options(words: list[str]) -> list[str]:
    """What `stateferry serve` passes on to vLLM's server, of its command line."""
    from typer.testing import CliRunner

    from stateferry.cli.app import app

    result = CliRunner().invoke(app, [*words[1:], "--dry-run"])
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.exception or result.output}"
    passed = shlex.split(result.output)
    return passed[passed.index("--model") :]


def router_refuses(words: list[str]) -> str:
    """Why the pinned vllm-router would not start with these arguments; empty if it would."""
    import argparse

    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=False)
    try:
        known, unknown = parser.parse_known_args(words[1:])
        if unknown:
            return f"unknown: {unknown}"
        RouterArgs.from_cli_args(known)._validate_router_args()
    except (argparse.ArgumentError, SystemExit, ValueError) as e:
        return str(e)
    return ""
