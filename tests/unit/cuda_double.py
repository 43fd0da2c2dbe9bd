"""A double of NVIDIA's driver: device memory is this process's, and streams run when they are looked at.

It stands where `cuda_driver` keeps its library, so everything above the driver's calls is the real thing. Of
the kernel it knows what its table says; the kernel itself is tried in Triton's interpreter.
"""

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from stateferry.testing.transport_rigs import SENTINEL, Buffer, Local, Rig, Target, content
from stateferry.transport import MemoryKind, MemoryRegion, Transport, cuda_driver
from stateferry.transport.cuda_driver import Kernel
from stateferry.transport.cuda_gather import CHUNK_BYTES, ODD_CHUNK_BYTES, WORD_BYTES, Copier, Gatherer
from stateferry.transport.cudaipc import CudaIpcTransport

NOT_READY, INVALID = 600, 400


def copiers(device_index: int) -> tuple[Copier, Copier]:
    """What the compiler would have made; a function's number is its unit."""
    words, odd = (Kernel(unit, 256, 0) for unit in (WORD_BYTES, 1))
    return Copier(words, WORD_BYTES, CHUNK_BYTES), Copier(odd, 1, ODD_CHUNK_BYTES)


class Double:
    """The library. `fail[name]` is how many calls of a name still succeed before each fails."""

    def __init__(self) -> None:
        self.allocations: dict[int, Any] = {}
        self.adopted: dict[int, int] = {}
        self.mapped: list[int] = []
        self.events: dict[int, bool] = {}
        self.streams: dict[int, deque[Callable[[], None]]] = {0: deque()}
        self.current = 0
        self.fail: dict[str, int] = {}
        self.copies = True
        self._numbers = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name[2].isupper():
            fail = object.__getattribute__(self, "fail")
            fail[name] = fail.get(name, 1 << 30) - 1
            if fail[name] < 0:
                return lambda *arguments: INVALID
        return object.__getattribute__(self, name)

    # -- for tests --------------------------------------------------------------------------------------

    def adopt(self, array: Buffer) -> MemoryRegion:
        """Take an array for device memory."""
        self.adopted[array.ctypes.data] = array.nbytes
        return MemoryRegion(array.ctypes.data, array.nbytes, MemoryKind.CUDA)

    def step(self) -> None:
        """Every stream gets on by one command."""
        for queue in self.streams.values():
            if queue:
                queue.popleft()()

    @property
    def pending(self) -> int:
        return sum(map(len, self.streams.values()))

    # -- the driver's calls -----------------------------------------------------------------------------

    def cuGetErrorString(self, result: int, text: Any) -> int:
        text._obj.value = b"invalid"
        return 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1000 + device
        return 0

    def cuCtxSetCurrent(self, context: int) -> int:
        self.current = context
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> int:
        sizes = {start: ctypes.sizeof(memory) for start, memory in self.allocations.items()} | self.adopted
        for start, length in sizes.items():
            if start <= address < start + length:
                base._obj.value, size._obj.value = start, length
                return 0
        return INVALID

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> int:
        ctypes.memmove(ctypes.addressof(handle._obj), struct.pack("<Q", address), 8)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        (found,) = struct.unpack("<Q", ctypes.string_at(ctypes.addressof(handle), 8))
        if found not in self.allocations and found not in self.adopted:
            return INVALID
        address._obj.value = found
        self.mapped.append(found)
        return 0

    def cuIpcCloseMemHandle(self, address: int) -> int:
        self.mapped.remove(address)
        return 0

    def cuMemAlloc_v2(self, address: Any, size: int) -> int:
        memory = (ctypes.c_uint64 * -(-size // 8))()
        address._obj.value = ctypes.addressof(memory)
        self.allocations[address._obj.value] = memory
        return 0

    def cuMemHostAlloc(self, address: Any, size: int, flags: int) -> int:
        return self.cuMemAlloc_v2(address, max(size, 1 << 16))  # where the allocator aligns to pages

    def cuMemFree_v2(self, address: int) -> int:
        del self.allocations[address]
        return 0

    def cuMemFreeHost(self, address: int) -> int:
        return self.cuMemFree_v2(address)

    def cuMemcpyHtoD_v2(self, address: int, source: bytes, size: int) -> int:
        ctypes.memmove(address, source, size)
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = self._number()
        self.streams[stream._obj.value] = deque()
        return 0

    def cuStreamSynchronize(self, stream: int) -> int:
        while self.streams[stream]:
            self.streams[stream].popleft()()
        return 0

    def cuStreamDestroy_v2(self, stream: int) -> int:
        del self.streams[stream]
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        event._obj.value = self._number()
        self.events[event._obj.value] = True
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        self.events[event] = False
        self.streams[stream].append(lambda: self.events.update({event: True}))
        return 0

    def cuEventQuery(self, event: int) -> int:
        self.step()
        return 0 if self.events[event] else NOT_READY

    def cuEventSynchronize(self, event: int) -> int:
        while not self.events[event]:
            self.step()
        return 0

    def cuEventDestroy_v2(self, event: int) -> int:
        del self.events[event]
        return 0

    def cuLaunchKernel(self, function: int, pieces: int, chunks: int, *rest: Any) -> int:
        parameters = rest[6]
        (first,) = struct.unpack("<Q", ctypes.string_at(parameters, 8))
        (table,) = struct.unpack("<Q", ctypes.string_at(first, 8))
        assert self.current, "no context is current"

        def run() -> None:
            for i in range(pieces):
                source, target, count = struct.unpack("<3q", ctypes.string_at(table + 24 * i, 24))
                if self.copies:
                    ctypes.memmove(target, source, count * function)

        self.streams[rest[5]].append(run)
        return 0

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


@contextmanager
def driver() -> Iterator[Double]:
    """The double in the driver's place."""
    double = Double()
    with patch.object(cuda_driver, "_driver", lambda: double):
        yield double


def make_transport() -> Transport:
    """cudaipc over the double."""
    with patch.object(torch.cuda, "is_available", lambda: True), patch.object(torch.version, "hip", None):
        transport = CudaIpcTransport()
    transport._make_gatherer = lambda index: Gatherer(index, copiers)  # type: ignore[assignment]
    return transport


class DoubleLocal(Local):
    """The reader's memory."""

    def __init__(self, sizes: Sequence[int], double: Double) -> None:
        super().__init__(sizes)
        self._regions = [double.adopt(buffer) for buffer in self._buffers]

    def regions(self) -> list[MemoryRegion]:
        return self._regions

    def reset(self) -> None:
        for buffer in self._buffers:
            buffer[:] = SENTINEL


class DoubleTarget(Target):
    """What is read from, in this process; its end is that its transport is closed."""

    def __init__(self, sizes: Sequence[int], seed: int, double: Double) -> None:
        self.content = content(seed, sizes)
        self._regions = [double.adopt(buffer) for buffer in self.content]
        self.reopen()

    def reopen(self) -> None:
        self._transport = make_transport()
        self.registration = self._transport.register(self._regions)

    def close_transport(self) -> None:
        self._transport.close()

    def kill(self) -> None:
        self._transport.close()

    def end(self) -> None:
        self._transport.close()


class DoubleRig(Rig):
    """cudaipc over one double."""

    def __init__(self, double: Double) -> None:
        super().__init__("cudaipc")
        self._double = double

    def new_reader(self) -> Transport:
        return make_transport()

    def new_local(self, sizes: Sequence[int]) -> Local:
        return DoubleLocal(sizes, self._double)

    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        return DoubleTarget(sizes, seed, self._double)


def numbers(count: int, seed: int = 0) -> Buffer:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
