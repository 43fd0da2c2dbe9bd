"""The tables of model families and attention backends, without vLLM."""

import pytest

from stateferry.errors import LayoutError
from stateferry.layout.shard import intervals
from stateferry.layout.spec import PartRule
from stateferry.testing.unsharded import B12X
from stateferry.vllm.kv_tables import (
    HEAD_PACKED,
    HEAD_ROWS,
    SIDE_PACKED,
    SIDE_ROWS,
    Axis,
    StateShapes,
    attention_axis,
    inner_loops,
    side_loops,
    state_axes,
    total_kv_heads,
)

FLASH, CPU = sorted(HEAD_ROWS)[0], next(iter(HEAD_PACKED))


def shapes(
    *shapes: tuple[int, ...], tp: int = 2, dim_first: bool = True, groups: int | None = None
) -> StateShapes:
    return StateShapes(shapes=shapes, tp_size=tp, conv_dim_first=dim_first, n_groups=groups)


def parts(axis: Axis) -> list[tuple[str, int]]:
    return [(part.name, part.size) for part in axis.parts]


def test_mamba1_splits_channels_of_both_states() -> None:
    """F2.7."""
    conv, ssm = state_axes("MAMBA1", False, shapes((8, 3), (8, 16)))
    assert (conv.dim, parts(conv)) == (0, [("x", 16)])
    assert (ssm.dim, parts(ssm)) == (0, [("channels", 16)])


@pytest.mark.parametrize("dim_first", [True, False])
def test_gated_delta_net_is_q_k_v(dim_first: bool) -> None:
    """F2.7."""
    window = (64, 3) if dim_first else (3, 64)
    conv, matrix = state_axes("GDN_ATTN", False, shapes(window, (4, 8, 16), dim_first=dim_first))
    assert conv.dim == (0 if dim_first else 1)
    assert parts(conv) == [("Q", 32), ("K", 32), ("V", 64)]
    assert parts(matrix) == [("heads", 8)]
    assert all(part.rule is PartRule.SPLIT for part in conv.parts)


def test_kda_may_come_as_four_tensors_or_with_records() -> None:
    four = state_axes("GDN_ATTN", False, shapes((8, 3), (8, 3), (8, 3), (2, 4, 4)))
    assert [axis.name for axis in four] == ["conv_q", "conv_k", "conv_v", "matrix"]
    assert [parts(axis) for axis in four[:3]] == [[("Q", 16)], [("K", 16)], [("V", 16)]]
    records = state_axes("GDN_ATTN", False, shapes((24, 3), (2, 4, 4), (2, 5, 4), (2, 5, 8)))
    assert [axis.name for axis in records] == ["conv", "matrix", "record_1", "record_2"]


@pytest.mark.parametrize(
    ("tp", "local_groups", "configured", "expected"),
    [
        (1, 4, None, 4),  # one rank holds all groups
        (2, 2, None, 4),  # more than one group here: they are split
        (2, 1, 2, 2),  # one of two
        (2, 1, 1, 1),  # the only one, copied
        (2, 1, None, None),  # cannot be told
        (4, 1, 2, None),  # vLLM does not run this: do not guess
    ],
)
def test_mamba2_groups(tp: int, local_groups: int, configured: int | None, expected: int | None) -> None:
    """F2.7."""
    conv_channels = 4 * 8 + 2 * local_groups * 16
    conv, ssm = state_axes("MAMBA2", False, shapes((conv_channels, 3), (4, 8, 16), tp=tp, groups=configured))
    assert parts(ssm) == [("heads", 4 * tp)]
    if expected is None:
        assert conv == Axis("conv", opaque=True)
        return
    assert parts(conv) == [("x", 32 * tp), ("B", 16 * expected), ("C", 16 * expected)]
    held = [found.size for found in intervals(conv.parts, tp - 1, tp)]
    assert held == [32, 16 * local_groups, 16 * local_groups]


def test_mamba2_ring_of_recent_inputs() -> None:
    ring = ((4, 16, 8), (4, 16), (2, 16, 16))
    axes = state_axes("MAMBA2", False, shapes((32 + 64, 3), (4, 8, 16), *ring))
    assert [axis.name for axis in axes] == ["conv", "ssm", "ring_x", "ring_dt", "ring_b"]
    assert parts(axes[4]) == [("groups", 4)]
    unknown = state_axes("MAMBA2", False, shapes((32 + 32, 3), (4, 8, 16), *ring[:2], (1, 16, 16)))
    assert unknown[4].opaque


def test_single_state_families() -> None:
    assert parts(state_axes("SHORT_CONV", False, shapes((8, 3)))[0]) == [("x", 16)]
    assert parts(state_axes("LINEAR", False, shapes((4, 8, 8)))[0]) == [("heads", 8)]


def test_state_on_every_rank_has_no_axis() -> None:
    assert state_axes("SHORT_CONV", True, shapes((8, 3))) == [Axis("conv")]


@pytest.mark.parametrize(
    ("family", "states", "text"),
    [
        ("HYENA", ((4, 4),), "'HYENA' are not supported"),
        ("MAMBA1", ((8, 3),), "not a known set"),
        ("MAMBA1", ((8, 3), (8, 16), (8, 16)), "not a known set"),
        ("MAMBA1", ((8, 3), (8, 16, 2)), "not a known set"),
        ("MAMBA2", ((33, 3), (4, 8, 16)), r"not x \(32\) \+ B \+ C"),
        ("MAMBA2", ((32, 3), (4, 8, 16)), r"not x \(32\) \+ B \+ C"),
        ("MAMBA2", ((32 + 24, 3), (4, 8, 16)), r"not x \(32\) \+ B \+ C"),
        ("GDN_ATTN", ((31, 3), (2, 8, 16)), r"not Q \+ K \+ V"),
        ("GDN_ATTN", ((16, 3), (2, 8, 16)), r"not Q \+ K \+ V"),
        ("GDN_ATTN", ((32, 3), (16, 3)), "not convolutions and then head matrices"),
        ("GDN_ATTN", ((32, 3), (16, 3), (2, 4, 4), (2, 4, 4)), "2 convolution states"),
        ("SHORT_CONV", ((4, 4, 4),), "not a known set"),
        ("LINEAR", ((4, 4),), "not a known set"),
    ],
)
def test_states_that_the_table_does_not_know(
    family: str, states: tuple[tuple[int, ...], ...], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        state_axes(family, False, shapes(*states))


def test_attention_heads_are_cut_only_for_known_pages() -> None:
    heads = attention_axis(FLASH, 2, None, 4, latent=False)
    assert (heads.dim, parts(heads), heads.strided) == (1, [("heads", 4)], True)
    packed = attention_axis(CPU, 2, None, 4, latent=False)
    assert (packed.dim, parts(packed), packed.strided) == (1, [("heads", 4)], False)
    assert attention_axis("x.FlashAttentionBackend", 2, None, 4, latent=False).opaque, (
        "same name, other class"
    )
    assert attention_axis(FLASH, 2, 4, 4, latent=False).opaque, "slots are not heads"
    assert attention_axis(FLASH, 1, None, None, latent=False).opaque, "heads unknown"


def test_two_slots_of_two_heads_are_not_taken_for_a_slot_a_head() -> None:
    """With two KV heads a rank the page has two slots either way."""
    for backend in (*HEAD_ROWS, *HEAD_PACKED):
        assert attention_axis(backend, 2, 2, 4, latent=False).opaque
    for backend in (*SIDE_ROWS, *SIDE_PACKED):
        assert attention_axis(backend, 2, 2, 4, latent=False).sides
        assert attention_axis(backend, 2, None, 4, latent=False).opaque
        assert attention_axis(backend, 2, 4, 4, latent=False).opaque


def test_heads_inside_the_slots_of_k_and_v() -> None:
    page = (2, 2, 8), (960, 480, 60), 60  # two kernel blocks of 8 tokens, 3 heads of 20 bytes
    (rows,), (packed,) = SIDE_ROWS & {B12X}, SIDE_PACKED
    loops = side_loops(attention_axis(rows, 3, 2, 6, latent=False), 3, page)
    assert loops == ((2, 2, 8, 3), (960, 480, 60, 20), 20)
    loops = side_loops(attention_axis(packed, 3, 2, 6, latent=False), 3, page)
    assert loops == ((2, 2, 3), (960, 480, 160), 160)
    assert side_loops(Axis("page", opaque=True), 3, page) == page


def test_latents_are_on_every_rank() -> None:
    assert attention_axis("any", 1, None, None, latent=True) == Axis("latent")
    assert attention_axis("any", 1, 2, None, latent=True).opaque


@pytest.mark.parametrize(
    ("local", "tp", "configured", "total"),
    [
        (4, 1, None, 4),
        (4, 1, 8, 4),
        (2, 4, None, 8),
        (1, 4, 4, 4),
        (1, 4, 2, 2),
        (1, 4, 1, 1),
        (1, 4, None, None),
        (1, 4, 3, None),
        (1, 4, 8, None),
    ],
)
def test_heads_of_the_whole_model(local: int, tp: int, configured: int | None, total: int | None) -> None:
    assert total_kv_heads(local, tp, configured) == total


def test_inner_loops_take_dense_dimensions_into_the_unit() -> None:
    loops, unit, number = inner_loops((1, 2, 4), (64, 32, 8), 8, Axis("page", opaque=True))
    assert (loops, unit, number) == ((), 64, None)
    loops, unit, number = inner_loops((1, 2, 4), (64, 32, 8), 8, Axis("heads", 1))
    assert ([(p.count, p.stride_bytes) for p in loops], unit, number) == ([(1, 64), (2, 32)], 32, 1)
    loops, unit, number = inner_loops((1, 2, 4), (64, 8, 16), 8, Axis("heads", 1, strided=True))
    assert ([p.count for p in loops], unit, number) == ([1, 2, 4], 8, 1)
    loops, unit, _ = inner_loops((1, 2, 4), (64, 100, 8), 8, Axis("page", opaque=True))
    assert ([(p.count, p.stride_bytes) for p in loops], unit) == ([(1, 64), (2, 100)], 32)
