"""Every metric that an engine with StateFerry serves on vLLM's `/metrics`. Same for all transports."""

import enum
from dataclasses import dataclass


class MetricKind(enum.Enum):
    """How Prometheus keeps it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `label` is what it is split by; every metric also has vLLM's own labels."""

    name: str
    kind: MetricKind
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """All values of the label: a metric that never happened is served as 0."""
    buckets: tuple[float, ...] = ()


SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)

METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            "stateferry_handoffs",
            MetricKind.COUNTER,
            "Hand-offs that this engine's requests had as a consumer, by how they ended.",
            "outcome",
            ("received", "failed", "abandoned"),
        ),
        Metric(
            "stateferry_received_bytes",
            MetricKind.COUNTER,
            "Bytes received over all ranks, by kind of KV-cache group.",
            "kind",
            ("attention", "window", "state"),
        ),
        Metric(
            "stateferry_received_pieces",
            MetricKind.COUNTER,
            "Descriptors posted over all ranks, after merging.",
        ),
        Metric(
            "stateferry_retries",
            MetricKind.COUNTER,
            "Reads that failed and were posted again over all ranks, whatever became of them then.",
        ),
        Metric(
            "stateferry_quarantined_transfers",
            MetricKind.GAUGE,
            "Reads past their deadline that may still write, over all ranks, as of the last step. Their "
            "blocks are out of use until they cannot (docs/operations.md).",
        ),
        Metric(
            "stateferry_handoff_seconds",
            MetricKind.HISTOGRAM,
            "From vLLM's load order to the end, the slowest rank's.",
            buckets=SECONDS,
        ),
        Metric(
            "stateferry_open_handoffs",
            MetricKind.GAUGE,
            "Hand-offs that are open here. scheduler: requests with an offer, blocks kept for others "
            "or being read into, as vLLM's scheduler sees them. ferry: all ranks' ferries added up, as of "
            "the last step (an idle engine takes none). 0 when nothing is going on.",
            "half",
            ("scheduler", "ferry"),
        ),
        Metric(
            "stateferry_grants",
            MetricKind.COUNTER,
            "Finished prefills whose blocks this engine kept for others, by how that ended, over all ranks.",
            "end",
            ("released", "expired"),
        ),
        Metric(
            "stateferry_refused_claims",
            MetricKind.COUNTER,
            "Claims that this engine refused: used twice, expired, changed on their way, or for another life "
            "of it.",
        ),
        Metric(
            "stateferry_refused_peers",
            MetricKind.COUNTER,
            "Connections to control sockets that were turned away: another key or none, or no peer of ours.",
        ),
    )
}
