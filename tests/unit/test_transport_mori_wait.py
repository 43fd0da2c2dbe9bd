"""Waiting for MoRI's requests: with `wait_all` where MoRI has it, else by looking (F1.1 to F1.4)."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.mori_pair import Pair

from stateferry.errors import TransportError, TransportTimeout
from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import Behaviour, Kind, World
from stateferry.testing.transport_rigs import content, regions_of
from stateferry.transport.mori import MoriTransport
from stateferry.transport.mori_options import MoriBackend, MoriOptions
from stateferry.transport.mori_request import Request, Verdict, verdict
from stateferry.transport.mori_wait import Waiter

NEVER = Behaviour(Kind.NEVER)
FAILS = Behaviour(Kind.FAILS_WRITING, message="work completion error: remote access")


def requests(pair: Pair, *behaviours: Behaviour) -> list[Request]:
    """One read each, of 16 bytes."""
    pair.world.script.extend(behaviours)
    session = pair.peer.link.session((0, 0))  # type: ignore[attr-defined]
    found = [session.read([64 * i], [64 * i], [16]) for i in range(len(behaviours))]
    pair.world.waits_ms.clear()
    return found


@pytest.fixture(params=[True, False], ids=["wait_all", "no wait_all"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(wait_all=request.param)


@pytest.mark.parametrize(
    ("wait_all", "codes", "native"), [(1, 1, True), (0, 1, False), (1, 0, False), (0, 0, False)]
)
def test_both_the_method_and_the_codes_are_needed(wait_all: int, codes: int, native: bool) -> None:
    """F1.1: `StatusCode` can be imported and the engine has `wait_all`; otherwise neither is touched."""
    world = World(default=Behaviour(looks=3))
    io: Any = MoriDouble(world, wait_all=bool(wait_all))
    if not codes:
        io = SimpleNamespace(**{k: v for k, v in vars(io).items() if k != "StatusCode"})
    target = MoriTransport(io=io, clock=world.clock, pause=world.advance)
    buffers = content(1, (4096,))
    with MoriTransport(io=io, clock=world.clock, pause=world.advance) as reader:
        assert reader.waiter.native is native
        reader.register(regions_of(content(2, (4096,))))
        reader.connect(target.register(regions_of(buffers)), 1.0)
        assert bool(world.waits_ms) is native


def test_mori_is_asked_once_what_it_can_do(caplog: pytest.LogCaptureFixture) -> None:
    """F1.1: cached for the life of the engine, and logged once."""

    class Counting:
        asked = 0

        def __getattr__(self, name: str) -> object:
            Counting.asked += name == "wait_all"
            raise AttributeError(name)

    pair = Pair()
    pair.reader.engine._engine = Counting()
    with caplog.at_level(logging.INFO, "stateferry.transport.mori_wait"):
        waiter = Waiter(pair.reader.engine, pair.world.advance)
        for _ in range(3):
            waiter.wait(requests(pair, Behaviour(looks=2)), 1.0)
    assert Counting.asked == 1
    assert [r.message for r in caplog.records] == ["mori: no wait_all; looks every ms"]


@pytest.mark.parametrize(("timeout_s", "whole_ms"), [(0.05, 50), (0.0001, 1), (30.0, 30000)])
def test_one_call_for_the_whole_batch_and_never_with_zero(timeout_s: float, whole_ms: int) -> None:
    """F1.2: one deadline for all, in whole milliseconds; 0 would mean to look once."""
    pair = Pair()
    batch = requests(pair, Behaviour(looks=1), Behaviour(looks=2 if whole_ms > 1 else 1))
    pair.reader.waiter.wait(batch, timeout_s)
    assert pair.world.waits_ms in ([whole_ms], [])
    assert verdict(batch) is Verdict.DONE
    with pytest.raises(TransportTimeout):
        pair.reader.waiter.wait(requests(pair, NEVER), timeout_s)
    assert pair.world.waits_ms[0] == whole_ms
    assert 0 not in pair.world.waits_ms


def test_nothing_to_wait_for_is_over_at_once(pair: Pair) -> None:
    """F1.2: an empty list never calls into MoRI."""
    pair.world.waits_ms.clear()
    pair.reader.waiter.wait([], 0.0)
    assert not pair.world.waits_ms


def test_a_late_request_is_a_timeout_that_says_what_to_turn(pair: Pair) -> None:
    """F1.2 and F1.3: how many are pending, after how long, and the setting."""
    started_s = pair.world.clock()
    with pytest.raises(
        TransportTimeout, match=r"0/2 requests failed, 1 timed out after 0.25 s \(transfer_timeout_s\)"
    ):
        pair.reader.waiter.wait(requests(pair, NEVER, Behaviour(looks=2)), 0.25)
    assert 0.25 <= pair.world.clock() - started_s < 0.26


def test_a_failure_is_told_with_moris_words_and_code(pair: Pair) -> None:
    """F1.2 and F1.3: text and code of the status that failed, and how many of how many."""
    with pytest.raises(TransportError, match=r"1/2 requests failed: .*remote access.*ERR_RDMA_OP"):
        pair.reader.waiter.wait(requests(pair, Behaviour(looks=1), FAILS), 0.25)


def test_a_failure_that_is_known_waits_for_nobody(pair: Pair) -> None:
    """F1.3: a pending sibling must not hold up the error, wherever it stands in the list."""
    started_s = pair.world.clock()
    with pytest.raises(TransportError, match="1/2 requests failed"):
        pair.reader.waiter.wait(requests(pair, NEVER, FAILS), 30.0)
    assert pair.world.clock() - started_s < 0.01


def test_success_wins_over_a_deadline_in_the_same_look(pair: Pair) -> None:
    """F1.3."""
    pair.reader.waiter.wait(requests(pair, Behaviour(), Behaviour()), 0.0)


def test_a_failure_behind_a_pending_request_is_found_by_looking() -> None:
    """F1.2 and section 6.5: `wait_all` answers IN_PROGRESS then; the statuses know better."""
    pair = Pair()
    with pytest.raises(TransportError, match=r"requests failed: .*remote access"):
        pair.reader.waiter.wait(
            requests(pair, NEVER, Behaviour(Kind.FAILS_WRITING, looks=3, message="remote access")), 0.05
        )


def test_a_request_that_has_not_begun_is_waited_for() -> None:
    """Section 6.5: `wait_all` returns at once for INIT, which is no success."""
    pair = Pair()
    batch = requests(pair, Behaviour(init_looks=6, looks=2))
    pair.reader.waiter.wait(batch, 1.0)
    assert verdict(batch) is Verdict.DONE


def test_xgmi_is_waited_for_in_short_slices() -> None:
    """Section 6.5: a bounded wait looks once and then sleeps to its deadline, whatever has long arrived."""
    pair = Pair(mori=MoriOptions(MoriBackend.XGMI))
    started_s = pair.world.clock()
    pair.reader.waiter.wait(requests(pair, Behaviour(looks=5)), 30.0)
    assert set(pair.world.waits_ms) == {1}
    assert pair.world.clock() - started_s < 0.02


def test_xgmi_in_one_wait_would_sleep_to_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above: the double has the trap."""
    pair = Pair(mori=MoriOptions(MoriBackend.XGMI))
    monkeypatch.setattr(pair.reader.waiter, "_sliced", False)
    started_s = pair.world.clock()
    pair.reader.waiter.wait(requests(pair, Behaviour(looks=2)), 30.0)
    assert pair.world.clock() - started_s >= 30.0


@pytest.mark.parametrize(
    ("behaviours", "expected"),
    [
        ((), Verdict.DONE),
        ((Behaviour(), Behaviour()), Verdict.DONE),
        ((Behaviour(), NEVER), Verdict.PENDING),
        ((Behaviour(init_looks=9),), Verdict.PENDING),
        ((NEVER, FAILS), Verdict.FAILED),
        ((FAILS, NEVER), Verdict.FAILED),
    ],
)
def test_the_verdict_of_several(behaviours: tuple[Behaviour, ...], expected: Verdict) -> None:
    """F1.4: FAILED if one failed, whatever others do; then PENDING. All are looked at, none waited for."""
    pair = Pair()
    batch = requests(pair, *behaviours)
    assert verdict(batch) is expected
    assert not pair.world.waits_ms
    for request, behaviour in zip(batch, behaviours, strict=True):
        if behaviour.kind is Kind.FAILS_WRITING:
            assert request.error
