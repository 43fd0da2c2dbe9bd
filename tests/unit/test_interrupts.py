"""Ctrl-C while a command still imports ends it at once, with the documented code and without a word."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stateferry.cli.interrupts import EXIT_INTERRUPTED, ends_on_interrupt
from stateferry.cli.vllm_server import MODULE, SERVER
from stateferry.models import RECALL_GDN

pytestmark = pytest.mark.usefixtures("interrupts")

COMMAND = ("-c", "from stateferry.cli.main import main; main()")
WITHOUT = ("-c", "from stateferry.cli.app import app; app()")
"""The command, but for what it does about Ctrl-C."""
IMPORTING = "STATEFERRY_TEST_IMPORTING"
STALL = f"""
import os, threading
os.write(int(os.environ["{IMPORTING}"]), b"!")
try:
    threading.Event().wait()
except BaseException as e:  # as libraries do that are imported in pieces
    raise ImportError("a piece of it cannot be loaded") from e
"""
SERVE = ("serve", "prefill", str(RECALL_GDN), "--port", "0")
COMMANDS = (
    SERVE,
    ("demo",),
    ("gate",),
    ("bench", "handoff"),
    ("doctor",),
    ("inspect", str(RECALL_GDN)),
    ("top", "http://127.0.0.1:1"),
)


def environment(folder: Path, module: str, text: str) -> dict[str, str]:
    """In which `module` is this text, in place of the real one."""
    path = folder / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for parent in path.parents[: module.count(".")]:
        (parent / "__init__.py").write_text("")
    return {**os.environ, "PYTHONPATH": ":".join([str(folder), *sys.path]), "HF_HUB_OFFLINE": "1"}


def interrupted(folder: Path, module: str, words: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of a Python with these arguments that gets Ctrl-C while it imports `module`."""
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, *words],
        env=environment(folder, module, STALL) | {IMPORTING: str(theirs)},
        pass_fds=[theirs],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    try:
        assert os.read(ours, 1), f"ended before it imported {module}: {process.communicate()}"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        os.close(ours)
        process.kill()
        process.communicate()
    return process.returncode, errors


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_ctrl_c_while_our_own_modules_are_imported_ends_with_130(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Symptom: a Python traceback, and another code."""
    assert interrupted(tmp_path, "typer", (*COMMAND, *words)) == (EXIT_INTERRUPTED, "")


@pytest.mark.parametrize(
    ("module", "words"),
    [(SERVER, SERVE), ("torch", ("doctor",)), ("torch", ("inspect", str(RECALL_GDN)))],
    ids=["serve", "doctor", "inspect"],
)
def test_ctrl_c_while_torch_or_vllm_is_imported_ends_with_130(
    module: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    code, errors = interrupted(tmp_path, module, (*COMMAND, *words))
    assert code == EXIT_INTERRUPTED
    assert [line for line in errors.splitlines() if not line.startswith("stateferry: ")] == []


@pytest.mark.parametrize(
    ("module", "words"), [("typer", WITHOUT), (SERVER, ("-m", SERVER))], ids=["ours", "vLLM"]
)
def test_a_start_that_does_nothing_about_ctrl_c_is_noticed(
    module: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    code, errors = interrupted(tmp_path, module, words)
    assert code != EXIT_INTERRUPTED
    assert "Traceback" in errors


def test_once_vllms_server_is_imported_it_runs_as_if_it_had_been_started_itself(tmp_path: Path) -> None:
    """Its name, its arguments, its Ctrl-C; and nothing is said."""
    text = """
import json, signal, sys
if __name__ == "__main__":
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(json.dumps([heard, sys.modules["__main__"].__spec__.name, sys.argv[0] == __file__, sys.argv[1:]]))
"""
    env = environment(tmp_path, SERVER, text)
    said = []
    for module in (MODULE, SERVER):
        command = [sys.executable, "-m", module, "--model", "m"]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        said.append(json.loads(result.stdout))
    assert said[0] == said[1] == [True, SERVER, True, ["--model", "m"]]


def test_who_hears_or_ignores_the_signal_already_goes_on_doing_so() -> None:
    """A command under nohup, or inside a program that has a handler."""
    with ends_on_interrupt():
        ends = signal.getsignal(signal.SIGINT)
    assert ends is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for handler in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGINT, handler)
        with ends_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
