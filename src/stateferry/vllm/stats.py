"""Numbers for vLLM's `/metrics` and its periodic log line.

Collected by the scheduler half, which hears from every rank, so that one hand-off counts once
whatever the tensor-parallel size. vLLM carries them to the API server as plain dictionaries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stateferry.layout.spec import Group
from stateferry.session import Outcome, Report
from stateferry.telemetry import METRICS, Metric, MetricKind
from stateferry.vllm.compat import KVConnectorPromMetrics, KVConnectorStats

Values = dict[str, dict[str, Any]]
"""Metric name -> label value ("" without a label) -> what to add, set, or (a list) observe."""


class StateFerryStats(KVConnectorStats):
    """What happened in one or more steps."""

    data: Values

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def add(self, name: str, value: float, label: str = "") -> None:
        """Count something; nothing is not counted."""
        if not value:
            return
        values = self.data.setdefault(name, {})
        values[label] = values.get(label, 0) + value

    def set(self, name: str, value: float, label: str = "") -> None:
        """Say how something stands now."""
        self.data.setdefault(name, {})[label] = value

    def observe(self, name: str, value: float) -> None:
        """Add one observation."""
        self.data.setdefault(name, {}).setdefault("", []).append(value)

    def aggregate(self, other: KVConnectorStats) -> "StateFerryStats":
        """Add a later step's numbers to ours."""
        for name, values in other.data.items():
            for label, value in values.items():
                ours = self.data.setdefault(name, {})
                if METRICS[name].kind is MetricKind.GAUGE or label not in ours:
                    ours[label] = value
                else:
                    ours[label] = ours[label] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: sums, last values, and the median of observations."""
        line: dict[str, int | float] = {}
        for name, values in self.data.items():
            for label, value in values.items():
                key = f"{name}{{{label}}}" if label else name
                if isinstance(value, list):
                    line[f"{key} median"] = round(sorted(value)[len(value) // 2], 4)
                    line[f"{key} count"] = len(value)
                else:
                    line[key] = value
        return line


def record_handoff(stats: StateFerryStats, groups: Sequence[Group], reports: Sequence[Report]) -> None:
    """Count one request's hand-off, given every rank's report."""
    worst = max(reports, key=lambda r: (r.outcome is Outcome.FAILED, r.outcome is Outcome.ABANDONED))
    stats.add("stateferry_handoffs", 1, worst.outcome.value)
    stats.observe("stateferry_handoff_seconds", max(r.total_s for r in reports))
    stats.add("stateferry_received_pieces", sum(r.pieces for r in reports))
    stats.add("stateferry_retries", sum(r.retries for r in reports))
    for report in reports:
        if report.outcome is Outcome.RECEIVED:
            for group, size in zip(report.groups, report.bytes_by_group, strict=True):
                stats.add("stateferry_received_bytes", size, groups[group].kind.value)


class StateFerryPromMetrics(KVConnectorPromMetrics):
    """Registers our metrics with vLLM's registry and feeds them, in the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {name: self._create(m) for name, m in METRICS.items()}
        for engine in per_engine_labelvalues:
            for name, metric in METRICS.items():
                for value in metric.values or ("",):
                    self._at(name, engine, value)

    def observe(self, transfer_stats_data: Values, engine_idx: int = 0) -> None:
        """Take over one step's numbers."""
        for name, values in transfer_stats_data.items():
            for label, value in values.items():
                metric = self._at(name, engine_idx, label)
                if METRICS[name].kind is MetricKind.COUNTER:
                    metric.inc(value)
                elif METRICS[name].kind is MetricKind.GAUGE:
                    metric.set(value)
                else:
                    for observation in value:
                        metric.observe(observation)

    def _create(self, metric: Metric) -> Any:
        names = [*self._labelnames, metric.label] if metric.label else list(self._labelnames)
        if metric.kind is MetricKind.COUNTER:
            return self._counter_cls(name=metric.name, documentation=metric.help, labelnames=names)
        if metric.kind is MetricKind.GAUGE:
            return self._gauge_cls(name=metric.name, documentation=metric.help, labelnames=names)
        return self._histogram_cls(
            name=metric.name, documentation=metric.help, labelnames=names, buckets=metric.buckets
        )

    def _at(self, name: str, engine: int, label: str) -> Any:
        values = list(self.per_engine_labelvalues[engine])
        return self._metrics[name].labels(*values, *([label] if METRICS[name].label else []))
