"""One hand-off on the consumer: when it may be reported, and how."""

import time

import pytest

from stateferry.block_ids import BlockIds
from stateferry.ids import EngineId, Epoch, RequestId, TransferId
from stateferry.session import (
    Cause,
    GroupLoad,
    Handoff,
    Lease,
    Load,
    Outcome,
    ReadStatus,
    SystemClock,
    claimant_name,
    producer_ranks,
    releases_expected,
)
from stateferry.wire import ClaimAnswer, Offer, RankAddress

DONE = ReadStatus(done=True, quiet=True)
MOVING = ReadStatus(done=False, quiet=False)
BROKEN_MOVING = ReadStatus(done=False, quiet=False, error="broke")
BROKEN_QUIET = ReadStatus(done=False, quiet=True, error="broke")


def handoff(ranks: int = 1) -> Handoff:
    offer = Offer(
        transfer_id=TransferId("t"),
        engine_id=EngineId("p"),
        request_id=RequestId("there"),
        num_tokens=40,
        block_ids=(BlockIds((1,)),),
        first_blocks=(0,),
        prefix_digest="0" * 32,
        lease_s=15.0,
        ranks=tuple(RankAddress("127.0.0.1", 1 + r, Epoch(1)) for r in range(ranks)),
    )
    return Handoff(RequestId("here"), offer, tuple(range(ranks)))


def answered(reason: str = "") -> ClaimAnswer:
    lease_s = 0.0 if reason else 15.0
    return ClaimAnswer(transfer_id=TransferId("t"), claimant="d/here", lease_s=lease_s, reason=reason)


def loading(ranks: int = 1, claimed: bool = True) -> Handoff:
    h = handoff(ranks)
    if claimed:
        for rank in range(ranks):
            h.claim_answered(rank, answered(), sent_s=100.0)
    h.order_load(
        Load(RequestId("here"), 0, (GroupLoad(0, 0, BlockIds((1,)), BlockIds((1,))),)), 100.0, timeout_s=60.0
    )
    return h


def test_received_needs_bytes_claim_digests_and_lease() -> None:
    """F1.8, F3.10: every byte of every group, convolution and matrix alike."""
    assert loading().settle(101.0, DONE, verified=True) is Outcome.RECEIVED
    assert loading().settle(101.0, MOVING, verified=True) is None
    assert loading().settle(101.0, DONE, verified=False) is None
    assert loading(claimed=False).settle(101.0, DONE, verified=True) is None
    assert loading().settle(115.0, DONE, verified=True) is Outcome.FAILED


def test_one_unanswered_claim_of_two_holds_the_request_back() -> None:
    h = handoff(2)
    h.claim_answered(0, answered(), sent_s=100.0)
    h.order_load(Load(RequestId("here"), 0, ()), 100.0, 60.0)
    assert h.settle(101.0, DONE, verified=True) is None
    h.claim_answered(1, answered(), sent_s=100.0)
    assert h.settle(101.0, DONE, verified=True) is Outcome.RECEIVED


def test_a_lease_lost_on_one_rank_fails_the_read_on_all() -> None:
    h = loading(2)
    h.renewed(0, sent_s=110.0, lease_s=15.0)
    assert h.settle(116.0, DONE, verified=True) is Outcome.FAILED
    assert "rank 1" in h.failure


@pytest.mark.parametrize("how", ["error", "closed", "lease", "deadline"])
def test_nothing_is_reported_while_a_byte_may_land(how: str) -> None:
    h = loading()
    status, now_s = MOVING, 101.0
    if how == "error":
        status = BROKEN_MOVING
    elif how == "closed":
        h.close()
    elif how == "lease":
        now_s = 116.0
    else:
        h.renewed(0, sent_s=159.0, lease_s=15.0)
        now_s = 161.0
    assert h.settle(now_s, status, verified=False) is None
    after = h.settle(now_s, BROKEN_QUIET if how == "error" else ReadStatus(False, True), verified=False)
    assert after is (Outcome.ABANDONED if how == "closed" else Outcome.FAILED)


def test_the_first_reason_is_kept() -> None:
    h = loading()
    h.fail("first", Cause.PEER)
    h.fail("second", Cause.LEASE)
    assert (h.failure, h.cause) == ("first", Cause.PEER)


def test_a_refused_claim_fails_the_load_with_the_producers_words() -> None:
    h = handoff()
    h.claim_answered(0, answered(reason="taken by another"), 100.0)
    h.order_load(Load(RequestId("here"), 0, ()), 100.0, 60.0)
    assert h.settle(100.0, None, verified=False) is Outcome.FAILED
    assert "taken by another" in h.failure


def test_without_a_load_only_closing_ends_it() -> None:
    h = handoff()
    h.fail("lost", Cause.PEER)
    assert h.settle(1e9, None, verified=False) is None
    h.close()
    assert h.settle(1e9, None, verified=False) is Outcome.ABANDONED


def test_the_deadline_says_what_was_missing() -> None:
    unclaimed = loading(claimed=False)
    assert unclaimed.settle(160.0, MOVING, verified=False) is None
    assert "no answer to the claim" in unclaimed.failure
    claimed = loading()
    claimed.renewed(0, sent_s=159.0, lease_s=15.0)
    assert claimed.settle(160.0, MOVING, verified=False) is None
    assert "no end of the read" in claimed.failure


def test_a_lease_counts_from_when_the_question_was_sent() -> None:
    lease = Lease.from_claim(sent_s=100.0, lease_s=15.0)
    assert lease.alive(114.9)
    assert not lease.alive(115.0)
    lease.renewed(sent_s=110.0, lease_s=15.0)
    lease.renewed(sent_s=105.0, lease_s=15.0)  # an older answer that comes later takes nothing away
    assert lease.alive(124.9)
    assert not lease.alive(125.0)


@pytest.mark.parametrize(
    ("rank", "size", "producers", "expected"),
    [
        (0, 1, 1, (0,)),
        (1, 2, 2, (1,)),
        (5, 8, 4, (2,)),
        (7, 8, 1, (0,)),
        (1, 4, 8, (2, 3)),
        (0, 1, 4, (0, 1, 2, 3)),
    ],
)
def test_which_producer_ranks_a_consumer_rank_deals_with(
    rank: int, size: int, producers: int, expected: tuple[int, ...]
) -> None:
    assert producer_ranks(rank, size, producers) == expected


@pytest.mark.parametrize(("size", "producers"), [(1, 1), (2, 4), (8, 2), (3, 6), (6, 3)])
def test_every_producer_rank_is_released_as_often_as_it_expects(size: int, producers: int) -> None:
    touched = [p for rank in range(size) for p in producer_ranks(rank, size, producers)]
    assert {p: touched.count(p) for p in range(producers)} == dict.fromkeys(
        range(producers), releases_expected(size, producers)
    )


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 \(producer\) and 2 \(consumer\)"):
        producer_ranks(0, 2, 3)


def test_claimants_differ_by_engine_and_request() -> None:
    names = {claimant_name(EngineId(e), RequestId(r)) for e in "ab" for r in "cd"}
    assert len(names) == 4


def test_a_claimants_name_fits_into_a_message_and_still_differs() -> None:
    long = "x" * 5000
    names = {claimant_name(EngineId("d"), RequestId(long + end)) for end in ("a", "b")}
    assert len(names) == 2
    assert all(len(name) <= 256 for name in names)


def test_a_machine_that_slept_does_not_believe_in_a_lease_that_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux's monotonic clock stands still while a machine sleeps; its producer's machine was awake."""
    clocks = {time.CLOCK_MONOTONIC: 100.0, time.CLOCK_BOOTTIME: 100.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: clocks[time.CLOCK_MONOTONIC])
    h = handoff()
    h.claim_answered(0, answered(), SystemClock().now_s())
    clocks[time.CLOCK_BOOTTIME] += 60.0
    assert h.lapsed(SystemClock().now_s())
