"""Ctrl-C while a command still imports ends it at once, with the documented code and without a word; while
vLLM starts its processes, in order."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
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


STARTING = """
import asyncio, multiprocessing, os, signal, sys, threading

def work():
    deaf = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.argv[-1] != "leaf":
        sys.argv.append("leaf")
        multiprocessing.get_context("spawn").Process(target=work).start()
    else:
        print("started deaf" if deaf else "started", flush=True)
    threading.Event().wait()

def interrupt(number, frame):
    raise KeyboardInterrupt("terminated")

async def serve():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("up", flush=True)
    await told.wait()
    print("ended in order", flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    if sys.argv[-1] == "up":
        asyncio.run(serve())
        sys.exit(7)
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    while child.is_alive():
        try:
            child.join()
        except KeyboardInterrupt:
            pass
    raise RuntimeError("the child died")
"""
"""A server that does as vLLM's: while it starts it forgets an interrupt that comes to itself, and has a child
and a grandchild that do not end by SIGTERM. Or, `up`: its loop hears SIGTERM."""
HEARING = (
    "-c",
    "from stateferry.cli import interrupts, vllm_server as server; "
    "interrupts.block_interrupts = server.block_interrupts = lambda: None; server.main()",
)
LEAVING = ("-c", "from stateferry.cli import vllm_server as s; s._descendants = lambda pid: []; s.main()")


def ended(
    folder: Path, words: Sequence[str], *signals: int, shell: str = "", patience_s: float = 30.0
) -> tuple[int, list[str], str]:
    """Exit code, what it said, and its errors, of a server that gets signals as from a terminal, with all of
    its processes, once it has a grandchild or is up."""
    command = [sys.executable, *words]
    process = subprocess.Popen(
        ["sh", "-c", f'{shell}; exec "$@"', "sh", *command] if shell else command,
        env=environment(folder, SERVER, STARTING),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        said = [process.stdout.readline()]
        for number in signals:
            (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
        rest, errors = process.communicate(timeout=patience_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode, [line.strip() for line in (*said, *rest.splitlines())], errors


def test_ctrl_c_while_vllm_starts_its_processes_ends_all_without_a_word(tmp_path: Path) -> None:
    """Symptom: tracebacks of every process that was being started."""
    assert ended(tmp_path, ("-m", MODULE), signal.SIGINT) == (EXIT_INTERRUPTED, ["started deaf"], "")


def test_ctrl_c_of_a_server_that_is_up_is_sigterm_to_it(tmp_path: Path) -> None:
    assert ended(tmp_path, ("-m", MODULE, "up"), signal.SIGINT) == (7, ["up", "ended in order"], "")


def test_a_server_whose_ctrl_c_is_ignored_goes_on_until_it_is_told_to_end(tmp_path: Path) -> None:
    """As a shell starts what runs in the background of a script."""
    found = ended(tmp_path, ("-m", MODULE, "up"), signal.SIGINT, signal.SIGTERM, shell="trap '' INT")
    assert found == (7, ["up", "ended in order"], "")


def test_a_server_whose_processes_all_hear_ctrl_c_is_noticed(tmp_path: Path) -> None:
    _, _, errors = ended(tmp_path, ("-m", SERVER), signal.SIGINT)
    assert "Traceback" in errors


def test_children_that_hear_ctrl_c_are_noticed(tmp_path: Path) -> None:
    assert ended(tmp_path, HEARING, signal.SIGKILL) == (-signal.SIGKILL, ["started"], "")


def test_a_server_that_has_a_word_to_say_of_what_was_killed_is_noticed(tmp_path: Path) -> None:
    talking = (
        "-c",
        "import threading; from stateferry.cli import vllm_server as s; kill = s.kill_descendants; "
        "s.NEVER_S = 0.005; s.kill_descendants = lambda: (kill(), threading.Event().wait(1)); s.main()",
    )
    _, _, errors = ended(tmp_path, talking, signal.SIGINT)
    assert "the child died" in errors


def test_processes_that_are_left_behind_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):  # they hold its output open
        ended(tmp_path, LEAVING, signal.SIGINT, patience_s=1.0)


def test_an_error_of_the_server_is_shown(tmp_path: Path) -> None:
    env = environment(tmp_path, SERVER, "if __name__ == '__main__': raise OSError('a port is taken')")
    result = subprocess.run([sys.executable, "-m", MODULE], env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert "OSError: a port is taken" in result.stderr


TOLD = """
import subprocess, sys
from stateferry.cli import vllm_server
word = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(9)); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", word], stdout=subprocess.PIPE)
child.stdout.readline()
vllm_server.tell_descendants()
print(child.wait(20))
"""


def test_processes_of_a_server_that_is_up_are_told_to_end_with_it() -> None:
    """Symptom: vLLM killed an engine core that it expected to end by itself, and reported it dead."""
    result = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("9\n", "")
