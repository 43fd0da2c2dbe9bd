"""Reads into the waiting room without vLLM: slots, their fences, and what the ferry says of them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from stateferry.block_ids import BlockIds
from stateferry.config import Config, TransportName, Verify
from stateferry.errors import LayoutError
from stateferry.ferry.room import Room
from stateferry.ids import RequestId
from stateferry.layout.room import room_layout, slot_bytes
from stateferry.session import GroupLoad, Orders, Outcome
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.transport.base import TransportOptions
from stateferry.transport.faults import FaultsTransport
from stateferry.transport.memory import MemoryTransport

TABLES = ((1, 2, 3), (4,))
"""40 tokens: three attention blocks; the state sits in column 2, block 4."""
FIRST, SECOND = RequestId("first"), RequestId("second")


def small_room(slots: int) -> Room:
    layout = small_layout("d")
    return Room(room_layout(layout, slots * slot_bytes(layout)))


@pytest.fixture
def offer() -> Iterator[Any]:
    with EngineRank("p") as producer:
        yield producer.offer(40, TABLES)


def test_a_room_gives_whole_hand_offs_or_nothing(offer: Any) -> None:
    room = small_room(7)
    found = room.admit(FIRST, offer)
    assert found is not None
    load, fence = found
    assert load.groups == (
        GroupLoad(0, 0, BlockIds((0, 1, 2)), BlockIds((1, 2, 3))),
        GroupLoad(1, 2, BlockIds((3,)), BlockIds((4,))),
    )
    assert fence()
    assert room.admit(SECOND, offer) is None, "four slots in three"
    assert room.free == [4, 5, 6]
    room.leave(load)
    assert room.admit(SECOND, offer) is not None


def test_a_slot_is_not_written_while_a_device_still_copies_out_of_it(offer: Any) -> None:
    room = small_room(4)
    load, _ = room.admit(FIRST, offer) or pytest.fail("no room")
    copied = False
    room.leave(load, lambda: copied)
    _, fence = room.admit(SECOND, offer) or pytest.fail("no room")
    assert not fence()
    copied = True
    assert fence()


def test_a_slot_whose_next_hand_off_ends_unread_is_still_not_written_while_a_device_copies_out_of_it(
    offer: Any,
) -> None:
    room = small_room(4)
    copied = False
    load, _ = room.admit(FIRST, offer) or pytest.fail("no room")
    room.leave(load, lambda: copied)
    unread, _ = room.admit(SECOND, offer) or pytest.fail("no room")
    room.leave(unread)  # its request was closed before its read could be posted
    _, fence = room.admit(FIRST, offer) or pytest.fail("no room")
    assert not fence()
    copied = True
    assert fence()


def test_tables_that_do_not_fit_are_an_error(offer: Any) -> None:
    short = msgspec.structs.replace(offer, block_ids=(BlockIds((1, 2)), BlockIds((4,))))
    with pytest.raises(LayoutError, match="position"):
        small_room(9).admit(FIRST, short)


def test_the_ferry_reads_ahead_releases_and_keeps_the_bytes_until_they_are_placed() -> None:
    with EngineRank("p") as producer, EngineRank("d", room_slots=4) as consumer:
        producer.write_tags(1)
        consumer.write_tags(2)
        before = consumer.memory.bytes[: consumer.layout.region_sizes_bytes[0]].copy()
        consumer.open("first", producer.grant(40, TABLES))
        producer.wait_sent("prefill")
        wait_until(lambda: consumer.ferry.wait(0.01))
        results = consumer.ferry.take()
        (load,) = results.waiting
        assert [report.outcome for report in results.reports] == [Outcome.RECEIVED]
        assert not results.received, "vLLM knows of no load"
        for part, remote in zip(load.groups, TABLES, strict=True):
            for slot, block in zip(part.local_block_ids, remote, strict=True):
                assert consumer.room_page(part.group, slot) == producer.page(part.group, block)
        assert np.array_equal(before, consumer.memory.bytes[: len(before)]), "a block was written"
        # There is room for one: the next is to be loaded the other way.
        consumer.open("second", producer.grant(40, TABLES, request_id="other"))
        wait_until(lambda: consumer.ferry.wait(0.01))
        assert consumer.ferry.take().apart == {"second"}
        consumer.close("second")
        consumer.ferry.submit(Orders(placed=(FIRST,)))
        wait_until(lambda: consumer.ferry.open_count == 0)


def faulty(kind: str, **settings: Any) -> Any:
    """What the ferry says of a hand-off whose reads go wrong in this way."""
    config = Config(testing=True, transport=TransportName.FAULTS, transfer_timeout_s=2.0, **settings)
    faults = TransportOptions(faults={"transport": "auto", "rules": []})
    transport = FaultsTransport(faults, MemoryTransport())
    with (
        EngineRank("p") as producer,
        EngineRank("d", config=config, transport=transport, room_slots=4) as consumer,
    ):
        producer.write_tags(1)
        offer = producer.grant(40, TABLES)
        consumer.open("first", msgspec.structs.replace(offer, tamper={"faults": [{"kind": kind}]}))
        wait_until(lambda: consumer.ferry.wait(0.01))
        results = consumer.ferry.take()
        producer.wait_sent("prefill")
        if results.waiting:
            consumer.close("first")
            wait_until(lambda: consumer.ferry.open_count == 0)
            return results, None
        consumer.load("first", offer, ((5, 6, 7), (8,)))
        final = consumer.wait_received("first")
        wait_until(lambda: consumer.ferry.open_count == 0)
        return results, final


@pytest.mark.parametrize("kind", ["fail", "break", "fail_writing", "land_late", "drop", "truncate", "hang"])
def test_a_read_ahead_that_fails_is_left_to_vllms_policy(kind: str) -> None:
    """Its producer is free, its slots are, and the load that vLLM is then asked for fails at once."""
    results, final = faulty(kind)
    assert results.apart == {FIRST}
    assert not results.waiting
    assert not results.reports
    assert final.failed == {FIRST}
    assert final.reports[-1].reason


def test_wrong_bytes_that_look_right_do_not_wait_in_the_room() -> None:
    """Digests are compared before the request may run; the second half shows that the fault does damage."""
    results, final = faulty("corrupt", verify=Verify.ALL)
    assert (results.apart, results.waiting) == ({FIRST}, ())
    assert "digests" in final.reports[-1].reason
    missed, _ = faulty("corrupt")
    assert [load.request_id for load in missed.waiting] == [FIRST]
