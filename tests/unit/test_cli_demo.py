"""The demo without engines: its verdict, what it shows while servers start, and that it cleans up."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from tests.left_behind import processes_with

from stateferry.cli.demo import _show
from stateferry.cli.showcase import Arm, Asked, ask_all
from stateferry.cli.starting import step
from stateferry.stack import Client, Completion, Engine, Handoff, Router

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
"""How long a child may take to start or to end on a crowded machine; otherwise it takes moments."""

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


@dataclasses.dataclass(frozen=True)
class Place:
    """A question, an engine, or a router."""

    url: str = "engine"
    text: str = "where is Clara Brook"
    answer: str = "Paris"
    follow_up: str = RIGHT.removeprefix("Paris ")


class Answers:
    """A client of engines whose hand-offs take these milliseconds, one after the other."""

    def __init__(self, milliseconds: Sequence[float], last: str = "received") -> None:
        outcomes = ["received"] * (len(milliseconds) - 1) + [last]
        self._hand_offs = iter(
            {"outcome": outcome, "milliseconds": took, "wait_milliseconds": took / 2, "bytes": {"state": 1}}
            for took, outcome in zip(milliseconds, outcomes, strict=True)
        )

    def reset_prefix_cache(self, url: str) -> None:
        """Nothing is kept."""

    def complete(self, url: str, prompt: str, max_tokens: int, *, stream: bool = False) -> Completion:
        said = url == "router" and not stream and max_tokens > 2
        params = {"stateferry": {"received": next(self._hand_offs)}} if said else None
        return Completion(RIGHT, (), "length", 60, params, None, 0.1, 0.2 if stream else None)

    def handoff(self, *_: object, **__: object) -> Handoff:
        wrong = Completion("Rome", (), "length", 60, None, None, 0.1, None)
        return Handoff(wrong, wrong, 0.1, None)


def asked(client: Answers) -> Asked:
    engine, router = cast(Engine, Place()), cast(Router, Place("router"))
    (one,) = ask_all(cast(Client, client), engine, engine, router, [Place()], lambda text: None)
    return one


def test_what_is_shown_of_a_reading_is_the_median_of_several() -> None:
    """Symptom: one slow hand-off of one was shown as read in 528 ms, beside a first token after 209 ms."""
    one = asked(Answers([527.9, 4.0, 5.0]))
    assert one.two_engines.received["milliseconds"] == 5.0
    assert one.problems() == []


def test_a_hand_off_that_was_not_received_is_not_hidden_by_two_that_were() -> None:
    one = asked(Answers([4.0, 5.0, 6.0], last="failed"))
    assert any("it reports failed" in problem for problem in one.problems())


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_says_what_was_waiting_and_that_the_requests_differ(width: int) -> None:
    screen = Console(file=io.StringIO(), width=width)
    _show(screen, [asked(Answers([527.9, 4.0, 5.0]))])
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    (row,) = [line for line in shown.splitlines() if "5.0 ms" in line]
    assert "2.5 ms" in row
    assert "others than those whose first token is timed" in " ".join(shown.split())


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
        return processes_with(self.mark, but=self.process.pid)


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
    deadline = time.monotonic() + PATIENCE_S
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
    output, errors = demo.process.communicate(timeout=PATIENCE_S)
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
    output, errors = demo.process.communicate(timeout=PATIENCE_S)
    assert demo.process.returncode == 130
    assert demo.left() == []
    assert "Traceback" not in errors
    said = [line.strip() for line in output.splitlines()]
    assert said[said.index("killing prefill, decode") :][-1] == "all stopped"


def test_an_engine_that_dies_ends_the_demo_with_its_reason(start: Callable[..., Demo]) -> None:
    demo = start("operator torchvision::nms does not exist", "sys.exit(1)", "--json")
    output, errors = demo.process.communicate(timeout=PATIENCE_S)
    assert demo.process.returncode == 3
    assert "operator torchvision::nms does not exist" in errors
    assert "Hint: torchvision does not fit" in errors
    assert "Traceback" not in errors
    assert json.loads(output.splitlines()[-1])["passed"] is False
    assert demo.left() == []


def test_an_engine_that_hangs_ends_the_demo_in_time(start: Callable[..., Demo]) -> None:
    demo = start("hanging", "time.sleep(600)", "--timeout-s", "2")
    _, errors = demo.process.communicate(timeout=PATIENCE_S)
    assert demo.process.returncode == 3
    assert "not ready after 2 s" in errors
    assert demo.left() == []
