"""One kernel that copies every piece of a hand-off. Imported where torch and triton are known to be there."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from stateferry.transport import cuda_driver
from stateferry.transport.pieces import Spans, cut

WORD_BYTES = 8
CHUNK_BYTES = 64 << 10
"""What one program copies at most: large enough to fill the link, small enough to use all of the chip."""
ODD_CHUNK_BYTES = 8 << 10
"""The same for pieces that are not made of whole words; those are copied byte by byte."""
FIRST_ROWS = 4096
"""Rows of table that a launch has room for at first."""
MAX_SEAL_BYTES = 64
LANES = 1024
WARPS = 8

Table = npt.NDArray[np.int64]
"""`int64[programs, 3]`: source address, destination address, number of units."""


@triton.jit  # type: ignore[misc]
def _gather(table, unit_bytes: tl.constexpr, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table + tl.program_id(0) * 3
    source, target, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if unit_bytes == 8:
        source_pointer = source.to(tl.pointer_type(tl.int64))
        target_pointer = target.to(tl.pointer_type(tl.int64))
    else:
        source_pointer = source.to(tl.pointer_type(tl.uint8))
        target_pointer = target.to(tl.pointer_type(tl.uint8))
    for start in range(0, count, lanes):
        index = start + tl.arange(0, lanes)
        mask = index < count
        tl.store(target_pointer + index, tl.load(source_pointer + index, mask=mask), mask=mask)


def tables(spans: Spans) -> tuple[Table, Table]:
    """One row a program: of pieces made of whole words, and of the others (counted in bytes)."""
    odd = (spans.local | spans.remote | spans.sizes) % np.uint64(WORD_BYTES) != 0
    return _rows(spans, ~odd, CHUNK_BYTES, WORD_BYTES), _rows(spans, odd, ODD_CHUNK_BYTES, 1)


def _rows(spans: Spans, mask: npt.NDArray[np.bool_], chunk_bytes: int, unit_bytes: int) -> Table:
    chosen = Spans(
        spans.local[mask],
        spans.remote[mask],
        spans.sizes[mask],
        spans.local_regions[mask],
        spans.remote_regions[mask],
    )
    chunks = cut(chosen, chunk_bytes)
    table = np.empty((len(chunks.sizes), 3), np.int64)
    table[:, 0], table[:, 1] = chunks.remote, chunks.local
    table[:, 2] = chunks.sizes // np.uint64(unit_bytes)
    return table


class Launched:
    """A gather on its way. The device reads its table, and writes into `seal`, until `done`."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._table = torch.empty((FIRST_ROWS, 3), dtype=torch.int64, pin_memory=True)
        self._seal = torch.empty(MAX_SEAL_BYTES, dtype=torch.uint8, pin_memory=True)
        self._seal_bytes = 0

    def start(self, words: Table, odd: Table, seal_address: int, seal_bytes: int, stream: Any) -> None:
        """Launch on the current device and stream. The kernel reads the table where it lies, in pinned
        host memory: a copy to the device would take a call more and save nothing."""
        rows = len(words) + len(odd)
        if rows > len(self._table):
            self._table = torch.empty((2 * rows, 3), dtype=torch.int64, pin_memory=True)
        host = self._table.numpy()
        host[: len(words)], host[len(words) : rows] = words, odd
        if len(words):
            _gather[(len(words),)](self._table, WORD_BYTES, LANES, num_warps=WARPS)
        if len(odd):
            _gather[(len(odd),)](self._table[len(words) :], 1, LANES, num_warps=WARPS)
        self._seal_bytes = seal_bytes
        # A command of its own: on one stream it begins when the pieces are in.
        cuda_driver.copy_to_host(self._seal.data_ptr(), seal_address, seal_bytes, stream.cuda_stream)
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the device has finished; raises RuntimeError when it failed."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Until `done`; raises RuntimeError when the device failed."""
        self._event.synchronize()

    def seal(self) -> bytes:
        """What was read last, after all pieces."""
        return bytes(self._seal[: self._seal_bytes].numpy())


class Gatherer:
    """Launches gathers on a stream of its own. One thread."""

    def __init__(self, device_index: int) -> None:
        """Compiles the kernel, which takes seconds the first time on a machine."""
        self.device_index = device_index
        self._free: list[Launched] = []
        with torch.cuda.device(device_index):
            self._stream = torch.cuda.Stream()
            scratch = torch.zeros(2 * WORD_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")
            torch.cuda.current_stream().synchronize()
            source = scratch.data_ptr()
            row = np.array([[source, source + WORD_BYTES, 1]], np.int64)
            with torch.cuda.stream(self._stream):
                first = Launched()
                # Twice one: the kernel is compiled for tables that are aligned to 16 bytes and for others.
                for words, odd in ((row, row), (np.concatenate([row, row]), row)):
                    first.start(words, odd, source, WORD_BYTES, self._stream)
                    self._stream.synchronize()
        self._free.append(first)

    def launch(self, spans: Spans, seal_address: int, seal_bytes: int) -> Launched:
        """Copy all pieces, and then `seal_bytes` from the device's `seal_address` to the host. To be
        given back with `retire` once done."""
        words, odd = tables(spans)
        with torch.cuda.device(self.device_index), torch.cuda.stream(self._stream):
            launched = self._free.pop() if self._free else Launched()
            try:
                launched.start(words, odd, seal_address, seal_bytes, self._stream)
            except BaseException:
                self._stream.synchronize()  # part of it may be on its way: not failed before it is quiet
                raise
        return launched

    def retire(self, launched: Launched) -> None:
        """Take back what is done: its pinned memory is used again."""
        self._free.append(launched)
