"""vLLM finds the connector by name in every process, and calls our plugin as often as it likes."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    from stateferry.vllm import plugin
    from stateferry.vllm.compat import KVConnectorFactory


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


@pytest.mark.parametrize(("beside", "hybrid"), [("OffloadingConnector", True), ("LMCacheConnectorV1", False)])
def test_multi_connector_keeps_hybrid_memory_beside_another_that_takes_it(beside: str, hybrid: bool) -> None:
    plugin.register()
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in (plugin.NAME, beside)]
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    assert MultiConnector.all_children_support_hma(config) is hybrid
