"""vLLM finds the connector by name in every process, and calls our plugin as often as it likes."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
        MooncakeConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    from stateferry.vllm import plugin
    from stateferry.vllm.compat import KVConnectorFactory
    from stateferry.vllm.prompt import cut_last_token


def test_vllm_finds_the_plugin_and_may_call_it_again() -> None:
    register = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["stateferry"]
    for _ in range(3):
        register()
    loaded = KVConnectorFactory.get_connector_class_by_name(plugin.NAME)
    assert loaded.__name__ == plugin.NAME
    assert loaded.__module__ == plugin.MODULE


def test_without_our_look_the_second_call_would_end_the_process() -> None:
    """The mutant: what `register` would do if it did not look first."""
    plugin.register()
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector(plugin.NAME, plugin.MODULE, plugin.NAME)


def test_an_engine_that_may_sleep_is_refused_by_vllm_where_it_asks() -> None:
    """vLLM 0.33 asks the connector's class; its own default answer would be yes."""
    connector = KVConnectorFactory.get_connector_class_by_name(plugin.NAME)
    assert connector.supports_sleep_mode(None) is False


@pytest.mark.parametrize(
    ("beside", "hybrid"),
    [("OffloadingConnector", True), ("MooncakeConnector", True), ("LMCacheConnectorV1", False)],
)
def test_multi_connector_keeps_hybrid_memory_beside_another_that_takes_it(beside: str, hybrid: bool) -> None:
    plugin.register()
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in (plugin.NAME, beside)]
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    assert MultiConnector.all_children_support_hma(config) is hybrid


def test_beside_mooncakes_connector_a_prompt_would_be_cut_twice() -> None:
    """Why docs/compat.md says no: both take the same prefill leg, and the state would be h(N-2)."""
    request = SimpleNamespace(
        prompt_token_ids=[1, 2, 3, 4, 5],
        prompt_embeds=None,
        _all_token_ids=[1, 2, 3, 4, 5],
        num_prompt_tokens=5,
        max_tokens=9,
        kv_transfer_params={"do_remote_decode": True},
        get_skip_reading_prefix_cache=lambda: False,
    )
    cut_last_token(request, None)
    assert request.num_prompt_tokens == 4
    MooncakeConnectorScheduler._truncate_mamba_request_for_prefill(SimpleNamespace(), request)
    assert request.num_prompt_tokens == 3


def test_two_connectors_that_answer_under_one_key_end_the_engine() -> None:
    """Why docs/compat.md says no to NIXL's and MoRIIO's: their answers have the keys of ours."""

    def answering(*keys: str) -> Any:
        answer = dict.fromkeys(keys, 1)
        return SimpleNamespace(request_finished_all_groups=lambda request, blocks: (True, dict(answer)))

    both = MultiConnector.__new__(MultiConnector)
    both._all_support_hma = True
    both._requests_to_connector, both._extra_async_saves = {}, {}
    request: Any = SimpleNamespace(request_id="r")
    both._connectors = [answering("remote_block_ids", "stateferry"), answering("another")]
    _, params = both.request_finished_all_groups(request, ([1],))
    assert params == {"remote_block_ids": 1, "stateferry": 1, "another": 1}
    both._connectors = [answering("remote_block_ids", "stateferry"), answering("remote_block_ids")]
    with pytest.raises(RuntimeError, match="Key clash"):
        both.request_finished_all_groups(request, ([1],))
