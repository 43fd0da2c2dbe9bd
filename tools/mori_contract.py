"""Compare what the `mori` transport uses of MoRI with the published packages, without importing any.

Downloads the wheels of amd-mori by name (some 20 MB), reads their files, prints what is missing. Exit code 0:
all there, or the package index cannot be reached; 1: something is missing. `make mori-contract` runs it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from stateferry.testing.mori_contract import UNREADABLE, VERSIONS, Package, optional_there, problems

PLATFORM = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312")
SYSTEMS = ("manylinux_2_39_x86_64", "manylinux2014_x86_64")
TIMEOUT_S = 300


class Offline(Exception):
    """No version could be downloaded."""


def download(folder: Path, versions: tuple[str, ...] = VERSIONS) -> list[Path]:
    """The wheels, one a version, oldest first; the newest may be one of the others.

    Raises Offline when none can be had, LookupError when only some can.
    """
    refused = {}
    for version in versions:
        wanted = f"amd-mori=={version}" if version else "amd-mori"
        platforms = [part for system in SYSTEMS for part in ("--platform", system)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [*PLATFORM, *platforms, "--disable-pip-version-check", "--dest", str(folder), wanted]
        made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if made.returncode:
            refused[wanted] = made.stderr.strip().splitlines()[-1:]
    if len(refused) == len(versions):
        raise Offline(f"no version of amd-mori could be downloaded: {refused}")
    if refused:
        raise LookupError(f"could not be downloaded: {refused}")
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
