"""Whatever a client sends as `kv_transfer_params`: the answer is right, the engine goes on, nothing leaks."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from harness import HYBRID, Pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_model import answer
from vllm.v1.engine import FinishReason

from stateferry.session import producer as ledger

pytestmark = pytest.mark.scheduler

PROMPT = random.Random(1).choices(range(1000), k=11)
QUIET = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        patch.object(ledger, "PARK_S", 0.2),
        Pair(HYBRID, caching=False, lease_s=600, handshake_timeout_s=0.2, retry_interval_s=0.05) as pair,
    ):
        yield pair


@pytest.fixture(scope="module")
def good(pair: Pair) -> dict[str, Any]:
    """An offer that is good, and stays good because nothing that is made from it here is."""
    params = pair.prefill(PROMPT)
    for _ in range(3):
        pair.producer.step()
    return params


def serve(pair: Pair, params: Any) -> str:
    """A decode leg with these parameters. The producer need not step: it holds the good offer."""
    request_id = pair.consumer.add(PROMPT, params=params, max_tokens=3).request_id
    pair.run_until(lambda: not pair.consumer.busy, "the answer")
    assert pair.consumer.finished[request_id].tokens == answer(PROMPT, 3)
    assert pair.consumer.finished[request_id].reason is FinishReason.LENGTH
    pair.consumer.check_idle()
    assert [e for e in pair.log.errors if not e.startswith("could not post the reads of request")] == []
    return request_id


def put(params: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with one entry replaced."""
    changed = copy.deepcopy(params)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


WIRE_INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
"""Others never get here: vLLM refuses them at its API (test_fuzz_params tries those)."""
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(["", "x" * 5000, "0", "1", "\x00", "\ud800"]),
    st.sampled_from([-1, 1 << 31, (1 << 31) + 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.5, 1e300]),
    st.lists(st.none() | st.text(max_size=3) | st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.none() | WIRE_INTEGERS, max_size=3),
    st.sampled_from([nested(3), nested(900), {"a": {"b": {"c": nested(50)}}}]),
)
PATHS = [
    ("do_remote_prefill",),
    ("remote_engine_id",),
    ("remote_request_id",),
    ("remote_block_ids",),
    ("remote_block_ids", 0),
    ("remote_block_ids", 3),
    ("remote_block_ids", 3, 1),
    ("stateferry",),
    ("stateferry", "version"),
    ("stateferry", "transfer_id"),
    ("stateferry", "num_tokens"),
    ("stateferry", "first_blocks"),
    ("stateferry", "first_blocks", 0),
    ("stateferry", "prefix_digest"),
    ("stateferry", "lease_s"),
    ("stateferry", "ranks"),
    ("stateferry", "ranks", 0),
    ("stateferry", "ranks", 0, 0),
    ("stateferry", "ranks", 0, 1),
    ("stateferry", "ranks", 0, 2),
]


@QUIET
@given(path=st.sampled_from(PATHS), junk=JUNK)
def test_one_entry_of_good_params_is_junk(
    pair: Pair, good: dict[str, Any], path: tuple[Any, ...], junk: Any
) -> None:
    if path == ("do_remote_prefill",) and junk is True:
        return  # that is what it was
    if (
        path in (("remote_engine_id",), ("remote_request_id",))
        and isinstance(junk, str)
        and 0 < len(junk) <= 512
    ):
        return  # only named in logs: the offer is good
    if path == ("stateferry", "first_blocks", 0) and junk == 0:
        return
    serve(pair, put(good, path, junk))
    assert pair.producer.ferry.open_count == 1, "the good offer was used up"


@QUIET
@given(
    params=st.dictionaries(
        st.sampled_from(
            [
                "do_remote_prefill",
                "do_remote_decode",
                "remote_block_ids",
                "remote_engine_id",
                "stateferry",
                "x",
            ]
        ),
        JUNK,
    )
)
def test_nothing_but_junk(pair: Pair, params: dict[str, Any]) -> None:
    if params.get("do_remote_decode") is not True:
        params["do_remote_prefill"] = True
    serve(pair, params)


def without(*path: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(params: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(params)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]
        return changed

    return change


def tables(change: Callable[[list[list[int]]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda params: put(
        params, ("remote_block_ids",), change(copy.deepcopy(params["remote_block_ids"]))
    )


SHAPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda params: {},
    "only the flag": lambda params: {"do_remote_prefill": True},
    "of another connector": without("stateferry"),
    "both flags": lambda params: params | {"do_remote_decode": True, "do_remote_prefill": False},
    "no block ids": without("remote_block_ids"),
    "no digest": without("stateferry", "prefix_digest"),
    "no ranks": without("stateferry", "ranks"),
    "flat block ids": tables(lambda t: t[0]),
    "block ids as text": tables(lambda t: [[str(i) for i in ids] for ids in t]),
    "block ids as one text": tables(str),
    "a group too many": lambda params: put(
        put(params, ("remote_block_ids",), [*params["remote_block_ids"], [1]]),
        ("stateferry", "first_blocks"),
        [*params["stateferry"]["first_blocks"], 0],
    ),
    "a group too few": lambda params: put(
        put(params, ("remote_block_ids",), params["remote_block_ids"][1:]),
        ("stateferry", "first_blocks"),
        params["stateferry"]["first_blocks"][1:],
    ),
    "groups without positions": tables(lambda t: [*t, [1]]),
    "a short table": tables(lambda t: [*t[:-1], t[-1][:-1]]),
    "an empty table": tables(lambda t: [*t[:-1], []]),
    "no tables": tables(lambda t: []),
    "no state": tables(lambda t: [[], *t[1:]]),
    "a null block": tables(lambda t: [*t[:-1], [t[-1][0], 0, t[-1][2]]]),
    "a null state": tables(lambda t: [[0], *t[1:]]),
    "a negative block": tables(lambda t: [*t[:-1], [t[-1][0], -1, t[-1][2]]]),
    "blocks that the producer does not have": tables(lambda t: [[10**6], *t[1:]]),
    "a state at another position": lambda params: put(params, ("stateferry", "first_blocks", 0), 0),
    "one token less": lambda params: put(params, ("stateferry", "num_tokens"), 9),
    "one token more": lambda params: put(params, ("stateferry", "num_tokens"), 11),
    "no tokens": lambda params: put(params, ("stateferry", "num_tokens"), 0),
    "a version of the future": lambda params: put(params, ("stateferry", "version"), 2),
    "nobody's address": lambda params: put(params, ("stateferry", "ranks"), [["127.0.0.1", 1, 1]]),
    "three ranks": lambda params: put(params, ("stateferry", "ranks"), params["stateferry"]["ranks"] * 3),
    "an earlier life": lambda params: put(params, ("stateferry", "ranks", 0, 2), 1),
    "a transfer nobody made": lambda params: put(params, ("stateferry", "transfer_id"), "0" * 32),
    "an address that is none": lambda params: put(params, ("stateferry", "ranks", 0, 0), "no host; at all"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_params_are(pair: Pair, good: dict[str, Any], shape: str) -> None:
    request_id = serve(pair, SHAPES[shape](good))
    assert request_id not in pair.consumer.loaded_pages


def test_after_all_that_a_good_offer_is_used(pair: Pair) -> None:
    params = pair.prefill(PROMPT)
    pair.producer.step()
    assert serve(pair, params) in pair.consumer.loaded_pages


@pytest.mark.parametrize("shape", ["an address that is none", "nobody's address", "no state"])
def test_junk_beside_a_good_request_does_it_no_harm(shape: str) -> None:
    """Both arrive in one step, so both their orders travel in the same metadata."""
    with Pair(HYBRID, caching=False, handshake_timeout_s=0.2) as pair:
        params = pair.prefill(PROMPT)
        other = [5, *PROMPT]
        junk = SHAPES[shape](pair.prefill(other))
        junk_id = pair.consumer.add(other, params=junk, max_tokens=3).request_id
        request_id = pair.consumer.add(PROMPT, params=params, max_tokens=3).request_id
        pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the good request")
        assert request_id in pair.consumer.loaded_pages
        pair.run_until(lambda: pair.consumer.finished[junk_id].reason is not None, "the other one")
        assert pair.consumer.finished[junk_id].tokens == answer(other, 3)
        pair.run_until(lambda: not pair.consumer.busy, "the consumer to be idle")
        pair.consumer.check_idle()
        assert pair.log.errors == []
