"""What vLLM carries between our two halves: it pickles these, so they are plain values."""

from dataclasses import dataclass, field

from stateferry.ids import RequestId
from stateferry.session import Orders, Report
from stateferry.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from stateferry.wire import RankAddress


@dataclass
class StateFerryMetadata(KVConnectorMetadata):
    """One step's orders, scheduler half to every worker half."""

    step: int
    """Counts up: vLLM shows the same metadata to several hooks, orders are taken once."""
    orders: Orders


@dataclass
class StateFerryHandshake(KVConnectorHandshakeMetadata):
    """One worker's address and cache, worker half to scheduler half, before any request."""

    address: RankAddress
    layout: bytes
    """Encoded, as the hand-shake sends it."""


@dataclass
class StateFerryWorkerMetadata(KVConnectorWorkerMetadata):
    """What ended since the last step, every worker half to the scheduler half."""

    reports: tuple[Report, ...] = ()
    lost: frozenset[RequestId] = field(default_factory=frozenset)
    open_counts: dict[int, int] = field(default_factory=dict)
    """Hand-offs that are open on a rank, where that changed."""
    released: int = 0
    expired: int = 0
    refused_claims: int = 0
    refused_peers: int = 0
    quarantined: dict[int, int] = field(default_factory=dict)
    """Hand-offs in quarantine on a rank, where that changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both workers' news."""
        assert isinstance(other, StateFerryWorkerMetadata)
        return StateFerryWorkerMetadata(
            self.reports + other.reports,
            self.lost | other.lost,
            self.open_counts | other.open_counts,
            self.released + other.released,
            self.expired + other.expired,
            self.refused_claims + other.refused_claims,
            self.refused_peers + other.refused_peers,
            self.quarantined | other.quarantined,
        )
