"""vLLM's processes sleep between looks for each other's messages where the environment asks for it."""

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateferry.errors import ConfigError
from stateferry.pause import MOST_US, PAUSE_US, pause_us

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import zmq
    from harness import ATTENTION, Engine

    from stateferry.vllm import plugin, waits
    from stateferry.vllm.compat import message_queue


class Calls:
    """How often vLLM yielded and slept."""

    def __init__(self) -> None:
        self.yields = 0
        self.sleeps_s: list[float] = []

    def yielded(self) -> None:
        self.yields += 1

    def slept(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """vLLM's wait as shipped, restored afterwards; nobody yields or sleeps."""
    calls = Calls()
    monkeypatch.setattr(message_queue, waits.YIELD, message_queue.sched_yield)
    monkeypatch.setattr(os, "sched_yield", calls.yielded)
    monkeypatch.setattr(time, "sleep", calls.slept)
    monkeypatch.delenv(PAUSE_US, raising=False)
    return calls


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[message_queue.SpinCondition]:
    """What waits in vLLM's processes: a message was there just now."""
    context = zmq.Context()
    condition = message_queue.SpinCondition(True, context, f"ipc://{tmp_path}/writes", busy_loop_s=3600.0)
    condition.record_read()
    yield condition
    context.destroy(linger=0)


def test_vllm_as_shipped_yields(calls: Calls, reader: message_queue.SpinCondition) -> None:
    plugin.register()
    reader.wait()
    assert (calls.yields, calls.sleeps_s) == (1, [])


def test_it_sleeps_where_the_environment_asks(
    calls: Calls, reader: message_queue.SpinCondition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PAUSE_US, "50")
    for _ in range(2):
        plugin.register()
    reader.wait()
    assert (calls.yields, calls.sleeps_s) == (0, [pytest.approx(50e-6)])


@pytest.mark.parametrize("value", ["", "0", " 0 "])
def test_nothing_asked_for_changes_nothing(
    calls: Calls, reader: message_queue.SpinCondition, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(PAUSE_US, value)
    plugin.register()
    reader.wait()
    assert (calls.yields, calls.sleeps_s) == (1, [])


@pytest.mark.parametrize("value", ["-1", "0.5", "1e3", "fifty", "50us", str(MOST_US + 1), "9" * 400, "²"])
def test_a_value_that_cannot_be_read_ends_the_engine_at_its_start(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(PAUSE_US, value)
    with pytest.raises(ConfigError, match=f"{PAUSE_US}: expected a whole number .* from 0 to {MOST_US}"):
        plugin.register()
    assert pause_us({PAUSE_US: str(MOST_US)}) == MOST_US


def test_it_sleeps_where_vllm_knows_only_our_modules_path(
    calls: Calls, reader: message_queue.SpinCondition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: `VLLM_PLUGINS` left the plugin out, and engines waited as shipped, whatever `stateferry serve`
    had said."""
    monkeypatch.setenv(PAUSE_US, "50")
    Engine("kv_consumer", ATTENTION).shut_down()
    calls.sleeps_s.clear()
    reader.wait()
    assert (calls.yields, calls.sleeps_s) == (0, [pytest.approx(50e-6)])


def test_a_value_that_cannot_be_read_is_told_there_too(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAUSE_US, "soon")
    with pytest.raises(ConfigError, match=PAUSE_US):
        Engine("kv_consumer", ATTENTION)


def test_a_vllm_that_waits_in_another_way_is_left_alone(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PAUSE_US, "50")
    monkeypatch.delattr(message_queue, waits.YIELD)
    plugin.register()
    assert not hasattr(message_queue, waits.YIELD)
    assert "waits in another way" in caplog.text
