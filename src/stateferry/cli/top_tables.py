"""The tables of `stateferry top`."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from stateferry.watch import Between, Figures, Found

NUMBERS = ("a second", "median", "95 %", "open")
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NO_ANSWER = "bold red"


def engine_table(engines: Sequence[Found], figures: Sequence[Figures], silent: Mapping[str, str]) -> Table:
    """One line for each engine that was asked; `silent`: why some gave no answer, by URL."""
    table = _table("Engines")
    for name in ("engine", "role", "requests", "cache", "hand-offs", *NUMBERS, "bytes by kind", "peers"):
        right = name in NUMBERS or name == "cache"
        table.add_column(
            name, no_wrap=name != "engine", overflow="fold", justify="right" if right else "left"
        )
    table.add_column("trouble", overflow="fold")
    for engine in engines:
        if engine.url in silent:
            row = [Text(address(engine.url)), Text(engine.role or "-"), Text("no answer", NO_ANSWER)]
            row += [Text("-")] * (len(table.columns) - len(row) - 1)
            table.add_row(*row, Text("why: below", NO_ANSWER))
        for f in figures:
            if f.url == engine.url:
                _add_engine(table, f)
    return table


def _add_engine(table: Table, f: Figures) -> None:
    table.add_row(
        Text(place(f)),
        f.role or "-",
        f"{f.running} run\n{f.waiting} wait",
        f"{f.cache_used:.0%}",
        lines(f.handoffs) or "-",
        "-" if f.handoffs_rate is None else f"{f.handoffs_rate:.1f}",
        at_most(f.median),
        at_most(f.slow),
        str(f.open),
        sizes(f),
        lines({state: count for state, count in f.peers.items() if count}) or "-",
        trouble(f),
    )


def failure_table(figures: Sequence[Figures], now_unix_s: float) -> Table | None:
    """Why hand-offs came to nothing, and the last one of each cause; None: none did."""
    table = _table("Failed hand-offs")
    for name in ("engine", "cause", "how many", "last", "request", "reason begins"):
        table.add_column(name, overflow="fold")
    for f in figures:
        last = {example.labels["cause"]: example for example in f.failed}
        for cause, count in sorted(f.failures.items(), key=lambda item: -item[1]):
            example = last.get(cause)
            labels = example.labels if example else {}
            table.add_row(
                Text(place(f)),
                cause,
                str(count),
                ago(example.at_unix_s, now_unix_s) if example else "-",
                Text(labels.get("request", "-")),
                Text(labels.get("reason", "-")),
            )
    return table if table.row_count else None


def slow_table(figures: Sequence[Figures], now_unix_s: float) -> Table | None:
    """The slowest hand-offs that a page names; None: it names none."""
    table = _table("Slowest hand-offs")
    for name in ("engine", "took", "outcome", "when", "request", "trace"):
        table.add_column(name, overflow="fold")
    for f in figures:
        for example in f.slowest:
            table.add_row(
                Text(place(f)),
                duration(example.value),
                example.labels.get("outcome", "-"),
                ago(example.at_unix_s, now_unix_s),
                Text(example.labels.get("request", "-")),
                Text(example.labels.get("trace_id", "-")),
            )
    return table if table.row_count else None


def silent_table(silent: Mapping[str, str]) -> Table | None:
    """Why engines do not answer; None: all do. A table of its own, for this is long and terminals are not."""
    table = _table("No answer")
    table.add_column("engine")
    table.add_column("why", overflow="fold")
    for url, why in silent.items():
        table.add_row(Text(address(url)), Text(why))
    return table if table.row_count else None


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def place(f: Figures) -> str:
    """An engine's name in a table: its URL without the scheme, and its number if that says anything."""
    name = address(f.url)
    return name if f.engine == "0" else f"{name} #{f.engine}"


def address(url: str) -> str:
    """A URL without its scheme."""
    return url.partition("://")[2]


def duration(seconds: float | None) -> str:
    """For people."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def at_most(found: Between | None) -> str:
    """A quantile for people: all that is known of it, in one bound."""
    if found is None:
        return "-"
    return f"> {duration(found.above_s)}" if found.at_most_s is None else f"<= {duration(found.at_most_s)}"


def size(count: float) -> str:
    """Bytes for people, in powers of a thousand."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}"


def sizes(f: Figures) -> str:
    """Bytes of each kind that came: all, and a second."""
    rates = f.bytes_rate or {}
    rows = (
        f"{kind} {size(count)}" + (f", {size(rates[kind])}/s" if kind in rates else "")
        for kind, count in f.received_bytes.items()
        if count
    )
    return "\n".join(rows) or "-"


def lines(counts: Mapping[str, int]) -> str:
    """One line for each that is not 0."""
    return "\n".join(f"{count} {name}" for name, count in counts.items() if count)


def trouble(f: Figures) -> str:
    """What an operator should look into."""
    found = {
        "in quarantine": f.quarantined,
        "lease losses": f.lease_losses,
        "grants expired": f.grants.get("expired", 0),
        "offers refused": f.refused_offers,
        "retries": f.retries,
        **{f"do not fit: {field}": count for field, count in f.refusals.items()},
    }
    return lines(found) or "-"


def ago(at_unix_s: float, now_unix_s: float) -> str:
    """How long before now, by this machine's clock."""
    if not at_unix_s:
        return "-"
    seconds = max(0.0, now_unix_s - at_unix_s)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} d ago"
