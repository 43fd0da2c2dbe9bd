"""Which slot of the waiting room each of a producer's blocks lies in."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from stateferry.vllm import placing

from stateferry.block_ids import BlockIds
from stateferry.errors import StateFerryError
from stateferry.session import GroupLoad

ARRIVED = GroupLoad(1, 0, BlockIds((7, 8, 9)), BlockIds((30, 10, 20)))
"""The producer's block 30 lies in slot 7, and so on."""


def test_blocks_are_found_in_whatever_order_and_as_often_as_they_are_asked_for() -> None:
    """A state is placed in several columns: the same block is asked for again."""
    assert placing._slots_of(ARRIVED, BlockIds((10, 20, 30, 10))).tolist() == [8, 9, 7, 8]
    assert placing._slots_of(ARRIVED, BlockIds()).tolist() == []


@pytest.mark.parametrize("missing", [5, 15, 31])
def test_a_block_that_did_not_arrive_is_named_and_nothing_is_placed_for_it(missing: int) -> None:
    with pytest.raises(StateFerryError, match=f"group 1: the producer's block {missing} is to be placed"):
        placing._slots_of(ARRIVED, BlockIds((10, missing)))
