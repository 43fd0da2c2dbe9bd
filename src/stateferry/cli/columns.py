"""Tables for terminals of any width: what does not fit is left out whole, and named, or shortened."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 3
"""Columns of the terminal between two of a table."""
EDGES = 2


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a `Fitted`."""

    name: str
    rank: int
    """1 is the most important. Where room is short, the highest is left out first."""
    least: int = 1000
    """May be cut to so many characters; none are cut unless it is given."""
    name_like: bool = True
    """Cut in the middle, for names differ at both ends; else at the end."""
    right: bool = False
    wraps: bool = False
    """What is longer goes on in the next line, by words, and is not cut."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table that is as wide as its terminal at most. A row takes one line, unless a column wraps.

    One rule: columns are left out from the least important on until the rest fits, each as narrow as it may
    be; then each gets what it lacks, the least important first, for an engine is known by a part of its
    name. The title names what was left out.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    """A cell for each column. Cells have no line breaks."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(options.max_width)

    def _table(self, room: int) -> Table:
        widths = self._widths(room)
        hidden = [column.name for number, column in enumerate(self.columns) if number not in widths]
        title = Text(self.title, no_wrap=True, overflow="ellipsis")
        if hidden:
            title.append(f"  too narrow for: {', '.join(hidden)}", "dim")
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for number, width in widths.items():
            column = self.columns[number]
            table.add_column(
                column.name,
                width=width,
                no_wrap=not column.wraps,
                overflow="fold",
                justify="right" if column.right else "left",
            )
        for row in self.rows:
            table.add_row(*(self._cell(row[number], number, width) for number, width in widths.items()))
        return table

    def _cell(self, text: Text, number: int, width: int) -> Text:
        column = self.columns[number]
        if column.wraps or text.cell_len <= width:
            return text
        tail = width // 2 if column.name_like else 0
        return Text(shortened(text.plain, width, tail), text.style)

    def _widths(self, room: int) -> dict[int, int]:
        """Of those columns that are shown, by number, in order. `room`: characters of a line."""
        wanted = [
            max([len(column.name), *(row[number].cell_len for row in self.rows)])
            for number, column in enumerate(self.columns)
        ]
        kept = sorted(range(len(self.columns)), key=lambda number: self.columns[number].rank)
        least = {number: min(wanted[number], self.columns[number].least) for number in kept}
        while len(kept) > 1 and _total(least[number] for number in kept) > room:
            least.pop(kept.pop())
        spare = max(0, room - _total(least.values()))
        for number in reversed(kept):
            more = min(wanted[number] - least[number], spare)
            least[number] += more
            spare -= more
        only_one = max(1, room - EDGES)
        return {number: min(least[number], only_one) for number in sorted(kept)}


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + GAP * (len(found) - 1) + EDGES


def shortened(text: str, width: int, tail: int) -> str:
    """At most `width` characters, with a mark for those that are missing before the last `tail`."""
    if len(text) <= width:
        return text
    return f"{text[: max(0, width - 1 - tail)]}…{text[len(text) - tail :]}"
