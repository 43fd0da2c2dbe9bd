"""Each mutant really does the damage that it claims: which bytes arrive, and from where.

The cache is laid out as vLLM lays out a small hybrid model: one recurrent layer a group, attention
last, everything in one region. Every byte of the producer's memory tells where it is.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.errors import ProtocolError
from stateferry.ids import EngineId, Epoch, RequestId, TransferId
from stateferry.layout.blocks import concatenate, merge
from stateferry.layout.plan import make_plan
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, LayerCache, Loop, Pieces
from stateferry.session import GroupLoad
from stateferry.testing.mutants import DAMAGES_NOTHING, tamper
from stateferry.testing.peers import EngineRank
from stateferry.wire import Offer, RankAddress, offer_to_params

HEADS, HEAD_BYTES, CONV_BYTES, KV_BYTES = 3, 8, 12, 64
BLOCKS = 24
PAGE = CONV_BYTES + HEADS * HEAD_BYTES

STATES = ("layers.0", "layers.1", "layers.2")
TABLES = tuple(map(BlockIds, ((5,), (6,), (7,), (8, 9, 10))))
"""Remote blocks: three states, then the attention blocks at positions 0 to 2."""
LOCAL = tuple(map(BlockIds, ((11,), (12,), (13,), (14, 15, 16))))
OTHER = tuple(map(BlockIds, ((17,), (18,), (19,), (20, 21, 22))))


def tensor(name: str, offset: int, count: int, unit: int, stride: int) -> CacheTensor:
    return CacheTensor(
        name=name,
        region=0,
        offset_bytes=offset,
        block_stride_bytes=stride,
        block_count=BLOCKS,
        unit_bytes=unit,
        element_bytes=2,
        dtype="bfloat16",
        loops=(Loop(count=count, stride_bytes=unit),),
    )


def layout(layers_in_one_group: bool = False, heads: int = HEADS, states: int = len(STATES)) -> CacheLayout:
    """Three recurrent layers and one attention layer; a block is wide enough for all of them."""
    stride = 3 * PAGE + KV_BYTES
    recurrent = [
        LayerCache(
            name=STATES[i],
            tensors=(
                tensor("conv", i * PAGE, 3, CONV_BYTES // 3, stride),
                tensor("matrix", i * PAGE + CONV_BYTES, heads, HEADS * HEAD_BYTES // heads, stride),
            ),
        )
        for i in range(states)
    ]
    attention = LayerCache(name="layers.3", tensors=(tensor("heads", 3 * PAGE, 2, KV_BYTES // 2, stride),))
    sets = [tuple(recurrent)] if layers_in_one_group else [(layer,) for layer in recurrent]
    groups = [Group(kind=GroupKind.STATE, block_tokens=16, layers=layers) for layers in sets]
    groups.append(Group(kind=GroupKind.ATTENTION, block_tokens=16, layers=(attention,)))
    return CacheLayout(
        engine_id=EngineId("e"),
        epoch=Epoch(1),
        tp_rank=0,
        tp_size=1,
        groups=tuple(groups),
        region_sizes_bytes=(BLOCKS * stride,),
        facts={},
    )


def loads(tables: tuple[BlockIds, ...] = TABLES, first_block: int = 0) -> tuple[GroupLoad, ...]:
    """What a consumer that holds `first_block` attention blocks itself would read."""
    found = [GroupLoad(i, 2, LOCAL[i], tables[i]) for i in range(len(tables) - 1)]
    last = len(tables) - 1
    found.append(GroupLoad(last, first_block, LOCAL[3][first_block:], tables[last][first_block:]))
    return tuple(found)


def replace_group(load: GroupLoad, group: int) -> GroupLoad:
    """The same blocks in another group."""
    return GroupLoad(group, load.first_block, load.local_block_ids, load.remote_block_ids)


def other_params(tables: tuple[BlockIds, ...] = OTHER) -> dict[str, Any]:
    return offer_to_params(
        Offer(
            transfer_id=TransferId("0" * 32),
            engine_id=EngineId("p"),
            request_id=RequestId("other"),
            num_tokens=40,
            block_ids=tables,
            first_blocks=(2, 2, 2, 0),
            prefix_digest="0" * 32,
            lease_s=15.0,
            ranks=(RankAddress("127.0.0.1", 1, Epoch(1)),),
        )
    )


Pages = dict[tuple[str, str, int], list[Any]]
"""(layer, tensor, local block) -> for every byte the producer's byte that it came from; None: kept."""


def arrived(
    what: Mapping[str, Any],
    cache: CacheLayout | None = None,
    ordered: tuple[GroupLoad, ...] | None = None,
) -> Pages:
    """Where every byte of every destination page comes from, under this damage."""
    cache = cache or layout()
    ordered = ordered or loads()
    pieces = tamper(what, cache, make_plan(cache, cache, merge=False), ordered)
    return pages(cache, ordered, pieces)


def pages(cache: CacheLayout, ordered: tuple[GroupLoad, ...], pieces: list[Pieces]) -> Pages:
    came_from = np.full(cache.region_sizes_bytes[0], -1)
    everything = merge(concatenate(pieces))
    for local, remote, size in zip(
        everything.local_offsets.tolist(),
        everything.remote_offsets.tolist(),
        everything.sizes.tolist(),
        strict=True,
    ):
        assert (came_from[local : local + size] == -1).all(), "a byte is written twice"
        came_from[local : local + size] = np.arange(remote, remote + size)
    found: Pages = {}
    for load in ordered:
        for layer in cache.groups[load.group].layers:
            for t in layer.tensors:
                for block in load.local_block_ids:
                    start = t.offset_bytes + block * t.block_stride_bytes
                    page = came_from[start : start + t.block_bytes].tolist()
                    found[layer.name, t.name, block] = page
                    came_from[start : start + t.block_bytes] = -1
    assert (came_from == -1).all(), "a byte outside of every destination block is written"
    return found


def source(cache: CacheLayout, layer: str, name: str, block: int) -> list[int]:
    """The bytes of one page of the producer."""
    for group in cache.groups:
        for entry in group.layers:
            for t in entry.tensors:
                if (entry.name, t.name) == (layer, name):
                    start = t.offset_bytes + block * t.block_stride_bytes
                    return list(range(start, start + t.block_bytes))
    raise KeyError(layer)


def clean(tables: tuple[BlockIds, ...] = TABLES, cache: CacheLayout | None = None) -> Pages:
    """What a good hand-off brings."""
    cache = cache or layout()
    found: Pages = {}
    for i, layer in enumerate(STATES):
        for name in ("conv", "matrix"):
            found[layer, name, LOCAL[i][0]] = source(cache, layer, name, tables[i][0])
    for local, remote in zip(LOCAL[3], tables[3], strict=True):
        found["layers.3", "heads", local] = source(cache, "layers.3", "heads", remote)
    return found


def withheld(*keys: tuple[str, str]) -> Pages:
    """A good hand-off without the pages of these (layer, tensor)s."""
    return {key: [-1] * len(page) if (key[0], key[1]) in keys else page for key, page in clean().items()}


BOTH = ("conv", "matrix")


def test_no_damage_is_a_good_hand_off() -> None:
    assert arrived({"nothing": True}) == clean()


def test_all_state_withheld() -> None:
    assert arrived({"withhold": "state"}) == withheld(*itertools.product(STATES, BOTH))


def test_convolution_withheld_keeps_the_matrices() -> None:
    assert arrived({"withhold": "convolution"}) == withheld(*((layer, "conv") for layer in STATES))


def test_attention_withheld_keeps_the_state() -> None:
    assert arrived({"withhold": "attention"}) == withheld(("layers.3", "heads"))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7])
def test_one_layer_is_counted_over_all_groups(number: int) -> None:
    expected = withheld(*((STATES[number % 3], name) for name in BOTH))
    assert arrived({"withhold": f"layer:{number}"}) == expected


def test_one_layer_of_a_group_of_several() -> None:
    cache = layout(layers_in_one_group=True)
    ordered = loads((BlockIds((5,)), BlockIds((8, 9, 10))))
    found = arrived({"withhold": "layer:1"}, cache, (ordered[0], GroupLoad(1, 0, LOCAL[3], TABLES[3])))
    lost = {key[0] for key, page in found.items() if -1 in page}
    assert lost == {"layers.1"}


def test_a_drafters_layers_withheld_are_no_others() -> None:
    """They share a group, and so block tables, with the model's own attention."""
    cache = layout()
    (own,) = cache.groups[3].layers
    (heads,) = own.tensors
    drafter = LayerCache(name="mtp.layers.0", tensors=(replace(heads, offset_bytes=0),))
    both = replace(cache.groups[3], layers=(own, drafter))
    found = arrived({"withhold": "drafts"}, replace(cache, groups=(both,)), (replace_group(loads()[3], 0),))
    assert {key[0] for key, page in found.items() if -1 in page} == {"mtp.layers.0"}
    assert {key[0] for key, page in found.items() if -1 not in page} == {"layers.3"}


def test_last_attention_block_withheld() -> None:
    expected = clean()
    expected["layers.3", "heads", 16] = [-1] * KV_BYTES
    assert arrived({"withhold": "last_block"}) == expected


@pytest.mark.parametrize(("number", "name"), [(0, "conv"), (1, "matrix")])
def test_one_number_withheld_is_one_number(number: int, name: str) -> None:
    found, good = arrived({"withhold": f"number:{number}"}), clean()
    changed = {key: page for key, page in found.items() if page != good[key]}
    assert list(changed) == [("layers.0", name, 11)]
    (page,) = changed.values()
    lost = [i for i, byte in enumerate(page) if byte == -1]
    assert len(lost) == 2  # bfloat16
    assert lost[0] % 2 == 0
    kept = [i for i in range(len(page)) if i not in lost]
    assert [page[i] for i in kept] == [good["layers.0", name, 11][i] for i in kept]


@pytest.mark.parametrize("what", ["state", "attention", "all"])
def test_pages_of_another_hand_off(what: str) -> None:
    found, good, bad = arrived({"other": other_params(), "what": what}), clean(), clean(OTHER)
    for key, page in found.items():
        damaged = what == "all" or (key[0] in STATES) is (what == "state")
        assert page == (bad if damaged else good)[key]


def test_another_hand_off_is_paired_by_position_behind_a_local_prefix() -> None:
    found = arrived({"other": other_params(), "what": "attention"}, ordered=loads(first_block=1))
    bad = clean(OTHER)
    blocks = [key[2] for key in found if key[0] == "layers.3"]
    assert blocks == [15, 16]
    assert all(found["layers.3", "heads", b] == bad["layers.3", "heads", b] for b in blocks)


def test_past_the_end_of_another_hand_off_its_last_block_comes() -> None:
    found = arrived({"other": other_params((*OTHER[:3], OTHER[3][:2])), "what": "attention"})
    cache = layout()
    assert found["layers.3", "heads", 15] == source(cache, "layers.3", "heads", 21)
    assert found["layers.3", "heads", 16] == source(cache, "layers.3", "heads", 21)


def test_the_first_two_heads_of_every_matrix_change_places() -> None:
    expected = clean()
    for layer, block in zip(STATES, (11, 12, 13), strict=True):
        page = expected[layer, "matrix", block]
        expected[layer, "matrix", block] = (
            page[HEAD_BYTES : 2 * HEAD_BYTES] + page[:HEAD_BYTES] + page[2 * HEAD_BYTES :]
        )
    assert arrived({"swap": "heads"}) == expected


@pytest.mark.parametrize(("number", "first", "second"), [(0, 0, 1), (1, 1, 2), (2, 2, 0), (3, 0, 1)])
def test_layers_of_different_groups_change_places(number: int, first: int, second: int) -> None:
    expected = clean()
    for name in BOTH:
        one, two = (STATES[first], name, 11 + first), (STATES[second], name, 11 + second)
        expected[one], expected[two] = expected[two], expected[one]
    assert arrived({"swap": f"layers:{number}"}) == expected


def test_layers_of_one_group_change_places() -> None:
    cache = layout(layers_in_one_group=True)
    ordered = (GroupLoad(0, 2, LOCAL[0], TABLES[0]), GroupLoad(1, 0, LOCAL[3], TABLES[3]))
    found = arrived({"swap": "layers"}, cache, ordered)
    for name in BOTH:
        assert found["layers.0", name, 11] == source(cache, "layers.1", name, 5)
        assert found["layers.1", name, 11] == source(cache, "layers.0", name, 5)
        assert found["layers.2", name, 11] == source(cache, "layers.2", name, 5)


@pytest.mark.parametrize(
    ("what", "cache", "ordered"),
    [
        ({"withhold": "last_block"}, layout(), loads()[:3]),  # a prefix hit covered all of it
        ({"withhold": "attention"}, layout(), loads()[:3]),
        ({"withhold": "drafts"}, layout(), loads()),
        ({"withhold": "state"}, layout(), loads()[3:]),
        ({"withhold": "layer:0"}, layout(), loads()[3:]),
        ({"withhold": "number:2"}, layout(), loads()),
        ({"swap": "heads"}, layout(heads=1), loads()),
        ({"swap": "layers"}, layout(), loads()[1:2]),
        ({"other": other_params(TABLES)}, layout(), loads()),
        ({"other": other_params(), "what": "attention"}, layout(), loads()[:3]),
    ],
)
def test_a_damage_without_effect_says_so(
    what: dict[str, Any], cache: CacheLayout, ordered: tuple[GroupLoad, ...]
) -> None:
    with pytest.raises(ProtocolError, match=DAMAGES_NOTHING):
        arrived(what, cache, ordered)


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"verify": "all"},
        {"withhold": "everything"},
        {"swap": "blocks"},
        {"other": {}},
        {"other": other_params(), "what": "heads"},
        {"withhold": "state", "swap": "heads"},
    ],
)
def test_an_unknown_order_is_refused(what: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as refused:
        arrived(what)
    assert DAMAGES_NOTHING not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "caught"),
    [({"nothing": True}, False), ({"withhold": "number:1"}, True), ({"withhold": "last_block"}, True)],
)
def test_one_hand_off_may_ask_for_digests(damage: dict[str, Any], caught: bool) -> None:
    tables, local = ((1, 2, 3), (4,)), ((5, 6, 7), (8,))
    with EngineRank("p") as producer, EngineRank("d", config=Config(testing=True)) as consumer:
        producer.write_tags(seed=1)
        for wanted in (None, "all"):
            offer = replace(producer.grant(40, tables), tamper={**damage, "verify": wanted})
            results = consumer.read(f"r{wanted}", offer, local)
            assert bool(results.failed) is (caught and wanted is not None)
            assert ("digests" in results.reports[-1].reason) is bool(results.failed)


def test_a_damage_without_effect_fails_the_hand_off_with_its_reason() -> None:
    with EngineRank("p") as producer, EngineRank("d", config=Config(testing=True)) as consumer:
        offer = replace(producer.grant(40, ((1, 2, 3), (4,))), tamper={"withhold": "number:2"})
        results = consumer.read("r", offer, ((5, 6, 7), (8,)))
        assert results.failed == {"r"}
        assert DAMAGES_NOTHING in results.reports[-1].reason


@pytest.mark.parametrize(("damage", "byte"), [({"withhold": "state"}, 0x00), ({"nothing": True}, None)])
def test_what_is_withheld_reads_as_zero_whatever_was_there(damage: dict[str, Any], byte: int | None) -> None:
    with EngineRank("p") as producer, EngineRank("d", config=Config(testing=True)) as consumer:
        producer.write_tags(seed=1)
        consumer.write_tags(seed=2)
        offer = replace(producer.grant(40, ((1, 2, 3), (4,))), tamper=damage)
        assert not consumer.read("r", offer, ((5, 6, 7), (8,))).failed
        page = consumer.page(1, 8)
        assert page == (producer.page(1, 4) if byte is None else bytes([byte]) * len(page))
