"""A request that asks an engine to describe itself: what it answers, and that nothing else happens."""

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from harness import ATTENTION, HYBRID, Engine, Pair
from simulated_model import answer
from vllm.v1.engine import FinishReason

from stateferry.layout.fingerprint import compare, decode_layout, encode_layout
from stateferry.layout.spec import CacheLayout
from stateferry.vllm import description, worker
from stateferry.wire import DESCRIBE_PARAMS, parse_description

pytestmark = pytest.mark.scheduler

PROMPT = random.Random(1).choices(range(1000), k=11)
ROLES = ("producer", "consumer")


@pytest.fixture
def described() -> Iterator[list[CacheLayout]]:
    """Every layout that a worker has made, in the order in which the workers started."""
    layouts: list[CacheLayout] = []
    real = worker.describe

    def spy(*args: Any, **kwargs: Any) -> Any:
        layout, regions = real(*args, **kwargs)
        layouts.append(layout)
        return layout, regions

    with patch.object(worker, "describe", spy):
        yield layouts


def ask(pair: Pair, role: str, params: Any = DESCRIBE_PARAMS, max_tokens: int = 1) -> dict[str, Any] | None:
    """The response's parameters, after checks that the request was computed as any other."""
    engine: Engine = getattr(pair, role)
    request_id = engine.add(PROMPT, params=params, max_tokens=max_tokens).request_id
    pair.run()
    assert engine.finished[request_id].tokens == answer(PROMPT, max_tokens)
    assert engine.finished[request_id].reason is FinishReason.LENGTH
    done, _ = engine.scheduled[request_id][0]
    assert done + engine.computed_here(request_id) == len(PROMPT) + max_tokens - 1
    return engine.finished[request_id].params


def check_description(params: dict[str, Any] | None, engine: Engine, layouts: list[CacheLayout]) -> None:
    """The answer holds exactly these layouts, and where the workers listen."""
    read = parse_description(params)
    assert [decode_layout(layout) for layout in read.layouts] == layouts
    assert [layout.tp_rank for layout in layouts] == list(range(len(engine.ferries)))
    assert [r.epoch for r in read.ranks] == [layout.epoch for layout in layouts]
    handshakes = [half.get_handshake_metadata() for half in engine.worker_halves]
    assert list(read.ranks) == [handshake.address for handshake in handshakes if handshake is not None]
    assert read.kv_role == engine.config.kv_transfer_config.kv_role


@pytest.mark.parametrize("model", [HYBRID, ATTENTION], ids=["hybrid", "attention"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_engines_describe_themselves(model: Any, ranks: int, described: list[CacheLayout]) -> None:
    with Pair(model, ranks=ranks) as pair:
        ours = {"producer": described[:ranks], "consumer": described[ranks:]}
        for role in ROLES:
            check_description(ask(pair, role), getattr(pair, role), ours[role])
        assert ours["producer"][0].engine_id != ours["consumer"][0].engine_id
        for mine, its in zip(ours["consumer"], ours["producer"], strict=True):
            compare(mine, its)
        pair.check_idle()
        assert all(ferry.counters.released == 0 for ferry in pair.producer.ferries)


@pytest.mark.parametrize("role", ROLES)
def test_an_answer_of_another_rank_or_with_one_rank_less_is_noticed(
    role: str, described: list[CacheLayout]
) -> None:
    for change in (lambda found: found[::-1], lambda found: found[:1]):
        learn = description.SelfDescription.learn

        def wrong(self: Any, found: Any, change: Any = change, learn: Any = learn) -> None:
            learn(self, change(found))

        described.clear()
        with patch.object(description.SelfDescription, "learn", wrong), Pair(HYBRID, ranks=2) as pair:
            layouts = described[:2] if role == "producer" else described[2:]
            params = ask(pair, role)
            with pytest.raises(AssertionError):
                check_description(params, getattr(pair, role), layouts)


@pytest.mark.parametrize("role", ROLES)
def test_an_engine_describes_itself_as_often_as_it_is_asked(role: str, described: list[CacheLayout]) -> None:
    with Pair(HYBRID) as pair:
        answers = [ask(pair, role, max_tokens=tokens) for tokens in (1, 3, 1)]
        assert answers[0] is not None
        assert answers[1:] == answers[:1] * 2
        pair.check_idle()


def test_a_hand_off_beside_it_is_not_disturbed() -> None:
    with Pair(HYBRID) as pair:
        for engine in (pair.producer, pair.consumer):
            engine.add([7, *PROMPT], params=dict(DESCRIBE_PARAMS))
        request_id = pair.hand_off(PROMPT, max_tokens=3)
        received = pair.consumer.finished[request_id].params
        assert received is not None
        assert received["stateferry"]["received"]["outcome"] == "received"
        assert "layouts" not in received["stateferry"]
        assert pair.consumer.finished[request_id].tokens == answer(PROMPT, 3)
        pair.check_idle()


NOT_ASKED: dict[str, Any] = {
    "false": {"stateferry": {"describe": False}},
    "one": {"stateferry": {"describe": 1}},
    "text": {"stateferry": {"describe": "true"}},
    "a list": {"stateferry": {"describe": [True]}},
    "nothing": {"stateferry": {"describe": None}},
    "flat": {"describe": True},
    "ours is a list": {"stateferry": ["describe"]},
    "ours is true": {"stateferry": True},
    "of another connector": {"other": {"describe": True}},
    "empty": {},
}


@pytest.mark.parametrize("shape", NOT_ASKED)
@pytest.mark.parametrize("role", ROLES)
def test_anything_else_is_an_ordinary_request(role: str, shape: str) -> None:
    with Pair(HYBRID) as pair:
        assert ask(pair, role, NOT_ASKED[shape]) is None
        pair.check_idle()


def test_a_prefill_leg_that_also_asks_is_a_prefill_leg() -> None:
    with Pair(HYBRID) as pair:
        params = {"do_remote_decode": True, **DESCRIBE_PARAMS}
        request_id = pair.producer.add(PROMPT, params=params).request_id
        pair.run_until(lambda: pair.producer.finished[request_id].reason is not None, "the prefill")
        offer = pair.producer.finished[request_id].params
        assert offer is not None
        assert offer["do_remote_prefill"] is True
        assert "layouts" not in offer["stateferry"]
        offer["stateferry"]["describe"] = True
        consumer_id = pair.consumer.add(PROMPT, params=offer, max_tokens=2).request_id
        pair.run()
        received = pair.consumer.finished[consumer_id].params
        assert received is not None
        assert received["stateferry"]["received"]["outcome"] == "received"
        pair.check_idle()


def test_an_engine_whose_workers_said_nothing_answers_without_a_description() -> None:
    with (
        patch.object(description.SelfDescription, "learn", lambda self, found: None),
        Pair(HYBRID) as pair,
    ):
        assert ask(pair, "producer") is None
        pair.check_idle()


def test_a_described_layout_is_what_the_hand_shake_sends(described: list[CacheLayout]) -> None:
    with Pair(HYBRID) as pair:
        (layout,) = parse_description(ask(pair, "producer")).layouts
        assert layout == encode_layout(described[0])
