"""What a survey says of hand-offs, against the plans that hand-offs use and against counting by hand."""

from unittest.mock import patch

import msgspec
import pytest

from stateferry.errors import LayoutError, LayoutMismatch
from stateferry.layout import survey as survey_module
from stateferry.layout.blocks import merge
from stateferry.layout.plan import make_plan
from stateferry.layout.spec import CacheLayout, Group, GroupKind, Part, PartRule
from stateferry.layout.survey import check_ranks, moved_blocks, survey
from stateferry.testing.caches import Model, Tensor

HEADS = Part(name="heads", size=4, rule=PartRule.SPLIT)
KV_HEADS = Part(name="heads", size=2, rule=PartRule.GROUPED, granules=2)
STATE = Model(((Tensor("conv", (3, (HEADS,)), 2), Tensor("matrix", ((HEADS,), 5), 4)),) * 2)
ATTENTION = Model(((Tensor("kv", (4, (KV_HEADS,)), 8),),) * 3, GroupKind.ATTENTION)
BLOCKS = 80
LENGTHS = (1, 2, 5, 6, 33, 150)


def engine(size: int, seed: int = 0) -> list[CacheLayout]:
    """All ranks of an engine with a group of state and one of attention, in a region each."""
    return [
        joined(STATE.layout(rank, size, seed, BLOCKS), ATTENTION.layout(rank, size, seed, BLOCKS))
        for rank in range(size)
    ]


def joined(first: CacheLayout, second: CacheLayout) -> CacheLayout:
    group = second.groups[0]
    layers = tuple(
        msgspec.structs.replace(
            layer, tensors=tuple(msgspec.structs.replace(t, region=1) for t in layer.tensors)
        )
        for layer in group.layers
    )
    return msgspec.structs.replace(
        first,
        groups=(*first.groups, msgspec.structs.replace(group, layers=layers)),
        region_sizes_bytes=first.region_sizes_bytes + second.region_sizes_bytes,
    )


def check_against_plans(producers: list[CacheLayout], consumers: list[CacheLayout]) -> None:
    """Each number of the survey, made again from the pieces that a hand-off would read."""
    found = survey(producers, consumers, LENGTHS)
    total = [[0, 0] for _ in LENGTHS]
    for pair in found.pairs:
        consumer, producer = consumers[pair.consumer_rank], producers[pair.producer_rank]
        raw, plan = make_plan(consumer, producer, merge=False), make_plan(consumer, producer)
        for number, length in enumerate(LENGTHS):
            counts = moved_blocks(consumer, length)
            apart = [[2 * b for b in range(count)] for count in counts]
            in_a_row = [list(range(count)) for count in counts]
            unmerged = [raw.pieces(g, apart[g], apart[g]) for g in range(2)]
            scattered = [plan.merged_pieces(g, apart[g], apart[g]) for g in range(2)]
            consecutive = [plan.merged_pieces(g, in_a_row[g], in_a_row[g]) for g in range(2)]
            assert pair.pieces[number].unmerged == sum(map(len, unmerged))
            assert pair.pieces[number].scattered == sum(map(len, scattered))
            assert pair.pieces[number].consecutive == sum(map(len, consecutive))
            assert all(len(merge(p)) <= len(p) for p in consecutive)
            for g in range(2):
                total[number][g] += unmerged[g].total_bytes
    for number, length in enumerate(found.lengths):
        held = [
            count * sum(t.block_bytes for c in consumers for x in c.groups[g].layers for t in x.tensors)
            for g, count in enumerate(length.blocks)
        ]
        assert list(length.group_bytes) == total[number] == held
        assert (length.state_bytes, length.attention_bytes) == tuple(total[number])
        assert length.total_bytes == sum(total[number])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("consumer_size", [1, 2, 4])
@pytest.mark.parametrize("producer_size", [1, 2, 4])
def test_every_number_is_that_of_a_real_plan(producer_size: int, consumer_size: int, seed: int) -> None:
    check_against_plans(engine(producer_size, seed), engine(consumer_size, seed))


@pytest.mark.parametrize("name", ["moved_blocks", "_consecutive", "producer_ranks_to_read"])
def test_a_wrong_number_is_noticed(name: str) -> None:
    wrong = {
        "moved_blocks": lambda layout, length: (1, 1),
        "_consecutive": lambda plan, group, blocks: len(plan.groups[group]) * blocks,
        "producer_ranks_to_read": lambda consumer, size: (0,),
    }[name]
    with patch.object(survey_module, name, wrong), pytest.raises(AssertionError):
        check_against_plans(engine(2), engine(1 if name == "producer_ranks_to_read" else 2))


def test_bytes_by_hand() -> None:
    found = survey(engine(1), engine(1), [10])
    state = 2 * (3 * 4 * 2 + 4 * 5 * 4)
    attention = 3 * (4 * 2 * 8)
    (length,) = found.lengths
    assert length.tokens == 9
    assert length.blocks == (1, 3)
    assert (length.state_bytes, length.attention_bytes) == (state, 3 * attention)
    (pair,) = found.pairs
    assert pair.block_bytes == (state, attention)


def test_heads_that_several_ranks_hold_are_read_by_each_of_them() -> None:
    once = survey(engine(1), engine(1), [9]).lengths[0]
    four = survey(engine(1), engine(4), [9]).lengths[0]
    assert four.state_bytes == once.state_bytes
    assert four.attention_bytes == 2 * once.attention_bytes


def test_a_prompt_of_one_token_moves_nothing() -> None:
    found = survey(engine(1), engine(1), [1])
    assert found.lengths[0].blocks == (0, 0)
    assert found.lengths[0].total_bytes == 0
    assert found.pairs[0].pieces[0].consecutive == 0


def test_engines_that_do_not_fit_are_refused_as_in_the_hand_shake() -> None:
    other = [msgspec.structs.replace(layout, facts={"dtype": "float16"}) for layout in engine(1)]
    with pytest.raises(LayoutMismatch, match=r"facts\.dtype"):
        survey(other, engine(1), [9])


def test_a_group_that_is_kept_out_moves_nothing() -> None:
    kept = Group(kind=GroupKind.ATTENTION, block_tokens=4, layers=(), transfers=False)
    layouts = [msgspec.structs.replace(x, groups=(*x.groups, kept)) for x in engine(2)]
    found = survey(layouts, layouts, [100])
    assert found.lengths[0].blocks[2] == 0
    assert all(pair.strips[2] == 0 for pair in found.pairs)


@pytest.mark.parametrize("ranks", [[], [0], [1, 0], [0, 0]])
def test_a_list_that_is_not_all_ranks_is_refused(ranks: list[int]) -> None:
    layouts = engine(2)
    with pytest.raises(LayoutError, match="all ranks"):
        check_ranks([layouts[rank] for rank in ranks])
