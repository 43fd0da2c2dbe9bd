"""Agent sessions: the file format, scaling, what follows what, prompts, and made-up ones."""

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateferry.bench.agentx import coarsened, make_session, read_sessions, write_session
from stateferry.bench.agentx.prompts import MARKER_TOKENS, Prompts, ideal_hits
from stateferry.bench.agentx.trace import Request, Session
from stateferry.bench.agentx.turns import MAIN, Turn, turns_of
from stateferry.bench.figures import percentile
from stateferry.errors import ConfigError

RECORDED = {
    "id": "one",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 6, "hash_ids": [1, 2], "api_time": 2.0, "unknown": 1},
        {
            "t": 3.0,
            "type": "subagent",
            "agent_id": "a",
            "duration_ms": 5000,
            "status": "completed",
            "requests": [
                {"t": 0.0, "type": "s", "in": 64, "out": 2, "hash_ids": [7], "api_time": 1.0},
                {"t": 2.0, "type": "s", "in": 128, "out": 2, "hash_ids": [7, 8], "api_time": 1.0},
            ],
        },
        {"t": 4.0, "type": "n", "in": 200, "out": 6, "hash_ids": [1, 2, 3], "api_time": 1.0},
        {"t": 9.0, "type": "n", "in": 256, "out": 6, "hash_ids": [1, 2, 3, 4], "api_time": 1.0},
    ],
}


def recorded(tmp_path: Path, **changes: Any) -> Session:
    (tmp_path / "one.json").write_text(json.dumps(RECORDED | changes))
    (found,) = read_sessions(tmp_path)
    return found


def test_a_session_is_read_as_others_write_it_and_written_as_they_read_it(tmp_path: Path) -> None:
    session = recorded(tmp_path)
    assert (session.requests[0].input_tokens, session.requests[0].output_tokens) == (130, 6)
    folder = tmp_path / "again"
    folder.mkdir()
    written = json.loads(write_session(session, folder).read_bytes())
    assert written["requests"][2] == RECORDED["requests"][2]  # type: ignore[index]
    assert read_sessions(folder) == [session]


def test_a_file_that_is_no_session_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"id": "x", "requests": [{"t": -1}]}')
    with pytest.raises(ConfigError, match=r"bad\.json is no session in the Weka format"):
        read_sessions(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no session"):
        read_sessions(tmp_path / "empty")


def order(session: Session) -> list[tuple[str, tuple[int, ...], float]]:
    return [(turn.agent.partition("#")[0], turn.after, turn.pause_s) for turn in turns_of(session)]


EXPECTED = [
    (MAIN, (), 0.0),
    ("a", (0,), 1.0),
    (MAIN, (0,), 2.0),  # beside the subagent, which had not ended
    ("a", (1,), 1.0),
    (MAIN, (2, 3), 3.0),  # joins it
]


def test_subagents_run_beside_the_main_agent_and_are_joined(tmp_path: Path) -> None:
    assert order(recorded(tmp_path)) == EXPECTED


def test_times_of_a_subagent_may_count_from_the_start_of_the_session(tmp_path: Path) -> None:
    session = recorded(tmp_path)
    for request in session.requests[1].requests:
        request.t += session.requests[1].t
    assert order(session) == EXPECTED


def test_scaling_keeps_sharing_and_ratios(tmp_path: Path) -> None:
    ids = list(range(1, 33))
    session = recorded(
        tmp_path,
        requests=[
            {"t": 0.0, "in": 64 * 32, "out": 64, "hash_ids": ids},
            {"t": 1.0, "in": 64 * 48, "out": 3, "hash_ids": [*ids, *range(50, 66)]},
        ],
    )
    first, second = coarsened(session, 16).requests
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (128, 4, [1, 2])
    assert (second.input_tokens, second.output_tokens, second.hash_ids) == (192, 1, [1, 2, 3])


def turn(number: int, ids: Sequence[int], length: int) -> Turn:
    return Turn(number, MAIN, 0.0, (), 0.0, Request(t=0, input_tokens=length, hash_ids=list(ids)))


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(st.integers(1, 9), max_size=6), st.lists(st.integers(1, 9), max_size=6), st.integers(1, 500))
def test_prompts_are_as_long_as_said_and_share_what_their_blocks_share(
    one: list[int], two: list[int], length: int
) -> None:
    prompts = Prompts(Session(id="s"), 0)
    a, b = prompts.tokens(turn(0, one, length)), prompts.tokens(turn(1, two, length))
    assert len(a) == len(b) == length
    blocks = shared(one[: length // 64], two[: length // 64])
    # The marker is everybody's; a chance match past the shared blocks is shorter than a block.
    assert max(64 * blocks, min(length, MARKER_TOKENS)) <= shared(a, b) < 64 * blocks + MARKER_TOKENS + 16


def test_no_two_replays_share_a_block_and_one_replay_is_the_same_again() -> None:
    session = Session(id="s")
    first, again, other = (Prompts(session, number).tokens(turn(0, [1, 2], 140)) for number in (0, 0, 1))
    assert first == again
    assert shared(first, other) < MARKER_TOKENS
    assert Prompts(Session(id="t"), 0).tokens(turn(0, [1, 2], 140)) != first


def test_ideal_hits_are_those_of_a_cache_that_forgets_nothing() -> None:
    sent = [([1, 2], 140), ([1, 2, 3], 200), ([1, 9, 3], 192), ([2], 64), ([1, 2], 128)]
    assert ideal_hits(sent, 64) == [0, 128, 64, 0, 127]


SCALE = 64


@pytest.fixture(scope="module")
def made_up() -> list[list[Turn]]:
    return [turns_of(make_session(number, 0, SCALE)) for number in range(400)]


def near(value: float, published: float, tolerance: float) -> bool:
    return abs(value - published) <= tolerance * published


@pytest.mark.timeout(240)  # seconds where the machine is quiet
def test_made_up_sessions_have_the_published_statistics(made_up: list[list[Turn]]) -> None:
    """Of the public traces, and for subagents of the published corpus; 400 sessions scatter by so much."""
    mains = [[t.request for t in turns if t.agent == MAIN] for turns in made_up]
    prompts = [r.input_tokens * SCALE for requests in mains for r in requests]
    outputs = [r.output_tokens * SCALE for requests in mains for r in requests]
    thinks = [r.think_time for requests in mains for r in requests[1:]]
    assert near(statistics.mean(prompts), 122_379, 0.2)
    assert near(percentile(prompts, 50), 103_662, 0.25)
    assert near(percentile(prompts, 90), 233_633, 0.25)
    assert near(percentile(outputs, 50), 216, 0.15)  # in steps of SCALE
    assert near(percentile(outputs, 90), 898, 0.15)
    assert near(percentile(thinks, 50), 10, 0.1)
    assert near(percentile(thinks, 90), 162, 0.15)
    assert near(percentile([len(requests) for requests in mains], 50), 45, 0.25)
    everything = sum(len(turns) for turns in made_up)
    theirs = sum(t.agent != MAIN for turns in made_up for t in turns)
    assert near(theirs / everything, 0.43, 0.2)
    assert near(sum(any(t.agent != MAIN for t in turns) for turns in made_up) / len(made_up), 0.44, 0.15)
    hits = whole = 0
    for turns in made_up[:100]:
        sent = [(t.request.hash_ids, t.request.input_tokens) for t in turns]
        hits += sum(ideal_hits(sent, 64))
        whole += sum(length for _, length in sent)
    assert near(hits / whole, 0.947, 0.02)  # as published for this scale
    assert not near(statistics.mean(outputs) * 2, statistics.mean(outputs), 0.2)  # what `near` would miss


def test_some_made_up_prompts_are_cut_back(made_up: list[list[Turn]]) -> None:
    mains = [[t.request for t in turns if t.agent == MAIN] for turns in made_up]
    pairs = [pair for requests in mains for pair in pairwise(requests)]
    cut = sum(after.input_tokens < 0.9 * before.input_tokens for before, after in pairs) / len(pairs)
    assert 0.004 < cut < 0.02


def test_made_up_subagents_are_written_as_other_readers_want_them(tmp_path: Path) -> None:
    """Symptom: AIPerf refused our files, for want of two fields, and took some of a subagent's times for the
    session's and some not."""
    found = 0
    for number in range(12):
        written = json.loads(write_session(make_session(number, 3, 64), tmp_path).read_text())
        for entry in written["requests"]:
            if entry["type"] == "subagent":
                found += 1
                assert entry["subagent_type"]
                assert entry["models"]
                assert entry["agent_id"]
                assert all(inner["t"] >= entry["t"] for inner in entry["requests"])
    assert found


def test_a_made_up_session_depends_on_its_seed_alone() -> None:
    assert make_session(1, 5, 64) == make_session(1, 5, 64)
    assert make_session(1, 5, 64) != make_session(1, 6, 64)
