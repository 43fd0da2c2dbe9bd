"""Random layers of every kind, and one fixed layer of each, for the proofs beside this file."""

from collections.abc import Callable
from math import lcm

from hypothesis import strategies as st

from stateferry.layout.plan import make_plan
from stateferry.layout.spec import GroupKind
from stateferry.testing.packed import Layers, Packed, Packing
from stateferry.testing.proof import Handover
from stateferry.testing.unsharded import (
    B12X,
    CPU,
    ROCM,
    Attention,
    Layer,
    Slots,
    gated_delta,
    latent_attention,
    linear_attention,
    mamba1,
    mamba2,
    replicated,
    short_convolution,
)

SIZES = (1, 2, 3, 4, 6, 8)
UNKNOWN = "somebody.elses.Backend"

Make = Callable[[st.DrawFn, int, int, bool], Layer]
"""(draw, consumer size, producer size, dimension first) -> a layer that divides over both sizes."""


def _few(draw: st.DrawFn, most: int = 2) -> int:
    return draw(st.integers(1, most))


def _widths(draw: st.DrawFn) -> tuple[int, int]:
    """Of the numbers of the first state and of the others: they need not be the same."""
    return draw(st.sampled_from([(1, 1), (2, 4), (2, 2), (1, 4)]))


def _heads(draw: st.DrawFn, ours: int, theirs: int) -> int:
    """KV heads that are split, or copied where there are fewer than ranks."""
    sizes = (ours, theirs)
    return draw(st.sampled_from([n for n in range(1, 25) if all(n % s == 0 or s % n == 0 for s in sizes)]))


def _mamba2(ring: bool, single: bool) -> Make:
    def make(draw: st.DrawFn, ours: int, theirs: int, dim_first: bool) -> Layer:
        common = lcm(ours, theirs)
        groups = 1 if single else common * _few(draw)
        heads = common * groups // (1 if groups % common else common)
        length = draw(st.integers(1, 3)) if ring else 0
        sizes = heads, _few(draw), groups, _few(draw, 3), _few(draw, 3)
        return mamba2(*sizes, dim_first, _widths(draw), ring=length)

    return make


def _gated(records: bool = False, apart: bool = False, key_like_value: bool = False) -> Make:
    def make(draw: st.DrawFn, ours: int, theirs: int, dim_first: bool) -> Layer:
        keys = lcm(ours, theirs)
        values = keys if key_like_value else keys * _few(draw)
        dims = (2, 2) if key_like_value else (_few(draw), _few(draw, 3))
        record = _few(draw) if records else 0
        return gated_delta(keys, values, *dims, _few(draw, 3), dim_first, _widths(draw), record, apart)

    return make


KINDS: dict[str, Make] = {
    "mamba 1": lambda d, o, t, first: mamba1(lcm(o, t) * _few(d), _few(d, 3), _few(d, 3), first, _widths(d)),
    "mamba 2, one group on all ranks": _mamba2(ring=False, single=True),
    "mamba 2, groups split": _mamba2(ring=False, single=False),
    "mamba 2 with a replay ring": _mamba2(ring=True, single=False),
    "gated delta net": _gated(),
    "gated delta net with records": _gated(records=True),
    "kda": _gated(key_like_value=True),
    "kda in four tensors": _gated(key_like_value=True, apart=True),
    "short convolution": lambda d, o, t, first: short_convolution(lcm(o, t) * _few(d), _few(d, 4), first, 2),
    "linear attention": lambda d, o, t, _: linear_attention(lcm(o, t), _few(d, 3), 4),
    "state on every rank": lambda d, o, t, first: replicated(_few(d, 7), _few(d, 3), first, 2),
    "attention": lambda d, o, t, _: Attention(_heads(d, o, t), 4, _few(d, 4), d(st.sampled_from([1, 2]))),
    "attention packed per head": lambda d, o, t, _: Attention(_heads(d, o, t), 4, _few(d, 4), 2, backend=CPU),
    "attention, K and V apart, packed per head": lambda d, o, t, _: Attention(
        _heads(d, o, t), 4, _few(d, 4), 2, slots=Slots.SIDES_PACKED, backend=ROCM
    ),
    "attention, K and V apart, token by token": lambda d, o, t, _: Attention(
        _heads(d, o, t), 4, _few(d, 4), 2, slots=Slots.SIDES_ROWS, backend=B12X
    ),
    "latents": lambda d, o, t, _: latent_attention(4, _few(d, 6), d(st.sampled_from([1, 2]))),
}
"""Every kind that goes between any two sizes that divide."""

EQUAL_ONLY: dict[str, Make] = {
    "attention, K heads and then V heads": lambda d, o, t, _: Attention(
        _heads(d, o, o), 4, 2, 1, slots=Slots.K_HEADS_THEN_V_HEADS
    ),
    "attention of a stranger": lambda d, o, t, _: Attention(_heads(d, o, o), 4, 3, 1, backend=UNKNOWN),
}
"""Kinds whose page is not known inside."""


@st.composite
def handovers(draw: st.DrawFn, kind: str) -> Handover:
    """Two engines of random sizes with layers of `kind` among groups of others, any packing."""
    equal = kind in EQUAL_ONLY
    ours = draw(st.sampled_from(SIZES))
    theirs = ours if equal else draw(st.sampled_from(SIZES))
    dim_first = draw(st.booleans())
    make = {**KINDS, **EQUAL_ONLY}[kind]
    layers = tuple(make(draw, ours, theirs, dim_first) for _ in range(_few(draw)))
    other = Layers((linear_attention(lcm(ours, theirs), 1, 1),) * _few(draw, 3))
    place = draw(st.sampled_from(GroupKind)) if isinstance(layers[0], Attention) else GroupKind.STATE
    groups = (other, Layers(layers, place)) if draw(st.booleans()) else (Layers(layers, place), other)
    packed_heads = isinstance(layers[0], Attention) and layers[0].backend == CPU
    tokens_first = draw(st.tuples(st.booleans(), st.booleans()))
    if equal:
        tokens_first = (tokens_first[0], tokens_first[0])
    elif packed_heads:
        tokens_first = (False, False)
    kernel_blocks = draw(st.sampled_from([1, 2, 4]))
    packings = [
        Packing(
            blocks=draw(st.integers(4, 6)),
            block_outermost=draw(st.booleans()),
            tokens_first=first,
            kernel_blocks=kernel_blocks,
            padding_bytes=draw(st.sampled_from([0, 0, 5])),
            lead_bytes=draw(st.sampled_from([0, 3])),
        )
        for first in tokens_first
    ]
    count = draw(st.integers(1, 3))
    ids = st.lists(st.integers(0, 3), min_size=count, max_size=count, unique=True)
    return Handover(
        Packed(groups, dim_first),
        ours,
        theirs,
        draw(ids),
        draw(ids),
        group=next(i for i, group in enumerate(groups) if group.layers is layers),
        consumer_packing=packings[0],
        producer_packing=packings[1],
    )


def fixed(dim_first: bool, units: int = 24) -> dict[str, Layer]:
    """One layer of each kind that divides over every size that divides `units`."""
    n, two = units, 2 * units
    return {
        "mamba 1": mamba1(n, 2, 3, dim_first, (2, 4)),
        "mamba 2, one group on all ranks": mamba2(n, 2, 1, 5, 3, dim_first, (2, 4)),
        "mamba 2, groups split": mamba2(two, 1, n, 3, 3, dim_first, (2, 4)),
        "mamba 2 with a replay ring": mamba2(n, 1, n, 2, 3, dim_first, (2, 4), ring=2),
        "gated delta net": gated_delta(n, two, 2, 3, 3, dim_first, (2, 4)),
        "gated delta net with records": gated_delta(n, n, 2, 3, 4, dim_first, (2, 2), record=2),
        "kda": gated_delta(n, n, 2, 2, 3, dim_first, (2, 4)),
        "kda in four tensors": gated_delta(n, n, 2, 2, 3, dim_first, (2, 4), apart=True),
        "short convolution": short_convolution(n, 3, dim_first, 2),
        "linear attention": linear_attention(n, 2, 4),
        "state on every rank": replicated(7, 3, dim_first, 2),
        "attention": Attention(n, 2, 3, 2),
        "attention, one head on all ranks": Attention(1, 4, 3, 1),
        "attention packed per head": Attention(n, 2, 3, 1, backend=CPU),
        "attention, K and V apart, packed per head": Attention(
            n, 2, 3, 1, slots=Slots.SIDES_PACKED, backend=ROCM
        ),
        "attention, K and V apart, token by token": Attention(
            n, 2, 3, 1, slots=Slots.SIDES_ROWS, backend=B12X
        ),
        "latents": latent_attention(4, 9, 1),
    }


def fixed_handover(kind: str, ours: int, theirs: int, dim_first: bool = False, units: int = 24) -> Handover:
    """The fixed layer of a kind, twice in its group, between two engines that pack differently."""
    layer = fixed(dim_first, units)[kind]
    place = GroupKind.ATTENTION if isinstance(layer, Attention) else GroupKind.STATE
    first = isinstance(layer, Attention) and layer.backend != CPU
    return Handover(
        Packed((Layers((layer,) * 2, place),), dim_first),
        ours,
        theirs,
        local_blocks=[3, 1],
        remote_blocks=[0, 2],
        consumer_packing=Packing(blocks=4, block_outermost=True, padding_bytes=4),
        producer_packing=Packing(blocks=5, tokens_first=first, lead_bytes=3),
    )


def uneven_loads(kind: str) -> list[str]:
    """Where producer ranks are not asked for about as many bytes each: many layers, or many groups."""
    layer = fixed(True)[kind]
    found = []
    for groups, layers in ((1, 16), (16, 1), (2, 8)):
        model = Packed(tuple(Layers((layer,) * layers) for _ in range(groups)), conv_dim_first=True)
        for ours, theirs in ((1, 8), (2, 8), (4, 8), (1, 2)):
            asked = _bytes_asked(model, ours, theirs)
            if max(asked) - min(asked) > max(asked) / 4:
                found.append(f"{groups} groups of {layers}, {theirs} to {ours} ranks: {asked}")
    return found


def _bytes_asked(model: Packed, ours: int, theirs: int) -> list[int]:
    """Bytes that each producer rank is asked for by all consumer ranks together."""
    asked = [0] * theirs
    for rank in range(ours):
        consumer = model.layout(rank, ours, Packing())
        for source in range(theirs):
            plan = make_plan(consumer, model.layout(source, theirs, Packing()))
            asked[source] += sum(plan.group_bytes(group) for group in range(len(model.groups)))
    return asked
