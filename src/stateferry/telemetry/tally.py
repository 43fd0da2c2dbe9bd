"""Counts by metric and label, from the thread where things happen to whoever tells them on."""

Key = tuple[str, str]
"""A metric's name and the value of its label ("" without one)."""


class Tally:
    """Grows for ever, by at most one entry for each value of a label. One thread adds, any may look."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}

    def add(self, name: str, label: str = "", number: int = 1) -> None:
        """Count something."""
        self._counts[name, label] = self._counts.get((name, label), 0) + number

    def counts(self) -> dict[Key, int]:
        """All counts as they are now."""
        return self._counts.copy()
