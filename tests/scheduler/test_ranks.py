"""Two ranks an engine: what one of them meets concerns the request as a whole."""

import random
import time

import pytest
from harness import ATTENTION, HYBRID, Pair, wait
from simulated_model import answer
from steered_transport import TRIES
from test_boundaries import sweep
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.scheduler


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


@pytest.mark.parametrize("hits", ["no hit", "part on D", "all on both"])
def test_every_length(hits: str) -> None:
    sweep(HYBRID, hits, ranks=2)


def test_ranks_read_their_own_rank_of_the_producer() -> None:
    with Pair(ATTENTION, ranks=2) as pair:
        pair.hand_off(prompt_of(10))
        assert [tap.posted for tap in pair.consumer.taps] == [1, 1]
        assert all(ferry.counters.released == 1 for ferry in pair.producer.ferries)
        pair.check_idle()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_ranks_failure_fails_the_load_on_all(rank: int, async_scheduling: bool) -> None:
    with Pair(HYBRID, ranks=2, async_scheduling=async_scheduling) as pair:
        pair.consumer.taps[rank].failing = TRIES
        request_id = pair.hand_off(prompt_of(14), max_tokens=4)
        assert pair.consumer.scheduled[request_id][0][0] == 0
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert received["outcome"] == "failed"
        pair.check_idle()


@pytest.mark.parametrize("slow", [0, 1])
def test_blocks_of_both_sides_stay_until_the_slower_rank_is_done(slow: int) -> None:
    with Pair(HYBRID, ranks=2) as pair:
        params = pair.prefill(prompt_of(14))
        pair.consumer.taps[slow].held = True
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.producer.ferries[1 - slow].counters.released == 1, "the quicker rank")
        for _ in range(20):
            pair.step()
        assert pair.consumer.status(request_id) is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert pair.producer.free_blocks < pair.producer.all_free
        pair.consumer.taps[slow].held = False
        pair.run()
        assert pair.consumer.scheduled[request_id][0] == (13, 1)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


@pytest.mark.parametrize("slow", [0, 1])
def test_abort_while_one_rank_still_reads(slow: int) -> None:
    with Pair(HYBRID, ranks=2, lease_s=30) as pair:
        params = pair.prefill(prompt_of(14))
        pair.consumer.taps[slow].held = pair.consumer.taps[slow].deaf = True
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.producer.ferries[1 - slow].counters.released == 1, "the quicker rank")
        pair.run_until(lambda: pair.consumer.taps[slow].posted > 0, "the slower rank's read")
        pair.consumer.abort(request_id)
        for _ in range(20):
            pair.step()
        assert pair.consumer.free_blocks < pair.consumer.all_free
        pair.consumer.taps[slow].held = False
        pair.run()
        pair.check_idle()
        assert [(f.counters.released, f.counters.expired) for f in pair.producer.ferries] == [(1, 0), (1, 0)]


def test_an_offer_released_before_its_grants() -> None:
    with Pair(HYBRID, ranks=2, lease_s=30) as pair:
        params = pair.prefill(prompt_of(14))
        request_id = pair.consumer.add(prompt_of(14), params=params).request_id
        pair.consumer.abort(request_id)
        while pair.consumer.busy or any(ferry.open_count for ferry in pair.consumer.ferries):
            pair.consumer.step()
        time.sleep(0.05)  # the releases are on their way
        pair.run()
        pair.check_idle()
        assert [(f.counters.released, f.counters.expired) for f in pair.producer.ferries] == [(1, 0), (1, 0)]


def test_one_rank_of_the_producer_does_not_hold_the_offer_any_more() -> None:
    """Refused on one rank, granted on the other: computed here, and given back everywhere."""
    with Pair(HYBRID, ranks=2, lease_s=30) as pair:
        params = pair.prefill(prompt_of(14))
        pair.producer.step()
        pair.run_until(lambda: all(f.counters.granted == 1 for f in pair.producer.ferries), "the grants")
        elsewhere = dict(params, stateferry=dict(params["stateferry"]))
        first, second = params["stateferry"]["ranks"]
        elsewhere["stateferry"]["ranks"] = [first, [second[0], second[1], second[2] + 2]]
        request_id = pair.consumer.add(prompt_of(14), params=elsewhere, max_tokens=4).request_id
        pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
        assert request_id not in pair.consumer.loaded_pages
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        wait(lambda: pair.producer.ferries[0].counters.released == 1, "the release on its way")
