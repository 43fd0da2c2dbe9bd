"""The process that is read from: one stretch of memory, registered with every transport of the bench.

As a program it takes the descriptor of a pipe, the kind of memory, its device, its size and the names of the
transports. It sends what became of each, answers how much processor time it has used, and ends with the pipe.
"""

import multiprocessing.connection
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import msgspec

from stateferry.bench.transport_memory import devices, make_memory
from stateferry.errors import EngineError, TransportError
from stateferry.transport import MemoryKind, MemoryRegion, Transport, TransportOptions, create_transport

START_S = 120.0
"""Longest wait for the process; it writes all its memory first."""


class _Registered(msgspec.Struct, frozen=True):
    registrations: dict[str, bytes]
    left_out: dict[str, str]


def register_all(
    names: Sequence[str], region: MemoryRegion, made: ExitStack
) -> tuple[dict[str, tuple[Transport, bytes]], dict[str, str]]:
    """Every transport that works here, closed with `made`, and its registration; and why others do not."""
    found: dict[str, tuple[Transport, bytes]] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            transport = made.enter_context(create_transport(name, TransportOptions()))
            found[name] = transport, transport.register([region])
        except TransportError as e:
            left_out[name] = str(e)
    return found, left_out


class PeerProcess:
    """The process, from outside. Ends with the block."""

    def __init__(self, kind: MemoryKind, size_bytes: int, names: Sequence[str]) -> None:
        """Raises EngineError when it does not start."""
        _, device = devices(kind)
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), kind.value, str(device), str(size_bytes), *names]
        self._pipe = multiprocessing.connection.Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stateferry.bench.transport_peer", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # libraries print; ours is for results
            )
        answer: _Registered = msgspec.msgpack.decode(self._answer(), type=_Registered)
        self.registrations = answer.registrations
        self.left_out = answer.left_out

    def cpu_s(self) -> float:
        """Processor time that it has used so far, all threads together."""
        self._pipe.send_bytes(b"cpu")
        (seconds,) = struct.unpack("d", self._answer())
        return float(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> bytes:
        with suppress(EOFError, OSError):
            if self._pipe.poll(START_S):
                return self._pipe.recv_bytes()
        self._process.kill()
        self._process.wait()
        raise EngineError(f"the process that is to be read from did not answer in {START_S:g} s")


def main(arguments: list[str]) -> None:
    """Serve until the other end closes."""
    descriptor, kind, device, size, *names = arguments
    pipe = multiprocessing.connection.Connection(int(descriptor))
    memory = make_memory(MemoryKind(kind), int(size), int(device), int(device))
    memory.fill()
    with ExitStack() as made:
        found, left_out = register_all(names, memory.region, made)
        registered = _Registered({name: blob for name, (_, blob) in found.items()}, left_out)
        pipe.send_bytes(msgspec.msgpack.encode(registered))
        while True:
            try:
                pipe.recv_bytes()
            except EOFError:
                break
            pipe.send_bytes(struct.pack("d", time.process_time()))


if __name__ == "__main__":
    main(sys.argv[1:])
