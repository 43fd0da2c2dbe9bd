"""One kernel that copies every piece of a hand-off. Imported where torch and triton are known to be there."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from stateferry.transport.pieces import Spans, cut

WORD_BYTES = 8
CHUNK_BYTES = 64 << 10
"""What one program copies at most: large enough to fill the link, small enough to use all of the chip."""
ODD_CHUNK_BYTES = 8 << 10
"""The same for pieces that are not made of whole words; those are copied byte by byte."""
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


@dataclass(slots=True)
class Launched:
    """A gather on its way. Holds the memory that the device reads until `done`."""

    event: Any
    seal: torch.Tensor
    """What was read last, after all pieces: the peer's cookie. Pinned host memory."""
    tables: list[torch.Tensor]

    def done(self) -> bool:
        """Whether the device has finished; raises RuntimeError when it failed."""
        return bool(self.event.query())


class Gatherer:
    """Launches gathers on a stream of its own. One thread."""

    def __init__(self, device_index: int) -> None:
        """Compiles the kernel, which takes seconds the first time on a machine."""
        self.device_index = device_index
        with torch.cuda.device(device_index):
            self._stream = torch.cuda.Stream()
            scratch = torch.zeros(2 * WORD_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")
            torch.cuda.current_stream().synchronize()
            row = np.array([[scratch.data_ptr(), scratch.data_ptr() + WORD_BYTES, 1]], np.int64)
            with torch.cuda.stream(self._stream):
                kept = [self._run(row, WORD_BYTES), self._run(row, 1)]
            self._stream.synchronize()
            del kept

    def launch(self, spans: Spans, seal_address: int, seal_bytes: int) -> Launched:
        """Copy all pieces, and then `seal_bytes` (whole words) from `seal_address` to the host."""
        with torch.cuda.device(self.device_index), torch.cuda.stream(self._stream):
            seal = torch.zeros(seal_bytes, dtype=torch.uint8, pin_memory=True)
            words, odd = tables(spans)
            last = np.array([[seal_address, seal.data_ptr(), seal_bytes // WORD_BYTES]], np.int64)
            kept = [self._run(words, WORD_BYTES)] if len(words) else []
            kept += [self._run(odd, 1)] if len(odd) else []
            # A launch of its own: on one stream it begins when the pieces are in.
            kept.append(self._run(last, WORD_BYTES))
            event = torch.cuda.Event()
            event.record(self._stream)
        return Launched(event, seal, kept)

    def _run(self, table: Table, unit_bytes: int) -> torch.Tensor:
        host = torch.from_numpy(table).pin_memory()
        device = host.to(f"cuda:{self.device_index}", non_blocking=True)
        _gather[(len(table),)](device, unit_bytes, LANES, num_warps=WARPS)
        return device
