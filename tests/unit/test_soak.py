"""What a soak's verdict is made of; the soak itself runs in the engine tier."""

import os
import threading
from collections import Counter
from typing import Any, ClassVar

import pytest

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
