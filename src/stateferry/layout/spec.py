"""What the bytes of one engine rank's KV cache mean. Pure data: no I/O, no torch, no vllm.

Everything that differs between models and parallel settings is in these values, so that one planner
serves them all. They are msgspec structs because two engines exchange them at the hand-shake.
"""

import enum
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from stateferry.ids import EngineId, Epoch

Int64Array = npt.NDArray[np.int64]


class GroupKind(enum.Enum):
    """How a KV-cache group relates blocks to tokens."""

    ATTENTION = "attention"
    """Block i holds tokens [i * block_tokens, (i + 1) * block_tokens)."""
    WINDOW = "window"
    """As ATTENTION, but only the last `window_tokens` tokens are kept."""
    STATE = "state"
    """Column i holds one copy of the recurrent state, after at most (i + 1) * block_tokens tokens."""


class PartRule(enum.Enum):
    """How tensor parallelism lays one part of an axis over ranks."""

    SPLIT = "split"
    """Rank r of R holds units [r * size / R, (r + 1) * size / R). R must divide size."""
    REPLICATED = "replicated"
    """Every rank holds all units."""
    GROUPED = "grouped"
    """`granules` indivisible runs of units: split over ranks while R <= granules; past that each
    granule lives on R / granules neighbouring ranks (KV heads, Mamba 2's B and C groups)."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stretch of a sharded axis, in units of that axis, as the unsharded model has it."""

    name: str
    size: int
    rule: PartRule
    granules: int = 1
    """Only read under GROUPED; must divide `size`."""


class Loop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One loop over a tensor inside a block, outermost first. The innermost unit is contiguous."""

    count: int
    stride_bytes: int


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a layer's cache: K and V of a head slot, an MLA latent, a convolution window …

    Unit (i, j, …) of block b starts at
    `offset_bytes + b * block_stride_bytes + i * loops[0].stride_bytes + j * loops[1].stride_bytes …`
    in its region and is `unit_bytes` long.
    """

    name: str
    region: int
    """Index into `CacheLayout.region_sizes_bytes`."""
    offset_bytes: int
    """Where block 0 of this tensor starts in the region."""
    block_stride_bytes: int
    block_count: int
    unit_bytes: int
    element_bytes: int
    """Size of one number, for comparing dtypes; a unit is a whole number of them."""
    dtype: str
    """As torch prints it without the prefix: `bfloat16`, `float32`, `uint8` …"""
    loops: tuple[Loop, ...] = ()
    axis: int | None = None
    """Which loop tensor parallelism splits; None: every rank holds the same whole tensor, or its
    inside is unknown (see `opaque`)."""
    parts: tuple[Part, ...] = ()
    """The parts of that loop in order; empty when `axis` is None."""
    opaque: bool = False
    """The inside of a block is not described: fit for equal ranks only."""

    @property
    def block_bytes(self) -> int:
        """Bytes of this tensor in one block (not counting gaps)."""
        size = self.unit_bytes
        for loop in self.loops:
            size *= loop.count
        return size


class LayerCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer's cache. Tensors in page order."""

    name: str
    tensors: tuple[CacheTensor, ...]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of vLLM's KV-cache groups: layers that share a block table."""

    kind: GroupKind
    block_tokens: int
    """Tokens per block. A STATE group that keeps one block for ever has max_model_len here."""
    layers: tuple[LayerCache, ...]
    window_tokens: int = 0
    """Only under WINDOW."""
    scratch_slots: int = 0
    """Trailing speculative slots of a STATE group's table: never the state to hand off."""
    transfers: bool = True
    """False: vLLM keeps this group out of KV transfer; it has a place in the order, and no layers
    that we touch."""


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole cache of one engine rank."""

    engine_id: EngineId
    epoch: Epoch
    tp_rank: int
    tp_size: int
    groups: tuple[Group, ...]
    """All of vLLM's groups in vLLM's order, so that index i is block table i."""
    region_sizes_bytes: tuple[int, ...]
    """Registered stretches of memory; usually one, shared by all layers."""
    facts: dict[str, str]
    """Everything else that must be equal on both sides, as text: model identity, versions,
    attention backend, cache layout, convolution layout … Compared field by field."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What to copy between one pair of ranks: parallel arrays, one entry a piece. `int64[pieces]`.

    Offsets count from the start of the region. Pieces of one value never overlap locally.
    """

    local_regions: Int64Array
    local_offsets: Int64Array
    remote_regions: Int64Array
    remote_offsets: Int64Array
    sizes: Int64Array

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes."""
        return int(self.sizes.sum())
