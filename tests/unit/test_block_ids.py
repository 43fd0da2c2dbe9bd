"""Packed block tables: values that numpy reads as they are, and that hold nothing but block ids."""

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from stateferry.block_ids import MAX_BLOCK_ID, BlockIds

IDS = (7, 0, MAX_BLOCK_ID, 7)


@pytest.mark.parametrize("given", [IDS, list(IDS), np.array(IDS), np.array(IDS, np.uint32), BlockIds(IDS)])
def test_a_table_is_the_same_whatever_it_came_as(given: Any) -> None:
    table = BlockIds(given)
    assert (len(table), table.tolist(), list(table), table[2]) == (4, list(IDS), list(IDS), MAX_BLOCK_ID)
    assert table == BlockIds(IDS)
    assert {table: 1}[BlockIds(IDS)] == 1
    assert table != BlockIds(IDS[::-1])
    assert table != IDS, "two representations of one table must not be mixed"


def test_a_part_is_a_table() -> None:
    assert BlockIds(IDS)[1:3] == BlockIds(IDS[1:3])
    assert BlockIds(IDS)[4:] == BlockIds() == BlockIds([])
    assert not BlockIds()
    assert MAX_BLOCK_ID in BlockIds(IDS)
    with pytest.raises(IndexError):
        BlockIds(IDS)[4]


def test_ids_times_strides_do_not_overflow() -> None:
    ids = np.asarray(BlockIds((MAX_BLOCK_ID,)))
    assert ids.dtype == np.int64
    assert int((ids * 4096)[0]) == MAX_BLOCK_ID * 4096


def test_nobody_can_change_a_table_through_its_array() -> None:
    table = BlockIds(IDS)
    np.asarray(table)[0] = 1
    assert table == BlockIds(IDS)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(table, "<i4")[0] = 1


def test_a_table_is_copied_and_travels_between_processes_whole() -> None:
    table = BlockIds(range(1000))
    carried = pickle.dumps(table)
    assert copy.deepcopy(table) == pickle.loads(carried) == table
    assert len(carried) < 4 * len(table) + 150
    assert sys.getsizeof(table) + sys.getsizeof(table._packed) < 4 * len(table) + 100


@pytest.mark.parametrize(
    "given",
    [
        (-1,),
        (MAX_BLOCK_ID + 1,),
        (1 << 63,),
        (1 << 70,),
        (1.0,),
        (True,),
        ("1",),
        (None,),
        ((1, 2),),
        "12",
        5,
        np.zeros((1, 1), np.int64),
        np.array([1.0]),
    ],
    ids=str,
)
def test_what_is_no_block_id_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="block ids must be"):
        BlockIds(given)
