"""Run the README's quick start as it is printed, in one shell, and look at what it says.

`make quickstart` runs it. It takes ports 8000, 8100 and 8200 and the time that two engines need to start.
With `--free-ports`, as tests run it, the system picks others, and nothing else is changed.
"""

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
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


def script(ports: Mapping[int, int] | None = None) -> str:
    """All blocks as one script that ends what it started, whatever happens. `ports`: others for its own."""
    stop = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"
    text = "\n".join(["set -e", stop, *blocks()[:-1], "trap - EXIT", blocks()[-1]])
    for printed, other in (ports or {}).items():
        text = re.sub(rf"\b{printed}\b", str(other), text)
    return text


def free_ports() -> dict[int, int]:
    """For each port of the quick start one that nobody has, and that the system gives to nobody: engines
    that start meanwhile take many of those it picks itself."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(10_000, lowest), lowest - 10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == len(PORTS):
            break
    return dict(zip(PORTS, found, strict=True))


def problems(output: str) -> list[str]:
    """What the quick start should have shown, and did not."""
    return [name for pattern, name in EXPECTED if not re.search(pattern, output, re.MULTILINE)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the README's quick start.")
    parser.add_argument("--free-ports", action="store_true", help="leave 8000, 8100 and 8200 to others")
    ports = free_ports() if parser.parse_args().free_ports else {}
    for port in () if ports else PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                print(f"quick start: port {port} is in use; stop what listens there first", file=sys.stderr)
                return 2
    shell = subprocess.Popen(
        ["bash", "-c", script(ports)], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = shell.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGTERM)  # the engines, too
        output, _ = shell.communicate()
        print(f"quick start: not done after {TIMEOUT_S} s. {output}", file=sys.stderr)
        return 1
    print(output)
    missing = problems(output)
    for name in missing:
        print(f"quick start: {name} is not in the output; see prefill.log, decode.log, router.log")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
