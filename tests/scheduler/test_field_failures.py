"""Symptoms that other engines and connectors were seen with; docs/failures.md says which."""

import copy
import logging
import random
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, WINDOW, Pair
from simulated_model import answer

from stateferry.ferry.link import Link
from stateferry.layout import plan as plan_module
from stateferry.vllm.connector import StateFerryConnector
from stateferry.wire import Message, Release

pytestmark = pytest.mark.scheduler

FLOOD = 60


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


# -- floods --------------------------------------------------------------------------------------------


def flood(**settings: Any) -> None:
    """Hand-offs that need many times what either cache holds, all asked for at once."""
    prompts = [prompt_of(20 + number % 9, number) for number in range(FLOOD)]
    waiting = {}
    answers = {}
    with Pair(HYBRID, blocks=60, consumer={"blocks": 40}, **settings) as pair:
        for prompt in prompts:
            request = pair.producer.add(prompt, params={"do_remote_decode": True})
            waiting[request.request_id] = prompt

        def over() -> bool:
            for request_id in [i for i in waiting if pair.producer.finished[i].reason is not None]:
                prompt, params = waiting.pop(request_id), pair.producer.finished[request_id].params
                request = pair.consumer.add(prompt, params=params, max_tokens=3)
                answers[request.request_id] = answer(prompt, 3)
            return not (waiting or pair.producer.busy or pair.consumer.busy)

        pair.run_until(over, "the flood to pass")
        for request_id, expected in answers.items():
            assert pair.consumer.finished[request_id].tokens == expected
        counters = pair.producer.ferry.counters
        assert (counters.released, counters.expired) == (FLOOD, 0), "blocks came back by lapse of time"
        assert len(pair.consumer.loads) == FLOOD
        pair.check_idle()


def test_a_flood_of_many_times_the_cache_is_answered_to_the_last() -> None:
    flood()


def drop_releases(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The network loses every release. Returns those that were lost."""
    right, lost = Link.send, []

    def send(self: Link, message: Message) -> bool:
        if isinstance(message, Release):
            lost.append(message)
            return True
        return right(self, message)

    monkeypatch.setattr(Link, "send", send)
    return lost


def test_a_flood_whose_blocks_come_back_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_releases(monkeypatch)
    with pytest.raises(AssertionError, match="lapse of time"):
        flood(lease_s=0.2)


# -- a lost acknowledgement ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [HYBRID, ATTENTION], ids=["align", "attention"])
def test_a_release_that_is_lost_costs_a_lease_and_nothing_else(
    model: CacheModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = drop_releases(monkeypatch)
    with Pair(model, lease_s=0.3) as pair:
        request_id = pair.hand_off(prompt_of(14), max_tokens=4)
        assert len(lost) == 1
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert request_id in pair.consumer.loaded_pages
        assert pair.producer.ferry.counters.expired == 1
        pair.check_idle()


# -- ranks -----------------------------------------------------------------------------------------------


def _both(ranks: list[list[Any]]) -> list[list[Any]]:
    return ranks[::-1]


def _addresses_only(ranks: list[list[Any]]) -> list[list[Any]]:
    (host, port, epoch), (other_host, other_port, other_epoch) = ranks
    return [[other_host, other_port, epoch], [host, port, other_epoch]]


@pytest.mark.parametrize("mix_up", [_both, _addresses_only], ids=["ranks", "addresses"])
@pytest.mark.parametrize("model", [HYBRID, ATTENTION, WINDOW], ids=["align", "attention", "window"])
def test_a_rank_never_reads_another_ranks_bytes_whatever_the_offer_says(
    model: CacheModel, mix_up: Any
) -> None:
    check_mixed_ranks(model, mix_up)


def test_a_plan_that_does_not_look_at_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan_module.overlaps

    def blind(parts: Any, consumer: int, size: int, producer: int, *more: Any) -> Any:
        return right(parts, consumer, size, consumer, *more)

    monkeypatch.setattr(plan_module, "overlaps", blind)
    with pytest.raises(AssertionError):
        check_mixed_ranks(HYBRID, _both)


def check_mixed_ranks(model: CacheModel, mix_up: Any) -> None:
    """An offer whose ranks are mixed up is recomputed, and the answer is right."""
    with Pair(model, ranks=2, lease_s=0.5, handshake_timeout_s=2) as pair:
        params = pair.prefill(prompt_of(14))
        mixed = copy.deepcopy(params)
        mixed["stateferry"]["ranks"] = mix_up(params["stateferry"]["ranks"])
        request_id = pair.consumer.add(prompt_of(14), params=mixed, max_tokens=4).request_id
        pair.run()
        assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert request_id not in pair.consumer.loaded_pages
        pair.check_idle()


# -- side effects ----------------------------------------------------------------------------------------


def other_loggers() -> dict[str, tuple[int, bool, bool, int]]:
    """How everybody else's loggers are set up."""
    loggers = {
        n: one for n, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)
    }
    return {
        name: (one.level, one.disabled, one.propagate, len(one.handlers))
        for name, one in loggers.items()
        if not name.startswith("stateferry")
    }


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compare a step's scheduler output before and after our hook. Returns what was changed."""
    right, changed = StateFerryConnector.build_connector_meta, []

    def build(self: StateFerryConnector, output: Any) -> Any:
        before = repr(output)
        metadata = right(self, output)
        if repr(output) != before:
            changed.append(before)
        return metadata

    monkeypatch.setattr(StateFerryConnector, "build_connector_meta", build)
    return changed


def test_nothing_of_vllms_is_changed_behind_its_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3.8: nothing in the scheduler's output is edited."""
    changed = watched(monkeypatch)
    with Pair(HYBRID) as first:  # whatever is imported late, is imported now
        first.hand_off(prompt_of(14))
    loggers = other_loggers()
    with Pair(HYBRID) as pair:
        configs = [engine.config for engine in (pair.producer, pair.consumer)]
        before = [
            (repr(c.kv_transfer_config), repr(c.cache_config), repr(c.scheduler_config)) for c in configs
        ]
        pair.hand_off(prompt_of(14))
        after = [
            (repr(c.kv_transfer_config), repr(c.cache_config), repr(c.scheduler_config)) for c in configs
        ]
        assert before == after
        assert configs[0].kv_transfer_config.kv_connector_extra_config == {"host": "127.0.0.1"}
        pair.check_idle()
    assert {name: how for name, how in other_loggers().items() if name in loggers} == loggers
    assert changed == []


def test_a_hook_that_edits_vllms_output_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StateFerryConnector.build_connector_meta

    def edits(self: StateFerryConnector, output: Any) -> Any:
        output.finished_req_ids.add("nobody")
        return right(self, output)

    monkeypatch.setattr(StateFerryConnector, "build_connector_meta", edits)
    changed = watched(monkeypatch)
    with Pair(HYBRID) as pair:
        pair.prefill(prompt_of(14))
        assert changed
