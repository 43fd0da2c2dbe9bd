"""A block table as every hand-off keeps it: packed, because thousands of them may be open at a time."""

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

MAX_BLOCK_ID = (1 << 31) - 1
"""Of any cache: a block is at least a kilobyte, so this is two terabytes of one rank."""


class BlockIds(Sequence[int]):
    """Ids of blocks, in the order of their positions. A value: it never changes, and may be a key.

    Four bytes an id, where a tuple of Python's integers takes 36. It is made once, where a table enters
    (vLLM's list, a decoded message); from there on numpy reads it without a loop.
    """

    __slots__ = ("_packed",)
    _packed: bytes

    def __init__(self, ids: Sequence[int] | npt.NDArray[Any] = ()) -> None:
        """From integers, `[ids]`. Raises ValueError for anything else, and outside 0..MAX_BLOCK_ID."""
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"block ids must be a list of integers, not {reprlib.repr(ids)}")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) <= MAX_BLOCK_ID:
            raise ValueError(
                f"block ids must be in 0..{MAX_BLOCK_ID}, these go from {given.min()} to {given.max()}"
            )
        self._packed = given.astype("<i4").tobytes()

    def __array__(self, dtype: npt.DTypeLike = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """For `np.asarray`: `int64[ids]` unless asked otherwise: ids times strides must not overflow."""
        packed = np.frombuffer(self._packed, "<i4")
        return np.array(packed, np.int64 if dtype is None else dtype, copy=copy)

    def __len__(self) -> int:
        return len(self._packed) // 4

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "BlockIds": ...
    def __getitem__(self, index: int | slice) -> "int | BlockIds":
        packed = np.frombuffer(self._packed, "<i4")
        return BlockIds(packed[index]) if isinstance(index, slice) else int(packed[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockIds) and self._packed == other._packed

    def __hash__(self) -> int:
        return hash(self._packed)

    def __repr__(self) -> str:
        return f"BlockIds({self.tolist()})"

    def tolist(self) -> list[int]:
        """As Python's integers: for messages and for people."""
        ids: list[int] = np.frombuffer(self._packed, "<i4").tolist()
        return ids
