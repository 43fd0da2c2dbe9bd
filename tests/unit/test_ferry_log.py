"""What is logged of hand-offs: one line each, loud only where somebody should look."""

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stateferry.config import Config
from stateferry.ferry.handoff_log import HandoffLog
from stateferry.ferry.peer_log import INTERVAL_S, MAX_PEERS, OTHERS, SHOWN, PeerLog
from stateferry.ids import RequestId, TransferId
from stateferry.session import Cause, Orders, Outcome, Report, VirtualClock
from stateferry.testing.peers import EngineRank, wait_until

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
LOGGER = "stateferry.ferry.handoff_log"


def report(**changes: Any) -> Report:
    base: dict[str, Any] = {
        "request_id": RequestId("r"),
        "transfer_id": TransferId("transfer"),
        "outcome": Outcome.RECEIVED,
        "peer": "10.0.0.1:7000",
        "groups": (0, 1),
        "bytes_by_group": (100, 28),
        "pieces_by_group": (2, 1),
        "wire_s": 0.0123,
        "total_s": 0.5,
    }
    return Report(**(base | changes))


def failed(**changes: Any) -> Report:
    return report(**({"outcome": Outcome.FAILED, "cause": Cause.READ, "reason": "gone"} | changes))


@pytest.mark.parametrize(
    ("ended", "level"),
    [
        (report(), logging.DEBUG),
        (report(total_s=1.5), logging.INFO),
        (report(retried_s=(0.1,)), logging.INFO),
        (failed(), logging.INFO),
        (report(outcome=Outcome.ABANDONED), logging.DEBUG),
        (report(outcome=Outcome.ABANDONED, cause=Cause.LEASE, reason="it ended"), logging.INFO),
    ],
    ids=["well", "slow", "tried again", "failed", "client left", "lost in the queue"],
)
def test_a_hand_off_is_loud_only_if_it_failed_or_was_slow(
    ended: Report, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    HandoffLog(VirtualClock(), slow_s=1.0).ended([ended])
    (record,) = caplog.records
    assert record.levelno == level


def test_the_line_has_fields_that_programs_can_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    HandoffLog(VirtualClock(), slow_s=1.0).ended([failed()])
    words = caplog.messages[0].split()
    assert words[:2] == ["hand-off", "failed"]
    fields = dict(word.split("=", 1) for word in words[2:])
    assert fields["request"] == "r"
    assert fields["peer"] == "10.0.0.1:7000"
    assert fields["bytes"] == "128"
    assert fields["pieces"] == "3"
    assert fields["wire_ms"] == "12.30"
    assert fields["cause"] == "read"
    assert fields["reason"] == "gone"


def test_many_faults_of_one_peer_are_a_few_lines_and_a_sum(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    clock = VirtualClock()
    log = HandoffLog(clock, slow_s=1.0)
    for number in range(40):
        cause = Cause.LEASE if number % 4 else Cause.READ
        log.ended([failed(cause=cause, reason=f"reason {number}")])
    log.ended([failed(peer="10.0.0.2:7000")])
    log.tick()
    assert [r.levelno for r in caplog.records] == [logging.INFO] * (SHOWN + 1)
    caplog.clear()
    clock.advance(INTERVAL_S)
    log.tick()
    (line,) = caplog.messages
    assert "peer=10.0.0.1:7000 faults=40" in line
    assert "lease:30" in line
    assert "read:10" in line
    assert f"not_shown={40 - SHOWN}" in line
    assert "last=reason 39" in line
    caplog.clear()
    log.tick()
    log.ended([failed()])
    assert [r.levelno for r in caplog.records] == [logging.INFO], "a new interval begins"


def test_peers_without_number_take_no_memory_without_end() -> None:
    log = PeerLog()
    shown = sum(log.may_show(f"peer {n}", "read", "gone", 0.0) for n in range(10 * MAX_PEERS))
    assert shown == MAX_PEERS + SHOWN
    (line,) = log.summaries(INTERVAL_S)
    assert f"peer={OTHERS} faults={9 * MAX_PEERS}" in line
    assert log._faults == {}


def test_a_ferry_logs_the_hand_offs_that_end_on_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    config = Config(slow_handoff_s=3600.0)
    with EngineRank("p") as producer, EngineRank("d", config=config) as consumer:
        consumer.read("r", producer.grant(40, TABLES), LOCAL)
        wait_until(lambda: len(caplog.records) == 1)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "hand-off received request=r" in record.getMessage()
    assert f"peer=127.0.0.1:{producer.address.port}" in record.getMessage()


def test_leases_that_end_by_the_dozen_are_a_few_lines_and_a_sum(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    with EngineRank("p", clock=clock) as producer:
        for number in range(12):
            producer.grant(40, TABLES, f"prefill {number}")
        wait_until(lambda: producer.ferry.counters.granted == 12)
        clock.advance(1.1 * producer.config.lease_s)
        wait_until(lambda: producer.ferry.counters.expired == 12)
        wait_until(lambda: len(caplog.records) == SHOWN)
        clock.advance(INTERVAL_S)
        producer.grant(40, TABLES, "wakes the thread")
        wait_until(lambda: len(caplog.records) == SHOWN + 1)
    assert "peer=nobody faults=12" in caplog.messages[-1]
    assert "kinds=unclaimed:12" in caplog.messages[-1]


def test_the_line_has_the_fields_that_the_page_shows_loud_or_not(caplog: pytest.LogCaptureFixture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
    (shown,) = re.findall(r"^```\n(hand-off failed .*?)```", page, re.MULTILINE | re.DOTALL)
    caplog.set_level(logging.DEBUG, LOGGER)
    HandoffLog(VirtualClock(), slow_s=1.0).ended([report(), failed()])
    quiet, loud = caplog.records
    assert (quiet.levelno, loud.levelno) == (logging.DEBUG, logging.INFO)
    for line in (quiet.getMessage(), loud.getMessage()):
        assert re.findall(r"(\w+)=", line) == re.findall(r"(\w+)=", shown)


def said_by_idle_engines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that two ferries log in three hours after their only hand-off."""
    caplog.set_level(logging.DEBUG, "stateferry")
    turns: Counter[int] = Counter()
    tick = HandoffLog.tick

    def counted(log: HandoffLog) -> None:
        turns[id(log)] += 1
        tick(log)

    monkeypatch.setattr(HandoffLog, "tick", counted)
    clock = VirtualClock()
    with EngineRank("p", clock=clock) as producer, EngineRank("d", clock=clock) as consumer:
        consumer.read("r", producer.grant(40, TABLES), LOCAL)
        wait_until(lambda: any("hand-off received" in line for line in caplog.messages))
        wait_until(lambda: producer.ferry.counters.released == 1)
        caplog.clear()
        for _ in range(18):
            clock.advance(600.0)
            for rank in (producer, consumer):
                log = id(rank.ferry._loop._log)
                seen = turns[log]
                rank.ferry.submit(Orders())
                wait_until(lambda log=log, seen=seen: turns[log] > seen)  # type: ignore[misc]
        return list(caplog.messages)


def test_an_idle_engine_writes_no_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said_by_idle_engines(caplog, monkeypatch) == []


def test_an_idle_engine_that_talks_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a ferry that reports once a turn, whatever there is to say."""
    words = logging.getLogger(LOGGER)
    monkeypatch.setattr(HandoffLog, "tick", lambda log: words.debug("0 hand-offs"))
    assert set(said_by_idle_engines(caplog, monkeypatch)) == {"0 hand-offs"}
