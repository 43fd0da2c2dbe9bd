"""Numbers of a scheduler half: what happened over all ranks, and how things stand. For vLLM's `/metrics`."""

from collections import OrderedDict
from collections.abc import Sequence

from stateferry.ids import RequestId
from stateferry.layout.spec import Group
from stateferry.session import Clock, Report
from stateferry.telemetry import TOLD, Key
from stateferry.vllm.metadata import StateFerryWorkerMetadata
from stateferry.vllm.stats import StateFerryStats, record_handoff

TELL_S = 5.0
"""An engine that takes steps says so every so often, though nothing else may have changed: so an engine that
is busy can be told from one that hangs."""

MAX_PARTIAL = 8192
"""Hand-offs that wait for some ranks' reports. A rank whose ferry ended reports none of those that it never
loaded, so the oldest are forgotten, and not counted."""


class Numbers:
    """Engine core's thread."""

    def __init__(self, groups: Sequence[Group], tp_size: int, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        self._tp_size = tp_size
        self._stats = StateFerryStats()
        self._reports: OrderedDict[RequestId, list[Report]] = OrderedDict()
        """Of hand-offs that some ranks have ended and others not."""
        self._levels: dict[int, dict[Key, int]] = {}
        """How things stand, by rank."""
        self._standing: dict[Key, int] = {}
        """How things stand over all ranks, and in this half."""
        self._told: dict[Key, int] = {}
        self._told_unix_s = 0.0

    def count(self, name: str, label: str) -> None:
        """Something happened here."""
        self._stats.add(name, 1, label)

    def heard(self, news: StateFerryWorkerMetadata) -> None:
        """Something happened on ranks. A hand-off counts once all ranks have ended it."""
        for report in news.reports:
            so_far = self._reports.setdefault(report.request_id, [])
            so_far.append(report)
            if len(so_far) == self._tp_size:
                record_handoff(self._stats, self._groups, self._reports.pop(report.request_id))
        while len(self._reports) > MAX_PARTIAL:
            self._reports.popitem(last=False)
        if news.levels:
            self._levels |= news.levels
            keys = {key for levels in self._levels.values() for key in levels}
            self._standing = {key: sum(of.get(key, 0) for of in self._levels.values()) for key in keys}
        for (name, label), number in news.counts.items():
            self._stats.add(name, number, label)

    def take(self, open_here: int) -> StateFerryStats | None:
        """What happened since the last call, with the time; None: nothing, and it was told a moment ago.
        `open_here` hand-offs are open in this half."""
        self._standing["stateferry_open_handoffs", "scheduler"] = open_here
        if self._standing != self._told:
            for (name, label), level in self._standing.items():
                if level != self._told.get((name, label), 0):
                    self._stats.set(name, level, label)
            self._told = dict(self._standing)
        now_unix_s = self._clock.unix_s()
        if self._stats.is_empty() and abs(now_unix_s - self._told_unix_s) < TELL_S:
            return None
        self._told_unix_s = now_unix_s
        self._stats.set(TOLD, now_unix_s)
        stats, self._stats = self._stats, StateFerryStats()
        return stats
