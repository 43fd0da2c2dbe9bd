"""The prefill leg: what is cut, what is offered, how long it is kept, and what the prefix cache remembers."""

import random
import time
from typing import Any

import pytest
from harness import ATTENTION, HYBRID, HYBRID_FINE, HYBRID_UNCACHED, WINDOW, Pair
from simulated_model import answer
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from stateferry.vllm import prompt as prompt_module

pytestmark = pytest.mark.scheduler

DECODE = {"do_remote_decode": True}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1000), k=length)


def finished(pair: Pair, request_id: str) -> Any:
    pair.run()
    return pair.producer.finished[request_id]


@pytest.mark.parametrize("model", [HYBRID, HYBRID_UNCACHED, WINDOW], ids=["align", "none", "window"])
def test_prefill_stops_before_the_last_token(model: Any) -> None:
    """F3.4."""
    with Pair(model) as pair:
        request = pair.producer.add(prompt_of(11), params=DECODE)
        assert request.num_prompt_tokens == len(request.prompt_token_ids) == request.num_tokens == 10
        pair.run_until(lambda: pair.producer.finished[request.request_id].reason is not None, "the prefill")
        assert pair.producer.computed_here(request.request_id) == 10
        params = pair.producer.finished[request.request_id].params
        assert params["stateferry"]["num_tokens"] == 10


def test_prefill_of_attention_alone_is_whole_and_offers_all_but_the_last_token() -> None:
    with Pair(ATTENTION) as pair:
        params = pair.prefill(prompt_of(11))
        assert pair.producer.scheduled["r0"] == [(0, 11)]
        assert params["stateferry"]["num_tokens"] == 10


@pytest.mark.parametrize("length", range(1, 15))
def test_window_model_is_offered_at_every_length(length: int) -> None:
    """At one length in every four vLLM had already freed the block in front of the window."""
    with Pair(WINDOW) as pair:
        assert pair.prefill(prompt_of(length))["do_remote_prefill"] == (length > 1)


@pytest.mark.parametrize("model", [HYBRID, ATTENTION], ids=["align", "attention"])
@pytest.mark.parametrize("length", range(2, 11))
def test_same_prompt_twice_in_a_row(length: int, model: Any) -> None:
    """After a full prefix hit there must still be a token to schedule, or vLLM asserts. F3.4."""
    with Pair(model) as pair:
        for _ in range(3):
            pair.prefill(prompt_of(length))


def test_a_prompt_of_one_token_is_not_offered_and_keeps_nothing() -> None:
    """F3.4."""
    with Pair(HYBRID) as pair:
        params = pair.prefill([7])
        assert params["do_remote_prefill"] is False
        assert "one token" in params["stateferry"]["not_offered"]
        pair.run()
        pair.check_idle()
        # Its consumer computes it, whatever it makes of such parameters.
        request_id = pair.consumer.add([7], params=params, max_tokens=2).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer([7], 2)
        pair.check_idle()


@pytest.mark.parametrize("params", [None, DECODE], ids=["plain", "prefill"])
@pytest.mark.parametrize("more", [[], [1], [1, 2, 3, 4, 5]], ids=["same", "one more", "five more"])
@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_a_block_whose_last_token_was_cut_off_is_never_a_prefix_hit(
    length: int, more: list[int], params: Any
) -> None:
    """The cut prompt's hashes must not name a block that ends in the token that was not computed."""
    prompt = prompt_of(length)
    with Pair(HYBRID) as pair:
        pair.prefill(prompt)
        request_id = pair.producer.add([*prompt, *more], params=params, max_tokens=3).request_id
        pair.run_until(lambda: pair.producer.finished[request_id].reason is not None, "the answer")
        first, _ = pair.producer.scheduled[request_id][0]
        assert first <= length - 1
        if params is None:
            assert pair.producer.finished[request_id].tokens == answer([*prompt, *more], 3)
        assert not pair.producer.worker.wrong


@pytest.mark.parametrize("model", [HYBRID, HYBRID_FINE, ATTENTION], ids=["align", "fine", "attention"])
def test_cut_hashes_are_the_hashes_of_the_cut_prompt(model: Any) -> None:
    with Pair(model) as pair:
        for length in range(2, 20):
            prompt = prompt_of(length)
            cut = pair.producer.add(prompt, params=DECODE)
            plain = pair.producer.add(prompt[: cut.num_prompt_tokens])
            assert cut.block_hashes == plain.block_hashes
            assert list(cut.all_token_ids) == list(plain.all_token_ids)


def test_a_stop_token_first_is_offered_all_the_same() -> None:
    prompt = prompt_of(10)
    (first,) = answer(prompt[:-1], 1)
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt, stop=first)
        assert pair.producer.finished["r0"].reason is FinishReason.STOP
        assert params["do_remote_prefill"]
        request_id = pair.consumer.add(prompt, params=params, max_tokens=3).request_id
        pair.run()
        assert pair.consumer.scheduled[request_id][0] == (9, 1)
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 3)
        pair.check_idle()


def test_max_tokens_of_the_prefill_leg_is_one_whatever_the_router_says() -> None:
    """A second token would move the state on before it is read."""
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(10), max_tokens=40)
        assert len(pair.producer.finished["r0"].tokens) == 1
        assert params["do_remote_prefill"]
        request_id = pair.consumer.add(prompt_of(10), params=params, max_tokens=3).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(10), 3)


@pytest.mark.parametrize("when", ["before its first step", "between chunks", "after it was held"])
def test_an_aborted_prefill_keeps_nothing(when: str) -> None:
    with Pair(HYBRID, producer={"max_batched_tokens": 8, "max_seqs": 8, "lease_s": 0.3}) as pair:
        request_id = pair.producer.add(prompt_of(22), params=DECODE).request_id
        if when == "between chunks":
            pair.producer.step()
        elif when == "after it was held":
            pair.run_until(lambda: pair.producer.finished[request_id].reason is not None, "the prefill")
        pair.producer.abort(request_id)
        result = finished(pair, request_id)
        assert (result.params is not None) == (when == "after it was held")
        pair.check_idle()


@pytest.mark.parametrize(
    ("request_id", "offered"),
    [
        ("cmpl-5b1c-0-1a2b3c4d", True),
        ("cmpl-5b1c-1-1a2b3c4d", False),
        ("cmpl-5b1c-12-1a2b3c4d", False),
        ("0_cmpl-5b1c-0-1a2b3c4d", False),
        ("1_chatcmpl-5b1c-1a2b3c4d", False),
        ("chatcmpl-5b1c-1a2b3c4d", True),
        ("chatcmpl-5b1c-1-1a2b3c4d", True),
    ],
)
def test_only_what_the_response_can_carry_is_kept(request_id: str, offered: bool) -> None:
    """Samples of one prompt and later prompts of one call share one response, hence one dictionary."""
    with Pair(HYBRID, lease_s=0.3) as pair:
        params = pair.prefill(prompt_of(10), request_id=request_id)
        assert params["do_remote_prefill"] == offered
        if not offered:
            assert pair.producer.computed_here(request_id) == 10, "what is not offered is not cut"
            pair.step()
            pair.producer.check_idle()
        pair.run()
        pair.check_idle()


def test_prompt_log_probabilities_are_computed_for_the_whole_prompt() -> None:
    """F3.7: nothing external, nothing read, the producer released."""
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(10), prompt_logprobs=1)
        assert not params["do_remote_prefill"]
        assert pair.producer.computed_here("r0") == 10
        # The consumer's leg asks for them, too, so vLLM takes nothing from elsewhere: offers go back unused.
        other = pair.prefill(prompt_of(10))
        request_id = pair.consumer.add(prompt_of(10), params=other, prompt_logprobs=1).request_id
        pair.run()
        assert pair.consumer.computed_here(request_id) == 10
        pair.check_idle()


def test_a_preempted_prefill_is_cut_once() -> None:
    """Two prompts that do not fit together: one is thrown out, and comes back with the same length. F3.4."""
    with Pair(HYBRID, producer={"blocks": 24, "max_batched_tokens": 8, "max_seqs": 8}) as pair:
        ids = [pair.producer.add(prompt_of(40, seed), params=DECODE).request_id for seed in range(2)]
        requests = [pair.producer.scheduler.requests[i] for i in ids]
        pair.producer.step()
        pair.producer.step()
        victim = requests[0]
        pair.producer.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.run_until(lambda: all(pair.producer.finished[i].reason for i in ids[:1]), "the first prefill")
        assert victim.num_preemptions
        assert victim.num_prompt_tokens == 39
        assert sum(n for _, n in pair.producer.scheduled[ids[0]]) > 39
        params = pair.producer.finished[ids[0]].params
        assert params["stateferry"]["num_tokens"] == 39
        request_id = pair.consumer.add(prompt_of(40, 0), params=params, max_tokens=2).request_id
        pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(40, 0), 2)


def test_chunks_of_a_long_prefill_are_offered_as_one() -> None:
    with Pair(HYBRID, producer={"max_batched_tokens": 12, "max_seqs": 12}) as pair:
        prompt = prompt_of(50)
        request_id = pair.hand_off(prompt, max_tokens=4)
        assert len(pair.producer.scheduled["r0"]) > 3
        assert pair.consumer.scheduled[request_id][0] == (49, 1)
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 4)
        pair.check_idle()


def test_blocks_of_a_finished_prefill_stay_until_the_release() -> None:
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(10))
        for _ in range(20):
            pair.step()
        assert pair.producer.free_blocks < pair.producer.all_free
        assert pair.producer.half.open_count == 1
        held = pair.producer.tables("r0")
        assert [ids[-1] for ids in held] == [ids[-1] for ids in params["remote_block_ids"]]
        pair.consumer.add(prompt_of(10), params=params)
        pair.run()
        pair.check_idle()
        assert pair.producer.ferry.counters.released == 1


def test_blocks_that_nobody_claims_come_back_while_the_engine_is_idle() -> None:
    with Pair(HYBRID, lease_s=0.3) as pair:
        before = time.monotonic()
        pair.prefill(prompt_of(10))
        pair.run()
        assert time.monotonic() - before >= 0.3
        pair.check_idle()
        assert pair.producer.ferry.counters.expired == 1


def test_a_claim_that_comes_before_the_grant_is_served() -> None:
    """The response can reach the consumer before the producer's next step, which carries the grant."""
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(10))
        request_id = pair.consumer.add(prompt_of(10), params=params, max_tokens=2).request_id
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            pair.consumer.step()
        assert pair.consumer.status(request_id).name == "WAITING_FOR_REMOTE_KVS"
        assert pair.producer.ferry.counters.granted == 0
        pair.run()
        assert pair.consumer.scheduled[request_id][0] == (9, 1)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(10), 2)
        pair.check_idle()


def test_an_offer_released_before_its_grant_does_not_keep_its_blocks_for_a_lease() -> None:
    """A consumer that has everything, or whose client has gone, can be that quick."""
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(10))
        request_id = pair.consumer.add(prompt_of(10), params=params).request_id
        pair.consumer.abort(request_id)
        while pair.consumer.busy or pair.consumer.ferry.open_count:
            pair.consumer.step()
        time.sleep(0.05)  # the release is on its way
        assert pair.producer.ferry.counters.granted == 0
        pair.run()
        pair.check_idle()
        assert pair.producer.ferry.counters.released == 1
        assert pair.producer.ferry.counters.expired == 0


def test_many_prefills_at_a_time() -> None:
    prompts = [prompt_of(length, length) for length in range(2, 40)]
    with Pair(HYBRID, blocks=400, producer={"max_batched_tokens": 64}) as pair:
        ids = [pair.producer.add(p, params=DECODE).request_id for p in prompts]
        answers = {}
        pair.run_until(lambda: all(pair.producer.finished[i].reason is not None for i in ids), "all prefills")
        for prompt, i in zip(prompts, ids, strict=True):
            params = pair.producer.finished[i].params
            answers[pair.consumer.add(prompt, params=params, max_tokens=5).request_id] = answer(prompt, 5)
        pair.run()
        for request_id, expected in answers.items():
            assert pair.consumer.finished[request_id].tokens == expected
        assert len(pair.consumer.loads) == len(prompts)
        pair.check_idle()


def test_a_streamed_prompt_loses_no_token_in_its_middle() -> None:
    """A session's later parts are appended to the first: a cut there would leave a hole."""
    with Pair(HYBRID) as pair:
        parts = [prompt_of(9), prompt_of(7, 1)]
        session = pair.producer.add(parts[0], params=DECODE, request_id="s", resumable=True)
        pair.run_until(lambda: session.status is RequestStatus.WAITING_FOR_STREAMING_REQ, "more input")
        pair.producer.add(parts[1], params=DECODE, request_id="s", resumable=True)
        assert list(session.prompt_token_ids) == [*parts[0], *parts[1]]
        pair.producer.abort("s")
        pair.run()
        pair.check_idle()


def test_a_prompt_of_embeddings_is_not_cut_and_not_offered() -> None:
    """F3.4, otherwise."""
    with Pair(HYBRID) as pair:
        request = pair.producer.add(prompt_of(9))
        request.prompt_embeds = object()
        assert "embeddings" in prompt_module.why_not_offered(request)
        request.prompt_embeds = None
        assert prompt_module.why_not_offered(request) == ""
