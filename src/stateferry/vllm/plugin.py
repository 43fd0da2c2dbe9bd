"""Entry point of vLLM's plugin system: lets `--kv-transfer-config` name `StateFerryConnector`."""

NAME = "StateFerryConnector"
MODULE = "stateferry.vllm.connector"


def register() -> None:
    """Tell vLLM where the connector is. vLLM calls this in every process, sometimes twice."""
    from stateferry.vllm.compat import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
