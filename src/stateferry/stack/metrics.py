"""Reading a server's `/metrics` page."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """The samples of one page in Prometheus' text format."""

    def __init__(self, text: str) -> None:
        self.samples = tuple(_parse(text))

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that carry these labels; 0.0 if there is none."""
        return sum(sample.value for sample in self.find(name, **labels))

    def find(self, name: str, **labels: str) -> list[Sample]:
        """The samples of this name that carry these labels."""
        return [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]


def _parse(text: str) -> list[Sample]:
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue  # a comment
        name, labels, value = match.groups()
        samples.append(Sample(name, dict(_LABEL.findall(labels or "")), float(value)))
    return samples
