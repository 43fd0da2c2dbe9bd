"""What all benches do to their numbers."""

from collections.abc import Sequence

QUANTILES = tuple(range(0, 101, 2))
"""Of distributions that results keep, in percent."""


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed."""
    if not values:
        raise ValueError("no values to take a percentile of")
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(rank, 1) - 1]


def quantiles(values: Sequence[float], digits: int = 5) -> list[float]:
    """The distribution of `values` at `QUANTILES`, for plots; empty for no values."""
    ordered = sorted(values)
    return [round(ordered[max(-(-len(ordered) * q // 100), 1) - 1], digits) for q in QUANTILES if ordered]


def spread(values: Sequence[float], digits: int = 5) -> dict[str, float] | None:
    """Median, best and worst of one figure's repeats; None where no repeat has it."""
    if not values:
        return None
    return {
        "median": round(percentile(values, 50), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }
