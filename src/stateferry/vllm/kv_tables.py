"""The tables that know model families and attention backends: which dimension of a cache tensor tensor
parallelism splits, and into which parts. Plain values in and out; nothing here imports vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stateferry.errors import LayoutError
from stateferry.layout.spec import Loop, Part, PartRule

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """How one tensor lies over tensor-parallel ranks."""

    name: str
    """Of the tensor."""
    dim: int | None = None
    """The dimension of the tensor's shape inside a block that is split; None: none is."""
    parts: tuple[Part, ...] = ()
    opaque: bool = False
    """The inside is not known: equal ranks only."""
    strided: bool = False
    """How far apart the units of a dimension are depends on how many units of another one this rank
    holds, so no dimension may be taken as one with the next: the other rank count could not follow."""
    sides: bool = False
    """The page has two head slots, K and V, with all of the rank's heads inside each (`side_loops`)."""


def _split(name: str, local: int, tp_size: int) -> Part:
    return Part(name=name, size=local * tp_size, rule=PartRule.SPLIT)


@dataclass(frozen=True, slots=True)
class StateShapes:
    """What the table of recurrent layers reads. All sizes are this rank's."""

    shapes: tuple[Shape, ...]
    tp_size: int
    conv_dim_first: bool
    """Convolution states are (channels, window), else (window, channels)."""
    n_groups: int | None = None
    """Mamba 2: groups of B and C in the whole model, as its config says; None: it does not."""

    @property
    def channel_dim(self) -> int:
        """The dimension of a convolution state that counts channels."""
        return 0 if self.conv_dim_first else 1

    def conv(self, name: str, *parts: Part) -> Axis:
        """A convolution state whose channels are `parts`."""
        return Axis(name, self.channel_dim, parts)

    def heads(self, name: str, shape: Shape, part: str = "heads") -> Axis:
        """A state whose first dimension is split evenly."""
        return Axis(name, 0, (_split(part, shape[0], self.tp_size),))


def _mamba1(s: StateShapes) -> list[Axis]:
    conv, ssm = s.shapes
    return [
        s.conv("conv", _split("x", conv[s.channel_dim], s.tp_size)),
        s.heads("ssm", ssm, "channels"),
    ]


def _mamba2(s: StateShapes) -> list[Axis]:
    conv, ssm, *ring = s.shapes
    heads, head_dim, state_size = ssm
    inner = heads * head_dim
    double, uneven = divmod(conv[s.channel_dim] - inner, 2)
    local_groups, odd = divmod(double, state_size)
    if uneven or odd or local_groups < 1:
        raise LayoutError(
            f"Mamba 2 convolution of {conv[s.channel_dim]} channels is not x ({inner}) + B + C with groups "
            f"of {state_size}"
        )
    n_groups = _mamba2_groups(local_groups, s)
    x = _split("x", inner, s.tp_size)
    if n_groups is None:
        conv_axis = Axis("conv", opaque=True)
    else:
        size = n_groups * state_size
        b, c = (Part(name=n, size=size, rule=PartRule.GROUPED, granules=n_groups) for n in ("B", "C"))
        conv_axis = s.conv("conv", x, b, c)
    axes = [conv_axis, s.heads("ssm", ssm)]
    if ring:
        x_ring, dt_ring, b_ring = ring
        groups = (Part(name="groups", size=n_groups or 1, rule=PartRule.GROUPED, granules=n_groups or 1),)
        axes += [s.heads("ring_x", x_ring), s.heads("ring_dt", dt_ring)]
        axes.append(Axis("ring_b", 0, groups) if n_groups and b_ring else Axis("ring_b", opaque=True))
    return axes


def _mamba2_groups(local_groups: int, s: StateShapes) -> int | None:
    """Groups of B and C in the whole model; None when it cannot be told.

    vLLM splits groups over ranks where it can; a single group is copied to every rank. One group here
    can therefore be one of `tp_size`, or the only one.
    """
    if s.tp_size == 1 or local_groups > 1:
        return local_groups * s.tp_size
    return s.n_groups if s.n_groups in (1, s.tp_size) else None


def _gated_delta(s: StateShapes) -> list[Axis]:
    convs = [shape for shape in s.shapes if len(shape) == 2]
    matrices = s.shapes[len(convs) :]
    if not matrices or any(len(shape) != 3 for shape in matrices):
        raise LayoutError(f"gated delta net: states {s.shapes} are not convolutions and then head matrices")
    heads, value_dim, _ = matrices[0]
    axes: list[Axis] = []
    if len(convs) == 1:
        value = heads * value_dim
        key, uneven = divmod(convs[0][s.channel_dim] - value, 2)
        if uneven or key < 1:
            raise LayoutError(
                f"gated delta net: convolution of {convs[0][s.channel_dim]} channels is not Q + K + V with "
                f"V of {value} channels"
            )
        axes.append(
            s.conv(
                "conv",
                _split("Q", key, s.tp_size),
                _split("K", key, s.tp_size),
                _split("V", value, s.tp_size),
            )
        )
    elif len(convs) == 3:
        axes += [
            s.conv(f"conv_{name.lower()}", _split(name, conv[s.channel_dim], s.tp_size))
            for name, conv in zip("QKV", convs, strict=True)
        ]
    else:
        raise LayoutError(f"gated delta net: {len(convs)} convolution states; expected one (Q|K|V) or three")
    names = ("matrix", *(f"record_{number}" for number in range(1, len(matrices))))
    axes += [s.heads(name, shape) for name, shape in zip(names, matrices, strict=True)]
    return axes


def _short_conv(s: StateShapes) -> list[Axis]:
    (conv,) = s.shapes
    return [s.conv("conv", _split("x", conv[s.channel_dim], s.tp_size))]


def _linear(s: StateShapes) -> list[Axis]:
    (matrix,) = s.shapes
    return [s.heads("matrix", matrix)]


_FAMILIES: dict[str, tuple[Callable[[StateShapes], list[Axis]], tuple[int, ...], tuple[int, ...]]] = {
    "MAMBA1": (_mamba1, (2,), (2, 2)),
    "MAMBA2": (_mamba2, (2, 5), (2, 3, 3, 2, 3)),
    "GDN_ATTN": (_gated_delta, (2, 4), ()),
    "SHORT_CONV": (_short_conv, (1,), (2,)),
    "LINEAR": (_linear, (1,), (3,)),
}
"""vLLM's `mamba_type` -> its rule, how many states it may have, and how many dimensions each has."""


def state_axes(mamba_type: str, replicated: bool, states: StateShapes) -> list[Axis]:
    """How each state of a recurrent layer lies over ranks, in page order.

    Raises LayoutError for a `mamba_type`, or a set of shapes, that the table does not know.
    """
    if mamba_type not in _FAMILIES:
        raise LayoutError(
            f"recurrent layers of type {mamba_type!r} are not supported; known: {', '.join(_FAMILIES)}"
        )
    rule, counts, ranks = _FAMILIES[mamba_type]
    if len(states.shapes) not in counts or any(
        len(shape) != rank for shape, rank in zip(states.shapes, ranks, strict=False)
    ):
        raise LayoutError(f"{mamba_type} layer with states {states.shapes}: not a known set of states")
    axes = rule(states)
    return [Axis(axis.name) for axis in axes] if replicated else axes


_BACKENDS = "vllm.v1.attention.backends."

HEAD_ROWS = frozenset(
    _BACKENDS + name
    for name in (
        "flash_attn.FlashAttentionBackend",
        "flash_attn_diffkv.FlashAttentionDiffKVBackend",
        "flashinfer.FlashInferBackend",
        "flex_attention.FlexAttentionBackend",
        "hpc_attn.HpcAttentionBackend",
        "rocm_aiter_fa.AiterFlashAttentionBackend",
        "rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend",
        "triton_attn.TritonAttentionBackend",
        "triton_attn_diffkv.TritonAttentionDiffKVBackend",
    )
)
"""Backends that keep, per head and token, one run of K and V: the page is `[heads, tokens, K|V]` in
whatever order the cache layout gives."""

HEAD_PACKED = frozenset({_BACKENDS + "cpu_attn.CPUAttentionBackend"})
"""Backends that pack a head's tokens for the processor: the smallest unit is a head."""

SIDE_ROWS = frozenset(
    {
        _BACKENDS + "b12x.B12xPagedAttentionBackend",
        _BACKENDS + "rocm_segmented_attn.RocmSegmentedAttentionBackend",
    }
)
"""Backends that keep K and V apart, as the page's two head slots; each is `[tokens, heads, K or V]`."""

SIDE_PACKED = frozenset({_BACKENDS + "rocm_attn.RocmAttentionBackend"})
"""Backends with K and V as two head slots, in each head after head, a head's tokens packed."""


def attention_axis(
    backend: str, local_heads: int, head_slots: int | None, total_heads: int | None, latent: bool
) -> Axis:
    """How an attention layer's page `[kernel blocks, heads, states, content]` lies over ranks.

    `backend` is the class's dotted path; `head_slots` the page's second dimension where the backend chose
    it (vLLM's `num_head_slots`), None: one slot per head of this rank. `total_heads` the KV heads of the
    whole model (None: unknown). A `latent` (MLA) is the same on every rank.
    """
    if latent:
        return Axis("latent") if (head_slots or local_heads) == 1 else Axis("page", opaque=True)
    if total_heads is None:
        return Axis("page", opaque=True)
    heads = (Part(name="heads", size=total_heads, rule=PartRule.GROUPED, granules=total_heads),)
    if head_slots is None and backend in HEAD_ROWS | HEAD_PACKED:
        return Axis("heads", 1, heads, strided=backend in HEAD_ROWS)
    if head_slots == 2 and backend in SIDE_ROWS | SIDE_PACKED:
        rows = backend in SIDE_ROWS
        return Axis("heads", 3 if rows else 2, heads, strided=rows, sides=True)
    return Axis("page", opaque=True)


Loops = tuple[tuple[int, int, int], tuple[int, int, int], int]
"""Shape `[kernel blocks, slots, states]`, strides and the size of the innermost run, in bytes."""


def side_loops(axis: Axis, local_heads: int, page: Loops) -> tuple[Shape, Shape, int]:
    """`page` with the heads that lie inside its slots as a dimension of their own.

    Rows: `[kernel blocks, 2, states, heads]`; packed: `[kernel blocks, 2, heads]`, all states of a head
    one run. Any other axis: unchanged.
    """
    shape, strides, run_bytes = page
    if not axis.sides:
        return page
    (kernel_blocks, slots, states), (per_kernel_block, per_slot, per_state) = shape, strides
    head_bytes = run_bytes // local_heads
    if axis.strided:
        inside = (kernel_blocks, slots, states, local_heads)
        return inside, (per_kernel_block, per_slot, per_state, head_bytes), head_bytes
    head_bytes *= states
    return (kernel_blocks, slots, local_heads), (per_kernel_block, per_slot, head_bytes), head_bytes


def total_kv_heads(local: int, tp_size: int, configured: int | None) -> int | None:
    """KV heads of the whole model, from what one rank holds; None when it cannot be told.

    Past one head per rank vLLM copies heads: one local head can be one of `tp_size`, or a copy.
    """
    if tp_size == 1 or local > 1:
        return local * tp_size
    if configured is not None and configured <= tp_size and tp_size % configured == 0:
        return configured
    return None


def inner_loops(
    shape: Sequence[int], strides_bytes: Sequence[int], run_bytes: int, axis: Axis
) -> tuple[tuple[Loop, ...], int, int | None]:
    """Loops, unit size and which loop is split, for a tensor `[*shape]` of runs of `run_bytes`.

    Dimensions that continue the run inside them become part of the unit, unless `axis` is strided.
    """
    loops = [Loop(count=c, stride_bytes=b) for c, b in zip(shape, strides_bytes, strict=True)]
    number = axis.dim
    if axis.strided:
        return tuple(loops), run_bytes, number
    while (
        loops and len(loops) - 1 != number and (loops[-1].count == 1 or loops[-1].stride_bytes == run_bytes)
    ):
        run_bytes *= loops.pop().count
    return tuple(loops), run_bytes, number
