"""Run the README's quick start as it is printed, in one shell, and look at what it says.

`make quickstart` runs it. It takes ports 8000, 8100 and 8200 and the time that two engines need to start.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORTS = (8000, 8100, 8200)
TIMEOUT_S = 420
EXPECTED = (
    (r'"text": ?" Kyoto"', "the answer"),
    (r'^stateferry_handoffs_total\{.*outcome="received".*\} 1\.0$', "one hand-off received"),
    (r'^stateferry_received_bytes_total\{.*kind="state".*\} [1-9]', "bytes of recurrent state"),
    (r'^stateferry_received_bytes_total\{.*kind="attention".*\} [1-9]', "bytes of attention KV"),
)


def blocks() -> list[str]:
    """The shell blocks between the README's quick start marks."""
    page = (ROOT / "README.md").read_text()
    part = page.partition("[start:quickstart]")[2].partition("[end:quickstart]")[0]
    return re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)


def script() -> str:
    """All blocks as one script that ends what it started, whatever happens."""
    stop = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"
    return "\n".join(["set -e", stop, *blocks()[:-1], "trap - EXIT", blocks()[-1]])


def problems(output: str) -> list[str]:
    """What the quick start should have shown, and did not."""
    return [name for pattern, name in EXPECTED if not re.search(pattern, output, re.MULTILINE)]


def main() -> int:
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                print(f"quick start: port {port} is in use; stop what listens there first", file=sys.stderr)
                return 2
    try:
        result = subprocess.run(
            ["bash", "-c", script()], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as e:
        print(f"quick start: not done after {TIMEOUT_S} s. {e.output}", file=sys.stderr)
        return 1
    print(result.stdout)
    missing = problems(result.stdout)
    for name in missing:
        print(f"quick start: {name} is not in the output; see prefill.log, decode.log, router.log")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
