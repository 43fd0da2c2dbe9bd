"""`load_mode: sync`: a request runs in the step in which it gets its blocks, over bytes that are in place.

Each test names the item of the READ contract (F) or the weakness of vLLM's own connector (W) that it guards
against.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, HYBRID_FINE, HYBRID_SPECULATIVE, HYBRID_UNCACHED, WINDOW, Pair
from simulated_model import answer
from vllm.v1.request import RequestStatus

from stateferry.errors import ConfigError
from stateferry.vllm import destinations, taking
from stateferry.vllm.connector import StateFerryConnector
from stateferry.vllm.placing import Placer
from stateferry.vllm.taking import Taking

pytestmark = pytest.mark.scheduler

SYNC = {"load_mode": "sync", "room_mib": 1}
MODELS = {
    "align": HYBRID,
    "align with scratch slots": HYBRID_SPECULATIVE,
    "align, hits inside a block": HYBRID_FINE,
    "align, blocks outermost": CacheModel(states=3, layout="BLHNC"),
    "none": HYBRID_UNCACHED,
    "attention": ATTENTION,
    "window": WINDOW,
    "window and states": CacheModel(states=2, window=6),
}


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


def sync_pair(model: CacheModel, consumer: dict[str, Any] | None = None, **both: Any) -> Pair:
    return Pair(model, consumer=SYNC | (consumer or {}), **both)


def hand_off(pair: Pair, prompt: list[int], extra: int = 0) -> str:
    """One hand-off, whose answer must be right; `extra` tokens are appended for the consumer."""
    params = pair.prefill(prompt)
    whole = prompt + list(range(2000, 2000 + extra))
    request_id = pair.consumer.add(whole, params=params, max_tokens=pair.model.block + 2).request_id
    pair.run()
    assert pair.consumer.finished[request_id].tokens == answer(whole, pair.model.block + 2)
    pair.check_idle()
    return request_id


def runs_later(model: CacheModel, length: int, extra: int = 0) -> bool:
    """Whether the state that is written lies in another block than the one that is loaded: vLLM would count
    too few blocks for a step that loads and runs it."""
    return (
        bool(model.states)
        and model.mode == "align"
        and (length - 2) // model.block != (length + extra - 1) // model.block
    )


def sweep(model: CacheModel, lengths: range | None = None, warm: bool = False, **settings: Any) -> None:
    """Hand-offs of every length, each placed in the step that admits its request."""
    with sync_pair(model, settings) as pair:
        for length in lengths or range(2, 4 * model.block + 3):
            prompt = prompt_of(length)
            if warm:
                pair.consumer.add(prompt[: len(prompt) // 2 + 1])
                pair.run()
            try:
                request_id = hand_off(pair, prompt)
                assert pair.consumer.scheduled[request_id][0] == (length - 1, 1)
                late = runs_later(model, length)
                ways = (pair.consumer.places, pair.consumer.loads)
                placed, loaded = ([p for p in way if p.request_id == request_id] for way in ways)
                assert not (placed if late else loaded), "it was loaded the other way"
                held = min(length // 2 + 1, length - 1) // model.block * model.block if warm else 0
                assert [p.groups[-1].first_block for p in (*placed, *loaded)] == [held // model.block] * (
                    held < length - 1
                )
            except AssertionError as e:
                raise AssertionError(f"prompt of {length} tokens: {e}") from e
        assert pair.consumer.places


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("model", MODELS)
def test_every_length_runs_over_the_producers_bytes(model: str, runner: str) -> None:
    """F1.5, F1.6, F3.10, W3, W5: all of it is in place before the forward, under both of vLLM's runners, of
    which V2 shows us its step only after it has moved states to the column that it runs in."""
    sweep(MODELS[model], runner=runner)


@pytest.mark.parametrize("model", ["align", "align, hits inside a block", "attention", "window and states"])
def test_blocks_that_are_held_are_not_placed_anew(model: str) -> None:
    """F3.7, W7, and with F3.8: vLLM's hashes are on all blocks already when we choose destinations."""
    sweep(MODELS[model], warm=True)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_scheduler_is_promised_what_is_there_and_not_asynchronously(async_scheduling: bool) -> None:
    """F3.5, W25: `(K - computed, False)`, only once the bytes wait here; until then vLLM is to come again."""
    with sync_pair(HYBRID, {"async_scheduling": async_scheduling}) as pair:
        asked: list[Any] = []
        right = pair.consumer.half.matched_tokens
        pair.consumer.half.matched_tokens = lambda *more: asked.append(right(*more)) or asked[-1]
        pair.consumer.tap.held = True
        params = pair.prefill(prompt_of(14))
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        for _ in range(5):
            pair.step()
        assert set(asked) == {(None, False)}
        assert pair.consumer.status(request_id) is RequestStatus.WAITING
        assert pair.consumer.free_blocks == pair.consumer.all_free, "it holds blocks while it waits"
        pair.consumer.tap.held = False
        pair.run()
        assert asked[-1] == (13, False)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


def test_running_decodes_are_not_held_up_by_a_read() -> None:
    """W25: the step never waits for a transfer, however long that takes."""
    with sync_pair(HYBRID) as pair:
        running = pair.consumer.add(prompt_of(9, 7), max_tokens=60).request_id
        pair.consumer.tap.held = True
        params = pair.prefill(prompt_of(14))
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.consumer.finished[running].reason is not None, "the decode's end")
        assert pair.consumer.finished[request_id].tokens == []
        pair.consumer.tap.held = False
        pair.run()
        assert pair.consumer.finished[running].tokens == answer(prompt_of(9, 7), 60)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True}, {"do_remote_prefill": "x"}])
def test_a_request_without_an_offer_claims_nothing(params: Any) -> None:
    """W4: the in-tree connector claimed N-1 tokens for each of these, and nobody had read them."""
    with sync_pair(HYBRID) as pair:
        request_id = pair.consumer.add(prompt_of(11), params=params, max_tokens=3).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 3)
        assert pair.consumer.scheduled[request_id][0][0] == 0
        pair.check_idle()


def test_a_preempted_request_computes_everything_again() -> None:
    """W4: an offer is used up by its first placing."""
    with sync_pair(HYBRID, caching=False) as pair:
        params = pair.prefill(prompt_of(11))
        request_id = pair.consumer.add(prompt_of(11), params=params, max_tokens=8).request_id
        pair.run_until(lambda: len(pair.consumer.finished[request_id].tokens) > 2, "the first tokens")
        pair.consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
        pair.run()
        steps = pair.consumer.scheduled[request_id]
        assert steps[0] == (10, 1)
        assert any(computed == 0 for computed, _ in steps)
        assert len(pair.consumer.places) == 1
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(11), 8)
        pair.check_idle()


def test_nothing_is_placed_where_vllm_wants_nothing() -> None:
    """F3.7, W2: zero external tokens, by prompt log-probabilities or because all is held: a state placed now
    would come after the forward and rewind h(N) to h(N-1)."""
    with sync_pair(ATTENTION) as pair:
        hand_off(pair, prompt_of(13))
        before = len(pair.consumer.places)
        hand_off(pair, prompt_of(13))
        assert len(pair.consumer.places) == before
    with sync_pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(14))
        request = pair.consumer.add(prompt_of(14), params=params, max_tokens=4, prompt_logprobs=1)
        pair.run()
        assert pair.consumer.places == pair.consumer.loads == []
        assert pair.consumer.scheduled[request.request_id][0][0] == 0
        assert pair.consumer.finished[request.request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("extra", [1, 3, 4, 9])
def test_a_longer_prompt_computes_the_rest_in_the_same_step(extra: int, runner: str) -> None:
    """W3: the chunk behind the state may end in a later block than the state's own."""
    for length in (8, 9, 10):
        with sync_pair(HYBRID, {"runner": runner}) as pair:
            request_id = hand_off(pair, prompt_of(length), extra)
            assert pair.consumer.scheduled[request_id][0][0] == length - 1
            late = runs_later(HYBRID, length, extra)
            assert (len(pair.consumer.places), len(pair.consumer.loads)) == (not late, late)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_two_requests_of_one_prompt_in_one_step(async_scheduling: bool) -> None:
    """vLLM puts its hashes on a sync load's blocks before they are filled: whoever finds them runs in the
    same step or later, and so after the placing."""
    with sync_pair(ATTENTION, {"async_scheduling": async_scheduling}) as pair:
        pair.consumer.tap.held = True
        params = pair.prefill(prompt_of(14))
        first = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        pair.consumer.tap.held = False
        pair.run_until(lambda: pair.consumer.half.taking.claimable[first].waiting == 1, "the bytes")
        second = pair.consumer.add(prompt_of(14), max_tokens=4).request_id
        pair.run()
        assert pair.consumer.scheduled[second][0][0] == 12, "it found the blocks of the first"
        for request_id in (first, second):
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


def test_the_producer_is_free_while_the_request_still_queues() -> None:
    """W10: it needs no lease once its bytes wait here, so it may also die."""
    with sync_pair(HYBRID, {"max_seqs": 1}) as pair:
        params = pair.prefill(prompt_of(14))
        pair.consumer.add(prompt_of(5), max_tokens=200)
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: not pair.producer.busy, "the producer to be idle", step_s=0.002)
        assert pair.consumer.status(request_id) is RequestStatus.WAITING
        pair.producer.worker_half.shutdown()
        pair.run_until(lambda: not pair.consumer.busy, "the answer")
        assert pair.consumer.scheduled[request_id][0] == (13, 1)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.consumer.check_idle()


def test_the_response_tells_of_the_hand_off() -> None:
    """Even if its answer is one token, and so over before anything more can be heard of it."""
    with sync_pair(HYBRID) as pair:
        request_id = pair.hand_off(prompt_of(11), max_tokens=1)
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert (received["outcome"], received["tokens"], received["ahead"]) == ("received", 10, True)
        assert received["bytes"]["state"] > 0


def test_speculation_is_refused_by_name() -> None:
    """F3.13: not proven together, so not begun; the message names the settings and the way out."""
    with sync_pair(HYBRID) as pair:
        config = pair.consumer.config
        config.speculative_config = object()
        role = pair.consumer.connector.role
        with pytest.raises(ConfigError, match=r"load_mode.*speculative-config.*'async'"):
            StateFerryConnector(config, role, pair.consumer.cache_config)


def test_an_engine_only_has_a_room_if_it_reads_into_it() -> None:
    """`load_mode` may be set on both engines; the producer takes no memory for it."""
    with Pair(HYBRID, **SYNC) as pair:
        assert pair.producer.worker_half._worker._placer is None
        hand_off(pair, prompt_of(10))
        assert len(pair.consumer.places) == 1


# -- mistakes that the sweep must notice -------------------------------------------------------------


def _run_at_once(patch: pytest.MonkeyPatch) -> None:
    """Also where vLLM counts too few blocks, which does no harm while there are many."""
    patch.setattr(taking, "_may_run_at_once", lambda *_: True)
    patch.setitem(globals(), "runs_later", lambda *_: False)


def test_a_state_is_placed_wherever_the_step_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _run_at_once(monkeypatch)
    for runner in ("v1", "v2"):
        sweep(HYBRID, range(2, 12), runner=runner)


def _states_of_their_own_column_only(patch: pytest.MonkeyPatch) -> None:
    _run_at_once(patch)
    patch.setattr(destinations, "later_columns", lambda *_: [])


def _after_the_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateFerryConnector, "start_load_kv", lambda *_: None)


def _states_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = Placer.place
    patch.setattr(Placer, "place", lambda self, i, groups, *more: right(self, i, groups[-1:], *more))


def _promised_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Taking, "_in_room", lambda self, claimable: True)


def _held_blocks_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(destinations, "not_held", lambda group, positions, *_: positions)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "a state is not placed where V2 runs": (_states_of_their_own_column_only, {"runner": "v2"}),
    "nothing is placed": (_after_the_forward, {}),
    "states are not placed": (_states_forgotten, {}),
    "held blocks are placed anew": (_held_blocks_too, {"warm": True}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sweep_notices_when(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1.6: what is not placed before the forward shows in the answer."""
    make, settings = MISTAKES[mistake]
    make(monkeypatch)
    with pytest.raises(AssertionError, match="prompt of"):
        sweep(HYBRID, range(2, 12), **settings)


def test_a_promise_that_was_not_kept_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours, which no peer can bring about: better no engine than an answer from nothing."""
    with sync_pair(HYBRID) as pair:
        pair.consumer.tap.held = True
        monkeypatch.setattr(Taking, "_in_room", lambda self, claimable: True)
        params = pair.prefill(prompt_of(14))
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.consumer.half.taking.claimable[request_id].waiting = 1
        with pytest.raises(Exception, match="does not wait here"):
            pair.run()
        assert pair.consumer.finished[request_id].tokens == []
        pair.consumer.tap.held = False
