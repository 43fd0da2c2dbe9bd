"""StateFerry under the name that MoRIIO's users have in their configurations.

"kv_connector": "MoRIIOConnector", "kv_connector_module_path": "stateferry.vllm.dropin"
"""

from stateferry.vllm.connector import StateFerryConnector


class MoRIIOConnector(StateFerryConnector):
    """The same connector: what the settings are written for decides, not its name."""
