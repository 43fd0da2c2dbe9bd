"""What `stateferry top` says of a median is true of the hand-offs that were counted."""

import math
from collections.abc import Callable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from stateferry.cli.top_tables import at_most
from stateferry.telemetry import METRICS
from stateferry.watch import Between
from stateferry.watch.figures import quantile

BOUNDS = (*METRICS["stateferry_handoff_seconds"].buckets, float("inf"))
Quantile = Callable[[Mapping[float, float], float], Between | None]


def histogram(values: list[float]) -> dict[float, float]:
    """As a page has it: how many values are at most so large."""
    return {bound: float(sum(value <= bound for value in values)) for bound in BOUNDS}


def untrue(quantile: Quantile, values: list[float], share: float) -> str:
    """What is said of these values and is not so; empty: nothing."""
    said = quantile(histogram(values), share)
    true = sorted(values)[math.ceil(round(share * len(values), 6)) - 1]
    if said is None or not said.above_s < true <= (said.at_most_s or float("inf")):
        return f"{share} of {values} is {true}, said {said}"
    return ""


@given(st.lists(st.floats(1e-6, 200.0), min_size=1, max_size=40), st.sampled_from([0.5, 0.95, 1.0]))
def test_what_is_said_of_a_quantile_is_true_of_the_values_behind_it(
    values: list[float], share: float
) -> None:
    assert untrue(quantile, values, share) == ""


def test_a_median_that_is_made_up_inside_its_bucket_is_noticed() -> None:
    """Symptom: one hand-off of 5.1 ms, and a median of 7.5 ms."""

    def interpolated(buckets: Mapping[float, float], share: float) -> Between | None:
        found = quantile(buckets, share)
        if found is None or found.at_most_s is None:
            return found
        middle = found.above_s + share * (found.at_most_s - found.above_s)
        return Between(middle - 1e-9, middle)

    assert untrue(interpolated, [0.0051], 0.5)
    assert quantile(histogram([0.0051]), 0.5) == Between(0.005, 0.01)


def test_a_median_is_shown_as_the_bound_that_is_known_of_it() -> None:
    """Symptom: `stateferry top` showed a median above the only value that there was."""
    assert at_most(quantile(histogram([0.0051]), 0.5)) == "<= 10 ms"
    assert at_most(quantile(histogram([70.0]), 0.5)) == "> 60 s"
    assert at_most(quantile(histogram([]), 0.5)) == "-"
    assert quantile({}, 0.5) is None
