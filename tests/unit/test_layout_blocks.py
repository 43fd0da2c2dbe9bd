"""Arithmetic on pieces and on block positions."""

import random

import numpy as np
import pytest

from stateferry.errors import LayoutError
from stateferry.layout.blocks import concatenate, merge, needed_blocks, pair
from stateferry.layout.spec import Group, GroupKind, LayerCache, Pieces


def pieces(*rows: tuple[int, int, int, int, int]) -> Pieces:
    """From (local region, local offset, remote region, remote offset, size)."""
    table = np.array(rows, np.int64).reshape(-1, 5)
    return Pieces(table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4])


def rows(value: Pieces) -> list[tuple[int, ...]]:
    columns = (
        value.local_regions,
        value.local_offsets,
        value.remote_regions,
        value.remote_offsets,
        value.sizes,
    )
    return [tuple(int(column[i]) for column in columns) for i in range(len(value))]


def copied(value: Pieces) -> dict[tuple[int, int], tuple[int, int]]:
    """Local byte -> remote byte."""
    found = {}
    for lr, lo, rr, ro, size in rows(value):
        found.update({(lr, lo + i): (rr, ro + i) for i in range(size)})
    return found


def group(kind: GroupKind, block_tokens: int = 4, window: int = 0) -> Group:
    layer = LayerCache(name="model.layers.7", tensors=())
    return Group(kind=kind, block_tokens=block_tokens, layers=(layer,), window_tokens=window)


def test_merge_joins_only_what_is_adjacent_on_both_sides() -> None:
    value = pieces(
        (0, 20, 0, 120, 10),
        (0, 10, 0, 110, 10),
        (0, 30, 0, 140, 5),  # a gap on the remote side
        (0, 35, 1, 145, 5),  # another remote region
        (1, 40, 1, 150, 5),  # another local region
        (0, 0, 0, 100, 9),  # a gap on the local side
    )
    merged = merge(value)
    assert rows(merged) == [
        (0, 0, 0, 100, 9),
        (0, 10, 0, 110, 20),
        (0, 30, 0, 140, 5),
        (0, 35, 1, 145, 5),
        (1, 40, 1, 150, 5),
    ]
    assert merged.total_bytes == value.total_bytes


def test_merging_keeps_every_byte() -> None:
    rng = random.Random(5)
    for _ in range(50):
        lengths = [rng.randint(1, 6) for _ in range(12)]
        spots = [(rng.randint(0, 1), rng.randint(0, 1)) for _ in lengths]
        ends = {("l", 0): 0, ("l", 1): 0, ("r", 0): 0, ("r", 1): 0}
        made = []
        for size, (lr, rr) in zip(lengths, spots, strict=True):
            gap_l, gap_r = rng.choice((0, 0, 2)), rng.choice((0, 0, 3))
            lo, ro = ends["l", lr] + gap_l, ends["r", rr] + gap_r
            ends["l", lr], ends["r", rr] = lo + size, ro + size
            made.append((lr, lo, rr, ro, size))
        rng.shuffle(made)
        value = pieces(*made)
        assert copied(merge(value)) == copied(value)
        assert merge(value).total_bytes == value.total_bytes


def test_nothing_stays_nothing() -> None:
    empty = concatenate([])
    assert len(empty) == len(merge(empty)) == 0
    assert rows(concatenate([pieces((0, 1, 0, 2, 3)), empty, pieces((1, 1, 1, 1, 1))])) == [
        (0, 1, 0, 2, 3),
        (1, 1, 1, 1, 1),
    ]


@pytest.mark.parametrize(
    ("local", "total", "expected"),
    [
        (0, 0, []),
        (0, 1, [0]),
        (0, 4, [0]),
        (0, 5, [0, 1]),
        (4, 5, [1]),
        (4, 9, [1, 2]),
        (5, 5, []),
        (8, 8, []),
    ],
)
def test_attention_needs_the_blocks_of_tokens_not_held(local: int, total: int, expected: list[int]) -> None:
    assert list(needed_blocks(group(GroupKind.ATTENTION), local, total)) == expected


@pytest.mark.parametrize(
    ("window", "local", "total", "expected"),
    [
        (4, 0, 7, [1]),  # vLLM's own example: the token at 7 sees 4 to 6 and itself
        (4, 0, 8, [1]),
        (5, 0, 8, [1]),
        (6, 0, 8, [0, 1]),
        (4, 8, 11, [2]),
        (100, 4, 11, [1, 2]),
        (1, 0, 8, []),  # sees only itself
    ],
)
def test_window_needs_what_the_next_token_sees(
    window: int, local: int, total: int, expected: list[int]
) -> None:
    assert list(needed_blocks(group(GroupKind.WINDOW, window=window), local, total)) == expected


@pytest.mark.parametrize(("total", "expected"), [(0, []), (1, [0]), (4, [0]), (5, [1]), (8, [1]), (9, [2])])
def test_state_is_the_column_of_the_last_token(total: int, expected: list[int]) -> None:
    """F3.3: W3, at a block border."""
    for local in (0, total):
        assert list(needed_blocks(group(GroupKind.STATE), local, total)) == expected


def test_more_held_than_there_is_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"local_tokens 5 is outside 0\.\.total_tokens 4"):
        needed_blocks(group(GroupKind.ATTENTION), 5, 4)


def test_pairs_by_position_and_not_by_list_length() -> None:
    """The producer's list starts at position 2; its last block does not pair with our last. F3.6."""
    ours, theirs = pair(group(GroupKind.ATTENTION), range(2, 4), [11, 12, 13, 14], [23, 24, 25], 2)
    assert ours.tolist() == [13, 14]
    assert theirs.tolist() == [23, 24]
    assert ours.dtype == theirs.dtype == np.int64


def test_state_pairs_its_column_among_null_blocks_and_scratch_slots() -> None:
    """F3.3."""
    positions = needed_blocks(group(GroupKind.STATE), 0, 8)
    ours, theirs = pair(group(GroupKind.STATE), positions, [0, 31, 40, 41], [0, 18, 50, 51], 0)
    assert (ours.tolist(), theirs.tolist()) == ([31], [18])


@pytest.mark.parametrize(
    ("local", "remote", "first", "text"),
    [
        ([1, 0, 3], [4, 5, 6], 0, "position 1 is needed, but this engine's table has the null block"),
        ([1, 2, 3], [4, 5, 0], 0, "position 2 is needed, but the producer's table has the null block"),
        ([1, 2], [4, 5, 6], 0, "position 2 is needed, but this engine's table covers positions 0 to 1"),
        ([1, 2, 3], [5, 6], 2, "position 1 is needed, but the producer's table covers positions 2 to 3"),
        ([1, 2, 3], [4], 0, "position 1 is needed, but the producer's table covers positions 0 to 0"),
    ],
)
def test_a_missing_block_is_named(local: list[int], remote: list[int], first: int, text: str) -> None:
    """F3.6."""
    with pytest.raises(LayoutError, match=rf"attention group of model\.layers\.7: {text}"):
        pair(group(GroupKind.ATTENTION), range(1, 3), local, remote, first)


def test_nothing_needed_reads_no_table() -> None:
    ours, theirs = pair(group(GroupKind.ATTENTION), range(3, 3), [], [], 9)
    assert len(ours) == len(theirs) == 0


def test_a_group_without_layers_is_named_by_its_kind() -> None:
    bare = Group(kind=GroupKind.STATE, block_tokens=4, layers=())
    with pytest.raises(LayoutError, match=r"^state group: position 0"):
        pair(bare, range(1), [], [1], 0)
