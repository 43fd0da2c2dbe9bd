"""Make `.venv-site` with what builds the documentation and checks deploy files. Nothing if it is up to date.

Apart from `.venv`, which holds what engines run with and should not change for a page.
"""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-site"
PINS = ROOT / "requirements" / "site.txt"
STAMP = VENV / ".stateferry-setup"


def main() -> int:
    wanted = hashlib.sha256(PINS.read_bytes() + f"{ROOT} {sys.version}".encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    print("setup: making .venv-site (half a minute) …", flush=True)
    venv.create(VENV, clear=True, with_pip=True)
    command = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--requirement", PINS]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        print("setup: pip's own words stand above. Run it again when the cause is gone.", flush=True)
        return 1
    STAMP.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
