"""Plots as SVG text: lines and points against two axes, and bars along a time line. No library, no script."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
ROW = 18
"""Height of a bar's row."""
COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#aa7744", "#666666")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line, or points if `line` is false."""

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    dashed: bool = False
    colour: int | None = None
    """Of COLOURS; None: by its place among the series."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took time, in a row of its own or in one shared by equal names."""

    row: str
    begin: float
    end: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places."""

    low: float
    high: float
    log: bool
    begin: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], log: bool, begin: float, end: float) -> "Axis":
        """An axis that shows all values; logarithmic only if all are above 0."""
        low, high = min(values), max(values)
        log = log and low > 0
        if not log:
            low = min(low, 0.0)
        if low == high:
            high = low + 1 if not log else low * 2
        return cls(low, high, log, begin, end)

    def place(self, value: float) -> float:
        """Where a value is drawn."""
        scale: Callable[[float], float] = math.log if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values on it."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        else:
            raw = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
            first = math.ceil(self.low / step)
            found = [n * step for n in range(first, math.floor(self.high / step) + 1)]
        return [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]


def line_chart(
    title: str, series: Sequence[Series], x: str, y: str, *, log_x: bool = False, log_y: bool = False
) -> str:
    """Lines and points against two named axes; empty without any point."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    across = Axis.around([point[0] for point in points], log_x, LEFT, WIDTH - RIGHT)
    up = Axis.around([point[1] for point in points], log_y, HEIGHT - BOTTOM, TOP)
    height = HEIGHT + 16 * ((len(series) + 2) // 3)
    parts = [_head(title, height), *_grid(across, up, x, y)]
    for number, one in enumerate(series):
        colour = COLOURS[(number if one.colour is None else one.colour) % len(COLOURS)]
        places = [(across.place(a), up.place(b)) for a, b in one.points]
        dash = ' stroke-dasharray="5 3"' if one.dashed else ""
        if one.line:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
            )
        if not one.line or len(places) < 16:
            for (a, b), (value_x, value_y) in zip(places, one.points, strict=True):
                tip = escape(f"{one.name}: {_number(value_x)}, {_number(value_y)}")
                parts.append(
                    f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" fill="{colour}"><title>{tip}</title></circle>'
                )
        place_x, place_y = LEFT + 190 * (number % 3), HEIGHT + 8 + 16 * (number // 3)
        parts.append(
            f'<line x1="{place_x}" x2="{place_x + 18}" y1="{place_y}" y2="{place_y}" stroke="{colour}"'
            f' stroke-width="3"{dash}/>'
        )
        parts.append(f'<text x="{place_x + 23}" y="{place_y + 4}">{escape(one.name)}</text>')
    return "".join((*parts, "</svg>"))


def time_line(
    title: str, bars: Sequence[Bar], x: str, ticks: Sequence[tuple[str, Sequence[float]]] = ()
) -> str:
    """Bars in named rows over one axis; `ticks`: rows of moments. Empty without anything."""
    moments = [m for bar in bars for m in (bar.begin, bar.end)] + [m for _, row in ticks for m in row]
    if not moments:
        return ""
    rows = list(dict.fromkeys([name for name, _ in ticks] + [bar.row for bar in bars]))
    left = 150
    bottom = TOP + ROW * len(rows)
    across = Axis.around(moments, False, left, WIDTH - RIGHT)
    parts = [_head(title, bottom + BOTTOM)]
    for value in across.ticks():
        place = across.place(value)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{_number(value)}</text>')
    parts.append(f'<text x="{(left + WIDTH) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(x)}</text>')
    for number, name in enumerate(rows):
        y = TOP + ROW * number + 13
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{escape(name)}</text>')
    for name, row in ticks:
        y = TOP + ROW * rows.index(name) + 3
        marks = "".join(f"M{across.place(m):.1f} {y}v12" for m in row)
        parts.append(f'<path d="{marks}" stroke="{COLOURS[0]}" stroke-width="1"/>')
    labels = list(dict.fromkeys(bar.label for bar in bars))
    for bar in bars:
        begin, end = across.place(bar.begin), across.place(bar.end)
        tip = escape(f"{bar.row} {bar.label}: {_number(bar.begin)} to {_number(bar.end)}")
        colour = COLOURS[labels.index(bar.label) % len(COLOURS)]
        parts.append(
            f'<rect x="{begin:.1f}" y="{TOP + ROW * rows.index(bar.row) + 3}" fill="{colour}" '
            f'width="{max(1.0, end - begin):.1f}" height="12"><title>{tip}</title></rect>'
        )
    return "".join((*parts, "</svg>"))


def _head(title: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img" aria-label="{escape(title)}">'
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>'
    )


def _grid(across: Axis, up: Axis, x: str, y: str) -> list[str]:
    parts = []
    for value in across.ticks():
        place = across.place(value)
        parts.append(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_number(value)}</text>'
        )
    for value in up.ticks():
        place = up.place(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{_number(value)}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x)}</text>')
    parts.append(
        f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )
    return parts


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
