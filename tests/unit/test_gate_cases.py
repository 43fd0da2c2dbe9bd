"""Prompts, the bytes that they should move, and the structure of the caches they move through."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stateferry.errors import ConfigError
from stateferry.gate import structure
from stateferry.gate.accounting import Accounting
from stateferry.gate.cases import Case, Hit, make_cases, spaced
from stateferry.gate.prompts import model_config, random_source, recall_source
from stateferry.gate.sizes import expected_sizes
from stateferry.gate.structure import check_structure
from stateferry.layout.plan import Plan
from stateferry.models.random_checkpoint import random_config

BLOCK, CHUNK = 128, 1024


def source(seed: int, length: int) -> tuple[int, ...]:
    return (seed,) * length


def cases(count: int = 64, **changes: Any) -> list[Case]:
    settings: dict[str, Any] = {
        "block_tokens": BLOCK,
        "chunk_tokens": CHUNK,
        "longest": 4000,
        "caching": True,
    }
    return make_cases(count, source=source, **settings | changes)


def test_every_border_is_among_the_first_64() -> None:
    lengths = {len(case.prompt) for case in cases()}
    assert {1, 2, 3, 4, 5} <= lengths
    assert {126, 127, 128, 129, 255, 256, 257} <= lengths
    assert {1023, 1024, 1025} <= lengths


@pytest.mark.parametrize("count", [1, 5, 29, 30, 64, 100, 256])
def test_as_many_as_asked_for_and_the_same_every_time(count: int) -> None:
    found = cases(count)
    assert len(found) == count
    assert [case.number for case in found] == list(range(count))
    assert found == cases(count)


def test_more_cases_repeat_the_borders_with_other_prompts() -> None:
    kinds = Counter(case.kind for case in cases(256))
    assert kinds["block border"] >= 28
    assert kinds["any length"] >= 100
    prompts = [case.prompt for case in cases(256)]
    assert len(set(prompts)) == len(prompts)


def test_hits_cover_whole_blocks_and_leave_something_to_move() -> None:
    hits = [case for case in cases(256) if case.hit is not Hit.NONE]
    assert {case.hit for case in hits} == {Hit.PREFILL, Hit.DECODE, Hit.BOTH}
    for case in hits:
        assert case.hit_tokens % BLOCK == 0
        assert case.hit_tokens > 0
        assert case.moves is (case.kind != "whole prompt held")
        assert (case.hit_tokens < len(case.prompt)) is case.moves


def test_where_an_engine_drops_a_block_of_a_hit_more_is_held_and_something_moves_always() -> None:
    """Seen on engines whose own layers draft: a prompt of 257 tokens, blocks of 128, a hit of 128."""
    for case in cases(256, drops=1):
        if case.hit is Hit.NONE:
            continue
        assert 0 < case.hit_tokens == len(case.prompt) // BLOCK * BLOCK - BLOCK == case.held_tokens - BLOCK
        assert case.held_tokens <= len(case.prompt)
        assert case.moves
    for case in cases(256):
        assert case.held_tokens == case.hit_tokens


def test_which_steps_have_another_shape_is_what_was_seen_on_engines() -> None:
    """Blocks of 128, three n-gram drafts, prefixes cached: these and no others differed, by rounding."""
    seen = [6, 7, 10, 13, 16, 19, 24, 27, 28, 32, 53]
    settings = {"block_tokens": 128, "chunk_tokens": 1024, "longest": 4078, "source": source}
    found = make_cases(64, caching=True, drafts=3, **settings)
    assert [case.number for case in found if case.reshaped] == seen
    layers = make_cases(64, caching=True, drafts=2, drops=1, **settings)
    assert [case.number for case in layers if case.reshaped] == [6, 7, 10, 13, 32, 53]
    for nothing in ({"caching": True}, {"caching": False, "drafts": 3}):
        assert not any(case.reshaped for case in make_cases(64, **(settings | nothing)))


def test_lengths_stay_within_what_the_engines_take() -> None:
    assert max(len(case.prompt) for case in cases(longest=300)) == 300
    assert all(case.hit is Hit.NONE for case in cases(caching=False))


def test_one_token_has_no_prefix_to_hand_off() -> None:
    assert [case.prompt for case in cases() if case.alone] == [(0,)]


@pytest.mark.parametrize(
    ("count", "expected"), [(3, [0, 3, 6]), (10, list(range(10))), (99, list(range(10)))]
)
def test_some_cases_are_taken_from_everywhere(count: int, expected: list[int]) -> None:
    assert [case.number for case in spaced([Case(i, "", ()) for i in range(10)], count)] == expected


def case(length: int, hit: Hit = Hit.NONE, held: int = 0, alone: bool = False) -> Case:
    return Case(0, "", (1,) * length, hit, held, alone)


def report(tokens: int, state: int = 500, attention: int = 30, outcome: str = "received") -> dict[str, Any]:
    return {"outcome": outcome, "tokens": tokens, "bytes": {"state": state, "attention": attention}}


@pytest.mark.parametrize(
    ("tried", "received"),
    [
        (case(300), report(300)),
        (case(257), report(257)),
        (case(256), report(256, attention=20)),
        (case(300, Hit.DECODE, 256), report(300, attention=10)),
        (case(300, Hit.DECODE, 256), {**report(300), "ahead": True}),
        (case(300, Hit.PREFILL, 256), report(300)),
        (case(256, Hit.DECODE, 256), {"outcome": "unused"}),
        (case(256, Hit.DECODE, 256), {"outcome": "abandoned", "bytes": {}}),
        (case(1, alone=True), {}),
    ],
)
def test_all_bytes_there(tried: Case, received: dict[str, Any]) -> None:
    accounting = Accounting(BLOCK)
    assert accounting.problems(case(128), report(128, attention=10)) == []
    assert accounting.problems(tried, received) == []


@pytest.mark.parametrize(
    ("tried", "received"),
    [
        (case(300), report(300, state=0)),
        (case(300), report(300, state=499)),
        (case(300), report(300, attention=0)),
        (case(300), report(300, attention=20)),
        (case(300), report(300, attention=29)),
        (case(300), report(299)),
        (case(300), report(300, outcome="failed")),
        (case(300), {}),
        (case(300), {"outcome": "received", "tokens": 300}),
        (case(300, Hit.DECODE, 256), report(300)),
        (case(300, Hit.DECODE, 256), {**report(300, attention=10), "ahead": True}),
        (case(256, Hit.DECODE, 256), report(256)),
        (case(256, Hit.DECODE, 256), {"outcome": "abandoned", "bytes": {"state": 500}}),
        (case(1, alone=True), report(1)),
    ],
)
def test_any_byte_missing_or_too_many_is_a_problem(tried: Case, received: dict[str, Any]) -> None:
    accounting = Accounting(BLOCK)
    accounting.problems(case(128), report(128, attention=10))
    assert accounting.problems(tried, received)


def test_sizes_follow_from_the_config_alone() -> None:
    """Numbers of a hand-off that vLLM made of this checkpoint: 407,040 and 128 tokens of 2,048 bytes."""
    sizes = expected_sizes(random_config("gdn"))
    assert sizes is not None
    assert 407_040 in sizes.state_bytes
    assert sizes.token_bytes == 2_048
    accounting = Accounting(BLOCK, sizes)
    assert accounting.problems(case(300), report(300, 407_040, 3 * 128 * 2_048)) == []


def test_sizes_of_latents_and_of_three_convolutions() -> None:
    """Three KDA layers of 4 heads of 128 x 128 (float32) with windows of 3 over Q, K and V (bfloat16); one
    layer of latents of 512 + 64 numbers."""
    sizes = expected_sizes(random_config("kda"))
    assert sizes is not None
    assert 3 * (4 * 128 * 128 * 4 + 3 * 4 * 128 * 3 * 2) in sizes.state_bytes
    assert sizes.token_bytes == 576 * 2


def test_a_layer_that_is_missing_from_every_hand_off_is_a_problem() -> None:
    sizes = expected_sizes(random_config("gdn"))
    two_of_three = 407_040 // 3 * 2
    assert Accounting(BLOCK, sizes).problems(case(300), report(300, two_of_three, 3 * 128 * 2_048))
    assert Accounting(BLOCK, sizes).problems(case(300), report(300, 407_040, 3 * 128 * 1_024))
    assert Accounting(BLOCK).problems(case(300), report(300, two_of_three, 3 * 128 * 2_048)) == []


def test_sizes_of_an_unknown_model_are_not_guessed() -> None:
    assert expected_sizes({"model_type": "gpt2"}) is None


def test_random_prompts_avoid_special_tokens() -> None:
    make = random_source({"vocab_size": 10, "eos_token_id": [1, 2], "bos_token_id": None, "pad_token_id": 3})
    prompt = make(1, 500)
    assert set(prompt) == {0, 4, 5, 6, 7, 8, 9}
    assert prompt == make(1, 500) != make(2, 500)


@pytest.mark.parametrize("config", [{}, {"vocab_size": "many"}, {"vocab_size": 1, "eos_token_id": 0}])
def test_a_model_without_a_vocabulary_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        random_source(config)


@pytest.mark.parametrize("length", [1, 2, 17, 18, 300])
def test_stories_of_any_length(length: int) -> None:
    assert len(recall_source(3, length)) == length
    assert recall_source(3, length) == recall_source(3, length)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_config_is_refused_by_its_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=tmp_path.name):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2"}))
    assert model_config(tmp_path) == {"model_type": "lfm2"}


def test_every_byte_of_every_made_up_cache_is_planned_once() -> None:
    found = check_structure()
    assert found["passed"]
    assert found["faults"] == []
    assert found["plans"] == len(structure.MODELS) * 3 * 7


def test_a_plan_that_forgets_a_strip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Plan.pieces

    def without_the_last(self: Plan, *blocks: Any) -> Any:
        pieces = whole(self, *blocks)
        return type(pieces)(*(getattr(pieces, name)[:-1] for name in pieces.__slots__))

    monkeypatch.setattr(Plan, "pieces", without_the_last)
    found = check_structure()
    assert not found["passed"]
    assert "written 0 times" in found["faults"][0]
