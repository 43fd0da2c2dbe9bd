"""Caches of the unsharded model, byte by byte, and what each rank holds of them.

Written from vLLM's weight loaders and shape calculators. It shares nothing with `layout` or with the
tables in `vllm/kv_tables.py`, because the proofs compare it with both.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

FLASH = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
CPU = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

ROCM = "vllm.v1.attention.backends.rocm_attn.RocmAttentionBackend"
B12X = "vllm.v1.attention.backends.b12x.B12xPagedAttentionBackend"

Tags = npt.NDArray[np.uint32]
"""A number for each byte of the unsharded model, no two the same; 0 is nowhere in it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of the axis that tensor parallelism cuts, in `runs` equal runs of units.

    Ranks share the runs out while there are enough of them; past that, neighbouring ranks hold the same.
    """

    units: int
    runs: int

    def held(self, rank: int, size: int) -> slice:
        """The units that the rank holds."""
        if self.runs >= size:
            share = self.units // size
            return slice(rank * share, (rank + 1) * share)
        run, length = rank // (size // self.runs), self.units // self.runs
        return slice(run * length, (run + 1) * length)


def even(units: int) -> Cut:
    """Units that are split evenly."""
    return Cut(units, units)


@dataclass(frozen=True, slots=True)
class Whole:
    """One tensor of one block in the unsharded model: `[units, *inner]` numbers of `width` bytes."""

    name: str
    cuts: tuple[Cut, ...]
    inner: tuple[int, ...]
    width: int = 1
    window_first: bool = False
    """In memory the first two dimensions change places (vLLM's convolution layout SD)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return sum(cut.units for cut in self.cuts) * prod(self.inner) * self.width

    def held(self, rank: int, size: int, first_tag: int) -> Tags:
        """What the rank holds, `[*shape, width]` in memory order; tags count up from `first_tag`."""
        unit = np.arange(prod(self.inner) * self.width, dtype=np.uint32)
        found, start = [], 0
        for cut in self.cuts:
            mine = cut.held(rank, size)
            units = np.arange(start + mine.start, start + mine.stop, dtype=np.uint32)
            found.append(np.uint32(first_tag) + units[:, None] * np.uint32(len(unit)) + unit)
            start += cut.units
        tags = np.concatenate(found).reshape(-1, *self.inner, self.width)
        return np.ascontiguousarray(tags.swapaxes(0, 1)) if self.window_first else tags

    def shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The rank's shape in memory order, in numbers."""
        units = sum((mine := cut.held(rank, size)).stop - mine.start for cut in self.cuts)
        if self.window_first:
            return (self.inner[0], units, *self.inner[1:])
        return (units, *self.inner)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer whose states lie in its page one after the other, each row-major."""

    mamba_type: str
    """As vLLM's `mamba_type` calls it."""
    tensors: tuple[Whole, ...]
    n_groups: int | None = None
    """Mamba 2: what the model's config says."""
    replicated: bool = False
    """vLLM's `tp_replicated`: every rank holds all of it."""


class Slots(enum.Enum):
    """What the second dimension of an attention page counts."""

    HEADS = "a slot per head, with K and V of a token in one run"
    K_HEADS_THEN_V_HEADS = "a slot per head of K, then one per head of V"
    SIDES_PACKED = "one slot of K and one of V, in each head after head"
    SIDES_ROWS = "one slot of K and one of V, in each token after token"


SIDES = (Slots.SIDES_PACKED, Slots.SIDES_ROWS)


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer that keeps `[heads, tokens, content]` numbers a block."""

    heads: int
    tokens: int
    content: int
    """Numbers per head and token: K and V (one of the two, where they are apart), or a latent."""
    width: int = 1
    latent: bool = False
    slots: Slots = Slots.HEADS
    backend: str = FLASH

    @property
    def tensors(self) -> tuple[Whole, ...]:
        """The one tensor."""
        heads = Cut(self.heads, self.heads)
        cuts = (heads,) if self.slots is Slots.HEADS else (heads, heads)
        return (Whole("page", cuts, (self.tokens, self.content), self.width),)


Layer = Recurrent | Attention


def convolution(cuts: Sequence[Cut], rows: int, dim_first: bool, width: int, name: str = "conv") -> Whole:
    """A window of `rows` inputs of as many channels as `cuts` have."""
    return Whole(name, tuple(cuts), (rows,), width, window_first=not dim_first)


def mamba1(channels: int, state: int, rows: int, dim_first: bool, widths: tuple[int, int]) -> Recurrent:
    """Convolution over x, and one state a channel."""
    conv = convolution([even(channels)], rows, dim_first, widths[0])
    return Recurrent("MAMBA1", (conv, Whole("ssm", (even(channels),), (state,), widths[1])))


def mamba2(
    heads: int,
    head_dim: int,
    n_groups: int,
    state: int,
    rows: int,
    dim_first: bool,
    widths: tuple[int, int],
    ring: int = 0,
) -> Recurrent:
    """Convolution over x|B|C. One group only: it is copied to every rank. `ring`: ReplaySSM's length."""
    groups = Cut(n_groups * state, n_groups)
    conv = convolution([even(heads * head_dim), groups, groups], rows, dim_first, widths[0])
    tensors = [conv, Whole("ssm", (even(heads),), (head_dim, state), widths[1])]
    if ring:
        tensors += [
            Whole("ring_x", (even(heads),), (ring, head_dim), widths[0]),
            Whole("ring_dt", (even(heads),), (ring,), 4),
            Whole("ring_b", (even(n_groups),), (ring, state), widths[0]),
        ]
    return Recurrent("MAMBA2", tuple(tensors), n_groups=n_groups)


def gated_delta(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    rows: int,
    dim_first: bool,
    widths: tuple[int, int],
    record: int = 0,
    apart: bool = False,
) -> Recurrent:
    """GDN and KDA: Q|K|V in one convolution, or (`apart`) in three. `record`: RecoverSSM's tokens."""
    cuts = even(key_heads * key_dim), even(key_heads * key_dim), even(value_heads * value_dim)
    heads = (even(value_heads),)
    tensors = [convolution(cuts, rows, dim_first, widths[0])]
    if apart:
        tensors = [
            convolution([cut], rows, dim_first, widths[0], f"conv_{n}")
            for n, cut in zip("qkv", cuts, strict=True)
        ]
    tensors.append(Whole("matrix", heads, (value_dim, key_dim), widths[1]))
    if record:
        tensors.append(Whole("record_1", heads, (record, value_dim), 4))
        tensors.append(Whole("record_2", heads, (record, 2 * value_dim), widths[0]))
    return Recurrent("GDN_ATTN", tuple(tensors))


def short_convolution(channels: int, rows: int, dim_first: bool, width: int) -> Recurrent:
    """One state."""
    return Recurrent("SHORT_CONV", (convolution([even(channels)], rows, dim_first, width),))


def linear_attention(heads: int, dim: int, width: int) -> Recurrent:
    """One matrix a head."""
    return Recurrent("LINEAR", (Whole("matrix", (even(heads),), (dim, dim), width),))


def replicated(channels: int, rows: int, dim_first: bool, width: int) -> Recurrent:
    """A short convolution that every rank holds whole."""
    conv = convolution([Cut(channels, 1)], rows, dim_first, width)
    return Recurrent("SHORT_CONV", (conv,), replicated=True)


def latent_attention(tokens: int, content: int, width: int) -> Attention:
    """MLA: one latent a token, the same on every rank."""
    return Attention(1, tokens, content, width, latent=True, backend="any")
