"""What a ferry counts of what happens on it, and how it says that things stand."""

from typing import Any

import pytest
from msgspec.structs import replace

from stateferry.config import Config
from stateferry.ferry import asking as ferry_asking
from stateferry.session import Cause, Outcome, VirtualClock
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.transport.memory import MemoryTransport

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))


def test_a_hand_off_says_what_went_where_and_how_long_it_took() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        (report,) = consumer.read("r", producer.grant(40, TABLES), LOCAL).reports
        assert report.outcome is Outcome.RECEIVED
        assert report.cause is Cause.NONE
        assert len(report.pieces_by_group) == len(report.groups) == 2
        assert report.pieces == sum(report.pieces_by_group) >= 2
        parts = report.waited_s + report.plan_s + report.wire_s
        assert report.plan_s > 0
        assert 0 < report.post_s <= report.wire_s
        assert parts <= report.total_s
        assert report.handshake_s > 0
        assert report.peer == f"127.0.0.1:{producer.address.port}"
        assert report.ended_unix_s > 1.7e9
        (again,) = consumer.read("again", producer.grant(40, TABLES, "2"), LOCAL).reports
        assert again.handshake_s == 0
        wait_until(lambda: producer.ferry.counts()["stateferry_grants", "released"] == 2)


def test_renewals_are_counted_on_both_sides() -> None:
    clock = VirtualClock()
    with EngineRank("p") as producer, EngineRank("d", clock=clock) as consumer:
        consumer.open("r", producer.grant(40, TABLES))
        wait_until(lambda: producer.ferry.counters.claimed == 1)

        def renewed(rank: EngineRank, side: str) -> int:
            return rank.ferry.counts().get(("stateferry_renewals", side), 0)

        for count in range(1, 3):
            wait_until(lambda: consumer.ferry.open_count == 1)
            clock.advance(0.4 * producer.config.lease_s)
            wait_until(lambda n=count: renewed(consumer, "consumer") == n)
            assert renewed(producer, "producer") == count
        assert renewed(consumer, "producer") == renewed(producer, "consumer") == 0


def test_a_lease_that_ends_is_a_loss_to_both_sides() -> None:
    clock, theirs = VirtualClock(), VirtualClock()
    with EngineRank("p", clock=clock) as producer, EngineRank("d", clock=theirs) as consumer:
        consumer.open("r", producer.grant(40, TABLES))
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        clock.advance(1.1 * producer.config.lease_s)
        wait_until(lambda: producer.ferry.counts()["stateferry_lease_losses", "producer"] == 1)
        producer.grant(40, TABLES, "unclaimed")
        wait_until(lambda: producer.ferry.counters.granted == 2)
        clock.advance(1.1 * producer.config.lease_s)
        wait_until(lambda: producer.ferry.counts()["stateferry_grants", "expired"] == 2)
        assert producer.ferry.counts()["stateferry_lease_losses", "producer"] == 1, "nobody had claimed it"
        theirs.advance(1.1 * producer.config.lease_s)
        consumer.wait_lost("r")
        consumer.close("r")
        (report,) = consumer.wait_idle().reports
        assert report.cause is Cause.LEASE
        assert consumer.ferry.counts()["stateferry_lease_losses", "consumer"] == 1


def refusals(rank: EngineRank) -> dict[str, int]:
    return {label: n for (name, label), n in rank.ferry.counts().items() if name == "stateferry_refusals"}


class Other(MemoryTransport):
    """The same under another name."""

    name = "other"


@pytest.mark.parametrize(
    ("theirs", "at_producer", "at_consumer"),
    [
        ({"layout": replace(small_layout("d"), facts={"model": "large"})}, {}, {"facts.model": 1}),
        ({"layout": small_layout("d", blocks=16)}, {}, {}),
        ({"layout": replace(small_layout("d"), facts={"model": "small", "x": "y"})}, {}, {"other": 1}),
        ({"layout": replace(small_layout("d"), groups=small_layout("d").groups[:1])}, {}, {"groups": 1}),
        ({"transport": Other()}, {"transport": 1}, {}),
    ],
    ids=["fact", "number of blocks", "unknown fact", "groups", "transport"],
)
def test_a_hand_shake_that_is_refused_is_counted_once_where_it_was(
    theirs: dict[str, Any], at_producer: dict[str, int], at_consumer: dict[str, int]
) -> None:
    with EngineRank("p") as producer, EngineRank("d", **theirs) as consumer:
        consumer.open("r", producer.grant(40, TABLES))
        if at_producer or at_consumer:
            consumer.wait_lost("r")
            consumer.close("r")
            (report,) = consumer.wait_idle().reports
            assert report.cause is Cause.REFUSED
            assert report.reason.count("producer rank at") == 1
        else:
            wait_until(lambda: producer.ferry.counters.claimed == 1)
        assert refusals(producer) == at_producer
        assert refusals(consumer) == at_consumer


def test_an_offer_of_a_former_life_is_refused_by_its_epoch() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        rank = replace(offer.ranks[0], epoch=offer.ranks[0].epoch + 1)
        consumer.open("r", replace(offer, ranks=(rank,)))
        consumer.wait_lost("r")
        assert refusals(producer) == {"epoch": 1}


def peers(rank: EngineRank) -> dict[str, int]:
    return {label: n for (name, label), n in rank.ferry.levels().items() if name == "stateferry_peers" and n}


def test_peers_are_counted_by_state() -> None:
    config = Config(handshake_timeout_s=0.2, retry_interval_s=30)
    with EngineRank("p") as producer, EngineRank("d", config=config) as consumer:
        consumer.read("r", producer.grant(40, TABLES), LOCAL)
        wait_until(lambda: peers(consumer) == {"ready": 1})
        lost = replace(producer.address, port=1)
        consumer.open("lost", replace(producer.offer(40, TABLES), ranks=(lost,)))
        wait_until(lambda: peers(consumer) == {"ready": 1, "greeting": 1})
        consumer.wait_lost("lost")
        wait_until(lambda: peers(consumer) == {"ready": 1, "failed": 1})


def test_a_renewal_that_is_not_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_asking, "RENEWALS_PER_LEASE", 1e-9)  # never renews
    monkeypatch.setattr("stateferry.testing.peers.time", _Hasty())
    with pytest.raises(TimeoutError):
        test_renewals_are_counted_on_both_sides()


class _Hasty:
    """A clock for tests that are to fail: their patience is over at the tenth look."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return 10.0 * self.looks

    def sleep(self, seconds: float) -> None:
        """Looks again at once."""
