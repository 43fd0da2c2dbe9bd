"""What all benches do to their numbers."""

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed."""
    if not values:
        raise ValueError("no values to take a percentile of")
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(rank, 1) - 1]
