"""What a soak's verdict is made of; the soak itself runs in the engine tier."""

import io
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console
from tests.command import run

from stateferry.cli import soak as cli_soak
from stateferry.cli.soak import show
from stateferry.errors import EngineError
from stateferry.gate.resources import LEAST_SAMPLES, Sample, growth, sample
from stateferry.gate.soak import CLEAN, Soak, SoakReport


def report(**changes: object) -> SoakReport:
    outcomes = {CLEAN: Counter(received=9), "read hangs": Counter(failed=1)}
    return SoakReport(**({"minutes": 1.0, "outcomes": outcomes} | changes))  # type: ignore[arg-type]


def test_one_wrong_answer_error_block_or_growth_is_enough_to_fail() -> None:
    assert report().passed
    for changes in (
        {"wrong": ["another token"]},
        {"errors": ["HTTP 500"]},
        {"held": "prefill engine: a block"},
        {"grown": ["threads"]},
        {"outcomes": {CLEAN: Counter(received=10)}},  # no fault was tried
    ):
        assert not report(**changes).passed, changes


def test_what_grows_steadily_is_named_and_what_only_fills_is_not() -> None:
    steady = [Sample(i * (10 << 20), 20 + i, 50) for i in range(30)]
    assert [text.split()[0] for text in growth(steady)] == ["resident_bytes", "threads"]
    filling = [Sample(min(i, 9) * (100 << 20), min(20 + i, 29), 50) for i in range(30)]
    assert growth(filling) == []
    assert growth(steady[: LEAST_SAMPLES - 1]) == []


def test_a_session_is_looked_at_as_a_whole() -> None:
    found = sample(os.getsid(0))
    assert found.resident_bytes > 1 << 20
    assert found.threads >= 1
    assert found.file_descriptors >= 3


class Answering:
    """A client and an engine in one: answers everything with the same token."""

    url, pid = "http://engine", os.getpid()
    received: ClassVar[dict[str, Any]] = {"outcome": "received"}
    token_ids = (1,) * 400

    @property
    def decode(self) -> "Answering":
        return self

    def complete(self, *args: Any, **more: Any) -> "Answering":
        return self

    def handoff(self, *args: Any, **more: Any) -> "Answering":
        self.asked.set()
        return self

    def __init__(self) -> None:
        self.asked = threading.Event()


def test_ctrl_c_in_a_soak_of_half_an_hour_waited_for_its_end() -> None:
    engine: Any = Answering()

    def interrupt(share: float, requests: int) -> None:
        assert engine.asked.wait(10.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Soak(engine, engine, engine, 0).run(30.0, interrupt)


def shown(found: SoakReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(console, found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_an_engine_said_is_shown_as_it_is() -> None:
    """Symptom: brackets in an error were taken for markup, and the command ended before its JSON."""
    text = "http://e answered HTTP 500: [Errno 111] at [/v1/completions]"
    assert text in shown(report(errors=[text]))


def test_a_soak_that_tried_no_fault_says_that_it_failed_for_that() -> None:
    """Symptom: "Failed." after a short soak, and no reason."""
    assert "no fault was tried" in shown(report(outcomes={CLEAN: Counter(received=10)}))
    assert "no fault was tried" not in shown(report(errors=["HTTP 500"]))


def test_a_transport_that_there_is_not_is_refused_before_engines_start() -> None:
    """Symptom: two engines started and died of it."""
    result = run("soak", "--transport", "telepathy")
    assert result.returncode == 2, result.stderr
    assert "key 'transport' = 'telepathy'" in result.stderr


def test_json_of_a_soak_whose_engines_do_not_start_is_printed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(*args: object) -> None:
        raise EngineError("prefill ended with exit code 1")

    monkeypatch.setattr(cli_soak, "start_engines", start)
    result = run("soak", "--json", "--log-folder", str(tmp_path))
    assert result.returncode == 3, result.stderr
    assert json.loads(result.stdout) == {"passed": False, "errors": ["prefill ended with exit code 1"]}
