"""What vLLM carries between our two halves: it pickles these, so they are plain values."""

from dataclasses import dataclass, field

from stateferry.ids import RequestId, TransferId
from stateferry.session import Answered, Kept, Orders, Report
from stateferry.telemetry import Key
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
    kept: tuple[Kept, ...] = ()
    counts: dict[Key, int] = field(default_factory=dict)
    """What happened, by metric and label: to be added."""
    levels: dict[int, dict[Key, int]] = field(default_factory=dict)
    """How things stand on a rank, by metric and label, where that changed."""
    waiting: tuple[RequestId, ...] = ()
    """Hand-offs that arrived in a rank's waiting room: a request once for each rank."""
    apart: tuple[RequestId, ...] = ()
    """Hand-offs that a rank must be given blocks for, because it has no room or its read failed."""
    answered: tuple[Answered, ...] = ()
    """Offers that requests waited for, from rank 0."""
    renounced: tuple[TransferId, ...] = ()
    """Transfers whose consumers gave up before they had claimed anything."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both workers' news."""
        assert isinstance(other, StateFerryWorkerMetadata)
        keys = self.counts.keys() | other.counts.keys()
        return StateFerryWorkerMetadata(
            self.reports + other.reports,
            self.lost | other.lost,
            self.kept + other.kept,
            {key: self.counts.get(key, 0) + other.counts.get(key, 0) for key in keys},
            self.levels | other.levels,
            self.waiting + other.waiting,
            self.apart + other.apart,
            self.answered + other.answered,
            self.renounced + other.renounced,
        )
