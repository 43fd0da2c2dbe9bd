"""Compare what the `mori` transport uses of MoRI with the published packages, without importing any.

Downloads the wheels of amd-mori by name (12 MB), reads their files, prints what is missing. Exit code 0:
all there, or the package index cannot be reached; 1: something is missing. `make mori-contract` runs it.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from stateferry.testing.mori_contract import UNREADABLE, VERSIONS, Package, optional_there, problems

PLATFORM = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312")
SYSTEMS = ("manylinux_2_39_x86_64", "manylinux2014_x86_64")
TIMEOUT_S = 200
NETWORK = re.compile(r"Retrying|timed out|onnection|HTTP error|ProxyError|SSLError|resolution", re.IGNORECASE)
"""How pip tells that it did not reach the index, or not well."""


class Offline(Exception):
    """The package index cannot be reached."""


def download(folder: Path, versions: tuple[str, ...] = VERSIONS) -> list[Path]:
    """The wheels, one a version, oldest first; the newest may be one of the others.

    Raises Offline when the index cannot be reached, LookupError when it does not have a version.
    """
    refused = {}
    for version in versions:
        wanted = f"amd-mori=={version}" if version else "amd-mori"
        platforms = [part for system in SYSTEMS for part in ("--platform", system)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [*PLATFORM, *platforms, "--retries", "1", "--timeout", "30", "--dest", str(folder), wanted]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as e:
            raise Offline(f"pip did not end within {TIMEOUT_S} s: {' '.join(command)}") from e
        if made.returncode:
            refused[wanted] = made.stderr.strip().splitlines()[-1:]
            if NETWORK.search(made.stderr):
                raise Offline(f"{wanted}: {made.stderr.strip()[-300:]}")
    if len(refused) == len(versions):
        raise Offline(f"no version of amd-mori could be downloaded: {refused}")
    if refused:
        raise LookupError(f"not in the package index: {refused}")
    return sorted(folder.glob("amd_mori-*.whl"))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheels = download(Path(folder))
        except Offline as e:
            print(f"skipped: {e}")
            return 0
        missing = 0
        for wheel in wheels:
            package = Package.of_wheel(wheel)
            found = problems(package)
            missing += len(found)
            waits = "with" if optional_there(package) else "without"
            verdict = "; ".join(found) or "all that we use is there"
            print(f"amd-mori {package.version}, {waits} wait_all: {verdict}")
    print("what no file of a wheel tells:")
    for text in UNREADABLE:
        print(f"  {text}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
