"""The picture of a block: every byte is in one stretch, and the bar is to scale."""

import random

import msgspec
import pytest

from stateferry.cli.page_picture import WIDTH, layers_drawn, names_of, picture, stretches
from stateferry.layout.spec import CacheTensor, Group, GroupKind, LayerCache, Loop
from stateferry.testing.caches import Model, Tensor


def tensor(name: str, offset: int, size: int, stride: int = 1000) -> CacheTensor:
    return CacheTensor(
        name=name,
        region=0,
        offset_bytes=offset,
        block_stride_bytes=stride,
        block_count=3,
        unit_bytes=size,
        element_bytes=1,
        dtype="uint8",
    )


def group(*layers: tuple[CacheTensor, ...]) -> Group:
    return Group(
        kind=GroupKind.STATE,
        block_tokens=4,
        layers=tuple(LayerCache(name=f"layer{i}", tensors=tensors) for i, tensors in enumerate(layers)),
    )


def bar_of(line: str) -> str:
    return line[14 : 14 + WIDTH]


def test_tensors_gaps_and_padding_in_order() -> None:
    one = group((tensor("conv", 0, 100), tensor("matrix", 250, 500)))
    found = [(s.name, s.start, s.end) for s in stretches(one)]
    assert found == [("conv", 0, 100), ("", 100, 250), ("matrix", 250, 750), ("", 750, 1000)]
    lines = picture(one)
    assert [line.split()[0] for line in lines] == ["0", "100", "250", "750"]
    assert "matrix" in lines[2]
    assert "500 bytes" in lines[2]
    assert "50.0 %" in lines[2]
    assert "padding" in lines[3]


def test_bars_are_to_scale_and_follow_each_other() -> None:
    lines = picture(group((tensor("conv", 0, 250), tensor("matrix", 250, 500))))
    assert [bar_of(line).count("█") for line in lines] == [WIDTH // 4, WIDTH // 2, 0]
    assert bar_of(lines[2]).strip() == "·" * (WIDTH // 4)
    columns = [bar_of(line).rstrip() for line in lines]
    assert [len(column) - len(column.lstrip()) for column in columns] == [0, WIDTH // 4, 3 * WIDTH // 4]


def test_the_smallest_tensor_is_seen() -> None:
    lines = picture(group((tensor("conv", 0, 1), tensor("last", 999, 1))))
    assert all("█" in bar_of(lines[number]) for number in (0, 2))
    assert all(len(bar_of(line)) == WIDTH for line in lines)


def test_layers_behind_each_other_are_drawn_once() -> None:
    behind = group((tensor("a", 0, 1000),), (tensor("a", 3000, 1000),))
    assert layers_drawn(behind) == 1
    assert [s.name for s in stretches(behind)] == ["a"]


def test_layers_inside_one_block_are_all_drawn_and_named() -> None:
    inside = group((tensor("a", 64, 400),), (tensor("a", 464, 400),))
    assert layers_drawn(inside) == 2
    assert [s.name for s in stretches(inside)] == ["layer0 a", "layer1 a", ""]


def test_heads_far_apart_span_more_than_they_hold() -> None:
    spread = msgspec.structs.replace(tensor("heads", 0, 10), loops=(Loop(count=2, stride_bytes=500),))
    (stretch, _) = stretches(group((spread,)))
    assert (stretch.start, stretch.end, stretch.size_bytes) == (0, 510, 20)


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_of_a_block_is_left_out(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(((Tensor("a", (rng.randint(1, 5), 3), 2), Tensor("b", (rng.randint(1, 9),), 4)),) * 2)
    layout = model.layout(0, 1, seed)
    reached = 0
    for stretch in stretches(layout.groups[0]):
        assert stretch.start <= reached
        reached = max(reached, stretch.end)
    assert reached >= layout.groups[0].layers[0].tensors[0].block_stride_bytes


def test_a_group_without_layers_has_no_picture() -> None:
    assert picture(group()) == []
    assert layers_drawn(group()) == 0


def test_names_take_little_room() -> None:
    assert names_of(["a"]) == "a"
    assert names_of(["a", "b", "c"]) == "a and 2 more"
