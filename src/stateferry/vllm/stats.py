"""Numbers for vLLM's `/metrics` and its periodic log line.

Collected by the scheduler half, which hears from every rank, so that one hand-off counts once
whatever the tensor-parallel size. vLLM carries them to the API server as plain dictionaries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter

from stateferry.layout.spec import Group
from stateferry.session import Cause, Outcome, Report
from stateferry.telemetry import METRICS, Metric, MetricKind, exemplar_of
from stateferry.vllm.compat import KVConnectorPromMetrics, KVConnectorStats

MAX_REQUEST_ID = 48
"""Characters of a request's id in an exemplar: its end, for routers put addresses before what is unique."""

Values = dict[str, dict[str, Any]]
"""Metric name -> label value ("" without a label) -> what to add or set, or a list of what happened one by
one: `[value, labels of an exemplar]` each."""


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

    def observe(
        self, name: str, value: float, label: str = "", exemplar: Mapping[str, str] | None = None
    ) -> None:
        """Add one observation of a histogram, or one event that is counted with an example."""
        self.data.setdefault(name, {}).setdefault(label, []).append([value, dict(exemplar or {})])

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
                if not isinstance(value, list):
                    line[key] = value
                elif METRICS[name].kind is MetricKind.COUNTER:
                    line[key] = sum(number for number, _ in value)
                else:
                    line[f"{key} median"] = round(sorted(number for number, _ in value)[len(value) // 2], 4)
                    line[f"{key} count"] = len(value)
        return line


def record_handoff(stats: StateFerryStats, groups: Sequence[Group], reports: Sequence[Report]) -> None:
    """Count one request's hand-off, given every rank's report."""
    worst = max(reports, key=lambda r: (r.outcome is Outcome.FAILED, r.outcome is Outcome.ABANDONED))
    # Not `-1234`: whoever looks for it in a log would give `grep` an option.
    request_id = worst.request_id[-MAX_REQUEST_ID:].lstrip("-")
    stats.add("stateferry_handoffs", 1, worst.outcome.value)
    trace_id = _trace_id(worst)
    seen = exemplar_of(trace_id=trace_id, request=request_id)
    took_s = max(r.total_s for r in reports)
    stats.observe("stateferry_handoff_seconds", took_s, worst.outcome.value, seen)
    stats.add("stateferry_retries", sum(r.retries for r in reports))
    why = next((r for r in (worst, *reports) if r.cause is not Cause.NONE), None)
    if why is not None:
        seen = exemplar_of(request=request_id, reason=why.reason)
        stats.observe("stateferry_failures", 1, why.cause.value, seen)
    if all(r.outcome is Outcome.RECEIVED for r in reports):
        for stage, seconds in stages(reports).items():
            stats.observe("stateferry_stage_seconds", seconds, stage)
    for report in reports:
        if report.outcome is Outcome.RECEIVED:
            for group, size, pieces in zip(
                report.groups, report.bytes_by_group, report.pieces_by_group, strict=True
            ):
                kind = groups[group].kind.value
                stats.add("stateferry_received_bytes", size, kind)
                stats.add("stateferry_received_pieces", pieces, kind)


def stages(reports: Sequence[Report]) -> dict[str, float]:
    """How long each stage of a hand-off took the slowest rank, seconds."""
    return {
        "wait": max(r.waited_s for r in reports),
        "plan": max(r.plan_s for r in reports),
        "post": max(r.post_s for r in reports),
        "wire": max(r.wire_s for r in reports),
    }


def _trace_id(report: Report) -> str:
    """The trace that a dashboard can go to from an exemplar; empty without one."""
    words = dict(report.trace).get("traceparent", "").split("-")
    return words[1] if len(words) == 4 and len(words[1]) == 32 else ""


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
        # Ray's metrics take none.
        self._exemplars = issubclass(self._counter_cls, Counter)
        for engine in per_engine_labelvalues:
            for name, metric in METRICS.items():
                for value in metric.values or ("",):
                    self._at(name, engine, value)

    def observe(self, transfer_stats_data: Values, engine_idx: int = 0) -> None:
        """Take over one step's numbers."""
        for name, values in transfer_stats_data.items():
            for label, value in values.items():
                metric = self._at(name, engine_idx, label)
                if METRICS[name].kind is MetricKind.GAUGE:
                    metric.set(value)
                    continue
                take = metric.inc if METRICS[name].kind is MetricKind.COUNTER else metric.observe
                for number, exemplar in value if isinstance(value, list) else [(value, None)]:
                    if exemplar and self._exemplars:
                        take(number, exemplar)
                    else:
                        take(number)

    def _create(self, metric: Metric) -> Any:
        names = [*self._labelnames, metric.label] if metric.label else list(self._labelnames)
        if metric.kind is MetricKind.COUNTER:
            return self._counter_cls(name=metric.name, documentation=metric.help, labelnames=names)
        if metric.kind is MetricKind.GAUGE:
            # With several API servers each keeps its own; what counts is what was told last.
            return self._gauge_cls(
                name=metric.name,
                documentation=metric.help,
                labelnames=names,
                multiprocess_mode="mostrecent",
            )
        return self._histogram_cls(
            name=metric.name, documentation=metric.help, labelnames=names, buckets=metric.buckets
        )

    def _at(self, name: str, engine: int, label: str) -> Any:
        values = list(self.per_engine_labelvalues[engine])
        return self._metrics[name].labels(*values, *([label] if METRICS[name].label else []))
