"""One engine's `/metrics` page, read into what concerns hand-offs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_plain

from stateferry.telemetry import METRICS

OURS = "stateferry_"
VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
"""What of vLLM's own numbers is shown beside ours."""
HANDOFF = "stateferry_handoff_seconds_bucket"
RECEIVED = "received"
FAILURES = "stateferry_failures_total"
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Example:
    """One hand-off that a metric names."""

    labels: Mapping[str, str]
    value: float
    at_unix_s: float
    """0: not said."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One data-parallel engine behind a URL, as its page said."""

    url: str
    engine: str
    """Its number, as vLLM labels it."""
    at_s: float
    """When the page was read, on the reader's clock."""
    read_unix_s: float
    """The same as Unix time, on the clock of the machine that served it; 0: not known."""
    values: Mapping[tuple[str, str], float]
    """By series and value of our own label ("" without one)."""
    buckets: Mapping[float, float]
    """How many of the hand-offs that were received took at most so many seconds: one that is refused is over
    at once, and would make its engine look quick."""
    timed: tuple[Example, ...]
    """Hand-offs with their seconds: the last one of each outcome and bucket; the labels have its outcome."""
    failed: tuple[Example, ...]
    """The last hand-off that failed, of each cause; the labels have its cause."""

    def value(self, series: str, label: str = "") -> float:
        """A number; 0.0 where the page does not have it."""
        return self.values.get((series, label), 0.0)

    def by_label(self, series: str) -> dict[str, float]:
        """All numbers of a series that has a label."""
        return {label: value for (name, label), value in self.values.items() if name == series}

    @property
    def ours(self) -> bool:
        """Whether the page has any number of ours."""
        return any(name.startswith(OURS) for name, _ in self.values)


def read_page(
    text: str, url: str, at_s: float, openmetrics: bool, read_unix_s: float = 0.0
) -> list[Snapshot]:
    """One snapshot for each engine on the page; lines that concern nobody here are not even parsed.

    Raises ValueError for a page in another format than said.
    """
    lines = list(_concerned(text.splitlines()))
    parse = read_openmetrics if openmetrics else read_plain
    families: list[Family] = list(parse("\n".join([*lines, "# EOF" if openmetrics else "", ""]).lstrip("\n")))
    by_engine: dict[str, _Collected] = {}
    for family in families:
        label = METRICS[family.name].label if family.name in METRICS else ""
        for sample in family.samples:
            found = by_engine.setdefault(sample.labels.get(ENGINE, "0"), _Collected({}, {}, [], []))
            own = sample.labels.get(label, "")
            if sample.name == HANDOFF:
                if own == RECEIVED:
                    found.buckets[float(sample.labels["le"])] = sample.value
                if sample.exemplar:
                    found.timed.append(_example(sample.exemplar, {"outcome": own}))
            elif "le" not in sample.labels:
                found.values[sample.name, own] = found.values.get((sample.name, own), 0.0) + sample.value
            if sample.name == FAILURES and sample.exemplar:
                found.failed.append(_example(sample.exemplar, {"cause": own}))
    return [
        Snapshot(
            url,
            engine,
            at_s,
            read_unix_s,
            found.values,
            found.buckets,
            tuple(found.timed),
            tuple(found.failed),
        )
        for engine, found in sorted(by_engine.items())
    ]


@dataclass(slots=True)
class _Collected:
    values: dict[tuple[str, str], float]
    buckets: dict[float, float]
    timed: list[Example]
    failed: list[Example]


def _concerned(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        words = line.split(maxsplit=3)
        name = words[2] if line.startswith("# ") and len(words) > 2 else line
        if name.startswith(OURS) or name.startswith(VLLM):
            yield line


def _example(exemplar: object, more: Mapping[str, str]) -> Example:
    labels, value, at = (getattr(exemplar, name) for name in ("labels", "value", "timestamp"))
    return Example({**more, **labels}, float(value), float(at or 0.0))
