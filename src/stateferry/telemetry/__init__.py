"""Names of everything that can be watched, in one place; and what counts it."""

from stateferry.telemetry.names import (
    METRICS,
    OTHER_FIELD,
    SPANS,
    TOLD,
    Metric,
    MetricKind,
    exemplar_of,
    refusal_label,
)
from stateferry.telemetry.tally import Key, Tally

__all__ = [
    "METRICS",
    "OTHER_FIELD",
    "SPANS",
    "TOLD",
    "Key",
    "Metric",
    "MetricKind",
    "Tally",
    "exemplar_of",
    "refusal_label",
]
