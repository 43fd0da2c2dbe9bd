"""Items of the READ contract (`docs/contract.md`) that no test for another reason proves."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import CacheModel, make_cache, make_config
from harness import ATTENTION, HYBRID, WINDOW, Pair
from simulated_model import answer
from test_producer import prompt_of

from stateferry.errors import ConfigError, LayoutError
from stateferry.vllm.connector import StateFerryConnector
from stateferry.vllm.kv_cache import outline

pytestmark = pytest.mark.scheduler


def outlined(model: CacheModel, **settings: Any) -> None:
    """As the connector does it when an engine starts."""
    config = make_config("kv_producer", model)
    for name, value in settings.items():
        setattr(config, name, value)
    cache, _, _ = make_cache(config, model)
    outline(cache, config)


def test_the_operators_graph_mode_is_never_overridden() -> None:
    """F1.9."""
    for extra in ({}, {"read_mode": "true"}, {"transport": "nixl"}):
        assert StateFerryConnector.requires_piecewise_for_cudagraph(extra) is False


def drafting(method: str, architecture: str | None = None) -> SimpleNamespace:
    """As much of vLLM's SpeculativeConfig as the gates read."""
    model = SimpleNamespace(architecture=architecture) if architecture else None
    return SimpleNamespace(method=method, draft_model_config=model)


@pytest.mark.parametrize("architecture", [None, "NemotronHMTPModel", "Qwen3NextMTP"])
@pytest.mark.parametrize("method", ["eagle", "mtp", "draft_model", "dspark"])
def test_drafts_with_layers_beside_a_recurrent_state_are_refused(
    method: str, architecture: str | None
) -> None:
    """F3.13: speculation other than what is proven names the setting, whose layers, and the way out."""
    if (method, architecture) == ("mtp", "Qwen3NextMTP"):
        outlined(HYBRID, speculative_config=drafting(method, architecture))
        return
    whose = architecture or "its own"
    with pytest.raises(LayoutError, match=rf"--speculative-config has method '{method}'.*{whose}.*leave"):
        outlined(HYBRID, speculative_config=drafting(method, architecture))


@pytest.mark.parametrize(
    ("model", "method"), [(HYBRID, "ngram"), (HYBRID, "suffix"), (ATTENTION, "eagle"), (HYBRID, None)]
)
def test_other_speculation_is_not_refused(model: CacheModel, method: str | None) -> None:
    """F3.13: the gate is for recurrent states only."""
    outlined(model, speculative_config=drafting(method) if method else None)


def test_a_model_without_anything_to_hand_off_is_refused() -> None:
    """F3.13: no layer takes part in transfer."""
    config = make_config("kv_producer", HYBRID)
    cache, _, _ = make_cache(config, HYBRID)
    for group in cache.kv_cache_groups:
        object.__setattr__(group, "enable_kv_transfer", False)
    with pytest.raises(LayoutError, match="nothing to hand off"):
        outline(cache, config)


def test_write_is_refused_when_the_engine_starts() -> None:
    """F2.8, F3.13: hybrid and not READ."""
    with pytest.raises(ConfigError, match="'read_mode': true"):
        Pair(HYBRID, read_mode="false", handshake_port=20000)


@pytest.mark.parametrize("model", [HYBRID, ATTENTION, WINDOW], ids=["hybrid", "attention", "window"])
def test_the_promise_behind_divergent_hits_is_kept(model: CacheModel) -> None:
    """F3.14: whoever says so must bring the state. We say so always, and bring what each model needs."""
    with Pair(model) as pair:
        assert pair.consumer.connector.supports_divergent_local_hybrid_hits is True
        prompt = prompt_of(14)
        pair.consumer.add(prompt[:9], max_tokens=1)
        pair.run()
        request_id = pair.hand_off(prompt, max_tokens=3)
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 3)
        pair.check_idle()


def test_an_abort_before_any_block_was_given_moves_nothing_and_frees_the_producer() -> None:
    """F3.12: one release, no read."""
    with Pair(HYBRID, lease_s=30.0) as pair:
        params = pair.prefill(prompt_of(10))
        request_id = pair.consumer.add(prompt_of(10), params=params).request_id
        pair.consumer.abort(request_id)
        pair.run()
        assert pair.consumer.tap.posted == 0
        assert pair.producer.ferry.counters.released == 1
        assert pair.producer.ferry.counters.expired == 0
        pair.check_idle()


def test_a_decode_leg_computes_its_last_token_and_nothing_else() -> None:
    """F3.5: matched are the prompt's tokens but one, less those computed; a producer matches none."""
    with Pair(HYBRID) as pair:
        params = pair.prefill(prompt_of(11))
        assert pair.producer.connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r0"), 0) == (
            0,
            False,
        )
        request = pair.consumer.add(prompt_of(11), params=params, max_tokens=2)
        matched = pair.consumer.connector.get_num_new_matched_tokens
        assert [matched(request, done)[0] for done in (0, 4, 9, 10, 11)] == [10, 6, 1, 0, 0]
        pair.run()
        assert pair.consumer.scheduled[request.request_id][0] == (10, 1)


def test_every_group_but_those_that_are_kept_out_is_loaded_without_being_zeroed() -> None:
    """F3.8, otherwise: vLLM is told which groups a load overwrites, and nothing in its output is edited."""
    with Pair(HYBRID) as pair:
        request = pair.consumer.add(prompt_of(9))
        groups = pair.consumer.connector.get_loaded_kv_cache_group_ids(request)
        assert groups == tuple(range(len(pair.consumer.cache_config.kv_cache_groups)))
        pair.consumer.abort(request.request_id)
