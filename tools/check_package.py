"""Build the wheel and install it into clean environments, as its users do. Minutes, gigabytes.

    make package                       without extras, and with each
    make package ARGS="--only bare"    without extras, half a minute

Each environment must print its versions, load neither torch nor vLLM on import, and pass `stateferry doctor`:
where the extra brings no vLLM that means to name torch and vllm as missing, and nothing else as a problem.
The doctor must find what the extra brings. What it says of devices is the machine's.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
WITHOUT_VLLM = {"torch", "vllm"}
PROBLEMS: dict[str, set[str]] = {
    "bare": WITHOUT_VLLM,
    "mooncake": WITHOUT_VLLM,
    "rocm": WITHOUT_VLLM,  # vLLM for ROCm is on no index
    "cpu": set(),
    "cuda": set(),
}
"""What the doctor must object to, by environment."""
BRINGS: dict[str, set[str]] = {
    "bare": set(),
    "mooncake": {"mooncake"},
    "rocm": {"vllm-router", *(["mori"] if sys.version_info[:2] == (3, 12) else [])},
    "cuda": {"torch", "vllm", "nixl", "vllm-router"},
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
    if extra != "cpu":
        pip(python, "install", f"{wheel}[{extra}]", *(constraints if extra != "cuda" else ()))
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Install the wheel into clean environments.")
    parser.add_argument("--only", choices=[*PROBLEMS], action="append")
    chosen = parser.parse_args().only or [*PROBLEMS]
    problems = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        for extra in chosen:
            python = clean(folder / extra)
            install(python, wheel, extra)
            problems += examine(python, extra, folder)
            shutil.rmtree(folder / extra)  # gigabytes
    for problem in problems:
        print(f"package: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
