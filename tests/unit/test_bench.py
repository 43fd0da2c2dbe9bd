"""Arithmetic of the benches; their engines are run by hand."""

import pytest

from stateferry.bench import ONE_ENGINE, Result, Times, percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 50, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        (list(range(1, 11)), 90, 9),
        (list(range(10)), 100, 9),
    ],
)
def test_percentile(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_what_an_arm_added_is_taken_round_by_round() -> None:
    result = Result([20, 1200], {"cma": Times([0.1, 1.0], [0.15, 1.02])})
    summary = result.summary()
    assert summary["cma"]["median_s"] == 0.02
    assert summary["cma"]["worst_s"] == 0.05
    assert summary[ONE_ENGINE]["worst_s"] == 1.0
