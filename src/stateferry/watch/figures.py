"""What is shown of an engine: totals since its start, and rates between two looks."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stateferry.telemetry import TOLD
from stateferry.watch.page import Example, Snapshot

HANDOFFS = "stateferry_handoffs_total"
BYTES = "stateferry_received_bytes_total"
SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Between:
    """A quantile as exactly as a histogram knows it: in which of its buckets it lies. A number inside the
    bucket would be made up, and may lie above every value that there was."""

    above_s: float
    at_most_s: float | None
    """None: it is past the last bound."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine. Rates are a second's; None where there is nothing to compare with."""

    url: str
    engine: str
    role: str
    running: int
    waiting: int
    cache_used: float
    """Share of vLLM's KV cache, 0 to 1."""
    told_s_ago: float | None
    """How old all numbers are: an engine tells them with its steps. None: it does not say."""
    handoffs: Mapping[str, int]
    """By outcome, since the engine's start; so are all that follow unless said."""
    handoffs_rate: float | None
    median: Between | None
    """Of the hand-offs that were received between the looks; with one look, of all that were."""
    slow: Between | None
    """The 95th percentile of the same."""
    received_bytes: Mapping[str, int]
    bytes_rate: Mapping[str, float] | None
    open: int
    peers: Mapping[str, int]
    failures: Mapping[str, int]
    """By cause, those that happened."""
    grants: Mapping[str, int]
    retries: int
    lease_losses: int
    refused_offers: int
    refusals: Mapping[str, int]
    """By field, those that happened."""
    quarantined: int
    slowest: tuple[Example, ...]
    failed: tuple[Example, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def figures_of(now: Snapshot, before: Snapshot | None, role: str) -> Figures:
    """Figures of an engine as of `now`. `before` is an earlier look at the same engine, or None."""
    if before is not None and _ended(before) > _ended(now):
        before = None  # it was restarted
    passed_s = now.at_s - before.at_s if before is not None else 0.0
    buckets: dict[float, float] = dict(now.buckets)
    handoffs_rate = bytes_rate = None
    if before is not None and passed_s > 0:
        buckets = {le: count - before.buckets.get(le, 0.0) for le, count in now.buckets.items()}
        handoffs_rate = (_ended(now) - _ended(before)) / passed_s
        bytes_rate = {
            kind: (size - before.value(BYTES, kind)) / passed_s for kind, size in now.by_label(BYTES).items()
        }
    return Figures(
        url=now.url,
        engine=now.engine,
        role=role or _role(now),
        running=int(now.value("vllm:num_requests_running")),
        waiting=int(now.value("vllm:num_requests_waiting")),
        cache_used=now.value("vllm:kv_cache_usage_perc"),
        told_s_ago=_told_s_ago(now),
        handoffs=_whole(now, HANDOFFS),
        handoffs_rate=handoffs_rate,
        median=quantile(buckets, 0.5),
        slow=quantile(buckets, 0.95),
        received_bytes=_whole(now, BYTES),
        bytes_rate=bytes_rate,
        open=int(now.value("stateferry_open_handoffs", "scheduler")),
        peers=_whole(now, "stateferry_peers"),
        failures=_happened(now, "stateferry_failures_total"),
        grants=_whole(now, "stateferry_grants_total"),
        retries=int(now.value("stateferry_retries_total")),
        lease_losses=int(sum(now.by_label("stateferry_lease_losses_total").values())),
        refused_offers=int(sum(now.by_label("stateferry_refused_offers_total").values())),
        refusals=_happened(now, "stateferry_refusals_total"),
        quarantined=int(now.value("stateferry_quarantined_transfers")),
        slowest=tuple(sorted(now.timed, key=lambda e: -e.value)[:SLOWEST]),
        failed=now.failed,
    )


def _told_s_ago(now: Snapshot) -> float | None:
    told_unix_s = now.value(TOLD)
    return max(0.0, now.read_unix_s - told_unix_s) if told_unix_s and now.read_unix_s else None


def quantile(buckets: Mapping[float, float], share: float) -> Between | None:
    """Where the smallest value lies that at least `share` of the observations do not exceed.

    `buckets`: how many observations are at most so large, by bound. None without observations.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = round(share * buckets[bounds[-1]], 6)  # 0.95 * 100 is to be 95
    for below, bound in itertools.pairwise([0.0, *bounds]):
        if buckets[bound] >= wanted:
            return Between(below, bound if math.isfinite(bound) else None)
    return Between(bounds[-1], None)


def _ended(snapshot: Snapshot) -> float:
    """Hand-offs that are over, however they ended."""
    return sum(snapshot.by_label(HANDOFFS).values())


def _role(snapshot: Snapshot) -> str:
    """What an engine did so far."""
    reads = _ended(snapshot) > 0
    gives = sum(snapshot.by_label("stateferry_grants_total").values()) > 0
    return "both" if reads and gives else "decode" if reads else "prefill" if gives else ""


def _whole(snapshot: Snapshot, series: str) -> dict[str, int]:
    return {label: int(value) for label, value in snapshot.by_label(series).items()}


def _happened(snapshot: Snapshot, series: str) -> dict[str, int]:
    return {label: count for label, count in _whole(snapshot, series).items() if count}
