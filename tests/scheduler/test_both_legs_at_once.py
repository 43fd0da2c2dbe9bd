"""A router that sends both legs at once: the decode leg waits in the queue until its offer is made.

It must end as if the router had waited: with the producer's bytes where there are any to be had, by computing
where there are none, and with nothing held for it meanwhile.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, HYBRID_FINE, WINDOW, Engine, Pair
from simulated_model import answer
from vllm.v1.request import RequestStatus

from stateferry.ids import TransferId
from stateferry.session import Ledger
from stateferry.vllm.taking import Taking
from stateferry.wire import RankAddress, engine_place

pytestmark = pytest.mark.scheduler

MODELS = {"hybrid": HYBRID, "hits inside a block": HYBRID_FINE, "attention": ATTENTION, "window": WINDOW}
NOBODY = RankAddress("127.0.0.1", 9, 1)  # type: ignore[arg-type]  # the discard port: nobody listens


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


def prefill_params(name: str) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}


def decode_params(pair: Pair, name: str, address: RankAddress | None = None) -> dict[str, Any]:
    handshake = pair.producer.worker_half.get_handshake_metadata()
    assert handshake is not None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_place("p", address or handshake.address),
        "transfer_id": name,
    }


def wait_for_the_question(pair: Pair) -> None:
    """Until the producer's ferry knows that somebody waits."""
    pair.run_until(lambda: awaited(pair.producer) > 0, "the question at the producer")


def awaited(engine: Engine) -> int:
    loop = engine.ferry._loop
    assert loop is not None
    return loop._producer.awaited.count


def decode_first(pair: Pair, prompt: list[int], name: str = "t", **more: Any) -> str:
    """The decode leg arrives, and its question at the producer, before the prefill leg does."""
    request_id = pair.consumer.add(prompt, params=decode_params(pair, name), max_tokens=4, **more).request_id
    wait_for_the_question(pair)
    return request_id


def assert_computed(pair: Pair, request_id: str) -> None:
    """To its end: the decode engine computed the prompt by itself, rightly, and nothing is kept."""
    pair.run()
    assert pair.consumer.scheduled[request_id][0][0] == 0
    assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
    pair.check_idle()


@pytest.mark.parametrize("load_mode", ["async", "sync"])
@pytest.mark.parametrize("model", MODELS)
def test_every_length_is_handed_off_whichever_leg_comes_first(model: str, load_mode: str) -> None:
    settings = {"load_mode": load_mode} | ({"room_mib": 1} if load_mode == "sync" else {})
    block = MODELS[model].block
    with Pair(MODELS[model], consumer=settings) as pair:
        for length in range(2, 3 * block + 2):
            prompt, name = prompt_of(length), f"name-{length}"
            if length % 2:
                pair.producer.add(prompt, params=prefill_params(name))
                request_id = pair.consumer.add(
                    prompt, params=decode_params(pair, name), max_tokens=4
                ).request_id
            else:
                request_id = decode_first(pair, prompt, name)
                pair.producer.add(prompt, params=prefill_params(name))
            pair.run()
            assert pair.consumer.finished[request_id].tokens == answer(prompt, 4), length
            assert pair.consumer.scheduled[request_id][0] == (length - 1, 1), "it was computed here"
            pair.check_idle()


def test_a_decode_leg_that_waits_holds_no_block_and_holds_up_nobody() -> None:
    with Pair(HYBRID) as pair:
        request_id = decode_first(pair, prompt_of(14))
        running = pair.consumer.add(prompt_of(9, 7), max_tokens=30).request_id
        pair.run_until(lambda: len(pair.consumer.finished[running].tokens) == 30, "a plain request")
        assert pair.consumer.status(request_id) is RequestStatus.WAITING
        assert pair.consumer.free_blocks == pair.consumer.all_free
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        pair.run()
        assert pair.consumer.scheduled[request_id] == [(13, 1), (14, 1), (15, 1), (16, 1)]
        pair.check_idle()


def test_all_ranks_read_though_one_of_them_asks() -> None:
    with Pair(HYBRID, ranks=2) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert [tap.posted for tap in pair.consumer.taps] == [1, 1]
        pair.check_idle()


def test_a_prefill_that_is_aborted_frees_its_decode_leg_at_once() -> None:
    with Pair(HYBRID) as pair:
        request_id = decode_first(pair, prompt_of(14))
        prefill = pair.producer.add(prompt_of(14), params=prefill_params("t")).request_id
        pair.producer.abort(prefill)
        assert_computed(pair, request_id)


def test_a_prefill_that_is_not_offered_frees_its_decode_leg_at_once() -> None:
    with Pair(HYBRID) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.producer.add(prompt_of(14), params=prefill_params("t"), prompt_logprobs=1)
        assert_computed(pair, request_id)


def test_a_client_that_leaves_while_its_decode_leg_waits_frees_the_prefill_before_the_lease_ends() -> None:
    with Pair(HYBRID) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.run_until(lambda: told_to_wait(pair), "the producer's first answer")
        pair.consumer.abort(request_id)
        pair.run_until(
            lambda: not pair.consumer.busy and pair.consumer.ferry.open_count == 0, "the end there"
        )
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        pair.run()
        counters = pair.producer.ferry.counters
        assert counters.released == counters.granted, "or it was not offered, where that was known in time"
        assert counters.expired == 0
        pair.check_idle()


def told_to_wait(pair: Pair) -> bool:
    loop = pair.consumer.ferry._loop
    assert loop is not None
    places = loop._consumer.inquiries._places.values()
    return all(inquiry.epoch is not None for place in places for inquiry in place.inquiries.values())


def test_another_prompt_under_the_same_name_is_computed() -> None:
    with Pair(HYBRID) as pair:
        request_id = decode_first(pair, prompt_of(14, 1))
        pair.producer.add(prompt_of(14, 2), params=prefill_params("t"))
        pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14, 1), 4)
        assert pair.consumer.scheduled[request_id][0][0] == 0


def test_a_name_serves_one_request_on_either_side() -> None:
    with Pair(HYBRID, producer={"lease_s": 0.5}) as pair:
        first = decode_first(pair, prompt_of(14))
        second = pair.consumer.add(prompt_of(14), params=decode_params(pair, "t"), max_tokens=4).request_id
        prefills = [pair.producer.add(prompt_of(14), params=prefill_params("t")).request_id for _ in "ab"]
        pair.run()
        assert pair.consumer.scheduled[first][0] == (13, 1)
        assert pair.consumer.scheduled[second][0][0] == 0
        for request_id in (first, second):
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        offered = [pair.producer.finished[request_id].params["do_remote_prefill"] for request_id in prefills]
        assert offered == [True, False]
        pair.check_idle()


@pytest.mark.parametrize(
    ("consumer", "address"),
    [
        ({"handshake_timeout_s": 0.3}, NOBODY),
        ({"offer_timeout_s": 0.3}, None),
    ],
    ids=["nobody listens", "no prefill leg comes"],
)
def test_a_decode_leg_does_not_wait_for_ever(
    consumer: dict[str, Any], address: RankAddress | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateferry.ferry.inquiries.REPEAT_S", 0.05)
    with Pair(HYBRID, consumer=consumer) as pair:
        params = decode_params(pair, "t", address)
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.scheduled[request_id][0][0] == 0
        pair.check_idle()


def test_an_offer_of_another_transfer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that lies, or mixes two up."""
    right = Ledger.made

    def mixed_up(self: Ledger, transfer_id: TransferId) -> Any:
        made = right(self, transfer_id)
        if made is None or isinstance(made, str):
            return made
        params = msgspec.msgpack.decode(made.params)
        params["stateferry"]["transfer_id"] = "0" * 32
        return replace(made, params=msgspec.msgpack.encode(params))

    monkeypatch.setattr(Ledger, "made", mixed_up)
    with Pair(HYBRID, producer={"lease_s": 0.5}) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        assert_computed(pair, request_id)


@pytest.mark.parametrize(
    "answered",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x80", b"\x91" * 5000],
    ids=["nothing", "no MessagePack", "a list", "an empty map", "nested deep"],
)
def test_junk_in_place_of_an_offer_is_computed(answered: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Taking._offer_came
    monkeypatch.setattr(
        Taking, "_offer_came", lambda self, a: right(self, replace(a, params=answered) if a.params else a)
    )
    with Pair(HYBRID, producer={"lease_s": 0.5}) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        assert_computed(pair, request_id)


@pytest.mark.parametrize(
    "params",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": "p"},
        {"remote_engine_id": "p@host.example:5"},
        {"remote_engine_id": "p@127.0.0.1:0"},
        {"remote_engine_id": "p@127.0.0.1:99999"},
        {"transfer_id": ""},
        {"transfer_id": "x" * 600},
    ],
)
def test_a_promise_that_cannot_be_read_is_computed(params: Mapping[str, Any]) -> None:
    with Pair(HYBRID) as pair:
        request = {**decode_params(pair, "t"), **params}
        request_id = pair.consumer.add(prompt_of(14), params=request, max_tokens=4).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


# -- mutants: the checks above notice ------------------------------------------------------------


def one_exchange(model: CacheModel = HYBRID) -> None:
    with Pair(model, consumer={"offer_timeout_s": 2.0}) as pair:
        request_id = decode_first(pair, prompt_of(14))
        pair.producer.add(prompt_of(14), params=prefill_params("t"))
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.scheduled[request_id][0] == (13, 1), "it was computed here"
        pair.check_idle()


def test_mutant_nobody_is_told_that_the_offer_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateferry.session.AwaitedOffers.settled", lambda self, transfer_id: [])
    monkeypatch.setattr("stateferry.ferry.inquiries.REPEAT_S", 2.5)
    with pytest.raises(AssertionError):
        one_exchange()


def test_mutant_the_scheduler_is_not_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Taking.matched_tokens
    monkeypatch.setattr(
        Taking,
        "matched_tokens",
        lambda self, request, local: (right(self, request, local)[0] or 0, right(self, request, local)[1]),
    )
    with pytest.raises(AssertionError):
        one_exchange()


def test_mutant_the_prompt_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taking, "_check_offer", lambda self, request, offer: None)
    with pytest.raises(AssertionError):
        test_another_prompt_under_the_same_name_is_computed()
