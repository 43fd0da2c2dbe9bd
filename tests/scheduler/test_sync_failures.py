"""`load_mode: sync` when a read goes wrong: never a token from its bytes, and the engine lives.

vLLM 0.32 offers a connector no way to take back a request that runs (docs/decisions/0004-sync-loads.md), so
nothing may go wrong any more once it does: whatever can, happens while the request still queues.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import ATTENTION, HYBRID, HYBRID_UNCACHED, WINDOW, Pair, wait
from simulated_model import answer
from steered_transport import TRIES
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from stateferry.ferry.ahead import ReadAhead
from stateferry.ferry.room import Room
from stateferry.layout.room import room_layout, slot_bytes, slot_count
from stateferry.vllm import taking, worker

pytestmark = pytest.mark.scheduler

SYNC = {"load_mode": "sync", "room_mib": 1}
MODELS = {"align": HYBRID, "none": HYBRID_UNCACHED, "attention": ATTENTION, "window": WINDOW}


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Room]]:
    """Every waiting room of the test; at its end all of them are empty."""
    found: list[Room] = []
    right = ReadAhead.into

    def into(layout: Any) -> ReadAhead:
        ahead = right(layout)
        found.extend([ahead.room] if ahead.room is not None else [])
        return ahead

    monkeypatch.setattr(ReadAhead, "into", into)
    yield found
    for room in found:
        assert sorted(room.free) == list(range(slot_count(room.layout))), "slots leaked"
        assert room.waiting == {}


def add(pair: Pair, prompt: list[int], max_tokens: int = 4) -> str:
    return pair.consumer.add(prompt, params=pair.prefill(prompt), max_tokens=max_tokens).request_id


def neighbours(pair: Pair) -> dict[str, list[int]]:
    """A plain request and a hand-off that are under way; what they must answer."""
    plain = pair.consumer.add(prompt_of(9, 7), max_tokens=60).request_id
    moved = add(pair, prompt_of(10, 8), 60)
    pair.run_until(lambda: len(pair.consumer.finished[moved].tokens) > 1, "the neighbours to decode")
    return {plain: answer(prompt_of(9, 7), 60), moved: answer(prompt_of(10, 8), 60)}


def check(pair: Pair, expected: dict[str, list[int]]) -> None:
    pair.run()
    for request_id, tokens in expected.items():
        assert pair.consumer.finished[request_id].tokens == tokens
    pair.check_idle()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_failed_read_starts_over_here(model: str, async_scheduling: bool, rooms: list[Room]) -> None:
    """F1.7, F3.11, W1: under `recompute`, whatever its groups; with asynchronous scheduling too, where vLLM
    itself would use a token that came from blocks reported as bad."""
    consumer = SYNC | {"async_scheduling": async_scheduling}
    with Pair(MODELS[model], consumer=consumer) as pair:
        others = neighbours(pair)
        pair.consumer.tap.failing = TRIES
        request_id = add(pair, prompt_of(14))
        check(pair, {**others, request_id: answer(prompt_of(14), 4)})
        assert pair.consumer.scheduled[request_id][0][0] == 0
        assert len(pair.consumer.places) == 1, "the neighbour's"
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert received["outcome"] == "failed"
        assert received["reason"]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_failed_read_is_an_error_where_the_operator_wants_that(
    model: str, async_scheduling: bool, rooms: list[Room]
) -> None:
    """F1.7, F3.11, W1: under `fail`."""
    consumer = SYNC | {"async_scheduling": async_scheduling}
    with Pair(MODELS[model], policy="fail", consumer=consumer) as pair:
        others = neighbours(pair)
        pair.consumer.tap.failing = TRIES
        request_id = add(pair, prompt_of(14))
        check(pair, others)
        assert pair.consumer.finished[request_id].reason is FinishReason.ERROR
        assert pair.consumer.finished[request_id].tokens == []


def test_a_read_that_failed_once_is_posted_again(rooms: list[Room]) -> None:
    with Pair(HYBRID, consumer=SYNC) as pair:
        pair.consumer.tap.failing = 1
        request_id = add(pair, prompt_of(14))
        check(pair, {request_id: answer(prompt_of(14), 4)})
        assert pair.consumer.scheduled[request_id][0] == (13, 1)
        assert len(pair.consumer.places) == 1


@pytest.mark.parametrize("leaves", [False, True], ids=["client waits", "client leaves"])
def test_a_request_does_not_wait_for_a_read_that_never_ends(
    leaves: bool, rooms: list[Room], leap: Callable[[float], None]
) -> None:
    """F1.2, W6, W12: one deadline, and past it only slots of the room stay out of use, no block of vLLM's."""
    with Pair(HYBRID, transfer_timeout_s=30, lease_s=600, consumer=SYNC) as pair:
        pair.consumer.tap.held = pair.consumer.tap.deaf = True
        request_id = add(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        if leaves:
            pair.consumer.abort(request_id)
        leap(31)
        pair.run_until(lambda: not (pair.producer.busy or pair.consumer.busy), "both engines to be idle")
        assert leaves or pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.free_blocks == pair.consumer.all_free
        wait(lambda: pair.consumer.ferry.quarantined_count == 1, "the quarantine")
        (room,) = rooms
        assert slot_count(room.layout) - len(room.free) == 4 + 3
        pair.consumer.tap.held = False
        wait(lambda: pair.consumer.ferry.quarantined_count == 0, "its end")
        pair.check_idle()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("point", ["arriving", "reading", "waiting", "running"])
def test_abort(point: str, async_scheduling: bool, rooms: list[Room]) -> None:
    """F3.12: at any point, and its blocks and slots are free at once."""
    with Pair(HYBRID, async_scheduling=async_scheduling, consumer=SYNC | {"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(14))
        first = pair.consumer.add(prompt_of(5), max_tokens=3 if point == "running" else 200).request_id
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=200).request_id
        if point == "reading":
            pair.consumer.tap.held = True
            pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read", step_s=0.001)
        elif point == "waiting":
            known = pair.consumer.half.taking.claimable[request_id]
            pair.run_until(lambda: known.waiting == 1, "the bytes", step_s=0.001)
        elif point == "running":
            pair.run_until(lambda: len(pair.consumer.finished[request_id].tokens) > 2, "some tokens")
        pair.consumer.abort(request_id)
        pair.consumer.tap.held = False
        check(pair, {first: answer(prompt_of(5), 3 if point == "running" else 200)})
        other = add(pair, prompt_of(9, 1))
        check(pair, {other: answer(prompt_of(9, 1), 4)})
        assert pair.consumer.scheduled[other][0] == (8, 1)


def test_abort_in_the_step_that_places(rooms: list[Room]) -> None:
    """With asynchronous scheduling a step may be under way when its request goes: it places all the same, and
    the blocks, which are known by their hashes then, hold what the hashes say."""
    with Pair(ATTENTION, consumer=SYNC | {"async_scheduling": True}) as pair:
        request_id = add(pair, prompt_of(14), 100)
        pair.run_until(lambda: bool(pair.consumer.places), "the step that places")
        pair.consumer.abort(request_id)
        second = pair.consumer.add(prompt_of(14), max_tokens=4).request_id
        check(pair, {second: answer(prompt_of(14), 4)})


def _small_room(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    monkeypatch.setattr(
        worker, "room_layout", lambda layout, _: room_layout(layout, slots * slot_bytes(layout))
    )


def test_what_finds_no_room_is_loaded_the_other_way(
    rooms: list[Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_room(monkeypatch, 12)
    with Pair(HYBRID, consumer=SYNC) as pair:
        prompts = [prompt_of(10 + number, number) for number in range(6)]
        offers = [pair.prefill(prompt) for prompt in prompts]
        pair.consumer.tap.held = True
        ids = [
            pair.consumer.add(prompt, params=params, max_tokens=4).request_id
            for prompt, params in zip(prompts, offers, strict=True)
        ]
        pair.run_until(lambda: pair.consumer.tap.posted == len(ids), "all reads")
        pair.consumer.tap.held = False
        check(pair, {i: answer(prompt, 4) for i, prompt in zip(ids, prompts, strict=True)})
        assert pair.consumer.places
        assert pair.consumer.loads
        assert sorted(x.request_id for x in (*pair.consumer.places, *pair.consumer.loads)) == sorted(ids)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_before_vllm_is_told(rank: int, policy: str, rooms: list[Room]) -> None:
    """W1: one rank has it in its room, on the other the read failed: no rank may run it."""
    with Pair(HYBRID, ranks=2, policy=policy, consumer=SYNC) as pair:
        pair.consumer.taps[rank].failing = TRIES
        request_id = add(pair, prompt_of(14))
        check(pair, {request_id: answer(prompt_of(14), 4) if policy == "recompute" else []})
        assert pair.consumer.places == []
        assert (pair.consumer.finished[request_id].reason is FinishReason.ERROR) == (policy == "fail")
        other = add(pair, prompt_of(15, 1))
        check(pair, {other: answer(prompt_of(15, 1), 4)})
        assert len(pair.consumer.places) == 1


def test_a_rank_without_room_reads_late_while_the_other_places(
    rooms: list[Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Room.admit
    monkeypatch.setattr(Room, "admit", lambda self, *more: None if self is rooms[1] else right(self, *more))
    with Pair(HYBRID, ranks=2, consumer=SYNC) as pair:
        request_id = add(pair, prompt_of(14))
        check(pair, {request_id: answer(prompt_of(14), 4)})
        assert pair.consumer.scheduled[request_id][0] == (13, 1)
        assert [load.request_id for load in pair.consumer.loads] == [request_id]
        assert pair.consumer.places == []


def test_an_offer_that_is_lost_in_the_queue_is_computed_here(rooms: list[Room]) -> None:
    """W10: the lease was over before the claim came."""
    with Pair(HYBRID, lease_s=0.2, consumer=SYNC) as pair:
        params = pair.prefill(prompt_of(14))
        pair.run()
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        check(pair, {request_id: answer(prompt_of(14), 4)})
        assert pair.consumer.places == []


def test_a_producer_that_goes_away_during_the_read(rooms: list[Room]) -> None:
    """F1.7, W1: a dead peer costs its own request only."""
    with Pair(HYBRID, consumer=SYNC | {"handshake_timeout_s": 3}) as pair:
        others = neighbours(pair)
        pair.consumer.tap.held = True
        request_id = add(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 1, "the read")
        pair.producer.worker_half.shutdown()
        pair.consumer.tap.held = False
        pair.run_until(lambda: not pair.consumer.busy, "the answers")
        for i, expected in {**others, request_id: answer(prompt_of(14), 4)}.items():
            assert pair.consumer.finished[i].tokens == expected
        pair.consumer.check_idle()


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_ferry_that_ends_takes_nothing_with_it(when: str) -> None:
    """What waits in the room is placed without its ferry; what it never had is computed here."""
    with Pair(HYBRID, lease_s=0.5, consumer=SYNC | {"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(14))
        if when == "before":
            pair.consumer.ferry.stop()
        pair.consumer.add(prompt_of(5), max_tokens=60)
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        if when != "before":
            known = pair.consumer.half.taking.claimable[request_id]
            pair.run_until(lambda: known.waiting == 1, "the bytes", step_s=0.001)
            pair.consumer.ferry.stop()
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.scheduled[request_id][0][0] == (0 if when == "before" else 13)
        assert pair.consumer.free_blocks == pair.consumer.all_free


def test_no_block_is_ever_reported_as_bad(rooms: list[Room], monkeypatch: pytest.MonkeyPatch) -> None:
    """F1.7, W6: with several groups such a report ends vLLM's scheduler; with one and asynchronous scheduling
    a token of the bad step gets through. There is never one to make."""
    for model in (HYBRID, ATTENTION):
        with Pair(model, consumer=SYNC) as pair:
            pair.consumer.tap.failing = TRIES
            request_id = add(pair, prompt_of(14))
            while pair.consumer.busy:
                pair.step()
                assert pair.consumer.worker_half.get_block_ids_with_load_errors() == set()
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)


# -- mistakes that these tests must notice -----------------------------------------------------------


def _failed_reads_count(patch: pytest.MonkeyPatch) -> None:
    right = ReadAhead.fall_back

    def fall_back(self: ReadAhead, reading: Any) -> Any:
        load = reading.handoff.load
        self.room.free = [slot for slot in self.room.free if slot not in load.groups[0].local_block_ids]
        handoff = right(self, reading)
        self._apart.clear()
        self.room.waiting[load.request_id] = load
        self._arrived.append(load)
        return handoff

    patch.setattr(ReadAhead, "fall_back", fall_back)


def _slots_of_stuck_reads_are_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadAhead, "keep_stuck", ReadAhead.gone)


@pytest.mark.parametrize("model", ["align", "attention"])
def test_a_failed_read_that_counts_is_noticed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _failed_reads_count(monkeypatch)
    # A room's memory may be that of an earlier test, with the right bytes of a prompt that both have.
    prompt = prompt_of(14, 77)
    with Pair(MODELS[model], consumer=SYNC) as pair:
        pair.consumer.tap.failing = TRIES
        request_id = add(pair, prompt)
        pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "an answer")
        assert pair.consumer.finished[request_id].tokens != answer(prompt, 4)
        assert pair.consumer.worker.wrong


def test_slots_that_are_freed_too_soon_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet before free: the next hand-off gets the very slots into which a stuck read still writes."""
    _slots_of_stuck_reads_are_free(monkeypatch)
    with pytest.raises(AssertionError, match="slots"):
        _two_hand_offs_in_one_small_room(monkeypatch)


def test_slots_of_a_stuck_read_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    _two_hand_offs_in_one_small_room(monkeypatch)


def _two_hand_offs_in_one_small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_room(monkeypatch, 4 + 3)
    with Pair(HYBRID, transfer_timeout_s=0.3, consumer=SYNC) as pair:
        pair.consumer.tap.held = pair.consumer.tap.deaf = True
        first = add(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.finished[first].reason is not None, "the first answer")
        taken = pair.consumer.tap.posted
        request_id = add(pair, prompt_of(14, 1))
        pair.run_until(lambda: pair.consumer.tap.posted > taken, "the second read")
        room_is_free = pair.consumer.status(request_id) is RequestStatus.WAITING
        pair.consumer.tap.held = False
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14, 1), 4)
        assert not room_is_free, "it was given slots that were not quiet"


def fill_up_and_take(length: int, extra: int, free: int) -> None:
    """A hand-off of that length, while the consumer's cache has only so many free blocks; then it has all."""
    prompt = prompt_of(length) + list(range(2000, 2000 + extra))
    with Pair(HYBRID, consumer=SYNC) as pair:
        params = pair.prefill(prompt_of(length))
        held = pair.consumer.pool.get_new_blocks(pair.consumer.free_blocks - free)
        request_id = pair.consumer.add(prompt, params=params, max_tokens=3).request_id
        claimable = pair.consumer.half.taking.claimable[request_id]
        pair.run_until(lambda: bool(claimable.waiting or claimable.apart), "the read ahead")
        for _ in range(4):
            pair.step()
        pair.consumer.pool.free_blocks(held)
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 3)
        pair.check_idle()


@pytest.mark.parametrize("length", [12, 13, 14])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_cache_that_is_nearly_full_does_not_end_the_engine(length: int, extra: int) -> None:
    """Symptom: vLLM raised `Cannot get 1 free blocks from the pool` in a step that was to place a hand-off
    and to compute a token of the next block."""
    for free in range(4, 14):
        fill_up_and_take(length, extra, free)


def test_an_engine_that_ends_because_its_cache_is_nearly_full_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taking, "_may_run_at_once", lambda *sizes: True)
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        test_a_cache_that_is_nearly_full_does_not_end_the_engine(13, 0)
