"""Which plots a bench's result has: distributions, time lines, what grows with size."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stateferry.bench.figures import QUANTILES, quantiles
from stateferry.bench.report.charts import Bar, Series, line_chart, time_line

Result = Mapping[str, Any]


def plots(result: Result) -> list[str]:
    """The plots of one result as SVG; none for a bench that is not known."""
    make = _PLOTS.get(str(result.get("bench")))
    return [plot for plot in make(result) if plot] if make is not None else []


def distribution(title: str, named: Mapping[str, Sequence[float]], x: str) -> str:
    """Share of values that are no larger, from kept quantiles; a logarithmic axis where that is possible."""
    series = [
        Series(name, [(value, float(q)) for value, q in zip(values, QUANTILES, strict=True)])
        for name, values in named.items()
        if values
    ]
    return line_chart(title, series, x, "share of values, %", log_x=True)


def _added_latency(result: Result) -> list[str]:
    rounds = dict(result["rounds"])
    lengths = rounds.pop("lengths")
    added = {
        name: [pair - one for pair, one in zip(times["pair_s"], times["one_engine_s"], strict=True)]
        for name, times in rounds.items()
    }
    title = "Added to one engine's first token"
    by_length = [
        Series(name, list(zip(lengths, values, strict=True)), line=False) for name, values in added.items()
    ]
    return [
        distribution(title, {name: quantiles(values) for name, values in added.items()}, "seconds"),
        line_chart(f"{title}, by prompt length", by_length, "prompt tokens", "seconds"),
    ]


def _plan(result: Result) -> list[str]:
    found = []
    for key, what in (("ms", "milliseconds"), ("pieces", "pieces")):
        series = []
        for case in result["cases"]:
            rows = [row for row in case["apply"] if row["arm"] != "unmerged"]
            worst: dict[int, float] = {}
            for row in rows:
                value = row["ms"]["median"] if key == "ms" else row["pieces"]
                worst[row["tokens"]] = max(value, worst.get(row["tokens"], 0.0))
            series.append(Series(case["case"], sorted(worst.items())))
        title = f"Laying a plan over one request: {what} (merged, the worse order of blocks)"
        found.append(line_chart(title, series, "prompt tokens", what, log_x=True, log_y=True))
    return found


def _interference(result: Result) -> list[str]:
    arms: Mapping[str, Any] = result["arms"]
    found = []
    series = []
    for number, (name, arm) in enumerate(arms.items()):
        for window, dashed in (("alone", True), ("arriving", False)):
            values = arm["distributions"][window]
            points = [(v, float(q)) for v, q in zip(values, QUANTILES, strict=True)] if values else []
            series.append(Series(f"{name}, {window}", points, dashed=dashed, colour=number))
    title = "From token to token of the running answers"
    found.append(line_chart(title, series, "seconds", "share of gaps, %", log_x=True))
    firsts = {name: arm["distributions"]["first_token"] for name, arm in arms.items()}
    found.append(distribution("First token of the requests that arrive", firsts, "seconds"))
    for name, arm in arms.items():
        line = arm["time_line"]
        if line is None:
            continue
        bars = [Bar("window", begin, end, label) for label, (begin, end) in _windows_s(line).items()]
        bars += [
            Bar(f"hand-off {n + 1}", sent, first, "until its first token")
            for n, (sent, first) in enumerate(line["arrivals_s"])
        ]
        title = f"{name}: one running answer, and hand-offs that arrive"
        found.append(time_line(title, bars, "seconds", [("its tokens", line["tokens_s"])]))
    return found


def _windows_s(line: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """Of a time line; older results have one window end where the next begins."""
    if "windows_s" in line:
        found: Mapping[str, Sequence[float]] = line["windows_s"]
        return found
    return dict(zip(("alone", "prefill", "arriving"), pairwise(line["marks_s"]), strict=True))


def _agentx(result: Result) -> list[str]:
    arms: Mapping[str, Any] = result["arms"]
    named = {"first_token": "First token", "inter_token": "From token to token"}
    return [
        distribution(title, {name: arm["distributions"][key] for name, arm in arms.items()}, "seconds")
        for key, title in named.items()
    ]


def _handoff(result: Result) -> list[str]:
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    found = []
    for concurrency in dict.fromkeys(cell["concurrency"] for cell in cells):
        series: dict[str, list[tuple[float, float]]] = {}
        here = [cell for cell in cells if cell["concurrency"] == concurrency]
        for cell in here:
            if cell["figures"].get("added_p50_s"):
                point = (cell["tokens"], cell["figures"]["added_p50_s"]["median"])
                series.setdefault(cell["arm"], []).append(point)
        title = f"Added to one engine's first token, {concurrency} at a time"
        lines = [Series(name, sorted(points)) for name, points in series.items()]
        found.append(line_chart(title, lines, "prompt tokens", "seconds, median", log_x=True))
        longest = max(cell["tokens"] for cell in here)
        named = {c["arm"]: c["distributions"]["first_token"] for c in here if c["tokens"] == longest}
        title = f"First token after {longest:,} prompt tokens, {concurrency} at a time"
        found.append(distribution(title, named, "seconds"))
    bars = [
        Bar(row["row"], begin, end, label)
        for row in result.get("time_lines", ())
        for label, begin, end in row["bars"]
    ]
    found.append(time_line("One hand-off from sending to the first token", bars, "milliseconds"))
    return found


def _transport(result: Result) -> list[str]:
    """Throughput against size, and how long the caller was held, over all hand-offs of a result."""
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {"gb_per_s": {}, "held_ms": {}}
    for case in result["cases"]:
        for name, figures in case["arms"].items():
            for key, arms in rows.items():
                if figures.get(key):
                    arms.setdefault(name, []).append((case["bytes"] / 1e6, figures[key]["median"]))
    titles = {"gb_per_s": ("Throughput against size", "GB/s"), "held_ms": ("Caller held", "milliseconds")}
    return [
        line_chart(
            titles[key][0],
            [Series(name, sorted(points), line=False) for name, points in arms.items()],
            "MB of a hand-off",
            titles[key][1],
            log_x=True,
            log_y=True,
        )
        for key, arms in rows.items()
    ]


_PLOTS: Mapping[str, Callable[[Result], list[str]]] = {
    "added-latency": _added_latency,
    "plan": _plan,
    "interference": _interference,
    "agentx": _agentx,
    "handoff": _handoff,
    "transport": _transport,
}
