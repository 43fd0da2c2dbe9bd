"""Memory of known content on a processor or a CUDA device, for the transport bench."""

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from stateferry.layout.spec import Pieces
from stateferry.transport import MemoryKind, MemoryRegion

Bytes = npt.NDArray[np.uint8]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_WORD = 8
CHUNK_WORDS = 1 << 22


def expected(offset: int, size: int) -> Bytes:
    """`size` bytes of what a peer's memory holds from `offset` on: no two words of it are the same."""
    first, last = offset // _WORD, -(-(offset + size) // _WORD)
    words = np.arange(first + 1, last + 1, dtype=np.uint64) * _FACTOR
    start = offset - first * _WORD
    return words.view(np.uint8)[start : start + size]


class Memory(ABC):
    """One region. The caller keeps it until the transports that know it are closed."""

    region: MemoryRegion

    @abstractmethod
    def write(self, offset: int, content: Bytes) -> None:
        """Put bytes there."""

    @abstractmethod
    def read(self, offset: int, size: int) -> Bytes:
        """A copy of what is there now."""

    @abstractmethod
    def plain_copy(self, size_bytes: int) -> float:
        """Copy so many bytes from the peer's kind of memory into this, at once and by nobody's library.
        Returns seconds."""

    def fill(self) -> None:
        """Make it a peer's: see `expected`."""
        step = CHUNK_WORDS * _WORD
        for offset in range(0, self.region.size_bytes, step):
            self.write(offset, expected(offset, min(step, self.region.size_bytes - offset)))

    def clear(self, pieces: Pieces) -> None:
        """Zero the local side of the pieces."""
        for offset, size in zip(pieces.local_offsets.tolist(), pieces.sizes.tolist(), strict=True):
            self.write(offset, np.zeros(size, dtype=np.uint8))

    def wrong_pieces(self, pieces: Pieces) -> int:
        """How many of the pieces do not hold what the peer has."""
        columns = (pieces.local_offsets, pieces.remote_offsets, pieces.sizes)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return sum(
            not np.array_equal(self.read(local, size), expected(remote, size)) for local, remote, size in rows
        )


class HostMemory(Memory):
    """The processor's."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.zeros(size_bytes, dtype=np.uint8)
        self._bytes[:] = 1  # every page is there before anybody is timed
        self._source = np.empty(0, dtype=np.uint8)
        self.region = MemoryRegion(self._bytes.ctypes.data, size_bytes)

    def write(self, offset: int, content: Bytes) -> None:
        self._bytes[offset : offset + len(content)] = content

    def read(self, offset: int, size: int) -> Bytes:
        return self._bytes[offset : offset + size].copy()

    def plain_copy(self, size_bytes: int) -> float:
        if len(self._source) < size_bytes:
            self._source = np.ones(size_bytes, dtype=np.uint8)
        start = perf_counter()
        np.copyto(self._bytes[:size_bytes], self._source[:size_bytes])
        return perf_counter() - start


class CudaMemory(Memory):
    """A CUDA device's. `source_device`: where a peer's lies, for the plain copy."""

    def __init__(self, size_bytes: int, device: int, source_device: int) -> None:
        import torch

        # Any: torch is imported only where there is a device to use.
        self._torch: Any = torch
        self._device, self._source_device = device, source_device
        self._bytes = torch.ones(size_bytes, dtype=torch.uint8, device=f"cuda:{device}")
        self._source = torch.ones(0, dtype=torch.uint8, device=f"cuda:{source_device}")
        torch.cuda.synchronize(device)
        self.region = MemoryRegion(self._bytes.data_ptr(), size_bytes, MemoryKind.CUDA, device)

    def write(self, offset: int, content: Bytes) -> None:
        self._bytes[offset : offset + len(content)] = self._torch.from_numpy(np.ascontiguousarray(content))
        self._torch.cuda.synchronize(self._device)

    def read(self, offset: int, size: int) -> Bytes:
        found: Bytes = self._bytes[offset : offset + size].cpu().numpy()
        return found

    def plain_copy(self, size_bytes: int) -> float:
        if len(self._source) < size_bytes:
            where = f"cuda:{self._source_device}"
            self._source = self._torch.ones(size_bytes, dtype=self._torch.uint8, device=where)
        for device in (self._device, self._source_device):
            self._torch.cuda.synchronize(device)
        start = perf_counter()
        self._bytes[:size_bytes].copy_(self._source[:size_bytes])
        self._torch.cuda.synchronize(self._device)
        return perf_counter() - start


def devices(kind: MemoryKind) -> tuple[int, int]:
    """Numbers of the devices of the reader and of the peer: two where there are two."""
    if kind is MemoryKind.CPU:
        return 0, 0
    import torch

    return 0, torch.cuda.device_count() - 1


def make_memory(kind: MemoryKind, size_bytes: int, device: int, source_device: int) -> Memory:
    """Memory of that kind, on `device`."""
    if kind is MemoryKind.CPU:
        return HostMemory(size_bytes)
    return CudaMemory(size_bytes, device, source_device)
