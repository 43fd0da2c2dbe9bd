"""The bench of transports: what it reads, in which order, and that it notices wrong bytes."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.command import run
from typer.testing import CliRunner

from stateferry.bench import PROMPT_TOKENS
from stateferry.bench.transport import (
    LIMIT,
    Bench,
    Measured,
    Sample,
    connected,
    room_for,
    timed_read,
)
from stateferry.bench.transport_cases import ENGINES, Handoff, made_up, planned
from stateferry.bench.transport_memory import HostMemory, expected
from stateferry.cli.app import app
from stateferry.errors import TransportError
from stateferry.layout.spec import Pieces
from stateferry.testing.transport_reads import pieces
from stateferry.transport import MemoryKind, Peer, Transfer, TransferState

SMALL = Handoff("small", 0, pieces([(0, 4096 * i, 0, 4096 * (19 - i) + 3, 1000) for i in range(20)]), 81920)


class Done(Transfer):
    """As it is told: pending for a while, then that state."""

    bytes_done = 0  # type: ignore[assignment]
    quiet = True  # type: ignore[assignment]

    def __init__(self, polls: int = 0, state: TransferState = TransferState.DONE) -> None:
        self.left, self.state, self.looks = polls, state, 0
        self.error = "broken" if state is TransferState.FAILED else ""

    def poll(self) -> TransferState:
        self.looks += 1
        return self.state if self.looks > self.left else TransferState.PENDING


class Fake(Peer):
    """Its reads are the given ones, then always done; each is written down."""

    def __init__(self, name: str, log: list[str], reads: list[Transfer] | None = None) -> None:
        self.name, self.log, self.reads = name, log, deque(reads or [])

    def post_read(self, pieces: Pieces) -> Transfer:
        self.log.append(self.name)
        return self.reads.popleft() if self.reads else Done()

    def close(self) -> None: ...


class Logged(HostMemory):
    """Writes plain copies down, and holds whatever it should."""

    log: list[str]

    def plain_copy(self, size_bytes: int) -> float:
        self.log.append(LIMIT)
        return super().plain_copy(size_bytes)

    def wrong_pieces(self, pieces: Pieces) -> int:
        return 0


class Idle:
    """A peer's process that uses no time."""

    def cpu_s(self) -> float:
        return 0.0


def test_every_round_has_every_arm_once_and_not_always_in_the_same_order() -> None:
    log: list[str] = []
    memory = Logged(SMALL.room_bytes)
    memory.log = log
    bench = Bench(memory, Idle(), {name: Fake(name, log) for name in "ab"}, {})  # type: ignore[arg-type]
    (measured,) = bench.measure([SMALL], rounds=20)
    turns = [tuple(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert len(turns) == 21  # the first is proven, not counted
    assert {tuple(sorted(turn)) for turn in turns} == {tuple(sorted(("a", "b", LIMIT)))}
    assert len(set(turns)) > 3
    assert [len(arm) for arm in measured.arms.values()] == [20, 20]
    assert len(measured.limit_ms) == 20


def test_shares_of_the_limit_are_taken_round_by_round() -> None:
    measured = Measured(SMALL, [1.0, 4.0, 2.0], {"a": [Sample(1, done, 1, 1, 1, 1) for done in (2, 5, 8)]})
    arm = measured.summary()["arms"]["a"]
    assert arm["share_of_limit"] == {"median": 0.5, "least": 0.25, "most": 0.8}
    assert arm["done_ms"] == {"median": 5, "least": 2, "most": 8}
    assert arm["gb_per_s"]["most"] == round(20_000 / 2 / 1e6, 3)


def test_a_read_is_looked_at_until_it_is_over() -> None:
    transfer = Done(polls=60)
    sample = timed_read("a", Fake("a", [], [transfer]), SMALL.pieces)
    assert transfer.looks == 61
    assert sample.post_ms <= sample.held_ms <= sample.done_ms
    assert sample.longest_call_ms <= sample.held_ms


def test_a_read_that_fails_ends_the_bench() -> None:
    with pytest.raises(TransportError, match="a: broken"):
        timed_read("a", Fake("a", [], [Done(1, TransferState.FAILED)]), SMALL.pieces)


def test_what_memory_holds_is_the_same_from_wherever_it_is_read() -> None:
    whole = expected(0, 5000)
    for offset, size in ((0, 1), (7, 9), (8, 8), (4093, 907)):
        assert (expected(offset, size) == whole[offset : offset + size]).all()
    assert len(np.unique(whole.view(np.uint64))) == 625


def test_planned_hand_offs_lie_in_their_region_and_grow_with_the_prompt() -> None:
    found = planned(prompts=PROMPT_TOKENS[:2])
    assert [h.tokens for h in found] == list(PROMPT_TOKENS[:2]) * len(ENGINES)
    for handoff in (*found, *made_up()):
        batch = handoff.pieces
        for offsets in (batch.local_offsets, batch.remote_offsets):
            assert int((offsets + batch.sizes).max()) <= handoff.room_bytes
            order = np.argsort(offsets)
            assert (offsets[order][1:] >= (offsets + batch.sizes)[order][:-1]).all(), "pieces overlap"
    for short, long in zip(found[::2], found[1::2], strict=True):
        assert short.pieces.total_bytes < long.pieces.total_bytes


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with connected(MemoryKind.CPU, room_for([SMALL]), ["cma", "cudaipc"]) as bench:
        yield bench


def test_reads_of_a_real_process_are_proven(bench: Bench) -> None:
    (measured,) = bench.measure([SMALL], rounds=2)
    (samples,) = measured.arms.values()
    assert list(measured.arms) == ["cma"]
    assert all(s.done_ms > 0 and s.cpu_ms > 0 for s in samples)


def test_a_transport_that_cannot_take_part_is_named_with_the_reason(bench: Bench) -> None:
    assert list(bench.left_out) == ["cudaipc"]
    assert bench.left_out["cudaipc"]


def test_wrong_bytes_are_noticed(bench: Bench) -> None:
    class Shifted(Fake):
        def post_read(self, pieces: Pieces) -> Transfer:
            moved = pieces.remote_offsets.copy()
            moved[7] += 1
            whole = Pieces(
                pieces.local_regions, pieces.local_offsets, pieces.remote_regions, moved, pieces.sizes
            )
            return bench.arms["cma"].post_read(whole)

    shifted = Bench(bench.memory, bench.process, {"shifted": Shifted("shifted", [])}, {})
    with pytest.raises(TransportError, match="shifted, small: 1 of 20 pieces wrong"):
        shifted.measure([SMALL], rounds=1)


def test_the_bench_prints_a_result_that_can_be_kept() -> None:
    command = ["bench", "transport", "--rounds", "5", "--tokens", "1024", "--arm", "cma", "--json"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    result = json.loads(printed.stdout.strip().splitlines()[-1])
    assert [case["tokens"] for case in result["cases"]] == [1024] * len(ENGINES)
    for case in result["cases"]:
        assert list(case["arms"]) == [LIMIT, "cma"]
        assert case["arms"]["cma"]["share_of_limit"]["median"] > 0
    assert result["host"]["versions"]["numpy"]


def test_an_arm_that_does_not_exist_is_refused_with_those_that_do() -> None:
    printed = CliRunner().invoke(app, ["bench", "transport", "--arm", "pigeon"])
    assert printed.exit_code != 0


def test_where_no_transport_works_the_bench_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: 0, and a table of plain copies."""

    @contextmanager
    def nothing(*_: object) -> Iterator[Bench]:
        yield Bench(HostMemory(1), Idle(), {}, {"mooncake": "not installed"})  # type: ignore[arg-type]

    monkeypatch.setattr("stateferry.cli.bench_transport.connected", nothing)
    result = run("bench", "transport", "--tokens", "1024", "--arm", "mooncake")
    assert result.returncode == 1
    assert "no transport that was asked for works here: mooncake: not installed" in result.stderr
    assert result.stdout == ""
