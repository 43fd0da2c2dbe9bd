"""Peers that die, lie, answer late or speak another tongue: each costs what was asked of it, no more."""

import logging

import pytest

from stateferry.ferry import consumer as ferry_consumer
from stateferry.session import Outcome, VirtualClock, claimant_name
from stateferry.testing.peers import EngineRank, wait_until

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
ELSEWHERE = ((9, 10, 11), (12,))


@pytest.mark.parametrize("number", range(6))
def test_of_two_claimants_the_one_that_was_granted_reads(number: int) -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        names = [f"{number}-{end}" for end in "ab"]
        for name in names:
            consumer.open(name, offer)
        for name, local in zip(names, (LOCAL, ELSEWHERE), strict=True):
            consumer.load(name, offer, local)
        reports = {r.request_id: r for r in consumer.wait_idle().reports}
        assert {r.outcome for r in reports.values()} == {Outcome.RECEIVED, Outcome.FAILED}
        for name, other in (names, reversed(names)):
            if reports[name].outcome is Outcome.FAILED:
                assert f"d/{other}" in reports[name].reason, "the answer to another's claim was taken"


def test_a_queued_request_whose_producer_died_hears_of_it_when_its_lease_lapses() -> None:
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:
        consumer.open("r", producer.grant(40, TABLES))
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        producer.ferry.stop()
        clock.advance(0.9 * producer.config.lease_s)
        assert not consumer.ferry.wait(0.3), "lost while its lease held"
        clock.advance(0.2 * producer.config.lease_s)
        assert consumer.wait_lost("r").lost == {"r"}


def test_a_claim_that_nobody_answers_is_given_up_before_blocks_are_given() -> None:
    clock = VirtualClock()
    with EngineRank("p", clock=VirtualClock()) as producer, EngineRank("d", clock=clock) as consumer:
        other = producer.grant(40, TABLES, "other")
        consumer.open("s", other)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        offer = producer.offer(40, TABLES)
        consumer.open("r", offer)  # parked there, where time stands still
        for _ in range(4):
            clock.advance(0.4 * producer.config.lease_s)
            wait_until(lambda n=producer.ferry.counters.renewed: producer.ferry.counters.renewed > n)
        assert consumer.wait_lost("r").lost == {"r"}
        consumer.load("s", other, LOCAL)
        assert not consumer.wait_received("s").failed


def test_block_ids_out_of_range_are_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "stateferry"),
        EngineRank("p") as producer,
        EngineRank("d") as consumer,
    ):
        bad = producer.grant(40, ((1, 2, 99), (4,)), "bad")
        assert consumer.read("r", bad, LOCAL).failed == {"r"}
    posting = [r for r in caplog.records if "could not post" in r.getMessage()]
    assert [(r.levelno, r.exc_info, "99" in r.getMessage()) for r in posting] == [
        (logging.WARNING, None, True)
    ]


def test_one_question_that_a_producer_cannot_read_costs_only_whoever_asked_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_long = "x" * 2000
    monkeypatch.setattr(
        ferry_consumer,
        "claimant_name",
        lambda engine, request: too_long if request == "bad" else claimant_name(engine, request),
    )
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:
        good, bad = producer.grant(40, TABLES, "good"), producer.grant(40, TABLES, "bad")
        consumer.open("bad", bad)
        consumer.open("good", good)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        consumer.load("good", good, LOCAL)
        assert not consumer.wait_received("good").failed
        clock.advance(2 * producer.config.lease_s)
        assert consumer.wait_lost("bad").lost == {"bad"}
