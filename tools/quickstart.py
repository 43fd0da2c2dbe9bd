"""Run the README's quick start as it is printed, in one shell, and look at what it says.

`make quickstart` runs it. It takes ports 8000, 8100 and 8200 and the time that two engines need to start.
With `--free-ports`, as tests run it, the system picks others, and nothing else is changed. Every block is
shown before it runs. However it ends, nothing that it started is left.

Exit codes: 0 passed · 1 it did not show what it should · 2 a port is taken · 130 Ctrl-C.
"""

import argparse
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from stateferry.stack.guard import end_sessions

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
    """All blocks as one script that ends what it started, whatever happens, and where a server has ended.
    `ports`: others for its own."""
    stop = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"
    alive = "for server in $PREFILL $DECODE $ROUTER; do kill -0 $server; done"
    shown = [f"printf '%s\\n' {shlex.quote(block)}\n{block}" for block in blocks()]
    checked = [f"{block}\n{alive}" for block in shown[:-1]]
    text = "\n".join(["set -e; unset PREFILL DECODE ROUTER", stop, *checked, "trap - EXIT", shown[-1]])
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    tell("the README's blocks, one after the other; two engines take half a minute to a minute to start")
    try:
        output, in_time = run(script(ports))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if not in_time:
        tell(f"failed: not done after {TIMEOUT_S} s; all stopped. See prefill.log, decode.log, router.log")
        return 1
    missing = problems(output)
    for name in missing:
        tell(f"{name} is not in the output; see prefill.log, decode.log, router.log")
    tell(f"{'failed' if missing else 'passed'}, all stopped")
    return 1 if missing else 0


def tell(text: str) -> None:
    """Between what the shell says."""
    print(f"quick start: {text}", flush=True)


def leave(number: int, frame: FrameType | None) -> None:
    """Leave through `run`, so that what it started is stopped."""
    raise SystemExit(128 + number)


def run(text: str, timeout_s: float = TIMEOUT_S) -> tuple[str, bool]:
    """Run a script in a session of its own, and show what it says while it says it.

    Returns all of that, and whether it ended in time. Nothing of the session is left, whatever ends this;
    a signal that comes while it is being stopped changes nothing.
    """
    shell = subprocess.Popen(
        ["bash", "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        end_sessions([shell.pid])

    timer = threading.Timer(timeout_s, end)
    said = []
    done = False
    try:
        timer.start()
        assert shell.stdout is not None
        for line in shell.stdout:
            said.append(line)
            print(line, end="", flush=True)
        shell.wait()
        done = True
    finally:
        timer.cancel()
        before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        if not done:
            tell("stopping everything, which takes up to 10 s")
        end_sessions([shell.pid])
        shell.wait()
        if not done:
            tell("all stopped")
        for number, handler in before.items():
            signal.signal(number, handler)
    return "".join(said), not late.is_set()


if __name__ == "__main__":
    sys.exit(main())
