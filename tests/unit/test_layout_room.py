"""The waiting room's layout, byte by byte: what is read into a slot and placed from it is what was sent."""

import random
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_layout_oracle import CALM, handoffs

from stateferry.errors import LayoutError
from stateferry.layout import room as module
from stateferry.layout.plan import make_plan
from stateferry.layout.reference import faults, meanings
from stateferry.layout.room import room_layout, slot_bytes, slot_count
from stateferry.layout.spec import CacheLayout
from stateferry.testing.caches import Model, Tensor
from stateferry.testing.peers import small_layout

SLOTS = 6


def made(layout: CacheLayout, slots: int = SLOTS) -> CacheLayout:
    return room_layout(layout, slots * slot_bytes(layout))


def slot_of(room: CacheLayout, group: int, slot: int) -> set[tuple[int, int]]:
    return set(meanings(room, group, [slot]))


def check_slots(layout: CacheLayout) -> None:
    """Different slots share no byte, whichever groups use them, and every slot is inside the room."""
    room = made(layout)
    assert slot_count(room) == SLOTS
    assert room.region_sizes_bytes == (*layout.region_sizes_bytes, SLOTS * slot_bytes(layout))
    held = {(g, s): slot_of(room, g, s) for g in range(len(room.groups)) for s in range(SLOTS)}
    for (group, slot), places in held.items():
        assert len(places) == len(slot_of(layout, group, 0)), "two tensors of a slot share a byte"
        assert {region for region, _ in places} == {len(layout.region_sizes_bytes)}
        for (_, other), others in held.items():
            assert slot == other or not places & others, f"slots {slot} and {other} share bytes"


def check_all(layouts: Iterable[CacheLayout]) -> None:
    for layout in layouts:
        check_slots(layout)


@CALM
@given(handoffs(), st.integers(0, 3), st.integers(0, 3), st.data())
def test_read_into_a_slot_and_placed_every_byte_is_right(
    handoff: tuple[Model, int, int, list[int], list[int]],
    our_seed: int,
    their_seed: int,
    data: st.DataObject,
) -> None:
    model, ours, theirs, local, remote = handoff
    layout = model.layout(data.draw(st.integers(0, ours - 1)), ours, our_seed)
    producers = [model.layout(r, theirs, their_seed) for r in range(theirs)]
    room = made(layout)
    slots = random.Random(our_seed).sample(range(SLOTS), len(local))
    reads = {p.tp_rank: make_plan(room, p).merged_pieces(0, slots, remote) for p in producers}
    assert faults(room, producers, 0, slots, remote, reads) == []
    placed = make_plan(layout, room).merged_pieces(0, local, slots)
    assert faults(layout, [room], 0, local, slots, {layout.tp_rank: placed}) == []
    check_slots(layout)


def several_groups() -> CacheLayout:
    """Groups of unlike layers over the same memory, as vLLM lays them."""
    models = (
        Model(((Tensor("a", (3,)), Tensor("b", (2, 2))), (Tensor("c", (7,)),))),
        Model(((Tensor("d", (5,)),),)),
    )
    layouts = [model.layout(0, 1) for model in models]
    sizes = (max(layout.region_sizes_bytes[0] for layout in layouts),)
    groups = tuple(layout.groups[0] for layout in layouts)
    return msgspec.structs.replace(layouts[0], groups=groups, region_sizes_bytes=sizes)


def test_groups_share_slots_as_they_share_blocks() -> None:
    layout = several_groups()
    assert slot_bytes(layout) == 7 + 7, "the largest first layer and the largest second"
    check_slots(layout)
    check_slots(small_layout("d"))


def test_blocks_in_a_row_stay_one_piece() -> None:
    """Between caches whose layers are apart, where the room's order would otherwise cut every run."""
    model = Model(tuple((Tensor("kv", (4,)),) for _ in range(3)))
    layout = model.layout(0, 1)
    pieces = make_plan(made(layout), model.layout(0, 1)).merged_pieces(0, [1, 2, 3], [0, 1, 2])
    assert len(pieces) == 3


def test_a_group_that_stays_behind_takes_no_room() -> None:
    layout = several_groups()
    behind = msgspec.structs.replace(layout.groups[0], transfers=False, layers=())
    layout = msgspec.structs.replace(layout, groups=(behind, layout.groups[1]))
    assert slot_bytes(layout) == 5
    assert made(layout).groups[0] == behind


def test_a_room_without_room_says_what_to_change() -> None:
    layout = small_layout("d")
    with pytest.raises(LayoutError, match=r"511 bytes.*512 bytes.*room_mib.*load_mode"):
        room_layout(layout, slot_bytes(layout) - 1)
    assert slot_count(room_layout(layout, slot_bytes(layout))) == 1


# -- mistakes that these tests must notice -----------------------------------------------------------


def _narrow_lanes(patch: pytest.MonkeyPatch) -> None:
    right = module._lanes
    patch.setattr(module, "_lanes", lambda layout: [max(1, n - 1) for n in right(layout)])


def _tensors_on_top_of_each_other(patch: pytest.MonkeyPatch) -> None:
    right = module._group

    def group(*more: object) -> object:
        made_group = right(*more)  # type: ignore[arg-type]
        layer = made_group.layers[0]
        start = layer.tensors[0].offset_bytes
        tensors = tuple(msgspec.structs.replace(t, offset_bytes=start) for t in layer.tensors)
        first = msgspec.structs.replace(layer, tensors=tensors)
        return msgspec.structs.replace(made_group, layers=(first, *made_group.layers[1:]))

    patch.setattr(module, "_group", group)


def _loops_with_their_old_gaps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "_dense", lambda tensor: tensor.loops)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "lanes are too narrow": _narrow_lanes,
    "tensors of a layer overlap": _tensors_on_top_of_each_other,
    "loops keep the cache's gaps": _loops_with_their_old_gaps,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_noticed_when(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = Model(((Tensor("a", (3,)), Tensor("b", (2, 2))),)).layout(0, 1)
    layer = gaps.groups[0].layers[0]
    apart = msgspec.structs.replace(
        layer.tensors[1],
        loops=tuple(
            msgspec.structs.replace(lp, stride_bytes=lp.stride_bytes * 9) for lp in layer.tensors[1].loops
        ),
    )
    group = msgspec.structs.replace(
        gaps.groups[0],
        layers=(
            msgspec.structs.replace(layer, tensors=(layer.tensors[0], apart)),
            *gaps.groups[0].layers[1:],
        ),
    )
    gaps = msgspec.structs.replace(gaps, groups=(group,), region_sizes_bytes=(400,))
    check_all((several_groups(), gaps))
    MISTAKES[mistake](monkeypatch)
    with pytest.raises((AssertionError, LayoutError)):
        check_all((several_groups(), gaps))
