"""Where the transport conformance suite runs: a reader here, and something to read from.

A `Rig` makes both for one transport. `ProcessRig` puts what is read from in a child process and
controls it over a pipe; `MemoryRig` keeps it in this process. Whatever a rig started ends with it.
"""

import multiprocessing.connection
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from stateferry.errors import EngineError
from stateferry.layout.spec import Pieces
from stateferry.transport import MemoryRegion, Peer, Transport, TransportOptions, create_transport
from stateferry.transport.memory import MemoryTransport

Buffer = npt.NDArray[np.uint8]

SENTINEL = 0xA5
"""What local memory holds before a check reads into it."""
START_S = 60.0
"""Longest wait for a child process to answer; a busy machine takes seconds to start one."""


def content(seed: int, sizes: Sequence[int]) -> tuple[Buffer, ...]:
    """What a target's regions hold: random bytes, the same in every process for the same arguments."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 256, size, dtype=np.uint8) for size in sizes)


def regions_of(buffers: Sequence[Buffer]) -> list[MemoryRegion]:
    """Arrays as regions to register."""
    return [MemoryRegion(buffer.ctypes.data, buffer.nbytes) for buffer in buffers]


class Target(ABC):
    """Something to read from: registered regions of known content, and ways to take them away."""

    content: tuple[Buffer, ...]
    registration: bytes
    process_id: int
    """Of the process that holds the memory."""

    @abstractmethod
    def close_transport(self) -> None:
        """Close its transport in good order. Its memory stays."""

    @abstractmethod
    def reopen(self) -> None:
        """A new life under the same roof: a new transport, hence a new `registration`."""

    @abstractmethod
    def kill(self) -> None:
        """Take it away without a word."""

    @abstractmethod
    def end(self) -> None:
        """Free everything. Idempotent."""


class Local:
    """The reader's registered memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._buffers = tuple(np.full(size, SENTINEL, dtype=np.uint8) for size in sizes)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What it holds now."""
        return self._buffers

    def regions(self) -> list[MemoryRegion]:
        """What is to be registered."""
        return regions_of(self._buffers)

    def reset(self) -> None:
        """Fill all with the sentinel."""
        for buffer in self._buffers:
            buffer[:] = SENTINEL

    def differences(self, pieces: Pieces, remote: Sequence[Buffer]) -> list[str]:
        """Where memory is not what reading `pieces`, and nothing else, would have made it."""
        found_now = self.buffers
        expected = [np.full(buffer.nbytes, SENTINEL, dtype=np.uint8) for buffer in found_now]
        columns = (pieces.local_regions, pieces.local_offsets, pieces.remote_regions, pieces.remote_offsets)
        rows = zip(*(c.tolist() for c in (*columns, pieces.sizes)), strict=True)
        for local_region, local, remote_region, offset, size in rows:
            expected[local_region][local : local + size] = remote[remote_region][offset : offset + size]
        found = []
        for index, (have, want) in enumerate(zip(found_now, expected, strict=True)):
            wrong = np.flatnonzero(have != want)
            if len(wrong):
                found.append(f"local region {index}: {len(wrong)} bytes differ, the first at {wrong[0]}")
        return found


class Link:
    """A reader connected to a target."""

    def __init__(self, transport: Transport, target: Target, local: Local) -> None:
        self.transport = transport
        self.target = target
        self.local = local
        transport.register(local.regions())
        self.peer: Peer = transport.connect(target.registration, START_S)


class Rig(ABC):
    """Makes readers and targets for one transport. Closes what it made when it is left."""

    def __init__(self, name: str, timeout_s: float = 20.0) -> None:
        """`timeout_s`: how long a read may take to end, whatever happened to the peer."""
        self.name = name
        self.timeout_s = timeout_s
        self._made = ExitStack()
        self._standing: dict[tuple[int, ...], Link] = {}
        self._links: list[Link] = []
        """All of them: their memory outlives the transports that write to it."""

    @abstractmethod
    def new_reader(self) -> Transport:
        """A transport that nobody used yet."""

    @abstractmethod
    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        """A target with regions of these sizes."""

    def new_local(self, sizes: Sequence[int]) -> Local:
        """Memory for a reader."""
        return Local(sizes)

    def reader(self) -> Transport:
        """As `new_reader`; closed with the rig."""
        return self._made.enter_context(self.new_reader())

    def target(self, sizes: Sequence[int], seed: int = 1) -> Target:
        """As `new_target`; ended with the rig."""
        target = self.new_target(sizes, seed)
        self._made.callback(target.end)
        return target

    def link(self, sizes: Sequence[int], seed: int = 1) -> Link:
        """A fresh reader connected to a fresh target, both with regions of these sizes."""
        link = Link(self.reader(), self.target(sizes, seed), self.new_local(sizes))
        self._links.append(link)
        return link

    def standing(self, sizes: Sequence[int]) -> Link:
        """One link for all checks that leave it whole, its local memory reset."""
        key = tuple(sizes)
        if key not in self._standing:
            self._standing[key] = self.link(sizes)
        link = self._standing[key]
        link.local.reset()
        return link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.close()
        self._standing.clear()
        self._links.clear()


class MemoryRig(Rig):
    """Everything in this process; for the memory transport and what wraps it."""

    def __init__(
        self, make: Callable[[], Transport] = MemoryTransport, name: str = "memory", timeout_s: float = 20.0
    ) -> None:
        """`make` makes the reader; targets use the memory transport itself."""
        super().__init__(name, timeout_s)
        self._make = make

    def new_reader(self) -> Transport:
        return self._make()

    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        return _MemoryTarget(sizes, seed)


class ProcessRig(Rig):
    """The reader here, each target in a child process."""

    def new_reader(self) -> Transport:
        return create_transport(self.name, TransportOptions())

    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        return _ProcessTarget([self.name, "cpu"], sizes, seed)


class CudaRig(ProcessRig):
    """As ProcessRig, all memory on CUDA devices: the reader's on the current one."""

    def __init__(self, name: str, target_device: int = 0, timeout_s: float = 20.0) -> None:
        """`target_device`: where the target's memory lies."""
        super().__init__(name, timeout_s)
        self._target_device = target_device

    def new_local(self, sizes: Sequence[int]) -> Local:
        from stateferry.testing.cuda_memory import CudaLocal

        return CudaLocal(sizes)

    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        return _ProcessTarget([self.name, str(self._target_device)], sizes, seed)


class _MemoryTarget(Target):
    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self.content = content(seed, sizes)
        self.process_id = os.getpid()
        self._transport = MemoryTransport()
        self.registration = self._transport.register(regions_of(self.content))

    def close_transport(self) -> None:
        self._transport.close()

    def reopen(self) -> None:
        self._transport = MemoryTransport()
        self.registration = self._transport.register(regions_of(self.content))

    def kill(self) -> None:
        self._transport.close()

    def end(self) -> None:
        self._transport.close()


class _ProcessTarget(Target):
    def __init__(self, how: Sequence[str], sizes: Sequence[int], seed: int) -> None:
        """`how`: the transport, and `cpu` or the number of a CUDA device."""
        self.content = content(seed, sizes)
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), *how, str(seed), *map(str, sizes)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stateferry.testing.transport_target", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.process_id = self._process.pid
        self._pipe = multiprocessing.connection.Connection(ours.detach())
        self.registration = self._answer()

    def close_transport(self) -> None:
        self._ask(b"close")

    def reopen(self) -> None:
        self.registration = self._ask(b"reopen")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        # The child leaves when its end of the pipe closes; it is not asked twice.
        self._pipe.close()
        self.kill()

    def _ask(self, command: bytes) -> bytes:
        self._pipe.send_bytes(command)
        return self._answer()

    def _answer(self) -> bytes:
        with suppress(EOFError, OSError):
            if self._pipe.poll(START_S):
                return self._pipe.recv_bytes()
        self.kill()
        raise EngineError(f"the child process that holds the memory to read did not answer in {START_S:g} s")
