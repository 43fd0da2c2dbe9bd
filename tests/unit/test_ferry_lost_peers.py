"""A producer that dies while nothing is handed off: what `stateferry_peers` says of it, and what follows."""

import threading
from pathlib import Path

import pytest
import zmq

from stateferry.config import Config
from stateferry.errors import TransportTimeout
from stateferry.ferry import links as ferry_links
from stateferry.ferry import loop as ferry_loop
from stateferry.ferry.link import Link
from stateferry.ferry.socket_events import SocketEvents
from stateferry.session import VirtualClock
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.transport.base import Peer
from stateferry.transport.memory import MemoryTransport

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))


def peers(rank: EngineRank) -> dict[str, int]:
    return {label: n for (name, label), n in rank.ferry.levels().items() if name == "stateferry_peers" and n}


def link_of(rank: EngineRank) -> Link:
    assert rank.ferry._loop is not None
    (link,) = rank.ferry._loop._consumer._links._links.values()
    return link


def hand_off(producer: EngineRank, consumer: EngineRank, name: str) -> None:
    assert not consumer.read(name, producer.grant(40, TABLES, name), LOCAL).failed


def test_a_producer_that_died_while_nothing_was_under_way_is_not_called_ready() -> None:
    """Symptom: `stateferry_peers` went on saying `ready` for ten minutes."""
    with EngineRank("d", config=Config(handshake_timeout_s=0.3)) as consumer:
        with EngineRank("p") as producer:
            hand_off(producer, consumer, "r")
            wait_until(lambda: peers(consumer) == {"ready": 1})
        wait_until(lambda: peers(consumer) == {"failed": 1})


def test_a_watch_that_hears_of_no_broken_connection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty:
        """A clock for tests that are to fail: their patience is over at the four hundredth look."""

        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        def sleep(self, seconds: float) -> None:
            self.now_s += 0.05
            nothing.wait(seconds)

    nothing = threading.Event()
    monkeypatch.setattr(SocketEvents, "take", lambda self: [])
    monkeypatch.setattr("stateferry.testing.peers.time", Hasty())
    with pytest.raises(TimeoutError):
        test_a_producer_that_died_while_nothing_was_under_way_is_not_called_ready()


def test_a_producer_that_comes_back_in_the_same_epoch_is_ready_again() -> None:
    layout = small_layout("p")
    with EngineRank("d", config=Config(handshake_timeout_s=60)) as consumer:
        with EngineRank("p", layout=layout) as producer:
            hand_off(producer, consumer, "before")
            assert producer.address is not None
            port = producer.address.port
        wait_until(lambda: peers(consumer) == {"greeting": 1})
        with EngineRank("p", layout=layout, port=port) as producer:
            wait_until(lambda: peers(consumer) == {"ready": 1})
            assert link_of(consumer).connections == 2, "memory of its former life would be read"
            hand_off(producer, consumer, "after")


def test_a_producer_that_was_restarted_is_not_called_ready_under_its_former_epoch() -> None:
    with EngineRank("d", config=Config(handshake_timeout_s=60)) as consumer:
        with EngineRank("p") as producer:
            hand_off(producer, consumer, "before")
            assert producer.address is not None
            port = producer.address.port
        with EngineRank("p", layout=small_layout("p"), port=port) as producer:
            wait_until(lambda: peers(consumer) == {"failed": 1})
            assert "it was restarted" in link_of(consumer).reason
            hand_off(producer, consumer, "after")
            wait_until(lambda: peers(consumer) == {"failed": 1, "ready": 1})


def test_a_connection_that_breaks_under_a_hand_off_disturbs_nothing_until_that_is_over() -> None:
    clock = VirtualClock()
    with EngineRank("d", clock=clock) as consumer:
        with EngineRank("p") as producer:
            consumer.open("r", producer.grant(40, TABLES))
            wait_until(lambda: producer.ferry.counters.claimed == 1)
        link = link_of(consumer)

        def heard() -> bool:
            clock.advance(0.001)
            return link.broke

        clock.advance(ferry_links.LOOK_S)
        wait_until(heard)
        for _ in range(3):
            clock.advance(1.1 * ferry_links.LOOK_S)
            assert not consumer.ferry.wait(0.3), "lost while its lease held"
            assert peers(consumer) == {"ready": 1}
        consumer.close("r")
        wait_until(lambda: consumer.ferry.open_count == 0)
        clock.advance(1.1 * ferry_links.LOOK_S)
        wait_until(lambda: peers(consumer) == {"greeting": 1})


def test_a_machine_that_falls_silent_is_noticed_by_the_kernel() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        hand_off(producer, consumer, "r")
        assert link_of(consumer).socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        # Half a minute: long before the link would be forgotten.
        idle, interval, count = (
            link_of(consumer).socket.getsockopt(option)
            for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT)
        )
        assert idle + interval * count == 30 < ferry_links.IDLE_LINK_S


def test_a_connection_that_a_firewall_forgot_is_given_up_long_before_a_lease_ends() -> None:
    """Symptom: for a quarter of an hour each request waited for its whole lease, and was computed anew."""
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        hand_off(producer, consumer, "r")
        unacknowledged_ms = link_of(consumer).socket.getsockopt(zmq.TCP_MAXRT)
        assert isinstance(unacknowledged_ms, int)
        assert 1000 <= unacknowledged_ms <= 1000 * consumer.config.lease_s / 3


def asked_by_kernels(producer: EngineRank) -> int:
    """How many ends of connections to its control port will ask whether the other machine is there."""
    assert producer.address is not None
    port, ends = f":{producer.address.port:04X}", 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer = line.split()[:6]
        ends += (port in local or port in remote) and (state, timer[:2]) == ("01", "02")
    return ends


def test_a_producer_does_not_keep_connections_of_machines_that_are_gone() -> None:
    """Symptom: a consumer whose machine died left an open connection at its producers, for ever."""
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        hand_off(producer, consumer, "r")
        wait_until(lambda: asked_by_kernels(producer) == 2)


def test_a_producer_that_never_asks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_loop, "lose_patience", lambda listener: None)
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        hand_off(producer, consumer, "r")
        wait_until(lambda: asked_by_kernels(producer) == 1)
        with pytest.raises(TimeoutError):
            wait_until(lambda: asked_by_kernels(producer) == 2, 0.5)


def test_links_that_cannot_be_watched_are_not_made_and_leave_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where file descriptors are used up: the request fails, the engine lives."""
    right, refusals = SocketEvents.__init__, [True]

    def refuse(self: SocketEvents, *arguments: object) -> None:
        if refusals.pop() if refusals else False:
            raise zmq.ZMQError(24)
        right(self, *arguments)  # type: ignore[arg-type]

    with EngineRank("p") as producer, EngineRank("d") as consumer:
        monkeypatch.setattr(SocketEvents, "__init__", refuse)
        offer = producer.grant(40, TABLES, "first")
        consumer.open("first", offer)
        assert consumer.wait_lost("first").lost == {"first"}
        assert peers(consumer) == {}
        hand_off(producer, consumer, "second")


class Firewalled(MemoryTransport):
    """Reaches the peer that it meets first. Its packets to others are dropped: a connect waits for as long as
    it may, and nothing else goes on."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.connects = 0

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        self.connects += 1
        if self.connects == 1:
            return super().connect(registration, timeout_s)
        self.clock.advance(timeout_s)
        raise TransportTimeout("no answer")


def test_a_peer_that_no_transport_reaches_costs_others_no_lease() -> None:
    """Symptom: a firewall in the way of the data, not of the hand-shake, held the ferry's thread for
    `handshake_timeout_s` each time, and short leases of all other hand-offs ended."""
    clock, config = VirtualClock(), Config(lease_s=9)
    with (
        EngineRank("near", config=config) as near,
        EngineRank("far", config=config) as far,
        EngineRank("d", config=config, clock=clock, transport=Firewalled(clock)) as consumer,
    ):
        consumer.open("near", near.grant(40, TABLES))
        wait_until(lambda: near.ferry.counters.claimed == 1)
        wait_until(lambda: not link_of(consumer).claims_sent_s)
        consumer.open("far", far.grant(40, TABLES))
        assert consumer.wait_lost("far").lost == {"far"}
        offer = near.offer(40, TABLES)
        consumer.load("near", offer, LOCAL)
        assert not consumer.wait_received("near").failed
