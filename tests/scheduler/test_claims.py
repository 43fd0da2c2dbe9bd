"""The decode leg: which requests take tokens from elsewhere, and which compute everything themselves."""

import copy
import random
import time
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, HYBRID_UNCACHED, WINDOW, Pair, wait
from simulated_model import answer, seed
from vllm.v1.request import RequestStatus

from stateferry.ferry.link import Link

pytestmark = pytest.mark.scheduler

LORA = "adapter"


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


def decode(pair: Pair, prompt: list[int], params: Any, max_tokens: int = 3, **more: Any) -> str:
    """The decode leg to its end; its answer must be right whatever was loaded."""
    request_id = pair.consumer.add(prompt, params=params, max_tokens=max_tokens, **more).request_id
    pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
    expected = answer(prompt, max_tokens, seed(more.get("lora")))
    assert pair.consumer.finished[request_id].tokens == expected
    return request_id


def loaded(pair: Pair, request_id: str) -> bool:
    """Whether blocks were read for a request."""
    return request_id in pair.consumer.loaded_pages


@pytest.mark.parametrize("model", [HYBRID, HYBRID_UNCACHED, ATTENTION, WINDOW])
def test_a_plain_request_computes_its_prompt_here(model: CacheModel) -> None:
    """F3.5: W4."""
    with Pair(model) as pair:
        request_id = decode(pair, prompt_of(11), None)
        assert pair.consumer.computed_here(request_id) == 13
        assert pair.consumer.loads == []
        pair.run()
        pair.check_idle()


def test_one_token_of_answer() -> None:
    with Pair(HYBRID) as pair:
        request_id = pair.hand_off(prompt_of(11), max_tokens=1)
        assert pair.consumer.scheduled[request_id] == [(10, 1)]
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 1)
        pair.check_idle()


@pytest.mark.parametrize("extra", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("model", [HYBRID, HYBRID_UNCACHED, ATTENTION, WINDOW])
def test_a_longer_prompt_than_the_offers_computes_the_rest(model: CacheModel, extra: int) -> None:
    """A router may serve the producer's first token at once and append it, or more."""
    for length in (8, 9, 10):
        with Pair(model) as pair:
            params = pair.prefill(prompt_of(length))
            longer = prompt_of(length) + list(range(2000, 2000 + extra))
            request_id = decode(pair, longer, params)
            assert loaded(pair, request_id)
            assert pair.consumer.scheduled[request_id][0][0] == length - 1
            assert pair.consumer.computed_here(request_id) == extra + 1 + 2
            pair.run()
            pair.check_idle()


@pytest.mark.parametrize(
    ("other", "more"),
    [
        (prompt_of(11, 1), {}),
        (prompt_of(11)[:10], {}),
        (prompt_of(11)[:4], {}),
        ([1, *prompt_of(11)[1:]], {}),
        ([*prompt_of(11)[:9], 1, 2], {}),
        (prompt_of(11), {"lora": LORA}),
        (prompt_of(11), {"salt": "secret"}),
    ],
    ids=["other", "as long as the offer", "shorter", "first token", "last offered token", "lora", "salt"],
)
def test_params_of_another_prompt_are_not_used(other: list[int], more: dict[str, Any]) -> None:
    with Pair(HYBRID, lease_s=0.5) as pair:
        params = pair.prefill(prompt_of(11))
        request_id = decode(pair, other, params, **more)
        assert pair.consumer.computed_here(request_id) == len(other) + 2
        assert pair.consumer.loads == []
        # The offer is still good for the prompt that it was made for.
        assert loaded(pair, decode(pair, prompt_of(11), params))
        pair.run()
        pair.check_idle()


@pytest.mark.parametrize("more", [{"lora": LORA}, {"salt": "secret"}], ids=["lora", "salt"])
def test_the_same_adapter_or_salt_on_both_legs_is_one_prompt(more: dict[str, Any]) -> None:
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(11), **more)
        assert loaded(pair, decode(pair, prompt_of(11), params, **more))
        pair.run()
        pair.check_idle()


def test_one_dictionary_on_two_prompts_of_one_call_serves_the_first() -> None:
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(11), request_id="cmpl-a-0-11111111")
        prompts = {"cmpl-b-0-22222222": prompt_of(11), "cmpl-b-1-22222222": prompt_of(12)}
        for request_id, prompt in prompts.items():
            pair.consumer.add(prompt, params=params, request_id=request_id, max_tokens=3)
        pair.run()
        for request_id, prompt in prompts.items():
            assert pair.consumer.finished[request_id].tokens == answer(prompt, 3)
        assert list(pair.consumer.loaded_pages) == ["cmpl-b-0-22222222"]
        pair.check_idle()


@pytest.mark.parametrize("overlapping", [False, True])
def test_params_used_twice_serve_one_request(overlapping: bool) -> None:
    with Pair(HYBRID, caching=False) as pair:
        params = pair.prefill(prompt_of(11))
        ids = []
        for _ in range(3):
            ids.append(pair.consumer.add(prompt_of(11), params=params, max_tokens=3).request_id)
            if not overlapping:
                pair.run()
        pair.run()
        for request_id in ids:
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 3)
        assert list(pair.consumer.loaded_pages) == ids[:1]
        pair.check_idle()


def test_a_second_use_of_an_offer_never_reads_what_the_first_has_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One engine's claims of one offer could get each other's answers: the loser then read freed blocks."""
    monkeypatch.setattr(Link, "renew", lambda *_: None)  # the next renewal would have found out, too late
    with Pair(HYBRID, caching=False, producer={"blocks": 24}) as pair:
        pair.hand_off(prompt_of(5))  # the engines know each other
        params = pair.prefill(prompt_of(11))
        pair.consumer.tap.held = True
        ids = []
        for _ in range(6):  # their claims wait for the grant, which comes with the producer's next step
            ids.append(pair.consumer.add(prompt_of(11), params=params, max_tokens=3).request_id)
            pair.consumer.step()
        wait(lambda: pair.producer.ferry.open_count == 0 and pair.consumer.tap.posted > 1, "the reads")
        time.sleep(0.05)
        pair.producer.step()
        for _ in range(50):
            pair.step()
            time.sleep(0.001)
        reuse = [pair.producer.add(prompt_of(20, number), max_tokens=2).request_id for number in range(1, 4)]
        pair.run_until(lambda: not pair.producer.scheduler.running, "other prompts in the same blocks")
        pair.consumer.tap.held = False
        pair.run()
        for request_id in ids:
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 3)
        assert all(pair.producer.finished[i].tokens for i in reuse)
        pair.check_idle()


def test_two_consumers_with_the_same_params_serve_one() -> None:
    with Pair(HYBRID) as pair, Pair(HYBRID) as other:
        params = pair.prefill(prompt_of(11))
        assert loaded(pair, decode(pair, prompt_of(11), params))
        request_id = other.consumer.add(prompt_of(11), params=params, max_tokens=3).request_id
        other.run()
        assert not loaded(other, request_id)
        assert other.consumer.finished[request_id].tokens == answer(prompt_of(11), 3)
        pair.run()
        pair.check_idle()
        other.check_idle()


def test_an_offer_that_has_expired_is_computed_here() -> None:
    with Pair(HYBRID, lease_s=0.2) as pair:
        params = pair.prefill(prompt_of(11))
        pair.run()
        request_id = decode(pair, prompt_of(11), params)
        assert not loaded(pair, request_id)
        pair.run()
        pair.check_idle()


def test_a_request_that_queues_for_longer_than_a_lease_keeps_its_offer() -> None:
    with Pair(HYBRID, lease_s=1.2, consumer={"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(11))
        pair.consumer.add(prompt_of(5), max_tokens=300)
        request_id = pair.consumer.add(prompt_of(11), params=params, max_tokens=2).request_id
        while pair.producer.ferry.counters.renewed < 4:
            pair.producer.step()
            if len(pair.consumer.loads) + pair.consumer.computed_here("r0") < 200:
                pair.consumer.step()
            time.sleep(0.01)
            assert pair.producer.ferry.counters.expired == 0
        assert pair.consumer.status(request_id) is RequestStatus.WAITING
        pair.run()
        assert loaded(pair, request_id)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 2)
        pair.check_idle()


def test_an_offer_lost_in_the_queue_is_not_waited_for() -> None:
    """No blocks are held for a load of which it is known that it cannot come."""
    with Pair(HYBRID, lease_s=0.2, consumer={"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(11))
        pair.run()
        pair.consumer.add(prompt_of(5), max_tokens=300)
        request_id = pair.consumer.add(prompt_of(11), params=params, max_tokens=2).request_id
        claimable = pair.consumer.half.taking.claimable[request_id]
        pair.run_until(lambda: claimable.lost, "the news", step_s=0.01)
        assert pair.consumer.status(request_id) is RequestStatus.WAITING
        pair.run()
        assert pair.consumer.loads == []
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 2)
        pair.check_idle()


def test_a_loaded_request_that_is_preempted_computes_everything_again() -> None:
    with Pair(HYBRID, caching=False) as pair:
        params = pair.prefill(prompt_of(11))
        request_id = pair.consumer.add(prompt_of(11), params=params, max_tokens=8).request_id
        pair.run_until(lambda: len(pair.consumer.finished[request_id].tokens) > 2, "the first tokens")
        pair.consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.run()
        steps = pair.consumer.scheduled[request_id]
        assert steps[0] == (10, 1)
        assert any(computed == 0 for computed, _ in steps)
        assert len(pair.consumer.loads) == 1
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 8)
        pair.check_idle()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_that_push_each_other_out_are_loaded_once_each(async_scheduling: bool) -> None:
    """Ten answers grow past what the consumer's cache holds: vLLM throws some out and resumes them."""
    with Pair(HYBRID, consumer={"blocks": 60, "async_scheduling": async_scheduling}) as pair:
        prompts = [prompt_of(12, number) for number in range(10)]
        offers = [pair.prefill(prompt) for prompt in prompts]
        ids = [
            pair.consumer.add(prompt, params=params, max_tokens=25).request_id
            for prompt, params in zip(prompts, offers, strict=True)
        ]
        requests = [pair.consumer.scheduler.requests[i] for i in ids]
        pair.run()
        assert any(request.num_preemptions for request in requests)
        for prompt, request_id in zip(prompts, ids, strict=True):
            assert pair.consumer.finished[request_id].tokens == answer(prompt, 25)
        assert sorted(load.request_id for load in pair.consumer.loads) == sorted(ids)
        pair.check_idle()


def test_a_consumer_only_engine_offers_nothing_and_a_producer_only_engine_claims_nothing() -> None:
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(11))
        request_id = pair.producer.add(prompt_of(11), params=params, max_tokens=3).request_id
        other_id = pair.consumer.add(
            prompt_of(11), params={"do_remote_decode": True}, max_tokens=3
        ).request_id
        done = (pair.producer.finished[request_id], pair.consumer.finished[other_id])
        pair.run_until(lambda: all(finish.reason for finish in done), "both answers")
        for finish in done:
            assert finish.tokens == answer(prompt_of(11), 3)
            assert finish.params is None
        assert pair.consumer.loads == pair.producer.loads == []


def test_an_engine_of_both_roles_hands_off_to_itself() -> None:
    """What one engine offers it may be asked to decode: from its own memory."""
    with Pair(HYBRID, caching=False) as pair, Pair(HYBRID, role="kv_both", caching=False) as both:
        engine = both.producer
        prefill = engine.add(prompt_of(11), params={"do_remote_decode": True}).request_id
        while engine.finished[prefill].reason is None:
            engine.step()
        params = engine.finished[prefill].params
        request_id = engine.add(prompt_of(11), params=params, max_tokens=3).request_id
        while engine.busy:
            engine.step()
        assert engine.finished[request_id].tokens == answer(prompt_of(11), 3)
        assert request_id in engine.loaded_pages
        engine.check_idle()
        pair.check_idle()


@pytest.mark.parametrize(
    ("model", "why"), [(ATTENTION, "groups"), (CacheModel(states=3, block=8), "position|group")]
)
def test_an_offer_of_another_shape_is_computed_here(model: CacheModel, why: str) -> None:
    with Pair(model, lease_s=0.3) as theirs, Pair(HYBRID) as ours:
        params = theirs.prefill(prompt_of(19))
        request_id = decode(ours, prompt_of(19), params)
        assert not loaded(ours, request_id)
        ours.run()
        theirs.run()
        ours.check_idle()
        theirs.check_idle()


def test_another_model_of_the_same_shape_is_refused_and_computed_here() -> None:
    with Pair(HYBRID, lease_s=0.3, model_name="another") as theirs, Pair(HYBRID) as ours:
        params = theirs.prefill(prompt_of(11))
        request_id = decode(ours, prompt_of(11), params)
        assert not loaded(ours, request_id)
        ours.run()
        theirs.run()
        ours.check_idle()
        theirs.check_idle()


def test_what_the_response_says_of_a_hand_off() -> None:
    with Pair(HYBRID) as pair:
        request_id = pair.hand_off(prompt_of(11))
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert received["outcome"] == "received"
        assert received["tokens"] == 10
        pages = pair.consumer.worker.groups
        assert received["bytes"] == {
            "state": 3 * 2 * pages[0].states[0].content_bytes,
            "attention": 3 * sum(len(layer.page(0)) for layer in pages[3].layers),
        }


def test_params_are_not_changed_by_being_used() -> None:
    """The router may send them again, or log them."""
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(11))
        before = copy.deepcopy(params)
        decode(pair, prompt_of(11), params)
        assert params == before
