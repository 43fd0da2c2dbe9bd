"""A hand-off goes wrong after vLLM gave blocks for it: that request alone is affected, by vLLM's policy."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, HYBRID_UNCACHED, Engine, Pair, wait
from simulated_model import answer
from steered_transport import TRIES
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from stateferry.errors import LayoutError
from stateferry.ferry.link import Link
from stateferry.vllm import taking
from stateferry.vllm.connector import StateFerryConnector

pytestmark = pytest.mark.scheduler

WAITS = RequestStatus.WAITING_FOR_REMOTE_KVS


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


def add_hand_off(pair: Pair, prompt: list[int], max_tokens: int = 4) -> str:
    return pair.consumer.add(prompt, params=pair.prefill(prompt), max_tokens=max_tokens).request_id


def neighbours(pair: Pair) -> dict[str, list[int]]:
    """A plain request and a hand-off that are under way; what they must answer."""
    plain = pair.consumer.add(prompt_of(9, 7), max_tokens=60).request_id
    moved = add_hand_off(pair, prompt_of(10, 8), 60)
    pair.run_until(lambda: len(pair.consumer.finished[moved].tokens) > 1, "the neighbours to decode")
    return {plain: answer(prompt_of(9, 7), 60), moved: answer(prompt_of(10, 8), 60)}


@pytest.mark.parametrize("model", [HYBRID, HYBRID_UNCACHED, ATTENTION], ids=["align", "none", "attention"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_read_starts_over_here(model: CacheModel, async_scheduling: bool) -> None:
    """F1.7, F3.11: the request is reported failed, with all its groups, and the engine lives."""
    with Pair(model, consumer={"async_scheduling": async_scheduling}) as pair:
        others = neighbours(pair)
        pair.consumer.tap.failing = TRIES
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run()
        assert pair.consumer.scheduled[request_id][0][0] == 0
        for i, expected in {**others, request_id: answer(prompt_of(14), 4)}.items():
            assert pair.consumer.finished[i].tokens == expected
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert received["outcome"] == "failed"
        assert received["reason"]
        pair.check_idle()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_read_is_an_error_where_the_operator_wants_that(async_scheduling: bool) -> None:
    """F1.7, F3.11: fails closed, for this request alone."""
    with Pair(HYBRID, policy="fail", consumer={"async_scheduling": async_scheduling}) as pair:
        others = neighbours(pair)
        pair.consumer.tap.failing = TRIES
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run()
        assert pair.consumer.finished[request_id].reason is FinishReason.ERROR
        assert pair.consumer.finished[request_id].tokens == []
        for i, expected in others.items():
            assert pair.consumer.finished[i].tokens == expected
        pair.check_idle()


def test_a_failed_read_of_a_partly_cached_prompt_uses_what_is_cached() -> None:
    with Pair(HYBRID) as pair:
        pair.consumer.add(prompt_of(14)[:9])
        pair.run()
        pair.consumer.tap.failing = TRIES
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run()
        assert pair.consumer.scheduled[request_id][0][0] == 8
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


def test_a_read_that_takes_too_long_fails_once_nothing_can_land_any_more(
    leap: Callable[[float], None],
) -> None:
    with Pair(HYBRID, transfer_timeout_s=30, lease_s=600) as pair:
        pair.consumer.tap.held = pair.consumer.tap.deaf = True
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        leap(31)
        pair.run_until(lambda: pair.consumer.ferry.quarantined_count == 1, "the quarantine")
        for _ in range(20):
            pair.step()
        assert pair.consumer.finished[request_id].tokens == []
        assert pair.consumer.status(request_id) is WAITS, "its blocks may still be written"
        pair.consumer.tap.held = False
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.computed_here(request_id) == 14 + 3
        pair.check_idle()


def test_a_read_that_can_be_cancelled_ends_at_its_deadline(leap: Callable[[float], None]) -> None:
    with Pair(HYBRID, transfer_timeout_s=30, lease_s=600) as pair:
        pair.consumer.tap.held = True
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        leap(31)
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.tap.held
        pair.check_idle()


def test_a_producer_that_goes_away_during_the_read() -> None:
    with Pair(HYBRID) as pair:
        pair.consumer.tap.held = True
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        pair.producer.worker_half.shutdown()
        pair.consumer.tap.held = False
        pair.run_until(lambda: not pair.consumer.busy, "the answer")
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.consumer.check_idle()


def test_a_producer_that_goes_away_while_the_request_queues() -> None:
    with Pair(HYBRID, lease_s=0.3, consumer={"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(14))
        pair.consumer.add(prompt_of(5), max_tokens=200)
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.producer.ferry.counters.claimed == 1, "the claim")
        pair.producer.worker_half.shutdown()
        pair.run_until(lambda: not pair.consumer.busy, "the answer")
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.consumer.check_idle()


def test_a_producer_that_died_while_nothing_was_under_way_is_told_with_the_next_step() -> None:
    """Symptom: `stateferry_peers` called it ready for ten minutes."""
    with Pair(HYBRID, handshake_timeout_s=0.3) as pair:
        pair.hand_off(prompt_of(14))
        pair.producer.worker_half.shutdown()
        wait(
            lambda: pair.consumer.ferry.levels()["stateferry_peers", "failed"] == 1, "the dead one to be seen"
        )
        pair.consumer.add(prompt_of(14, 1), max_tokens=2)
        pair.run_until(lambda: not pair.consumer.busy, "the answer")
        standing = pair.consumer.half.numbers._standing
        assert [standing["stateferry_peers", s] for s in ("ready", "greeting", "failed")] == [0, 0, 1]


def test_a_lease_that_runs_out_during_the_read_makes_it_worthless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes arrive, but the producer has given its blocks away: who knows whose they are."""
    monkeypatch.setattr(Link, "renew", lambda *_: None)
    with Pair(HYBRID, lease_s=0.3) as pair:
        pair.consumer.tap.held = pair.consumer.tap.deaf = True
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        pair.run_until(lambda: pair.producer.ferry.counters.expired == 1, "the lease's end")
        pair.consumer.tap.held = False
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert "lease" in received["reason"]
        pair.check_idle()


def test_blocks_that_cannot_be_paired_fail_the_load_and_free_the_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise LayoutError("cannot be paired")

    with Pair(HYBRID) as pair:
        others = neighbours(pair)
        monkeypatch.setattr(taking, "group_loads", broken)
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run()
        for i, expected in {**others, request_id: answer(prompt_of(14), 4)}.items():
            assert pair.consumer.finished[i].tokens == expected
        assert (
            pair.consumer.finished[request_id].params["stateferry"]["received"]["reason"]
            == "cannot be paired"
        )
        pair.check_idle()


@pytest.mark.parametrize(
    "hook", ["on_new_request", "matched_tokens", "group_loads", "heard", "request_finished", "received"]
)
def test_a_defect_in_a_hook_costs_the_hand_off_not_the_engine(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all nobody waits for a load that was never ordered."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError(hook)

    with Pair(HYBRID, lease_s=0.5) as pair:
        others = neighbours(pair)
        params = pair.prefill(prompt_of(14))
        monkeypatch.setattr(pair.consumer.half if hasattr(pair.consumer.half, hook) else taking, hook, broken)
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run()
        for i, expected in {**others, request_id: answer(prompt_of(14), 4)}.items():
            assert pair.consumer.finished[i].tokens == expected
        assert any(hook in error for error in pair.log.errors)
        for engine in (pair.producer, pair.consumer):
            assert engine.free_blocks == engine.all_free
            assert engine.scheduler.requests == {}


def test_a_dead_ferry_fails_loads_and_keeps_nothing() -> None:
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(14))
        pair.producer.ferry.stop()
        pair.consumer.ferry.stop()
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        for engine in (pair.producer, pair.consumer):
            assert engine.free_blocks == engine.all_free
            assert engine.scheduler.requests == {}


def test_hooks_of_another_half_are_refused_in_one_line() -> None:
    with Pair(HYBRID) as pair:
        worker: StateFerryConnector = pair.consumer.worker_half
        assert worker.get_num_new_matched_tokens(None, 0) == (0, False)
        assert "scheduler hook" in pair.log.errors[0]


@pytest.mark.parametrize(
    "trouble",
    [
        lambda engine: setattr(engine.tap, "failing", TRIES),
        lambda engine: None,
    ],
    ids=["fails", "succeeds"],
)
def test_blocks_are_the_ferrys_until_it_reports(trouble: Callable[[Engine], None]) -> None:
    with Pair(HYBRID) as pair:
        pair.consumer.tap.held = True
        trouble(pair.consumer)
        request_id = add_hand_off(pair, prompt_of(14))
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        held = pair.consumer.all_free - pair.consumer.free_blocks
        assert held == 4 + 3
        for _ in range(30):
            pair.step()
        assert pair.consumer.status(request_id) is WAITS
        assert pair.consumer.all_free - pair.consumer.free_blocks == held
        pair.consumer.tap.held = False
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()
