"""Build the wheel and install it into clean environments, as its users do. Minutes, gigabytes.

    make package                       without extras, [mooncake], [cpu]; the other extras are only resolved
    make package ARGS="--only bare"    without extras, half a minute

Each environment must print its versions, load neither torch nor vLLM on import, and pass `stateferry doctor`:
without [cpu] that means to name torch and vllm as missing, and nothing else as a problem. The doctor must
find what the extra brings.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
RESOLVED = {
    "cuda": "vLLM for CUDA asks for another torch than the CPU build that is pinned here",
    "rocm": "vLLM for ROCm comes first, and MoRI has wheels for Python 3.12 only",
}
"""Extras that pip only looks for, and why they are not installed."""
PROBLEMS: dict[str, set[str]] = {"bare": {"torch", "vllm"}, "mooncake": {"torch", "vllm"}, "cpu": set()}
"""What the doctor must object to, by environment."""
BRINGS: dict[str, set[str]] = {
    "bare": set(),
    "mooncake": {"mooncake"},
    "cpu": {"torch", "vllm", "nixl", "vllm-router"},
}
"""What it must find, by environment."""


Done = subprocess.CompletedProcess[str]


def run(*command: str | Path, check: bool = True, cwd: Path | None = None) -> Done:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    if check and result.returncode:
        print(result.stdout[-4000:] + result.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"package: {' '.join(map(str, command))} ended with {result.returncode}")
    return result


def pip(python: Path, *arguments: str | Path, check: bool = True) -> Done:
    return run(python, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input", check=check)


def build(folder: Path) -> Path:
    """The wheel, made from the source distribution, as an index would serve both."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    print(f"package: {wheel.name} {wheel.stat().st_size:,} bytes, {source.name} {source.stat().st_size:,}")
    return wheel


def clean(folder: Path) -> Path:
    """A new environment's Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install(python: Path, wheel: Path, extra: str) -> None:
    if extra == "bare":
        pip(python, "install", wheel)
        return
    constraints = ("--constraint", ROOT / "requirements" / "cpu.txt")
    if "torch" not in BRINGS[extra]:
        pip(python, "install", f"{wheel}[{extra}]", *constraints)
        return
    if pip(python, "install", TORCH, *constraints, check=False).returncode:
        pip(python, "install", "--no-deps", "--index-url", TORCH_CPU_INDEX, TORCH)
    pip(python, "install", f"{wheel}[{extra}]", *constraints)
    pip(python, "uninstall", "--yes", *UNFIT)


def examine(python: Path, extra: str, folder: Path) -> list[str]:
    """What is wrong with an installed environment; empty: nothing."""
    found = []
    command = python.with_name("stateferry")
    versions = json.loads(run(command, "version", "--json", cwd=folder).stdout)
    code = "import sys, stateferry; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    loaded = run(python, "-I", "-c", code, cwd=folder).stdout.strip()
    if loaded != "[]":
        found.append(f"importing stateferry loads {loaded}")
    report = run(command, "doctor", "--json", check=False, cwd=folder)
    told = json.loads(report.stdout.splitlines()[-1])
    problems = {text.partition(":")[0] for text in told["problems"]} - {"devices"}
    if problems != PROBLEMS[extra]:
        found.append(f"doctor objects to {sorted(problems)}, expected {sorted(PROBLEMS[extra])}")
    there = {f["name"] for f in told["findings"] if not f["found"].startswith("not installed")}
    if missing := BRINGS[extra] - there:
        found.append(f"doctor does not find {sorted(missing)}")
    if report.returncode != bool(told["problems"]):
        found.append(f"doctor ended with {report.returncode}")
    print(f"package: [{extra}] {versions}; doctor objects to {sorted(problems) or 'nothing'}")
    return found


def resolve(python: Path, wheel: Path, extra: str) -> list[str]:
    """Whether pip finds everything that an extra asks for."""
    result = pip(python, "install", "--dry-run", "--ignore-installed", f"{wheel}[{extra}]", check=False)
    can = "can" if not result.returncode else "CANNOT"
    print(f"package: [{extra}] {can} be resolved; it is not installed: {RESOLVED[extra]}")
    return [] if not result.returncode else [f"[{extra}]: {result.stderr.strip().splitlines()[-1]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Install the wheel into clean environments.")
    parser.add_argument("--only", choices=[*PROBLEMS, *RESOLVED], action="append")
    chosen = parser.parse_args().only or [*PROBLEMS, *RESOLVED]
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        for extra in chosen:
            python = clean(folder / extra)
            if extra in RESOLVED:
                problems += resolve(python, wheel, extra)
            else:
                install(python, wheel, extra)
                problems += examine(python, extra, folder)
    for problem in problems:
        print(f"package: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
