"""Arithmetic of the benches; their engines are run by hand."""

import json

import pytest
from typer.testing import CliRunner

from stateferry.bench import (
    CASES,
    IN_A_ROW,
    ONE_ENGINE,
    PROMPT_TOKENS,
    SCATTERED,
    UNMERGED,
    Measured,
    Result,
    Times,
    measure_plans,
    percentile,
)
from stateferry.cli.app import app


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


def measured(name: str) -> Measured:
    """One round of the case of this name."""
    (found,) = measure_plans([case for case in CASES if case.name == name], rounds=1)
    return found


def test_arms_of_a_plan_differ_in_pieces_and_not_in_bytes() -> None:
    """22 blocks of 6,144 tokens in 24 layers, and one state of two tensors in each of 69."""
    result = measured("Kimi-K3 TP8 to TP8 DCP8, layers outermost")
    assert (result.regions, result.tensors, result.block_tokens) == (1, 69 * 2 + 24, 6_144)
    arms = {arm: result.applied[131_072, arm] for arm in (UNMERGED, SCATTERED, IN_A_ROW)}
    assert len({applied.bytes for applied in arms.values()}) == 1
    assert arms[UNMERGED].pieces == 24 * 22 + 69 * 2
    assert arms[IN_A_ROW].pieces == 24 + 69
    assert arms[UNMERGED].pieces > arms[SCATTERED].pieces > arms[IN_A_ROW].pieces
    assert all(len(applied.seconds) == 1 for applied in result.applied.values())


def test_pages_of_one_block_are_one_piece_however_many_layers() -> None:
    """171 blocks of 768 tokens; a state's page has a gap at its end, so its layers stay apart."""
    for name in ("Kimi-K3", "twice Kimi-K3"):
        result = measured(f"{name} TP8 to TP8, blocks outermost")
        latents = result.applied[131_072, SCATTERED].pieces - result.case.model.recurrent_layers
        assert 150 < latents <= 171


def test_the_bench_of_plans_prints_a_result_that_can_be_kept() -> None:
    printed = CliRunner().invoke(app, ["bench", "plan", "--rounds", "5", "--json"])
    assert printed.exit_code == 0, printed.output
    result = json.loads(printed.stdout.strip().splitlines()[-1])
    assert [case["case"] for case in result["cases"]] == [case.name for case in CASES]
    assert {row["tokens"] for row in result["cases"][0]["apply"]} == set(PROMPT_TOKENS)
    assert result["host"]["versions"]["numpy"]
