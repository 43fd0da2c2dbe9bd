"""From (region, offset, size) to addresses: the arithmetic that every transport shares.

All checks are here, so that no transport reads or writes outside registered memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stateferry.layout.spec import Int64Array, Pieces

AddressArray = npt.NDArray[np.uint64]

ADDRESS_LIMIT = 1 << 57
"""No user address on a supported machine is at or above this; keeps sums inside int64."""


class Spans(NamedTuple):
    """One batch as addresses: parallel arrays, one entry a piece. `uint64[pieces]`."""

    local: AddressArray
    remote: AddressArray
    sizes: AddressArray
    local_regions: Int64Array
    remote_regions: Int64Array

    def take(self, chosen: npt.NDArray[np.bool_] | slice) -> "Spans":
        """Some of its entries, in order."""
        return Spans(
            self.local[chosen],
            self.remote[chosen],
            self.sizes[chosen],
            self.local_regions[chosen],
            self.remote_regions[chosen],
        )


class RegionTable:
    """The registered regions of one side, ready for whole-array look-ups."""

    def __init__(self, side: str, spans: Sequence[tuple[int, int]]) -> None:
        """`spans` are (address, size in bytes). Raises ValueError for one that cannot be memory."""
        for index, (address, size) in enumerate(spans):
            if address <= 0 or size <= 0 or address + size > ADDRESS_LIMIT:
                raise ValueError(f"{side} region {index}: address {address}, size {size} cannot be memory")
        self._side = side
        self.addresses = np.array([address for address, _ in spans], dtype=np.int64)
        self.sizes = np.array([size for _, size in spans], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def resolve(self, regions: Int64Array, offsets: Int64Array, sizes: Int64Array) -> AddressArray:
        """Addresses of the pieces. Raises ValueError that names the first piece out of bounds."""
        if len(regions) == 0:
            return np.empty(0, dtype=np.uint64)
        # As unsigned numbers what is negative is large: one comparison does for both ends.
        known = regions.view(np.uint64) < len(self)
        if not known.all():
            i = int(np.argmin(known))
            raise ValueError(f"piece {i}: {self._side} region {regions[i]} of {len(self)} does not exist")
        one = len(self) == 1
        room = self.sizes[:1] if one else self.sizes[regions]
        # Compared this way round, nothing can overflow: 0 < size <= room.
        fits = (sizes - 1).view(np.uint64) < room.view(np.uint64)
        inside = fits & (offsets.view(np.uint64) <= (room - sizes).view(np.uint64))
        if not inside.all():
            i = int(np.argmin(inside))
            raise ValueError(
                f"piece {i}: {sizes[i]} bytes at offset {offsets[i]} lie outside {self._side} region "
                f"{regions[i]} of {room[0 if one else i]} bytes"
            )
        start = self.addresses[:1] if one else self.addresses[regions]
        found: AddressArray = (start + offsets).view(np.uint64)
        return found

    def locate(self, address: int) -> str:
        """Say for people where an address lies."""
        inside = np.flatnonzero((self.addresses <= address) & (address < self.addresses + self.sizes))
        if len(inside) == 0:
            return f"address {address:#x}"
        region = int(inside[0])
        return f"{self._side} region {region} offset {address - int(self.addresses[region])}"


def resolve_pieces(pieces: Pieces, local: RegionTable, remote: RegionTable) -> Spans:
    """Turn pieces into addresses on both sides, before any byte moves.

    Raises ValueError that names what is wrong: a bug of the caller's.
    """
    count = len(pieces.sizes)
    for name in ("local_regions", "local_offsets", "remote_regions", "remote_offsets", "sizes"):
        array = getattr(pieces, name)
        if array.shape != (count,) or array.dtype != np.int64:
            raise ValueError(f"pieces.{name} is {array.dtype}{list(array.shape)}, expected int64[{count}]")
    return Spans(
        local.resolve(pieces.local_regions, pieces.local_offsets, pieces.sizes),
        remote.resolve(pieces.remote_regions, pieces.remote_offsets, pieces.sizes),
        pieces.sizes.view(np.uint64),  # none is negative
        pieces.local_regions,
        pieces.remote_regions,
    )


def cut(spans: Spans, max_bytes: int) -> Spans:
    """The same bytes in pieces of at most `max_bytes`, in the same order."""
    if len(spans.sizes) == 0 or int(spans.sizes.max()) <= max_bytes:
        return spans
    limit = np.uint64(max_bytes)
    counts = ((spans.sizes + (limit - np.uint64(1))) // limit).astype(np.int64)
    ends = np.cumsum(counts)
    # Which part of its piece each new entry is: 0, 1, 2 … restarting at every piece.
    part = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    skip = part.astype(np.uint64) * limit
    return Spans(
        np.repeat(spans.local, counts) + skip,
        np.repeat(spans.remote, counts) + skip,
        np.minimum(np.repeat(spans.sizes, counts) - skip, limit),
        np.repeat(spans.local_regions, counts),
        np.repeat(spans.remote_regions, counts),
    )


def batch_ends(sizes: AddressArray, max_bytes: int, max_pieces: int) -> list[int]:
    """Where the batches end that `sizes` is to be split into, in order, within both limits.

    No single piece is larger than `max_bytes` (see `cut`).
    """
    totals = np.cumsum(sizes.astype(np.int64))
    ends: list[int] = []
    start, before = 0, 0
    while start < len(sizes):
        by_size = int(np.searchsorted(totals, before + max_bytes, side="right"))
        start = min(by_size, start + max_pieces)
        before = int(totals[start - 1])
        ends.append(start)
    return ends
