"""A prefill and a decode engine on two hosts with a slow, lossy network between them, on one machine.

    sudo python tools/two_hosts.py --delay-ms 5 --loss 0.01

Each host is a network namespace whose only way out is a TUN device; this process carries the packets from
one to the other, late, and loses some. UCX is told to use TCP, for else it would notice that both hosts are
one machine and read memory directly; so every byte of a hand-off goes through here, and is counted. Engines
know each other by a key, as they must off loopback. Needs root and `/dev/net/tun`; nothing of the machine's
own network is touched.

Prints one JSON object. Exit code 0: every prompt was handed off over `nixl` and answered rightly.
"""

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PREFILL, DECODE = "10.77.0.1", "10.77.0.2"
PREFILL_URL, DECODE_URL = f"http://{PREFILL}:8100", f"http://{DECODE}:8200"
DEVICE = "wire0"
MTU = 8192
LENGTHS = (20, 60, 150, 400, 700, 1000)
START_S = 300.0
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


class Wire:
    """Packets under way in one direction: which are lost, and when the others arrive. No I/O."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, bytes]] = []
        self.carried = self.carried_bytes = self.lost = 0

    def put(self, now: float, packet: bytes) -> None:
        """A packet was sent."""
        if self._random.random() < self._loss:
            self.lost += 1
            return
        self.carried += 1
        self.carried_bytes += len(packet)
        heapq.heappush(self._queue, (now + self._delay_s, self.carried, packet))

    def due(self, now: float) -> Iterator[bytes]:
        """Packets that arrive now, in the order in which they were sent."""
        while self._queue and self._queue[0][0] <= now:
            yield heapq.heappop(self._queue)[2]

    def wait_s(self, now: float) -> float:
        """Until the next one arrives, a second at most."""
        return min(1.0, max(0.0, self._queue[0][0] - now)) if self._queue else 1.0


class Cable(threading.Thread):
    """Carries packets between two TUN devices until it is told to stop."""

    def __init__(self, ends: tuple[int, int], wires: tuple[Wire, Wire]) -> None:
        super().__init__(name="cable", daemon=True)
        self._ends = ends
        self._wires = wires
        self._ended = threading.Event()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for index, end in enumerate(self._ends):
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ, index)
        while not self._ended.is_set():
            ready = selector.select(min(wire.wait_s(time.monotonic()) for wire in self._wires))
            for key, _ in ready:
                self._take(key.fd, self._wires[key.data])
            for index, wire in enumerate(self._wires):
                for packet in wire.due(time.monotonic()):
                    os.write(self._ends[1 - index], packet)

    def stop(self) -> None:
        """Wait for the thread's end, a second or so."""
        self._ended.set()
        self.join()

    def _take(self, end: int, wire: Wire) -> None:
        for _ in range(64):
            try:
                wire.put(time.monotonic(), os.read(end, 65536))
            except BlockingIOError:
                return


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def host(name: str, address: str) -> Iterator[int]:
    """A namespace with one TUN device; gives the end of it that this process reads and writes."""
    ip("netns", "add", name)
    end = -1
    try:
        end = open_tun(name)
        inside = ("-netns", name)
        ip(*inside, "address", "add", f"{address}/24", "dev", DEVICE)
        ip(*inside, "link", "set", DEVICE, "mtu", str(MTU), "up")
        ip(*inside, "link", "set", "lo", "up")
        yield end
    finally:
        if end >= 0:
            os.close(end)
        ip("netns", "delete", name)


def open_tun(name: str) -> int:
    """Make the namespace's TUN device. A thread of its own visits the namespace, and ends there."""
    made: list[int | OSError] = []

    def visit() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                made.append(OSError(ctypes.get_errno(), "setns"))
                return
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        made.append(end)

    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    if not made or isinstance(made[0], OSError):
        raise made[0] if made and isinstance(made[0], OSError) else OSError("no TUN device could be made")
    return made[0]


@contextmanager
def engine(role: str, name: str, address: str, port: int, key: Path, log: Path) -> Iterator[None]:
    """`stateferry serve` on a host, ended with its children."""
    model = ROOT / "src" / "stateferry" / "models" / "recall_gdn"
    code = "from stateferry.cli.main import main; main()"
    command = ["ip", "netns", "exec", name, sys.executable, "-c", code, "serve", role, str(model)]
    command += ["--served-model-name", "model", "--enforce-eager", "--host", address, "--port", str(port)]
    command += ["--transport", "nixl", "--kv-host", address, "--auth-key-file", str(key)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"OMP_NUM_THREADS": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def ask() -> list[dict[str, Any]]:
    """Every prompt through both engines, by hand, from the prefill engine's host."""
    from stateferry.models import recall_prompt
    from stateferry.stack import Client

    found = []
    with Client(timeout_s=120.0) as client:
        for url in (PREFILL_URL, DECODE_URL):
            until_ready(url)
        for seed, length in enumerate(LENGTHS, 1):
            prompt = recall_prompt(seed, length)
            answer = client.handoff(PREFILL_URL, DECODE_URL, prompt.text, 1)
            right = answer.decode.text.split() == [prompt.answer]
            found.append({"tokens": length, "right": right, **answer.received})
    return found


def until_ready(url: str) -> None:
    """Wait for an engine. Raises TimeoutError."""
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1.0)
    raise TimeoutError(f"{url} is not ready after {START_S:g} s; see its log")


def verdict(answers: Sequence[dict[str, Any]], carried: int) -> list[str]:
    """What is wrong with a run; empty: nothing."""
    problems = [] if answers else ["no prompt was asked"]
    for one in answers:
        if one.get("outcome") != "received":
            problems.append(f"{one['tokens']} tokens: {one.get('outcome')}: {one.get('reason')}")
        elif not one["right"]:
            problems.append(f"{one['tokens']} tokens: a wrong answer")
    moved = sum(sum((one.get("bytes") or {}).values()) for one in answers)
    if carried < moved:
        problems.append(f"{moved} bytes were received, but only {carried} came over the network")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Two engines on two hosts, with delay and loss.")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of every packet, one way")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets that are lost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask()))
        return 0
    there = Wire(options.delay_ms / 1000, options.loss, options.seed)
    back = Wire(options.delay_ms / 1000, options.loss, options.seed + 1)
    names = (f"stateferry-p-{os.getpid()}", f"stateferry-d-{os.getpid()}")
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="two-hosts-"))
        ends = tuple(stack.enter_context(host(n, a)) for n, a in zip(names, (PREFILL, DECODE), strict=True))
        cable = Cable((ends[0], ends[1]), (there, back))
        cable.start()
        stack.callback(cable.stop)
        key = folder / "control.key"
        code = "from stateferry.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code, "key", str(key)], check=True, stdout=sys.stderr)
        for role, name, address, port in (
            ("prefill", names[0], PREFILL, 8100),
            ("decode", names[1], DECODE, 8200),
        ):
            stack.enter_context(engine(role, name, address, port, key, folder / f"{role}.log"))
        command = ["ip", "netns", "exec", names[0], sys.executable, __file__, "--ask"]
        asked = subprocess.run(command, capture_output=True, text=True)
        answers = json.loads(asked.stdout) if asked.returncode == 0 else []
    problems = verdict(answers, there.carried_bytes)
    if asked.returncode:
        problems.append(asked.stderr.strip().splitlines()[-1])
    result = {
        "passed": not problems,
        "problems": problems,
        "delay_ms": options.delay_ms,
        "loss": options.loss,
        "carried_bytes": [there.carried_bytes, back.carried_bytes],
        "packets_lost": [there.lost, back.lost],
        "answers": answers,
        "logs": str(folder),
    }
    print(json.dumps(result))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
