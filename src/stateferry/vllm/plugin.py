"""Entry point of vLLM's plugin system: lets `--kv-transfer-config` name `StateFerryConnector`, and makes
vLLM's processes wait as the environment asks."""

NAME = "StateFerryConnector"
MODULE = "stateferry.vllm.connector"


def register() -> None:
    """Tell vLLM where the connector is. vLLM calls this in every process, sometimes twice. Raises ConfigError
    for an environment variable of ours that cannot be read."""
    from stateferry.vllm.compat import KVConnectorFactory
    from stateferry.vllm.waits import sleep_between_looks

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    sleep_between_looks()
