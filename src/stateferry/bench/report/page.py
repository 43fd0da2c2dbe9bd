"""One page from the results of benches: plots, every figure, where it was measured. Loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from stateferry.bench.report.sections import Result, plots

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1340px;margin:2em auto;padding:0 1em}
svg{margin:.5em 1em 1.2em 0;vertical-align:top;max-width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:#333}svg .title{font-size:14px;font-weight:600}
svg .grid{stroke:#ddd;stroke-width:1}
table{border-collapse:collapse;margin:1em 0}th,td{padding:.15em .8em;border-bottom:1px solid #ddd}
td{text-align:right}td:first-child,th{text-align:left}h2{margin-top:2em}
"""
LEFT_OUT = frozenset(
    {"rounds", "distributions", "time_line", "time_lines", "host", "commit", "date", "bench"}
)
"""Raw material of plots, and what is told elsewhere."""


def page(results: Sequence[Result]) -> str:
    """An HTML page without scripts and without anything to load."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>StateFerry benches</title>',
        f"<style>{STYLE}</style></head><body><h1>StateFerry benches</h1>",
    ]
    for result in results:
        parts.append(f"<h2>{escape(str(result.get('bench', 'a bench')))}</h2>")
        parts.append(f"<p>{escape(provenance(result))}</p>")
        parts += plots(result)
        parts.append(_table(list(_rows("", {k: v for k, v in result.items() if k not in LEFT_OUT}))))
    return "".join((*parts, "</body></html>\n"))


def provenance(result: Result) -> str:
    """Date, commit, machine and versions in a line."""
    host: Mapping[str, Any] = result.get("host") or {}
    versions = ", ".join(f"{name} {version}" for name, version in (host.get("versions") or {}).items())
    facts = [
        result.get("date"),
        f"commit {result['commit'][:12]}" if result.get("commit") else None,
        host.get("processor"),
        f"{host['cores']} cores" if host.get("cores") else None,
        versions,
    ]
    return "; ".join(str(fact) for fact in facts if fact)


def _rows(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every figure with its path in the result; long lists are counted, not shown."""
    if isinstance(value, Mapping):
        if set(value) == {"median", "least", "most"}:
            yield path, f"{value['median']} ({value['least']} to {value['most']})"
            return
        for key, inner in value.items():
            if key not in LEFT_OUT:
                yield from _rows(f"{path} / {key}" if path else str(key), inner)
    elif isinstance(value, list | tuple):
        if any(isinstance(inner, Mapping) for inner in value):
            for number, inner in enumerate(value):
                yield from _rows(f"{path} / {_name(inner, number)}", inner)
        else:
            short = ", ".join(str(inner) for inner in value)
            yield path, short if len(short) < 80 else f"{len(value)} values"
    elif value is not None:
        yield path, str(value)


def _name(value: Any, number: int) -> str:
    """What to call an entry of a list."""
    if isinstance(value, Mapping):
        names = [str(value[key]) for key in ("case", "arm", "tokens", "concurrency") if key in value]
        if names:
            return ", ".join(names)
    return str(number + 1)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return (
        f"<table><tr><th>figure</th><th>value; median (least to most) of the repeats</th></tr>{cells}</table>"
    )
