"""Clients that go away at any point: every block is free again at once, on both engines."""

import random
import time
from collections.abc import Callable

import pytest
from harness import ATTENTION, HYBRID, HYBRID_UNCACHED, Pair
from simulated_model import answer
from steered_transport import TRIES
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.scheduler

WAITS = RequestStatus.WAITING_FOR_REMOTE_KVS
LEASE_S = 30.0
"""Nothing here may need a lease to end."""


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


def arriving(pair: Pair, request_id: str) -> None:
    """Before its first step."""


def claimed(pair: Pair, request_id: str) -> None:
    pair.consumer.tap.held = True
    pair.run_until(lambda: pair.producer.ferry.counters.claimed == 1, "the claim")


def reading(pair: Pair, request_id: str) -> None:
    pair.consumer.tap.held = True
    pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
    assert pair.consumer.status(request_id) is WAITS


def reading_beyond_recall(pair: Pair, request_id: str) -> None:
    pair.consumer.tap.deaf = True
    reading(pair, request_id)


def arrived(pair: Pair, request_id: str) -> None:
    """The ferry has the bytes, the scheduler does not know yet."""
    pair.run_until(lambda: pair.consumer.status(request_id) is WAITS, "blocks")
    while pair.consumer.ferry.open_count:
        pair.producer.step()


def reported(pair: Pair, request_id: str) -> None:
    """The scheduler knows that the load is done, and has not had a step since."""
    done = pair.consumer.scheduler.finished_recving_kv_req_ids
    pair.run_until(lambda: request_id in done, "the report")
    assert pair.consumer.status(request_id) is WAITS


def reported_failed(pair: Pair, request_id: str) -> None:
    pair.consumer.tap.failing = TRIES
    reported(pair, request_id)
    assert request_id in pair.consumer.scheduler.failed_recving_kv_req_ids


def recomputing(pair: Pair, request_id: str) -> None:
    pair.consumer.tap.failing = TRIES
    running(pair, request_id)


def running(pair: Pair, request_id: str) -> None:
    pair.run_until(lambda: len(pair.consumer.finished[request_id].tokens) > 1, "some tokens")


POINTS: list[Callable[[Pair, str], None]] = [
    arriving,
    claimed,
    reading,
    reading_beyond_recall,
    arrived,
    reported,
    reported_failed,
    recomputing,
    running,
]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", [HYBRID, HYBRID_UNCACHED, ATTENTION], ids=["align", "none", "attention"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_abort_on_the_consumer(
    point: Callable[[Pair, str], None], model: object, async_scheduling: bool
) -> None:
    """F3.12: at every point from arrival on."""
    both = {"lease_s": LEASE_S, "async_scheduling": async_scheduling}
    with Pair(model, **both) as pair:
        params = pair.prefill(prompt_of(14))
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=300).request_id
        point(pair, request_id)
        pair.consumer.abort(request_id)
        if pair.consumer.tap.deaf:
            for _ in range(20):
                pair.step()
            assert pair.consumer.free_blocks < pair.consumer.all_free, "bytes may still land"
        pair.consumer.tap.held = False
        before = time.monotonic()
        pair.run()
        assert time.monotonic() - before < LEASE_S / 3
        pair.check_idle()
        # Both engines still work.
        other = pair.hand_off(prompt_of(9, 1), max_tokens=3)
        assert pair.consumer.finished[other].tokens == answer(prompt_of(9, 1), 3)
        pair.check_idle()


def test_abort_in_the_queue_releases_the_producer_at_once() -> None:
    """F3.12."""
    with Pair(HYBRID, lease_s=LEASE_S, consumer={"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(14))
        first = pair.consumer.add(prompt_of(5), max_tokens=300).request_id
        request_id = pair.consumer.add(prompt_of(14), params=params).request_id
        pair.run_until(lambda: pair.producer.ferry.counters.claimed == 1, "the claim", step_s=0.02)
        pair.consumer.abort(request_id)
        pair.run_until(lambda: not pair.producer.busy, "the producer to be idle", step_s=0.02)
        assert pair.consumer.status(first) is RequestStatus.RUNNING
        pair.run()
        assert pair.consumer.finished[first].tokens == answer(prompt_of(5), 300)
        pair.check_idle()


def test_abort_of_one_leaves_the_others_loads_alone() -> None:
    with Pair(HYBRID, lease_s=LEASE_S, blocks=200) as pair:
        prompts = [prompt_of(10 + number, number) for number in range(6)]
        offers = [pair.prefill(prompt) for prompt in prompts]
        pair.consumer.tap.held = True
        ids = [
            pair.consumer.add(prompt, params=params, max_tokens=4).request_id
            for prompt, params in zip(prompts, offers, strict=True)
        ]
        pair.run_until(lambda: pair.consumer.tap.posted == len(ids), "all reads")
        for request_id in ids[::2]:
            pair.consumer.abort(request_id)
        pair.step()
        pair.consumer.tap.held = False
        pair.run()
        for prompt, request_id in list(zip(prompts, ids, strict=True))[1::2]:
            assert pair.consumer.finished[request_id].tokens == answer(prompt, 4)
            assert request_id in pair.consumer.loaded_pages
        pair.check_idle()


def test_abort_of_everything_while_everything_is_under_way() -> None:
    """An engine that is told to stop: `finish_requests(None)`."""
    with Pair(HYBRID, lease_s=0.5, blocks=200) as pair:
        offers = [pair.prefill(prompt_of(10 + number, number)) for number in range(5)]
        pair.producer.add(prompt_of(40), params={"do_remote_decode": True})
        for number, params in enumerate(offers):
            pair.consumer.add(prompt_of(10 + number, number), params=params, max_tokens=50)
        for _ in range(3):
            pair.step()
        for engine in (pair.producer, pair.consumer):
            engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        pair.run()
        pair.check_idle()


def test_blocks_given_back_after_an_abort_are_not_written_again() -> None:
    """The next request gets the very blocks of the one that was aborted in the middle of its read."""
    with Pair(HYBRID, lease_s=LEASE_S, consumer={"blocks": 16}) as pair:
        params = pair.prefill(prompt_of(26))
        pair.consumer.tap.held = pair.consumer.tap.deaf = True
        request_id = pair.consumer.add(prompt_of(26), params=params).request_id
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        pair.consumer.abort(request_id)
        other = pair.consumer.add(prompt_of(25, 1), max_tokens=3).request_id
        for _ in range(20):
            pair.step()
        assert pair.consumer.scheduled.get(other) is None, "there was room for both: a test of nothing"
        pair.consumer.tap.held = False
        pair.run()
        assert pair.consumer.finished[other].tokens == answer(prompt_of(25, 1), 3)
        pair.check_idle()
