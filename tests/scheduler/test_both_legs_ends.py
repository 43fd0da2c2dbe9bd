"""Both legs at once, and how it can end: clients that leave at any moment, hits that need no offer, names
that come again, engines that are both.

Blocks are given back because engines tell each other, not because leases end.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, WINDOW, Engine, Pair
from simulated_model import answer
from test_both_legs_at_once import (
    decode_first,
    decode_params,
    prefill_params,
    prompt_of,
    told_to_wait,
)

from stateferry.ferry.inquiries import Inquiries
from stateferry.session import Ledger
from stateferry.vllm.taking import Taking
from stateferry.wire import engine_place

pytestmark = pytest.mark.scheduler


def check_no_lease_was_waited_for(*engines: Engine) -> None:
    for engine in engines:
        assert [ferry.counters.expired for ferry in engine.ferries] == [0] * len(engine.ferries)


def check_over(pair: Pair) -> None:
    pair.run()
    pair.check_idle()
    check_no_lease_was_waited_for(pair.producer, pair.consumer)
    for engine in (pair.producer, pair.consumer):
        for ferry in engine.ferries:
            loop = ferry._loop
            assert loop is not None
            assert not loop._consumer.inquiries._told


# -- nothing is waited for that is not needed ----------------------------------------------------


@pytest.mark.parametrize("model", [ATTENTION, HYBRID], ids=["attention", "hybrid"])
def test_a_prompt_that_the_decode_engine_has_waits_for_no_prefill(model: CacheModel) -> None:
    """It waited for the prefill engine, until `offer_timeout_s` where that was dead."""
    prompt = prompt_of(3 * model.block + 1)
    with Pair(model) as pair:
        pair.consumer.add(prompt, max_tokens=2)
        pair.run()
        params = decode_params(pair, "t")
        request_id = pair.consumer.add(prompt, params=params, max_tokens=4).request_id
        pair.run_until(lambda: not pair.consumer.busy, "the answer, without a prefill leg")
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 4)
        assert pair.consumer.scheduled[request_id][0] == (len(prompt) - 1, 1)
        pair.producer.add(prompt, params=prefill_params("t"))
        check_over(pair)


def test_an_offer_for_another_prompt_is_given_back_before_its_lease_ends() -> None:
    with Pair(HYBRID) as pair:
        request_id = decode_first(pair, prompt_of(14, 1))
        pair.producer.add(prompt_of(14, 2), params=prefill_params("t"))
        check_over(pair)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14, 1), 4)
        assert pair.producer.ferry.counters.released == 1


def test_what_reading_an_offer_raises_leaves_its_request_and_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's hook is guarded; but what else had come in the same step was lost, and the name kept."""
    right = Taking._check_offer

    def defect(self: Taking, request: Any, offer: Any) -> None:
        if request.num_prompt_tokens == 14:
            raise TypeError("a defect")
        right(self, request, offer)

    monkeypatch.setattr(Taking, "_check_offer", defect)
    with Pair(HYBRID) as pair:
        bad, good = decode_first(pair, prompt_of(14), "bad"), decode_first(pair, prompt_of(15), "good")
        for length, name in ((14, "bad"), (15, "good")):
            pair.producer.add(prompt_of(length), params=prefill_params(name))
        pair.run()
        assert pair.consumer.finished[bad].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.scheduled[bad][0][0] == 0
        assert pair.consumer.scheduled[good][0] == (14, 1)
        assert len(pair.log.errors) == 1
        pair.log.errors.clear()
        check_over(pair)


# -- clients that leave --------------------------------------------------------------------------

LEAVES: dict[str, Callable[[Pair, str], bool]] = {
    "before it is asked for": lambda pair, request_id: True,
    "while it waits": lambda pair, request_id: told_to_wait(pair),
    "when the offer is here": lambda pair, request_id: request_id in pair.consumer.half.taking.claimable,
    "while it loads": lambda pair, request_id: any(x.request_id == request_id for x in pair.consumer.loads),
}


@pytest.mark.parametrize("when", LEAVES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_client_that_leaves_lets_nobody_wait_for_a_lease(when: str, ranks: int) -> None:
    with Pair(HYBRID, consumer={"ranks": ranks}) as pair:
        params = decode_params(pair, "t")
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        late = when in ("before it is asked for", "while it waits")
        if not late:
            pair.producer.add(prompt_of(14), params=prefill_params("t"))
        pair.run_until(lambda: LEAVES[when](pair, request_id), when)
        pair.consumer.abort(request_id)
        if late:
            pair.run_until(lambda: told_to_go(pair), "the producer to hear of it")
            pair.producer.add(prompt_of(14), params=prefill_params("t"))
        check_over(pair)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("others", [True, False], ids=["a busy engine", "an idle engine"])
def test_a_decode_leg_that_left_before_its_prefill_keeps_blocks_on_no_rank(ranks: int, others: bool) -> None:
    """Rank 0 was told; the others kept theirs for a lease, and with them vLLM kept the request's."""
    with Pair(HYBRID, producer={"ranks": 2}, consumer={"ranks": ranks}) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.run_until(lambda: told_to_wait(pair), "the producer's first answer")
        busy = pair.producer.add(prompt_of(9, 5), max_tokens=2000).request_id if others else None
        pair.consumer.abort(request_id)
        half = pair.producer.half.offering
        heard = (lambda: bool(half._renounced)) if others else (lambda: told_to_go(pair))
        pair.run_until(heard, "the producer to hear of it")
        prefill = pair.producer.add(prompt_of(14), params=prefill_params("t")).request_id
        pair.run_until(lambda: pair.producer.finished[prefill].reason is not None, "the prefill")
        if busy is not None:
            pair.producer.abort(busy)
            assert pair.producer.finished[prefill].params["do_remote_prefill"] is False
        check_over(pair)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offer_for_another_prompt_is_given_back_on_all_ranks(ranks: int) -> None:
    with Pair(HYBRID, producer={"ranks": 2}, consumer={"ranks": ranks}) as pair:
        request_id = decode_first(pair, prompt_of(14, 1))
        pair.producer.add(prompt_of(14, 2), params=prefill_params("t"))
        check_over(pair)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14, 1), 4)


def test_mutant_other_ranks_hear_of_no_leg_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "take_renounced", lambda self: [])
    with Pair(HYBRID, producer={"ranks": 2, "lease_s": 0.5}) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.run_until(lambda: told_to_wait(pair), "the producer's first answer")
        pair.consumer.abort(request_id)
        pair.run_until(lambda: told_to_go(pair), "the producer to hear of it")
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        with pytest.raises(AssertionError):
            check_over(pair)


def told_to_go(pair: Pair) -> bool:
    loop = pair.producer.ferry._loop
    assert loop is not None
    return not pair.consumer.busy and bool(loop._producer.ledger._ended)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_legs_in_any_order_with_clients_that_leave_at_any_time(seed: int, load_mode: str) -> None:
    """Every answer that is given is right, and in the end nothing is held by anybody."""
    draw = random.Random(seed)
    settings = {"load_mode": load_mode} | ({"room_mib": 1} if load_mode == "sync" else {})
    with Pair(HYBRID, producer={"lease_s": 2.0}, consumer={"offer_timeout_s": 1.0, **settings}) as pair:
        legs = [(side, number) for number in range(12) for side in ("p", "d")]
        draw.shuffle(legs)
        decoding: dict[str, list[int]] = {}
        alive: list[tuple[Engine, str]] = []
        while legs or alive:
            for _ in range(draw.randrange(4)):
                pair.step()
            if legs and draw.random() < 0.6:
                side, number = legs.pop()
                prompt, name = prompt_of(3 + number, number), f"name {number}"
                if side == "p":
                    request = pair.producer.add(prompt, params=prefill_params(name))
                    alive.append((pair.producer, request.request_id))
                else:
                    request = pair.consumer.add(prompt, params=decode_params(pair, name), max_tokens=4)
                    decoding[request.request_id] = prompt
                    alive.append((pair.consumer, request.request_id))
            elif alive:
                engine, request_id = alive.pop(draw.randrange(len(alive)))
                if draw.random() < 0.3:
                    engine.abort(request_id)
        pair.run()
        for request_id, prompt in decoding.items():
            tokens = pair.consumer.finished[request_id].tokens
            assert tokens == answer(prompt, 4)[: len(tokens)]
        pair.check_idle()


def test_mutant_a_decode_leg_that_leaves_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inquiries, "_release", lambda self, inquiry: None)
    with Pair(HYBRID, producer={"lease_s": 0.5}) as pair:
        request_id = decode_first(pair, prompt_of(14, 1))
        pair.producer.add(prompt_of(14, 2), params=prefill_params("t"))
        with pytest.raises(AssertionError):
            check_over(pair)
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14, 1), 4)


# -- names ---------------------------------------------------------------------------------------


def test_a_prefill_that_queues_while_8192_others_come_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was offered under another one, and its decode leg waited until `offer_timeout_s`."""
    monkeypatch.setattr("stateferry.vllm.offering.MAX_PROMISED", 1)
    with Pair(HYBRID) as pair:
        first, second = decode_first(pair, prompt_of(14), "one"), decode_first(pair, prompt_of(15), "two")
        pair.producer.add(prompt_of(14), params=prefill_params("one"))
        pair.producer.add(prompt_of(15), params=prefill_params("two"))
        check_over(pair)
        assert pair.consumer.scheduled[first][0] == (13, 1)
        assert pair.consumer.scheduled[second][0] == (14, 1)


def test_a_name_that_8192_others_pushed_out_does_not_leave_its_first_request_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stateferry.vllm.taking.MAX_USED", 1)
    with Pair(HYBRID) as pair:
        first = decode_first(pair, prompt_of(14), "one")
        decode_first(pair, prompt_of(15), "two")
        again = pair.consumer.add(prompt_of(14), params=decode_params(pair, "one"), max_tokens=4).request_id
        pair.run_until(lambda: pair.consumer.finished[again].reason is not None, "the one that came late")
        pair.producer.add(prompt_of(14), params=prefill_params("one"))
        pair.producer.add(prompt_of(15), params=prefill_params("two"))
        check_over(pair)
        for request_id in (first, again):
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)


# -- ranks and roles -----------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "load_mode"), [(HYBRID, "async"), (WINDOW, "async"), (HYBRID, "sync")])
def test_an_engine_that_is_both_hands_over_to_itself(model: CacheModel, load_mode: str) -> None:
    """Its decode leg names its own address, as a router does that has one engine."""
    settings = {"load_mode": load_mode} | ({"room_mib": 1} if load_mode == "sync" else {})
    with Pair(model, role="kv_both", **settings) as pair:
        both = pair.producer
        handshake = both.worker_half.get_handshake_metadata()
        assert handshake is not None
        params = decode_params(pair, "t") | {"remote_engine_id": engine_place("b", handshake.address)}
        request_id = both.add(prompt_of(14), params=params, max_tokens=4).request_id
        prefill = both.add(prompt_of(14), params=prefill_params("t")).request_id
        check_over(pair)
        assert both.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert both.finished[prefill].params["do_remote_prefill"]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_room_that_is_full_lets_later_legs_load_as_they_would_without(leaves: bool) -> None:
    with Pair(HYBRID, consumer={"load_mode": "sync", "room_mib": 1}) as pair:
        loop = pair.consumer.ferry._loop
        assert loop is not None
        room = loop._consumer.ahead.room
        assert room is not None
        room.free = room.free[:9]  # for one
        prompts = {f"n{number}": prompt_of(14, number) for number in range(6)}
        requests = {name: decode_first(pair, prompt, name) for name, prompt in prompts.items()}
        for name, prompt in prompts.items():
            pair.producer.add(prompt, params=prefill_params(name))
        if leaves:
            pair.consumer.abort(requests.pop("n3"))
        check_over(pair)
        for name, request_id in requests.items():
            assert pair.consumer.finished[request_id].tokens == answer(prompts[name], 4)
            assert pair.consumer.scheduled[request_id][0] == (13, 1)
