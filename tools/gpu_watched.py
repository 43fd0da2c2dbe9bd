"""Connectors that note where the time of an engine's steps goes, for gpu_engines.py.

vLLM loads a connector of this module in place of the one it is named after. Loading it puts a clock around
every hook of that connector and around the parts of vLLM's step, in the process of the engine core. Calls of
more than NOTED_MS, and all whole steps, go to a file, one a line: when it ended (seconds of `time.monotonic`,
which all processes of a host share), what it was, and how long it took in milliseconds.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "STATEFERRY_WATCHED"
NOTED_MS = 0.02
FLUSHED_S = 0.1
STEP = "step"
SLOW = 1.5
"""A step that takes so many times the median is slow."""
PARTS = {
    "vllm.v1.engine.core": {
        "EngineCore": ("step", "step_with_batch_queue", "preprocess_add_request", "add_request")
    },
    "vllm.v1.core.sched.scheduler": {"Scheduler": ("schedule", "update_from_output")},
    "vllm.v1.worker.gpu.model_runner": {"GPUModelRunner": ("execute_model", "add_requests", "sample_tokens")},
}
"""Module -> class -> methods. What is not there, in another version or process, is left alone."""
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
)


def environment(folder: Path) -> dict[str, str]:
    """What an engine needs so that it finds this module, and its folder."""
    here = str(Path(__file__).resolve().parent)
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join((here, os.environ.get("PYTHONPATH", "")))}


class _Notes:
    """The file of one process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.txt").open("a")
        self._flushed_s = 0.0
        self._lock = threading.Lock()

    def note(self, name: str, begin_s: float, end_s: float) -> None:
        """Of any thread."""
        took_ms = (end_s - begin_s) * 1e3
        if took_ms < NOTED_MS and name != STEP:
            return
        with self._lock:
            self.file.write(f"{end_s:.6f} {name} {took_ms:.3f}\n")
            if end_s - self._flushed_s > FLUSHED_S:
                self.file.flush()
                self._flushed_s = end_s


def _clocked(owner: type, method: str, name: str, notes: _Notes) -> None:
    inner: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.monotonic()
        try:
            return inner(*args, **kwargs)
        finally:
            notes.note(name, begin_s, time.monotonic())

    call.clocked = True  # type: ignore[attr-defined]
    setattr(owner, method, call)


def _watched(connector: type) -> type:
    """The connector with a clock around its hooks; vLLM's own parts get theirs when the first one is made."""
    if FOLDER not in os.environ:
        raise RuntimeError(f"{__name__} is loaded without {FOLDER} in its environment: expected a folder")
    notes = _Notes(Path(os.environ[FOLDER]))
    inner: Callable[..., None] = connector.__init__

    @functools.wraps(inner)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        _clock_parts(notes)
        inner(self, *args, **kwargs)

    found = type(connector.__name__, (connector,), {"__doc__": connector.__doc__, "__init__": made})
    for hook in HOOKS:
        if hasattr(found, hook):
            _clocked(found, hook, f"hook {hook}", notes)
    return found


def _clock_parts(notes: _Notes) -> None:
    for module, classes in PARTS.items():
        for owner, methods in classes.items():
            there = getattr(sys.modules.get(module), owner, None)
            for method in methods if there is not None else ():
                known = getattr(there, method, None)
                if known is not None and not hasattr(known, "clocked"):
                    name = STEP if method in ("step", "step_with_batch_queue") else method
                    _clocked(there, method, name, notes)


@functools.cache
def __getattr__(name: str) -> type:
    if name == "StateFerryConnector":
        from stateferry.vllm.connector import StateFerryConnector

        return _watched(StateFerryConnector)
    if name == "NixlConnector":
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

        return _watched(NixlConnector)
    raise AttributeError(f"{__name__} has no {name!r}")


# -- afterwards ----------------------------------------------------------------------------------

Note = tuple[float, str, float]
"""When it ended, in seconds; what; milliseconds."""


def read_notes(folder: Path) -> list[Note]:
    """All notes of an engine in order. A line that is not whole is left out: its process still writes."""
    found = []
    for path in folder.glob("*.txt"):
        for line in path.read_text().splitlines(keepends=True):
            end_s, _, rest = line.partition(" ")
            name, _, took_ms = rest.rpartition(" ")
            if line.endswith("\n"):
                found.append((float(end_s), name, float(took_ms)))
    return sorted(found)


def summary(folder: Path, repeats: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, Any]:
    """By window, of all repeats together: what took time in it, and what went on in its slow steps."""
    notes = read_notes(folder)
    found = {}
    for window in dict.fromkeys(name for windows in repeats for name in windows):
        spans = [windows[window] for windows in repeats if window in windows]
        inside = [note for note in notes if any(begin < note[0] <= end for begin, end in spans)]
        steps = [note for note in inside if note[1] == STEP]
        usual_ms = sorted(took_ms for _, _, took_ms in steps)[len(steps) // 2] if steps else 0.0
        slow = [note for note in steps if note[2] > SLOW * usual_ms]
        during = [
            note
            for end_s, _, took_ms in slow
            for note in inside
            if note[1] != STEP and end_s - took_ms / 1e3 < note[0] <= end_s
        ]
        found[window] = {
            "seconds": round(sum(end - begin for begin, end in spans), 3),
            "steps": len(steps),
            "usual_step_ms": usual_ms,
            "slow_steps": len(slow),
            "slow_steps_ms": [round(took_ms, 2) for _, _, took_ms in slow[:200]],
            "all": _by_name(inside),
            "in_slow_steps": _by_name(during),
        }
    return found


def _by_name(notes: Sequence[Note]) -> dict[str, dict[str, float]]:
    names = sorted({name for _, name, _ in notes})
    took = {name: [ms for _, other, ms in notes if other == name] for name in names}
    return {
        name: {"calls": len(all_ms), "sum_ms": round(sum(all_ms), 2), "most_ms": round(max(all_ms), 2)}
        for name, all_ms in took.items()
    }
