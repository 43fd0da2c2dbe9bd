"""The README's quick start: its blocks are found, and what they must show is looked for.

`make quickstart` and `tests/engines/test_quickstart.py` run them with real engines;
`test_documented_commands.py` looks at every command.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.left_behind import processes_with
from tests.programs import loaded

ROOT = Path(__file__).parents[2]
GOOD = """{"choices":[{"index":0,"text":" Kyoto","logprobs":null}]}
stateferry_handoffs_total{engine="0",model_name="model",outcome="received"} 1.0
stateferry_received_bytes_total{engine="0",kind="attention",model_name="model"} 262144.0
stateferry_received_bytes_total{engine="0",kind="state",model_name="model"} 407040.0
"""


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    return loaded(ROOT / "tools" / "quickstart.py")


def test_it_starts_asks_shows_and_stops(quickstart: ModuleType) -> None:
    found = quickstart.blocks()
    assert len(found) == 5
    words = ("serve prefill", "vllm-router", "completions", "metrics", "kill")
    for block, word in zip(found, words, strict=True):
        assert word in block
    assert subprocess.run(["bash", "-n"], input=quickstart.script(), text=True).returncode == 0


def test_other_ports_change_nothing_else(quickstart: ModuleType) -> None:
    ports = quickstart.free_ports()
    assert len(set(ports.values())) == 3
    other = quickstart.script(ports)
    assert not any(str(port) in other for port in quickstart.PORTS)
    back = {new: old for old, new in ports.items()}
    assert quickstart.script() == quickstart.re.sub(
        r"\b(" + "|".join(map(str, back)) + r")\b", lambda m: str(back[int(m[1])]), other
    )


def test_what_it_must_show_is_looked_for(quickstart: ModuleType) -> None:
    assert quickstart.problems(GOOD) == []
    assert quickstart.problems("") == [name for _, name in quickstart.EXPECTED]


@pytest.mark.parametrize(
    ("now", "then", "missing"),
    [
        ("Kyoto", "Quito", "the answer"),
        ('"received"} 1.0', '"failed"} 1.0', "one hand-off received"),
        ("407040.0", "0.0", "bytes of recurrent"),
    ],
)
def test_a_wrong_showing_is_noticed(quickstart: ModuleType, now: str, then: str, missing: str) -> None:
    (found,) = quickstart.problems(GOOD.replace(now, then))
    assert missing in found


AS_PRINTED = """
import sys
from pathlib import Path
from tests.programs import loaded
program = loaded(Path("tools/quickstart.py").resolve())
program.blocks = lambda: {blocks!r}
{damage}
sys.argv[1:] = ["--free-ports"]
sys.exit(program.main())
"""
ENGINES = "sleep 600 & sleep 600 &\necho both were started\n"
WAITS = "until false; do sleep 600; done\n"
STOPS = "kill $(jobs -p)\nwait\n"
LEAVES = "program.end_sessions = lambda leaders: None"


class Run:
    """`make quickstart` with other blocks, and everything that it starts."""

    def __init__(self, *blocks: str, damage: str = "") -> None:
        self.mark = f"STATEFERRY_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_PRINTED.format(blocks=list(blocks), damage=damage)],
            cwd=ROOT,
            env={**os.environ, name: value, "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> tuple[str, str]:
        """What it says on both streams from when the engines were started, after a signal."""
        assert self.process.stdout is not None
        while self.process.stdout.readline() not in ("both were started\n", ""):
            pass
        self.process.send_signal(number)
        return self.process.communicate(timeout=30)

    def left(self) -> list[int]:
        """What it started and is still alive."""
        return processes_with(self.mark, but=self.process.pid)


@pytest.fixture
def runs(interrupts: None) -> Iterator[list[Run]]:
    """Put every run here: what it leaves is killed."""
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        for pid in run.left():
            os.kill(pid, signal.SIGKILL)
        run.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_stops_everything(runs: list[Run], number: signal.Signals) -> None:
    """Symptom: the engines ran on, and the shell behind them went on and started a router, too."""
    run = Run(ENGINES, WAITS, "echo the router was started\n", STOPS)
    runs.append(run)
    output, errors = run.interrupt(number)
    assert run.process.returncode == 128 + number
    assert run.left() == []
    assert "Traceback" not in errors
    assert "the router was started\n" not in output
    assert output.splitlines()[-2:] == [
        "quick start: stopping everything, which takes up to 10 s",
        "quick start: all stopped",
    ]


def test_engines_that_run_on_are_noticed(runs: list[Run]) -> None:
    run = Run(ENGINES, WAITS, STOPS, damage="program.subprocess.Popen.wait = lambda self: 0;" + LEAVES)
    runs.append(run)
    assert run.process.stdout is not None
    while run.process.stdout.readline() not in ("both were started\n", ""):
        pass
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=30) == 130
    assert len(run.left()) >= 3


def test_a_good_run_shows_what_it_does_and_ends_with_a_verdict(runs: list[Run]) -> None:
    """Symptom: nothing on screen for half a minute, and no word at the end."""
    runs.append(Run(f"cat <<'END'\n{GOOD}END\n", STOPS.partition("\n")[2]))
    output, _ = runs[0].process.communicate(timeout=30)
    assert runs[0].process.returncode == 0
    lines = output.splitlines()
    assert lines.index("cat <<'END'") < len(lines) - 1 - lines[::-1].index(GOOD.splitlines()[0])
    assert lines[-1] == "quick start: passed, all stopped"


def test_a_bad_run_says_so_last(runs: list[Run]) -> None:
    runs.append(Run("echo Quito\n", STOPS.partition("\n")[2]))
    output, _ = runs[0].process.communicate(timeout=30)
    assert runs[0].process.returncode == 1
    assert output.splitlines()[-1] == "quick start: failed, all stopped"
    assert "passed" not in output


FAKES = {
    "stateferry": 'echo "port 8200 is taken"; [ $2 = {dies} ] && exit 2; exec {sleep} 600',
    "vllm-router": 'echo "port 8000 is taken"; [ {dies} = router ] && exit 2; exec {sleep} 600',
    "curl": '[ {dies} = router ] && case "$*" in *8000*) exit 7 ;; *) exit 0 ;; esac; exit 7',
    "sleep": "exec {sleep} 0.05",
}
"""Commands of the quick start, with one server that ends at once."""


def printed(quickstart: ModuleType, folder: Path, dies: str) -> str:
    """What its blocks say by hand, up to the one where a server does not start."""
    sleep = shutil.which("sleep")
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/sh\n{text.format(dies=dies, sleep=sleep)}\n")
        (folder / name).chmod(0o755)
    text = "\n".join(quickstart.blocks()[: 2 if dies == "router" else 1])
    text = text.replace(". .venv/bin/activate", f"PATH={folder}:$PATH")
    text = f"trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT\n{text}"
    result = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, timeout=30)
    assert "No such process" in result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("dies", "why"), [("prefill", "8200 is"), ("decode", "8200 is"), ("router", "8000 is")]
)
def test_waiting_ends_where_a_server_did_not_start_and_its_log_is_shown(
    quickstart: ModuleType, tmp_path: Path, dies: str, why: str
) -> None:
    """Symptom: the printed loop asked for ever, and the reason was in a log that nobody named."""
    assert f"port {why} taken" in printed(quickstart, tmp_path, dies)


def test_what_the_router_says_of_its_health_is_not_on_screen(quickstart: ModuleType) -> None:
    """Symptom: `All servers healthy` without an end of line ran into the answer."""
    (line,) = [line for line in quickstart.blocks()[1].splitlines() if "8000/health" in line]
    assert "-o /dev/null" in line


def test_a_server_that_did_not_start_ends_the_run_at_once(runs: list[Run]) -> None:
    """Symptom: the next blocks ran all the same, and waited for seven minutes."""
    runs.append(Run("sleep 600 & PREFILL=$!\nfalse & DECODE=$!\nwait $DECODE || true\n", WAITS, STOPS))
    output, _ = runs[0].process.communicate(timeout=30)
    assert runs[0].process.returncode == 1
    assert "sleep 600; done\n" not in output
    assert output.splitlines()[-1] == "quick start: failed, all stopped"
    assert runs[0].left() == []
