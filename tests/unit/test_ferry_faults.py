"""Every fault and what becomes of its hand-off: the right bytes or a failure, and never a late write."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from stateferry.config import Config, Verify
from stateferry.layout.spec import CacheLayout, Loop, Part, PartRule
from stateferry.session import Clock, Handoff, Next, Outcome, ReadStatus, Recovery, VirtualClock
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.testing.recorder import Recorder
from stateferry.transport import TransportOptions
from stateferry.transport.faults import FaultKind, FaultsTransport, Rule
from stateferry.transport.memory import MemoryTransport
from stateferry.wire import Offer

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
ELSEWHERE = ((9, 10, 11), (12,))
TRIES = 1 + Config().read_retries


@contextmanager
def pair(
    *, clock: Clock | None = None, rules: tuple[dict[str, Any], ...] = (), seed: int = 0, **settings: Any
) -> Iterator[tuple[EngineRank, EngineRank, Recorder]]:
    options = TransportOptions(faults={"seed": seed, "rules": list(rules)})
    recorder = Recorder(FaultsTransport(options, MemoryTransport()))
    config = Config(**{"testing": True, **settings})
    with (
        EngineRank("p") as producer,
        EngineRank("d", transport=recorder, config=config, clock=clock) as consumer,
    ):
        producer.write_tags(1)
        yield producer, consumer, recorder


def with_faults(offer: Offer, *rules: dict[str, Any], **more: Any) -> Offer:
    return replace(offer, tamper={"nothing": True, "faults": list(rules), **more})


def arrived(producer: EngineRank, consumer: EngineRank, local: Any = LOCAL) -> bool:
    return all(
        consumer.page(group, mine) == producer.page(group, theirs)
        for group in range(2)
        for mine, theirs in zip(local[group], TABLES[group], strict=True)
    )


HEALED = [
    ("fail", [1], 1),
    ("fail", [1, 2], 2),
    ("break", [1], 1),
    ("fail_writing", [1], 1),
    ("fail_writing", [1, 2], 2),
    ("land_late", [1], 1),
    ("land_late", [1, 2], 2),
    ("drop", [1], 1),
    ("truncate", [1, 2], 2),
    ("duplicate", [], 0),
    ("delay", [], 0),
]


@pytest.mark.parametrize(("kind", "reads", "retries"), HEALED)
def test_a_fault_that_passes_is_healed(kind: str, reads: list[int], retries: int) -> None:
    with pair() as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": kind, "reads": reads, "polls": 5})
        results = consumer.read("r", offer, LOCAL)
        assert recorder.restless == 0
        assert not recorder.overlaps
        assert not results.failed
        assert arrived(producer, consumer)
        assert results.reports[0].retries == retries
        # The last try goes over a fresh connection; so does any whose own broke.
        fresh = retries == TRIES - 1 or kind == "break"
        assert len(recorder.peers) == 1 + fresh
        producer.wait_sent("prefill")
        assert producer.ferry.open_count == consumer.ferry.open_count == 0


@pytest.mark.parametrize(
    ("kind", "retries"),
    [("fail", 2), ("break", 1), ("fail_writing", 2), ("land_late", 2), ("drop", 2), ("truncate", 2)],
)
def test_a_fault_that_stays_fails_its_request_alone(kind: str, retries: int) -> None:
    with pair() as (producer, consumer, recorder):
        bad = with_faults(producer.grant(40, TABLES, "bad"), {"kind": kind, "polls": 5})
        good = producer.grant(40, TABLES, "good")
        consumer.open("bad", bad)
        consumer.open("good", good)
        consumer.load("bad", bad, LOCAL)
        first = consumer.wait_received("bad") if kind == "break" else None  # it is their common connection
        consumer.load("good", good, ELSEWHERE)
        reports = {r.request_id: r for r in consumer.wait_idle().reports}
        reports |= {r.request_id: r for r in first.reports} if first is not None else {}
        assert recorder.restless == 0
        assert not recorder.overlaps
        assert reports["bad"].outcome is Outcome.FAILED
        assert reports["bad"].retries == retries
        assert "tries" in reports["bad"].reason
        assert reports["good"].outcome is Outcome.RECEIVED
        assert arrived(producer, consumer, ELSEWHERE)
        assert producer.wait_idle().sent == {"bad", "good"}
        before = consumer.memory.bytes.copy()
        consumer.read("next", producer.grant(40, TABLES, "next"), ((13, 14, 15), (16,)))
        changed = (before != consumer.memory.bytes).nonzero()[0]
        page = consumer.layout.groups[0].layers[0].tensors[0].block_stride_bytes
        assert {int(c) // page for c in changed} <= {13, 14, 15, 16}


def test_wrong_bytes_that_look_right_are_caught_by_digests_and_by_nothing_else() -> None:
    """The second half is the reason for the first: it shows that the fault does damage."""
    with pair(verify=Verify.ALL) as (producer, consumer, recorder):
        caught = with_faults(producer.grant(40, TABLES), {"kind": "corrupt"})
        results = consumer.read("r", caught, LOCAL)
        assert results.failed == {"r"}
        assert "digests" in results.reports[0].reason
        assert recorder.restless == 0
    with pair(verify=Verify.OFF) as (producer, consumer, _):
        missed = with_faults(producer.grant(40, TABLES), {"kind": "corrupt"})
        assert not consumer.read("r", missed, LOCAL).failed
        assert not arrived(producer, consumer)


def test_a_read_that_hangs_is_stopped_at_its_deadline() -> None:
    clock = VirtualClock()
    with pair(clock=clock, transfer_timeout_s=5) as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "hang"})
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: len(recorder.transfers) == 1 and producer.ferry.counters.claimed == 1)
        assert not consumer.ferry.wait(0.1)
        clock.advance(5.1)
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        assert "transfer_timeout_s" in results.reports[0].reason
        assert results.reports[0].retries == 0
        assert recorder.restless == 0


def test_nothing_is_tried_again_once_the_lease_is_over() -> None:
    clock = VirtualClock()
    with pair(clock=clock) as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "land_late", "polls": 1 << 20})
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: len(recorder.transfers) == 1 and producer.ferry.counters.claimed == 1)
        clock.advance(1.1 * producer.config.lease_s)
        recorder.transfers[0]._lands_after = 0  # type: ignore[attr-defined]
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        # Its claim's answer may have come before that look, or not yet.
        reason = results.reports[0].reason
        assert "lease" in reason or "did not answer the claim" in reason
        assert len(recorder.transfers) == 1


def test_a_read_that_never_becomes_quiet_is_kept_in_quarantine(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    with (
        caplog.at_level(logging.WARNING, "stateferry"),
        pair(clock=clock, transfer_timeout_s=5) as (producer, consumer, recorder),
    ):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "land_late", "polls": 1 << 20})
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: len(recorder.transfers) == 1 and producer.ferry.counters.claimed == 1)
        clock.advance(5.1)
        wait_until(lambda: consumer.ferry.quarantined_count == 1)
        # The producer's blocks are not needed for it, so they come back at once.
        producer.wait_sent("prefill")
        # Neither time nor the client's leaving makes its blocks safe.
        consumer.close("r")
        clock.advance(100.0)
        other = producer.grant(40, TABLES, "other")
        assert not consumer.read("other", other, ELSEWHERE).failed
        assert arrived(producer, consumer, ELSEWHERE)
        assert not consumer.ferry.take().received
        assert (consumer.ferry.quarantined_count, consumer.ferry.open_count) == (1, 1)
        recorder.transfers[0]._lands_after = 0  # type: ignore[attr-defined]
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        assert recorder.restless == 0
        wait_until(lambda: consumer.ferry.quarantined_count == consumer.ferry.open_count == 0)
    lines = [r.getMessage() for r in caplog.records if "quarantine:" in r.getMessage()]
    assert len(lines) == 1
    assert "request=r" in lines[0]
    assert f"peer=127.0.0.1:{offer.ranks[0].port}" in lines[0]
    assert "age_s=5.1" in lines[0]


def test_a_fresh_connection_leaves_reads_over_the_old_one_alone() -> None:
    with pair() as (producer, consumer, recorder):
        slow = with_faults(producer.grant(40, TABLES, "slow"), {"kind": "delay", "polls": 1 << 20})
        broken = with_faults(producer.grant(40, TABLES, "broken"), {"kind": "break", "reads": [1]})
        consumer.open("slow", slow)
        consumer.open("broken", broken)
        consumer.load("slow", slow, ELSEWHERE)
        wait_until(lambda: len(recorder.transfers) == 1)
        consumer.load("broken", broken, LOCAL)
        assert not consumer.wait_received("broken").failed
        assert arrived(producer, consumer)
        old, fresh = recorder.peers
        assert not old.closed, "closed under a read that was pending over it"
        recorder.transfers[0]._polls_left = 0  # type: ignore[attr-defined]
        results = consumer.wait_received("slow")
        assert not results.failed
        assert results.reports[-1].retries == 0
        assert arrived(producer, consumer, ELSEWHERE)
        wait_until(lambda: old.closed)
        assert not fresh.closed


@pytest.mark.parametrize("reborn", [False, True])
def test_there_is_no_fresh_connection_to_a_producer_that_is_gone(reborn: bool) -> None:
    # Where time stands still, nothing is noticed but what the new one says.
    clock = VirtualClock() if reborn else None
    with pair(clock=clock, handshake_timeout_s=60) as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "delay", "polls": 1 << 20})
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: len(recorder.transfers) == 1 and producer.ferry.counters.claimed == 1)
        producer.ferry.stop()
        with ExitStack() as stack:
            if reborn:
                stack.enter_context(EngineRank("p", port=offer.ranks[0].port))
            recorder.transfers[0]._polls_left = 0  # type: ignore[attr-defined]
            results = consumer.wait_received("r")
        assert results.failed == {"r"}
        expected = "it was restarted" if reborn else "cannot be dialled"
        assert expected in results.reports[0].reason
        assert (results.reports[0].retries, len(recorder.transfers)) == (0, 1)


def shared_out(engine_id: str, tp_rank: int, tp_size: int) -> CacheLayout:
    """The small layout with four heads in every tensor, split over the ranks."""
    whole = small_layout(engine_id, tp_rank=tp_rank, tp_size=tp_size)
    heads = (Part(name="heads", size=4, rule=PartRule.SPLIT),)
    groups = []
    for group in whole.groups:
        (layer,) = group.layers
        tensors = tuple(
            replace(t, axis=0, parts=heads, loops=(Loop(count=4 // tp_size, stride_bytes=t.unit_bytes),))
            for t in layer.tensors
        )
        groups.append(replace(group, layers=(replace(layer, tensors=tensors),)))
    return replace(whole, groups=tuple(groups))


class SecondReadFails(FaultsTransport):
    posted = 0

    def rule_for(self, read: int, rules: Sequence[Rule]) -> Rule | None:
        self.posted += 1
        return Rule(kind=FaultKind.FAIL) if self.posted == 2 else None


def test_with_two_producer_ranks_only_the_part_that_failed_is_posted_again() -> None:
    recorder = Recorder(SecondReadFails(inner=MemoryTransport()))
    with (
        EngineRank("p", layout=shared_out("p", 0, 2)) as first,
        EngineRank("p", layout=shared_out("p", 1, 2)) as second,
        EngineRank("d", layout=shared_out("d", 0, 1), transport=recorder) as consumer,
    ):
        first.write_tags(1)
        second.write_tags(2)
        offer = first.offer(40, TABLES)
        assert second.address is not None
        offer = replace(offer, ranks=(*offer.ranks, second.address))
        for rank in (first, second):
            rank.submit_grant(offer)
        results = consumer.read("r", offer, LOCAL)
        assert not results.failed, results.reports
        assert results.reports[0].retries == 1
        assert len(recorder.places) == 3
        assert recorder.places[2] == recorder.places[1] != recorder.places[0]
        for mine, theirs in zip(LOCAL[0], TABLES[0], strict=True):
            assert consumer.page(0, mine) == first.page(0, theirs) + second.page(0, theirs)


def test_faults_are_made_only_for_engines_under_test() -> None:
    with pair(testing=False) as (producer, consumer, _):
        results = consumer.read("r", with_faults(producer.grant(40, TABLES), {"kind": "fail"}), LOCAL)
        assert not results.failed
        assert results.reports[0].retries == 0
    with EngineRank("p") as producer, EngineRank("d", config=Config(testing=True)) as consumer:
        results = consumer.read("r", with_faults(producer.grant(40, TABLES), {"kind": "fail"}), LOCAL)
        assert results.failed == {"r"}
        assert "transport 'faults'" in results.reports[0].reason


def test_no_retries_where_none_are_wanted() -> None:
    with pair(read_retries=0) as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "fail", "reads": [1]})
        assert consumer.read("r", offer, LOCAL).failed == {"r"}
        assert len(recorder.transfers) == 1


@pytest.mark.parametrize("seed", range(4))
def test_many_faults_at_once(seed: int) -> None:
    kinds = ("fail", "break", "fail_writing", "land_late", "drop", "truncate", "duplicate", "delay")
    rules = tuple({"kind": kind, "rate": 0.1, "polls": 3} for kind in kinds)
    with pair(rules=rules, seed=seed) as (producer, consumer, recorder):
        places = [((3 * i, 3 * i + 1, 3 * i + 2), (i,)) for i in range(8)]
        outcomes = []
        for round_number in range(8):
            offers = [producer.grant(40, TABLES, f"p{round_number}.{i}") for i in range(8)]
            for i, offer in enumerate(offers):
                consumer.open(f"r{round_number}.{i}", offer)
                consumer.load(f"r{round_number}.{i}", offer, places[i])
            reports = {r.request_id: r.outcome for r in consumer.wait_idle().reports}
            assert recorder.restless == 0
            assert not recorder.overlaps
            for i, local in enumerate(places):
                outcome = reports[f"r{round_number}.{i}"]  # type: ignore[index]
                outcomes.append(outcome)
                assert outcome is not Outcome.RECEIVED or arrived(producer, consumer, local)
        assert outcomes.count(Outcome.RECEIVED) > len(outcomes) / 2
        assert len(producer.wait_idle().sent) == 64


# -- mutants: the checks above notice ------------------------------------------------------------------


def test_a_mutant_that_reports_before_the_read_is_quiet_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Handoff.settle

    def hasty(self: Handoff, now_s: float, reads: ReadStatus | None, verified: bool) -> Outcome | None:
        calm = ReadStatus(reads.done, True, reads.error) if reads is not None else None
        return settle(self, now_s, calm, verified)

    monkeypatch.setattr(Handoff, "settle", hasty)
    clock = VirtualClock()
    with pair(clock=clock, transfer_timeout_s=5) as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "land_late", "polls": 1 << 20})
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: len(recorder.transfers) == 1 and producer.ferry.counters.claimed == 1)
        clock.advance(5.1)
        consumer.wait_received("r")
        assert recorder.restless == 1


def test_a_mutant_that_tries_again_before_the_read_is_quiet_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide = Recovery.after_failure

    def hasty(self: Recovery, *, quiet: bool, usable: bool, hopeful: bool) -> Next:
        return decide(self, quiet=True, usable=usable, hopeful=hopeful)

    monkeypatch.setattr(Recovery, "after_failure", hasty)
    with pair() as (producer, consumer, recorder):
        offer = with_faults(producer.grant(40, TABLES), {"kind": "land_late", "reads": [1]})
        consumer.read("r", offer, LOCAL)
        assert recorder.overlaps
