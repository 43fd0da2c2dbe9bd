"""`kv_transfer_params` damaged at any depth, through the real scheduler: the answer is right, whatever was
loaded is what was offered, and everything is free at the end."""

import copy
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
from harness import HYBRID, Pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_model import answer
from stranger import give_back
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import FinishReason

from stateferry.ferry import links
from stateferry.session import producer as ledger
from stateferry.session.consumer import Handoff
from stateferry.session.producer import Holding

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]  # a thousand examples on a crowded machine

PROMPT = random.Random(1).choices(range(1000), k=11)
FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


SELF: list[Any] = []
SELF.append(SELF)
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 10, 11, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 1 << 200, -(1 << 63)),
    *(math.nan, math.inf, -math.inf, -0.5, 1e300, 1.0, 10.0),
    *("", "x", "0", "0" * 32, "f" * 32, "x" * 5000, "\x00", "a\nb", "\ud800", "ü", "\u2028", "127.0.0.1"),
    *([], {}, [[]], [None], [1] * 2000, [[1]] * 1100, ["1"], nested(40), nested(900), SELF),
    *({"a": {"b": nested(20)}}, {1: 2}, {None: None}, b"bytes", (1, 2), {1}, 1j, object()),
    *(["127.0.0.1", 1, 1], [["127.0.0.1", 1, 1]], [["no host", 1, 1]]),
)
"""Some of it no JSON can bring; a router in Python, in one process with the engine, may."""


def changed(value: Any, draw: random.Random) -> Any:
    """One place of a tree changed, at any depth."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key, what = draw.choice(list(value)), draw.randrange(10)
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return {
                **value,
                draw.choice(["surprise", "", "tamper", "\ud800", f"{key}{key}"]): draw.choice(JUNK),
            }
        if what == 2:
            return {**value, key: copy.deepcopy(value[draw.choice(list(value))])}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        items, place, what = list(value), draw.randrange(len(value)), draw.randrange(8)
        if what == 0:
            del items[place]
        elif what == 1:
            items.insert(place, copy.deepcopy(draw.choice(items)))
        elif what == 2:
            draw.shuffle(items)
        else:
            items[place] = changed(items[place], draw)
        return items
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice([1, -1, 2, 16, 10**6])
    if isinstance(value, str) and value and draw.random() < 0.5:
        place = draw.randrange(len(value))
        return value[:place] + draw.choice(["", "0", "\n", "é"]) + value[place + 1 :]
    return draw.choice(JUNK)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        patch.object(ledger, "PARK_S", 0.05),
        patch.object(links, "MAX_PAUSE_S", 0.05),
        patch.object(links, "IDLE_LINK_S", 0.05),
        Pair(HYBRID, caching=False, lease_s=600, handshake_timeout_s=0.1, retry_interval_s=0.01) as pair,
    ):
        yield pair


def serve(pair: Pair, good: dict[str, Any], params: Any) -> str:
    """A decode leg with these parameters; its request."""
    request_id = pair.consumer.add(PROMPT, params=params, max_tokens=2).request_id
    pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
    pair.run_until(lambda: not pair.consumer.busy, "the consumer to be idle")
    assert pair.consumer.finished[request_id].tokens == answer(PROMPT, 2)
    assert pair.consumer.finished[request_id].reason is FinishReason.LENGTH
    if request_id in pair.consumer.loaded_pages:
        pair.check_pages(request_id, good)
    pair.consumer.check_idle()
    assert pair.log.errors == []
    return request_id


class Supply:
    """Good params, made anew when they were used up, or when their consumer has seen their offer before."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.params: dict[str, Any] | None = None
        self.made = 0

    def get(self) -> dict[str, Any]:
        ferry = self.pair.producer.ferry
        if self.params is not None and ferry.open_count:
            if self.params["stateferry"]["transfer_id"] not in self.pair.consumer.half.taking.used:
                return self.params
            give_back(self.params)
        self.pair.run_until(lambda: not (ferry.open_count or self.pair.producer.busy), "the offer to end")
        self.params = self.pair.prefill(PROMPT)
        self.pair.run_until(lambda: ferry.open_count == 1, "the grant")
        self.made += 1
        return self.params


@pytest.fixture(scope="module")
def supply(pair: Pair) -> Supply:
    return Supply(pair)


@settings(FUZZ, max_examples=1000)
@given(seed=st.integers(0, (1 << 64) - 1))
def test_damaged_params_of_a_decode_leg(pair: Pair, supply: Supply, seed: int) -> None:
    draw = random.Random(seed)
    good = supply.get()
    params: Any = copy.deepcopy(good)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        params = changed(params, draw)
    if not isinstance(params, dict):
        return  # vLLM's API takes nothing else, and its scheduler looks into it before we do
    if params.get("do_remote_decode") is True:
        params["do_remote_decode"] = False  # that is a prefill leg: below
    with suppress(VLLMValidationError):  # integers that vLLM's API turns away
        serve(pair, good, params)


@settings(FUZZ, max_examples=150)
@given(seed=st.integers(0, (1 << 64) - 1))
def test_damaged_params_of_a_prefill_leg(pair: Pair, seed: int) -> None:
    """To the consumer, which offers nothing, and to the producer: nothing is kept for what is no leg."""
    draw = random.Random(seed)
    params = changed({"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}, draw)
    for engine in (pair.consumer, pair.producer) if isinstance(params, dict) else ():
        try:
            request_id = engine.add(PROMPT, params=params, max_tokens=2).request_id
        except VLLMValidationError:
            return
        done = engine.finished[request_id]
        pair.run_until(lambda done=done: done.reason is not None, "the answer")  # type: ignore[misc]
        # A leg that is one stops before the prompt's last token.
        assert done.tokens in (answer(PROMPT, 2), answer(PROMPT[:-1], 1))
        if done.params and done.params.get("do_remote_prefill"):
            pair._keep_offered_pages(done.params)
            serve(pair, done.params, done.params)
    assert pair.log.errors == []


def test_after_all_that_a_good_offer_is_used_and_everything_is_free(pair: Pair, supply: Supply) -> None:
    good = supply.get()
    assert serve(pair, good, good) in pair.consumer.loaded_pages
    pair.run()
    pair.check_idle()
    assert supply.made > 10, "no damage left an offer usable: then it is not only damage that is refused"


def test_served_tables_that_nobody_compared_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: without the tables' digest one of these seeds makes the answer wrong."""
    for half in (Holding, Handoff):
        monkeypatch.setattr(half, "table_digest", property(lambda self: "0" * 32))
    with Pair(HYBRID, caching=False, lease_s=600, handshake_timeout_s=0.1) as pair:
        good = pair.prefill(PROMPT)
        pair.run_until(lambda: pair.producer.ferry.open_count == 1, "the grant")
        params = copy.deepcopy(good)
        tables = params["remote_block_ids"]
        tables[-1][0], tables[-1][1] = tables[-1][1], tables[-1][0]
        with pytest.raises(AssertionError):
            serve(pair, good, params)
