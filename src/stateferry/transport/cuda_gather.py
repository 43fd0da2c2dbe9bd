"""One kernel that copies every piece of a hand-off. Imported where torch and triton are known to be there."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from stateferry.errors import TransportError, TransportUnavailable
from stateferry.transport import cuda_driver
from stateferry.transport.cuda_driver import Kernel, Parameters
from stateferry.transport.pieces import Spans

WORD_BYTES = 8
CHUNK_BYTES = 64 << 10
"""What one program copies at once: large enough to fill the link, small enough to use all of the chip."""
ODD_CHUNK_BYTES = 8 << 10
"""The same for pieces that are not made of whole words; those are copied byte by byte."""
PROGRAMS = 8192
"""About the most programs of a launch. Small pieces among large ones leave some of them without work."""
LANES = 1024
WARPS = 8
FIRST_ROWS = 4096
"""Rows of table that a launch has room for at first."""
COLUMNS = 3
MAX_SEAL_BYTES = 64
TABLE_ALIGNMENT = 16
"""Bytes. What Triton compiles the kernel for, because the table that it is shown lies so."""

Table = npt.NDArray[np.int64]
"""`int64[pieces, 3]`: source address, destination address, number of units."""


@triton.jit  # type: ignore[misc]
def _gather(  # type: ignore[no-untyped-def]
    table, unit_bytes: tl.constexpr, chunk: tl.constexpr, lanes: tl.constexpr
):
    """Program (p, i) copies chunks i, i + grid[1], … of piece p."""
    row = table + tl.program_id(0) * 3
    source, target, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if unit_bytes == 8:
        source_pointer = source.to(tl.pointer_type(tl.int64))
        target_pointer = target.to(tl.pointer_type(tl.int64))
    else:
        source_pointer = source.to(tl.pointer_type(tl.uint8))
        target_pointer = target.to(tl.pointer_type(tl.uint8))
    first = tl.program_id(1).to(tl.int64) * chunk
    for begin in range(first, count, tl.num_programs(1) * chunk):
        end = tl.minimum(begin + chunk, count)
        for start in range(begin, end, lanes):
            index = start + tl.arange(0, lanes)
            mask = index < end
            tl.store(target_pointer + index, tl.load(source_pointer + index, mask=mask), mask=mask)


@dataclass(frozen=True, slots=True)
class Copier:
    """The kernel compiled for one unit."""

    kernel: Kernel
    unit_bytes: int
    chunk_bytes: int

    def grid(self, pieces: int, largest_bytes: int) -> tuple[int, int]:
        """Programs of a launch over so many pieces. Chunks of the largest beyond that are taken in turn."""
        chunks = -(-largest_bytes // self.chunk_bytes)
        return pieces, min(chunks, max(1, PROGRAMS // pieces))


def compile_copiers(device_index: int) -> tuple[Copier, Copier]:
    """For words and for single bytes. Seconds, the first time on a machine. Each runs once, on nothing."""
    found = []
    with torch.cuda.device(device_index):
        nothing = torch.zeros((1, COLUMNS), dtype=torch.int64, device="cuda")
        for unit_bytes, chunk_bytes in ((WORD_BYTES, CHUNK_BYTES), (1, ODD_CHUNK_BYTES)):
            compiled = _gather[(1, 1)](nothing, unit_bytes, chunk_bytes // unit_bytes, LANES, num_warps=WARPS)
            kernel = Kernel(compiled.function, 32 * WARPS, compiled.metadata.shared)
            found.append(Copier(kernel, unit_bytes, chunk_bytes))
        torch.cuda.current_stream().synchronize()
    return found[0], found[1]


def split_odd(spans: Spans) -> tuple[Spans, Spans]:
    """Pieces made of whole words, and the others."""
    odd = ((spans.local | spans.remote | spans.sizes) & np.uint64(WORD_BYTES - 1)) != 0
    if not odd.any():
        return spans, spans.take(slice(0))
    return spans.take(~odd), spans.take(odd)


class _HostTable:
    """A table in host memory that the kernel reads where it lies: a copy to the device would take a call more
    and save nothing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        size = rows * COLUMNS * WORD_BYTES
        self.address = cuda_driver.allocate_host(size)
        assert self.address % TABLE_ALIGNMENT == 0
        memory = (ctypes.c_int64 * (rows * COLUMNS)).from_address(self.address)
        self.table: Table = np.ctypeslib.as_array(memory).reshape(rows, COLUMNS)
        self.parameters = Parameters([self.address])

    def fill(self, spans: Spans, unit_bytes: int) -> None:
        """One row a piece."""
        count = len(spans.sizes)
        self.table[:count, 0], self.table[:count, 1] = spans.remote, spans.local
        self.table[:count, 2] = spans.sizes // np.uint64(unit_bytes) if unit_bytes > 1 else spans.sizes

    def free(self) -> None:
        cuda_driver.free_host(self.address)


class Launched:
    """A gather on its way. The device reads its tables, and writes into `seal`, until `done`."""

    def __init__(self) -> None:
        self._event = cuda_driver.create_event()
        self._tables = [_HostTable(FIRST_ROWS), _HostTable(TABLE_ALIGNMENT)]
        """Of words, and of single bytes."""
        self._seal_row = _HostTable(1)
        self._seal = cuda_driver.allocate_host(MAX_SEAL_BYTES)
        self._seal_bytes = 0

    def start(
        self, spans: Spans, seal_address: int, seal_bytes: int, copiers: tuple[Copier, Copier], stream: int
    ) -> None:
        """Queue the copies, and behind them that of the seal; it is made of whole words."""
        assert seal_bytes <= MAX_SEAL_BYTES
        for number, (part, copier) in enumerate(zip(split_odd(spans), copiers, strict=True)):
            if len(part.sizes):
                table = self._room(number, len(part.sizes))
                table.fill(part, copier.unit_bytes)
                grid = copier.grid(len(part.sizes), int(part.sizes.max()))
                cuda_driver.launch(copier.kernel, grid, table.parameters, stream)
        self._seal_bytes = seal_bytes
        self._seal_row.table[0] = seal_address, self._seal, seal_bytes // WORD_BYTES
        # A launch of its own: on one stream it begins when the pieces are in.
        cuda_driver.launch(copiers[0].kernel, (1, 1), self._seal_row.parameters, stream)
        cuda_driver.record(self._event, stream)

    def done(self) -> bool:
        """Whether the device has finished; raises TransportError when it failed."""
        return cuda_driver.happened(self._event)

    def wait(self) -> None:
        """Until `done`; raises TransportError when the device failed."""
        cuda_driver.wait(self._event)

    def seal(self) -> bytes:
        """What was read last, after all pieces."""
        return ctypes.string_at(self._seal, self._seal_bytes)

    def free(self) -> None:
        """Give its memory back. It must be done."""
        for table in (*self._tables, self._seal_row):
            table.free()
        cuda_driver.free_host(self._seal)
        cuda_driver.destroy_event(self._event)

    def _room(self, number: int, rows: int) -> _HostTable:
        if rows > self._tables[number].rows:
            self._tables[number].free()
            self._tables[number] = _HostTable(2 * rows)
        return self._tables[number]


class Gatherer:
    """Launches gathers on a stream of its own. One thread."""

    def __init__(
        self,
        device_index: int,
        compile_for: Callable[[int], tuple[Copier, Copier]] = compile_copiers,
    ) -> None:
        """Compiles the kernel, and tries it. Raises TransportUnavailable when it cannot be compiled, and
        TransportError when it does not copy."""
        self.device_index = device_index
        try:
            self._copiers = compile_for(device_index)
        except Exception as e:  # whatever torch, Triton and its compilers raise: another transport may do
            raise TransportUnavailable(
                f"cudaipc: its kernel could not be compiled ({e!r}); use transport nixl"
            ) from e
        self._context = cuda_driver.retain_context(device_index)
        cuda_driver.make_current(self._context)
        self._stream = cuda_driver.create_stream()
        self._free: list[Launched] = []
        self._closed = False
        self._try()

    def enter(self) -> None:
        """Make the device's context current on this thread."""
        cuda_driver.make_current(self._context)

    def launch(self, spans: Spans, seal_address: int, seal_bytes: int) -> Launched:
        """Copy all pieces, and then `seal_bytes` from the device's `seal_address` to the host. To be
        given back with `retire` once done. Raises TransportError; nothing is on its way then."""
        cuda_driver.make_current(self._context)
        launched = self._free.pop() if self._free else Launched()
        try:
            launched.start(spans, seal_address, seal_bytes, self._copiers, self._stream)
        except BaseException:
            cuda_driver.synchronize(self._stream)  # part of it may be: not failed before it is quiet
            self.retire(launched)
            raise
        return launched

    def retire(self, launched: Launched) -> None:
        """Take back what is done: its memory is used again."""
        if self._closed:
            launched.free()
        else:
            self._free.append(launched)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if not self._closed:
            self._closed = True
            cuda_driver.make_current(self._context)
            while self._free:
                self._free.pop().free()
            cuda_driver.destroy_stream(self._stream)

    def _try(self) -> None:
        """The handle and the parameters of a compiled kernel are Triton's business: see that they are as
        expected here before anything is trusted to them."""
        content = bytes(range(1, 1 + MAX_SEAL_BYTES))
        device = cuda_driver.allocate(2 * MAX_SEAL_BYTES)
        try:
            cuda_driver.write(device, content)
            half = MAX_SEAL_BYTES // 2
            # The first half as words, the second but for a byte as single bytes; the seal reads both back.
            spans = _spans([(device + MAX_SEAL_BYTES, device, half), (device + 96, device + half, half - 1)])
            launched = self.launch(spans, device + MAX_SEAL_BYTES, MAX_SEAL_BYTES)
            launched.wait()
            found = launched.seal()
            self.retire(launched)
        finally:
            cuda_driver.free(device)
        if found[:-1] != content[:-1]:
            raise TransportError(
                f"cudaipc: the kernel compiled by Triton {triton.__version__} did not copy what it was told "
                "to; use transport nixl"
            )


def _spans(rows: list[tuple[int, int, int]]) -> Spans:
    """From (local address, remote address, size)."""
    local, remote, sizes = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    regions = np.zeros(len(rows), np.int64)
    return Spans(local, remote, sizes, regions, regions)
