"""Parts of an axis over ranks: the three rules, who reads whom, and what is refused."""

import msgspec
import pytest

from stateferry.errors import LayoutError
from stateferry.layout.reference import meanings, units_held
from stateferry.layout.shard import Interval, Overlap, Turn, copies, intervals, iter_tensors, overlaps
from stateferry.layout.spec import Part, PartRule
from stateferry.testing.caches import Model, Tensor

X = Part(name="x", size=8, rule=PartRule.SPLIT)
B = Part(name="B", size=6, rule=PartRule.GROUPED, granules=2)
ALL = Part(name="all", size=5, rule=PartRule.REPLICATED)


def test_a_rank_holds_a_run_of_each_part_one_after_the_other() -> None:
    assert intervals((X, B, ALL), 1, 4) == (
        Interval(start=2, size=2, local=0),
        Interval(start=0, size=3, local=2),
        Interval(start=0, size=5, local=5),
    )
    assert intervals((X, B, ALL), 1, 2)[1] == Interval(start=3, size=3, local=4)


@pytest.mark.parametrize(
    ("part", "size", "count"), [(X, 4, 1), (B, 1, 1), (B, 2, 1), (B, 4, 2), (B, 8, 4), (ALL, 3, 3)]
)
def test_copies_are_counted(part: Part, size: int, count: int) -> None:
    assert copies(part, size) == count


def test_each_reader_of_a_copied_granule_has_its_own_source_where_there_are_enough() -> None:
    """Granule 0 of B lies on producer ranks 0 to 3, and consumer ranks 0 and 1 read it."""
    sources = [
        [rank for rank in range(8) if overlaps((B,), reader, 4, rank, 8, Turn(0, 2))] for reader in range(4)
    ]
    assert sources == [[0], [2], [4], [6]]
    assert [rank for rank in range(8) if overlaps((B,), 0, 4, rank, 8, Turn(1, 2))] == [1]


def test_readers_share_sources_evenly_where_there_are_not_enough() -> None:
    sources = [[rank for rank in range(2) if overlaps((ALL,), reader, 8, rank, 2)] for reader in range(8)]
    assert sources == [[0]] * 4 + [[1]] * 4


def test_equal_ranks_read_themselves_whatever_the_turn() -> None:
    for turn in (Turn(layer, 5, group) for layer in range(5) for group in range(2)):
        for rank in range(4):
            assert [r for r in range(4) if overlaps((X, B, ALL), rank, 4, r, 4, turn)] == [rank]


def test_layers_that_follow_each_other_take_the_same_copy_and_groups_begin_elsewhere() -> None:
    assert [Turn(layer, 6).among(3) for layer in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [Turn(layer, 6, group=2).among(3) for layer in range(6)] == [2, 2, 0, 0, 1, 1]
    assert [Turn(0, 1, group).among(3) for group in range(4)] == [0, 1, 2, 0]
    assert [Turn(layer, 3).among(1) for layer in range(3)] == [0, 0, 0]


def test_overlap_is_where_both_hold_the_same_units() -> None:
    assert overlaps((X, B), 1, 2, 2, 4) == (
        Overlap(local=0, remote=0, size=2),
        Overlap(local=4, remote=2, size=3),
    )
    assert overlaps((X, B), 1, 2, 3, 4) == (Overlap(local=2, remote=0, size=2),)


@pytest.mark.parametrize(
    ("part", "size", "text"),
    [
        (X, 3, r"'x' \(split\): 8 units do not divide over 3 ranks"),
        (X, 16, r"'x' \(split\): 8 units do not divide over 16 ranks"),
        (B, 3, r"'B' \(grouped\): 2 granules of 3 units do not divide over 3 ranks"),
        (
            Part(name="C", size=5, rule=PartRule.GROUPED, granules=2),
            1,
            "'C': 5 units cannot be cut into 2 equal",
        ),
        (Part(name="D", size=0, rule=PartRule.SPLIT), 1, "'D': 0 units cannot be cut"),
        (
            Part(name="E", size=4, rule=PartRule.GROUPED, granules=0),
            1,
            "'E': 4 units cannot be cut into 0",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_name(part: Part, size: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        intervals((part,), 0, size)


def test_the_reference_refuses_the_same() -> None:
    for part, size in ((X, 3), (B, 3), (Part(name="C", size=5, rule=PartRule.GROUPED, granules=2), 1)):
        with pytest.raises(LayoutError, match="do not divide"):
            units_held(part, 0, size)


def test_a_rank_outside_its_count_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"rank 4 is outside 0\.\.3"):
        intervals((X,), 4, 4)


def test_groups_kept_out_have_no_tensors() -> None:
    layout = Model(((Tensor("a", (4,)),),)).layout(0, 1)
    assert [(index, name) for index, name, _ in iter_tensors(layout)] == [(0, "layer0")]
    out = msgspec.structs.replace(layout.groups[0], transfers=False)
    assert list(iter_tensors(msgspec.structs.replace(layout, groups=(out,)))) == []


def test_the_reference_refuses_tensors_that_share_bytes() -> None:
    layout = Model(((Tensor("a", (4,)), Tensor("b", (4,))),)).layout(0, 1)
    a, b = layout.groups[0].layers[0].tensors
    layer = msgspec.structs.replace(
        layout.groups[0].layers[0], tensors=(a, msgspec.structs.replace(b, offset_bytes=2))
    )
    group = msgspec.structs.replace(layout.groups[0], layers=(layer,))
    with pytest.raises(LayoutError, match="share byte"):
        meanings(msgspec.structs.replace(layout, groups=(group,)), 0, [0])
