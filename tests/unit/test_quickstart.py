"""The README's quick start: its blocks are found, and what they must show is looked for.

`make quickstart` and `tests/engines/test_quickstart.py` run them with real engines;
`test_documented_commands.py` looks at every command.
"""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
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
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


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
