"""The only place that knows which vLLM this is: every import that may move, every version check.

`offline*.py` import what only they need, from places where vLLM's engine core finds it.
"""

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast as message_queue
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from stateferry.vllm.versions import TESTED, is_tested, vllm_version

__all__ = [
    "TESTED",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "RequestStatus",
    "SupportsHMA",
    "current_platform",
    "get_ip",
    "is_tested",
    "message_queue",
    "server_arguments",
    "vllm_version",
]


def server_arguments(parser: Any) -> Any:
    """`parser` with every option of vLLM's OpenAI server. Imports the server: not for engine processes."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # moved in 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser
    return make_arg_parser(parser)
