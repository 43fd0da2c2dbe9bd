"""Names of everything that can be watched, in one place."""

from stateferry.telemetry.names import METRICS, Metric, MetricKind

__all__ = ["METRICS", "Metric", "MetricKind"]
