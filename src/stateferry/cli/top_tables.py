"""The tables of `stateferry top`."""

from collections.abc import Mapping, Sequence

from rich.text import Text

from stateferry.cli.columns import Column, Fitted
from stateferry.watch import Between, Figures, Found

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NO_ANSWER = "bold red"
HANGS_S = 60.0
"""An engine that has requests tells something every few seconds, unless one of its steps takes longer."""
ENGINE = Column("engine", 1, least=21)
"""An IPv4 address with its port fits."""
ENGINES = (
    ENGINE,
    Column("role", 4),
    Column("requests", 10),
    Column("told", 7, right=True),
    Column("cache", 12, right=True),
    Column("hand-offs", 3),
    Column("a second", 5, right=True),
    Column("median", 11, right=True),
    Column("95 %", 7, right=True),
    Column("open", 9, right=True),
    Column("bytes by kind", 8),
    Column("peers", 6),
    Column("trouble", 2, least=16, name_like=False),
)
FAILED = (
    ENGINE,
    Column("cause", 2),
    Column("how many", 5, right=True),
    Column("last", 6),
    Column("request", 4, least=16),
    Column("reason begins", 3, least=20, wraps=True),
)
SLOW = (
    ENGINE,
    Column("took", 2, right=True),
    Column("outcome", 3),
    Column("when", 5),
    Column("request", 4, least=16),
    Column("trace", 6, least=32),
)
SILENT = (ENGINE, Column("why", 2, least=24, wraps=True))
TROUBLE = (ENGINE, Column("trouble", 2, least=18, wraps=True), Column("look at", 3, least=24, wraps=True))
LOOK_AT = {
    "no step": "it hangs, or one step takes so long: its log, and the process VLLM::EngineCore",
    "silent peers": "prefill engines that hang: its log says which, and since when (has not answered since)",
    "in quarantine": "reads that neither end nor stop, whose blocks are out of use: docs/operations.md",
    "lease losses": "engines that died, or lease_s shorter than what requests wait for a free slot",
    "grants expired": "clients that left between the legs, a router that loses the second one, dead engines",
    "offers refused": "a router that changes prompts or uses an offer twice: its log has the reason",
    "retries": "the network or device: requests are slower, and right",
    "do not fit: epoch": "nothing, where an engine was restarted: others knew its former life",
    "do not fit": "engines with other flags, models or versions: stateferry doctor says what to change",
}
"""How a trouble's name begins, and where to look; the first that fits."""


def engine_table(engines: Sequence[Found], figures: Sequence[Figures], silent: Mapping[str, str]) -> Fitted:
    """One line for each engine that was asked; `silent`: why some gave no answer, by URL."""
    rows = []
    for engine in engines:
        if engine.url in silent:
            nothing = [Text("-") for _ in ENGINES[3:]]
            why = Text("no answer", NO_ANSWER)
            rows.append([Text(address(engine.url)), Text(engine.role or "-"), *nothing, why])
        rows += [_engine(f) for f in figures if f.url == engine.url]
    return Fitted("Engines", ENGINES, rows)


def _engine(f: Figures) -> list[Text]:
    cells = (
        place(f),
        f.role or "-",
        f"{f.running} run, {f.waiting} wait",
        "-" if f.told_s_ago is None else f"{age(f.told_s_ago)} ago",
        f"{f.cache_used:.0%}",
        listed(f.handoffs) or "-",
        "-" if f.handoffs_rate is None else f"{f.handoffs_rate:.1f}",
        at_most(f.median),
        at_most(f.slow),
        str(f.open),
        sizes(f),
        listed(f.peers) or "-",
        trouble(f),
    )
    return [Text(cell) for cell in cells]


def failure_table(figures: Sequence[Figures], now_unix_s: float) -> Fitted | None:
    """Why hand-offs came to nothing, and the last one of each cause; None: none did."""
    rows = []
    for f in figures:
        last = {example.labels["cause"]: example for example in f.failed}
        for cause, count in sorted(f.failures.items(), key=lambda item: -item[1]):
            example = last.get(cause)
            labels = example.labels if example else {}
            cells = (
                place(f),
                cause,
                str(count),
                ago(example.at_unix_s, now_unix_s) if example else "-",
                labels.get("request", "-"),
                labels.get("reason", "-"),
            )
            rows.append([Text(cell) for cell in cells])
    return Fitted("Failed hand-offs", FAILED, rows) if rows else None


def slow_table(figures: Sequence[Figures], now_unix_s: float) -> Fitted | None:
    """The slowest hand-offs that a page names; None: it names none."""
    rows = []
    for f in figures:
        for example in f.slowest:
            cells = (
                place(f),
                duration(example.value),
                example.labels.get("outcome", "-"),
                ago(example.at_unix_s, now_unix_s),
                example.labels.get("request", "-"),
                example.labels.get("trace_id", "-"),
            )
            rows.append([Text(cell) for cell in cells])
    return Fitted("Slowest hand-offs", SLOW, rows) if rows else None


def trouble_table(figures: Sequence[Figures]) -> Fitted | None:
    """What an operator should look into, and where; None: nothing. A line each: the table of engines has no
    room for all."""
    rows = []
    for f in figures:
        found = {name: f"{count} {name}" for name, count in troubles(f).items() if count}
        if said := no_step(f):
            found = {"no step": said} | found
        rows += [[Text(place(f)), Text(what), Text(_where_to_look(name))] for name, what in found.items()]
    return Fitted("Trouble, since the start of each engine", TROUBLE, rows) if rows else None


def _where_to_look(name: str) -> str:
    return next(where for begins, where in LOOK_AT.items() if name.startswith(begins))


def silent_table(silent: Mapping[str, str]) -> Fitted | None:
    """Why engines do not answer; None: all do. A table of its own, for this is long and terminals are not."""
    rows = [[Text(address(url)), Text(" ".join(why.split()))] for url, why in silent.items()]
    return Fitted("No answer", SILENT, rows) if rows else None


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
        f"{kind} {size(count)}" + (f" ({size(rates[kind])}/s)" if kind in rates else "")
        for kind, count in f.received_bytes.items()
        if count
    )
    return ", ".join(rows) or "-"


def listed(counts: Mapping[str, int]) -> str:
    """Each that is not 0."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def trouble(f: Figures) -> str:
    """What an operator should look into."""
    return ", ".join(filter(None, (no_step(f), listed(troubles(f))))) or "-"


def troubles(f: Figures) -> dict[str, int]:
    """How often there was something to look into, by its name in `LOOK_AT`."""
    return at_present(f) | {
        "lease losses": f.lease_losses,
        "grants expired": f.grants.get("expired", 0),
        "offers refused": f.refused_offers,
        "retries": f.retries,
        **{f"do not fit: {field}": count for field, count in f.refusals.items()},
    }


def no_step(f: Figures) -> str:
    """That an engine has requests and takes no steps; empty: it takes some, or has none, or does not say."""
    if f.told_s_ago is None or f.told_s_ago < HANGS_S or not f.running + f.waiting:
        return ""
    return f"no step for {age(f.told_s_ago)}"


def at_present(f: Figures) -> dict[str, int]:
    """What is amiss now, not only since the engine's start."""
    return {"silent peers": f.peers.get("silent", 0), "in quarantine": f.quarantined}


def ago(at_unix_s: float, now_unix_s: float) -> str:
    """How long before now, by this machine's clock."""
    if not at_unix_s:
        return "-"
    return f"{age(max(0.0, now_unix_s - at_unix_s))} ago"


def age(seconds: float) -> str:
    """For people, in the unit that fits."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"
