"""`tools/gpu.py` with made-up parts: one that works, one that fails, one that hangs, one that comes later."""

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.programs import loaded

TOOLS = Path(__file__).parents[2] / "tools"
FACTS = {"host": {"cores": 2}, "devices": ["made up"]}
HEAD = """
import json, signal, sys, threading
from pathlib import Path
def write(value):
    Path(sys.argv[sys.argv.index("--output") + 1]).write_text(json.dumps(value))
"""
PROGRAMS = {
    "works.py": "write({'value': sys.argv[1]})",
    "fails.py": "write({'half': 1}); print('the last words'); raise SystemExit(3)",
    "hangs.py": "threading.Event().wait()",
    "deaf.py": "signal.signal(signal.SIGINT, signal.SIG_IGN); threading.Event().wait()",
    "silent.py": "",
}


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tool = loaded(TOOLS / "gpu.py")
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(HEAD + text)
    monkeypatch.setattr(tool, "TOOLS", tmp_path)
    monkeypatch.setattr(tool, "ENDING_S", 0.2)
    return tool


def kept(output: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(output.read_text())
    return whole


def test_parts_that_fail_or_hang_are_noted_and_the_others_are_done(gpu: ModuleType, tmp_path: Path) -> None:
    parts = {
        "bad": gpu.Part(("fails.py",), 20),
        "slow": gpu.Part(("hangs.py",), 0.5),
        "deaf": gpu.Part(("deaf.py",), 0.5),
        "silent": gpu.Part(("silent.py",), 20),
        "good": gpu.Part(("works.py", "first"), 20),
    }
    output = tmp_path / "out.json"
    failed = gpu.run(parts, output, tmp_path / "logs", FACTS, "abc")
    assert failed == ["bad", "slow", "deaf", "silent"]
    whole = kept(output)
    assert (whole["bench"], whole["commit"], whole["host"], whole["devices"]) == (
        "gpu",
        "abc",
        {"cores": 2},
        ["made up"],
    )
    found = whole["parts"]
    assert found["good"]["result"] == {"value": "first"}
    assert "error" not in found["good"]
    assert (found["bad"]["error"], found["bad"]["result"]) == ("ended with 3", {"half": 1})
    assert found["bad"]["log"] == ["the last words"]
    assert found["slow"]["error"] == found["deaf"]["error"] == "not ready after 0.5 s"
    assert found["silent"]["error"] == "wrote no result"


def test_a_later_run_replaces_its_own_parts_and_keeps_the_others(gpu: ModuleType, tmp_path: Path) -> None:
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    gpu.run(
        {"a": gpu.Part(("works.py", "1"), 20), "b": gpu.Part(("fails.py",), 20)}, output, logs, FACTS, "old"
    )
    assert gpu.run({"b": gpu.Part(("works.py", "2"), 20)}, output, logs, FACTS, "new") == []
    found = kept(output)["parts"]
    assert (found["a"]["result"], found["a"]["commit"]) == ({"value": "1"}, "old")
    assert (found["b"]["result"], found["b"]["commit"]) == ({"value": "2"}, "new")
    assert "error" not in found["b"]


def test_an_old_result_of_a_part_is_not_taken_for_a_new_one(gpu: ModuleType, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    gpu.run({"a": gpu.Part(("works.py", "1"), 20)}, tmp_path / "out.json", logs, FACTS, "")
    gpu.run({"a": gpu.Part(("silent.py",), 20)}, tmp_path / "out.json", logs, FACTS, "")
    assert "result" not in kept(tmp_path / "out.json")["parts"]["a"]


def test_only_what_measures_nothing_runs_at_the_same_time(gpu: ModuleType) -> None:
    part = gpu.Part
    parts = {"a": part((), 1, False), "b": part((), 1, False), "c": part((), 1), "d": part((), 1)}
    assert gpu.groups(parts) == [["a", "b"], ["c"], ["d"]]


def test_every_part_is_a_program_that_is_there(gpu: ModuleType) -> None:
    for name, part in gpu.PARTS.items():
        assert (TOOLS / part.command[0]).is_file(), name


def test_what_went_on_in_slow_steps_is_told_by_window(tmp_path: Path) -> None:
    watched = loaded(TOOLS / "gpu_watched.py")
    lines = [f"{n / 100:.6f} step 4.000" for n in range(1, 100)]
    lines += ["1.500000 step 20.000", "1.490000 hook start_load_kv 15.000", "1.600000 schedule 3.000"]
    (tmp_path / "7.txt").write_text("\n".join([*lines, "1.7"]))
    found = watched.summary(tmp_path, [{"alone": (0.0, 1.0), "arriving": (1.0, 2.0)}, {"alone": (5.0, 6.0)}])
    assert (found["alone"]["steps"], found["alone"]["slow_steps"], found["alone"]["seconds"]) == (99, 0, 2.0)
    arriving = found["arriving"]
    assert (arriving["steps"], arriving["slow_steps"]) == (1, 0)  # the only one is as usual as any
    together = watched.summary(tmp_path, [{"all": (0.0, 2.0)}])["all"]
    assert (together["usual_step_ms"], together["slow_steps_ms"]) == (4.0, [20.0])
    assert together["in_slow_steps"] == {"hook start_load_kv": {"calls": 1, "sum_ms": 15.0, "most_ms": 15.0}}
    assert together["all"]["schedule"]["calls"] == 1


def test_a_watched_connector_does_what_it_did_and_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = loaded(TOOLS / "gpu_watched.py")
    monkeypatch.setattr(watched, "NOTED_MS", 0.0)
    monkeypatch.setattr(watched, "FLUSHED_S", -1.0)
    monkeypatch.setenv(watched.FOLDER, str(tmp_path))

    class Core:
        def step(self) -> str:
            return "stepped"

    class Connector:
        def __init__(self, name: str, kv_cache_config: object = None) -> None:
            self.name = name

        def start_load_kv(self, more: int) -> int:
            return more + 1

    module = ModuleType("made_up_core")
    module.EngineCore = Core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_core", module)
    monkeypatch.setattr(
        watched, "PARTS", {"made_up_core": {"EngineCore": ("step", "missing")}, "none": {"A": ("b",)}}
    )
    made: list[Any] = []
    real = watched._Notes
    monkeypatch.setattr(watched, "_Notes", lambda folder: made.append(real(folder)) or made[0])
    kind = watched._watched(Connector)
    assert "kv_cache_config" in inspect.signature(kind).parameters
    for _ in range(2):
        assert kind("x").name == "x"
    assert (kind("y").start_load_kv(1), Core().step()) == (2, "stepped")
    names = [name for _, name, _ in watched.read_notes(tmp_path)]
    assert sorted(names) == ["hook start_load_kv", "step"]
    made[0].file.close()
