"""On a host with two NVIDIA devices and vLLM 0.32: all that this repository measures there, in one JSON.

    PYTHONPATH=src python tools/gpu.py --output result.json [--only PART …]

Each part is a program of its own with a time limit. One that fails or takes too long is noted, with what it
had found by then, and the next one begins. The JSON is written after every part; where the file is there
already, its other parts stay: a host that is lent for some minutes at a time can do all of it in several
commands. Parts that measure nothing run beside each other.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from stateferry.stack import commit, host_facts

TOOLS = Path(__file__).resolve().parent
ENDING_S = 25.0
"""What a part gets to end its engines."""
SHOWN_LINES = 12
"""Of the log of a part that failed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A program beside this one. It takes `--output FILE` and `--logs FOLDER` and writes its result as JSON,
    anew after every step, so that what it had found is there whenever it ends."""

    command: tuple[str, ...]
    limit_s: float
    measures: bool = True
    """False: only right or wrong; it runs beside its neighbours of this kind."""


PARTS: Mapping[str, Part] = {
    "conformance": Part(("gpu_transports.py", "conformance"), 300, measures=False),
    "gate": Part(("gpu_gate.py",), 540, measures=False),
    "transports": Part(("gpu_transports.py", "bench"), 180),
    "ferry": Part(("gpu_ferry.py",), 120),
    "engines-eager": Part(("gpu_engines.py", "handoff", "interference", "--interference-repeats", "2"), 420),
    "engines-graphs": Part(("gpu_engines.py", "handoff", "interference", "--graphs", "--watch"), 420),
    "engines-short-prompts": Part(
        (
            "gpu_engines.py",
            "interference",
            "--graphs",
            "--watch",
            "--arm",
            "auto",
            "--arriving-tokens",
            "1000",
        ),
        300,
    ),
    "agentx": Part(("gpu_engines.py", "agentx", "--graphs"), 420),
}


def run(
    parts: Mapping[str, Part], output: Path, logs: Path, facts: Mapping[str, Any], version: str
) -> list[str]:
    """Do the parts, merge them into `output`, and return the names of those that failed."""
    whole: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    whole = {"bench": "gpu", "date": _today(), "commit": version, **facts, "parts": whole.get("parts", {})}
    logs.mkdir(parents=True, exist_ok=True)
    failed = []
    for group in groups(parts):
        with ThreadPoolExecutor(len(group)) as pool:
            running = {pool.submit(outcome, name, parts[name], logs): name for name in group}
            for done in as_completed(running):
                name = running[done]
                found = done.result()
                whole["parts"][name] = {"date": _today(), "commit": version, **found}
                output.write_text(json.dumps(whole) + "\n")
                error = found.get("error", "")
                failed += [name] if error else []
                print(f"{name}: {found['seconds']:.0f} s {error}".rstrip(), flush=True)
    return failed


def groups(parts: Mapping[str, Part]) -> list[list[str]]:
    """Names of parts that run at the same time, in order."""
    found: list[list[str]] = []
    for measures, some in groupby(parts, lambda name: parts[name].measures):
        names = list(some)
        found += [[name] for name in names] if measures else [names]
    return found


def outcome(name: str, part: Part, logs: Path) -> dict[str, Any]:
    """Run one part: seconds, its result, and what went wrong if something did."""
    result, log = logs / f"{name}.json", logs / f"{name}.log"
    result.unlink(missing_ok=True)
    program, *arguments = part.command
    command = [sys.executable, str(TOOLS / program), *arguments]
    command += ["--output", str(result), "--logs", str(logs / name)]
    start = time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        error = _ended(process, part.limit_s)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if result.exists():
        found["result"] = json.loads(result.read_text())
    elif not error:
        error = "wrote no result"
    if error:
        tail = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        found |= {"error": error, "log": tail}
    return found


def _ended(process: "subprocess.Popen[bytes]", limit_s: float) -> str:
    """Wait for its end; what was wrong about it, or nothing. An interrupt lets it end what it started."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"not ready after {limit_s:g} s"
    return f"ended with {code}" if code else ""


def devices() -> dict[str, Any]:
    """What NVIDIA's tool says of the devices; nothing where it is missing."""
    asked = {
        "devices": ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "links": ("topo", "-m"),
    }
    found = {}
    for what, arguments in asked.items():
        try:
            told = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = [" ".join(re.sub(r"\x1b\[\d*m", "", line).split()) for line in told.stdout.splitlines()]
        found[what] = [line for line in lines if line.startswith(("NVIDIA", "GPU"))]
    return found


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def main(arguments: Sequence[str] | None = None) -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--commit", default=commit(), help="what to call this version; default: git's name")
    given = parser.parse_args(arguments)
    parts = {name: part for name, part in PARTS.items() if name in (given.only or PARTS)}
    facts = {"host": host_facts(), **devices()}
    failed = run(parts, given.output.absolute(), given.logs.absolute(), facts, given.commit)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
