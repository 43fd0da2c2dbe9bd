"""What a soak's verdict is made of; the soak itself runs in the engine tier."""

import os
from collections import Counter

from stateferry.gate.resources import LEAST_SAMPLES, Sample, growth, sample
from stateferry.gate.soak import CLEAN, SoakReport


def report(**changes: object) -> SoakReport:
    outcomes = {CLEAN: Counter(received=9), "read hangs": Counter(failed=1)}
    return SoakReport(**({"minutes": 1.0, "outcomes": outcomes} | changes))  # type: ignore[arg-type]


def test_one_wrong_answer_error_block_or_growth_is_enough_to_fail() -> None:
    assert report().passed
    for changes in (
        {"wrong": ["another token"]},
        {"errors": ["HTTP 500"]},
        {"held": "prefill engine: a block"},
        {"grown": ["threads"]},
        {"outcomes": {CLEAN: Counter(received=10)}},  # no fault was tried
    ):
        assert not report(**changes).passed, changes


def test_what_grows_steadily_is_named_and_what_only_fills_is_not() -> None:
    steady = [Sample(i * (10 << 20), 20 + i, 50) for i in range(30)]
    assert [text.split()[0] for text in growth(steady)] == ["resident_bytes", "threads"]
    filling = [Sample(min(i, 9) * (100 << 20), min(20 + i, 29), 50) for i in range(30)]
    assert growth(filling) == []
    assert growth(steady[: LEAST_SAMPLES - 1]) == []


def test_a_session_is_looked_at_as_a_whole() -> None:
    found = sample(os.getsid(0))
    assert found.resident_bytes > 1 << 20
    assert found.threads >= 1
    assert found.file_descriptors >= 3
