"""The demo without engines: its verdict, what it shows while servers start, and that it cleans up."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stateferry.cli.showcase import Arm, Asked
from stateferry.cli.starting import step

RIGHT = "Paris . where is Clara Stone Rome ."
GOOD = Asked(
    prompt="Clara Brook has the bell . where is Clara Brook",
    prompt_tokens=60,
    expected=RIGHT,
    one_engine=Arm(RIGHT, 0.1, 0.05),
    two_engines=Arm(RIGHT, 0.1, 0.05, {"outcome": "received", "bytes": {"state": 1, "attention": 1}}),
    withheld=Arm("Rome . where is", 0.1),
)


def test_a_good_answer_has_no_problem() -> None:
    assert GOOD.problems() == []
    assert GOOD.question == "where is Clara Brook"


def test_an_error_in_place_of_the_withheld_answer_is_no_problem() -> None:
    withheld = Arm("", 0.0, error="HTTP 500")
    assert dataclasses.replace(GOOD, withheld=withheld).problems() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"one_engine": Arm("Rome", 0.1)}, "one engine answered 'Rome'"),
        ({"two_engines": dataclasses.replace(GOOD.two_engines, text="Rome")}, "two engines answered 'Rome'"),
        ({"two_engines": dataclasses.replace(GOOD.two_engines, error="differ")}, "two engines: differ"),
        ({"two_engines": dataclasses.replace(GOOD.two_engines, received={})}, "did not take the hand-off"),
        (
            {"two_engines": dataclasses.replace(GOOD.two_engines, received={"outcome": "failed"})},
            "it reports failed",
        ),
        ({"withheld": Arm(RIGHT, 0.1)}, "proves nothing"),
    ],
)
def test_anything_else_is_a_problem(changes: dict[str, Arm], words: str) -> None:
    problems = dataclasses.replace(GOOD, **changes).problems()
    assert any(words in problem for problem in problems)


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("$ python -m vllm.entrypoints.openai.api_server --model m", "importing vLLM"),
        (
            "(EngineCore pid=7) INFO 11-29 23:09:46 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with",
            "starting the engine core",
        ),
        (
            "(Worker pid=6) INFO 11-29 23:10:01 [default_loader.py:5] Loading weights took 0.01 s",
            "weights loaded",
        ),
        ("INFO:     Waiting for application startup.", "starting the HTTP server"),
        ("\x1b[32m INFO\x1b[0m something else", ""),
    ],
)
def test_log_lines_are_explained(line: str, meaning: str) -> None:
    assert step(line) == meaning


FAKE_VLLM = "import sys, time\nprint('RuntimeError: {words}', flush=True)\n{then}\n"


class Demo:
    """`stateferry demo` as a process, with a fake `vllm` in place of the real one."""

    def __init__(self, folder: Path, words: str, then: str, *arguments: str) -> None:
        package = folder / "fake" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        for parent in (package, package.parent, package.parent.parent):
            (parent / "__init__.py").write_text("")
        (package / "api_server.py").write_text(FAKE_VLLM.format(words=words, then=then))
        self.mark = f"STATEFERRY_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.logs = folder / "logs"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from stateferry.cli.main import main; main()"),
                *("demo", "--log-folder", str(self.logs), *arguments),
            ],
            env={**os.environ, name: value, "PYTHONPATH": ":".join([str(folder / "fake"), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def left(self) -> list[int]:
        """Processes that the demo started and that are alive, the guardian included."""
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
def start(tmp_path: Path, interrupts: None) -> Iterator[Callable[..., Demo]]:
    demos = []

    def start(words: str, then: str, *arguments: str) -> Demo:
        demos.append(Demo(tmp_path, words, then, *arguments))
        return demos[-1]

    yield start
    for demo in demos:
        demo.process.kill()
        demo.process.communicate()


def wait_for_log(demo: Demo, words: str) -> None:
    deadline = time.monotonic() + 30
    while not all(
        (demo.logs / name).exists() and words in (demo.logs / name).read_text()
        for name in ("prefill.log", "decode.log")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_stops_everything(start: Callable[..., Demo], number: signal.Signals, code: int) -> None:
    demo = start("starting", "time.sleep(600)")
    wait_for_log(demo, "starting")
    assert len(demo.left()) >= 2
    demo.process.send_signal(number)
    output, errors = demo.process.communicate(timeout=30)
    assert demo.process.returncode == code
    assert demo.left() == []
    assert "Traceback" not in errors
    said = [line.strip() for line in output.splitlines()]
    said = said[said.index("stopping 2 servers: prefill, decode") :]
    assert said[1].startswith("what has not ended after 10 s is killed")
    assert said[2] in ("1 to go: prefill", "1 to go: decode")
    assert said[3] == "all stopped"


DEAF = """import signal
signal.signal(signal.SIGTERM, lambda number, frame: print('heard and stays', flush=True))
print('listens', flush=True)
while True: time.sleep(600)"""


def test_a_second_ctrl_c_kills_what_does_not_end_and_says_so(start: Callable[..., Demo]) -> None:
    """Symptom: the command ended without a word, and the engines ran on for seconds."""
    demo = start("starting", DEAF)
    wait_for_log(demo, "listens")
    demo.process.send_signal(signal.SIGINT)
    wait_for_log(demo, "heard and stays")
    demo.process.send_signal(signal.SIGINT)
    output, errors = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 130
    assert demo.left() == []
    assert "Traceback" not in errors
    said = [line.strip() for line in output.splitlines()]
    assert said[said.index("killing prefill, decode") :][-1] == "all stopped"


def test_an_engine_that_dies_ends_the_demo_with_its_reason(start: Callable[..., Demo]) -> None:
    demo = start("operator torchvision::nms does not exist", "sys.exit(1)", "--json")
    output, errors = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 3
    assert "operator torchvision::nms does not exist" in errors
    assert "Hint: torchvision does not fit" in errors
    assert "Traceback" not in errors
    assert json.loads(output.splitlines()[-1])["passed"] is False
    assert demo.left() == []


def test_an_engine_that_hangs_ends_the_demo_in_time(start: Callable[..., Demo]) -> None:
    demo = start("hanging", "time.sleep(600)", "--timeout-s", "2")
    _, errors = demo.process.communicate(timeout=30)
    assert demo.process.returncode == 3
    assert "not ready after 2 s" in errors
    assert demo.left() == []
