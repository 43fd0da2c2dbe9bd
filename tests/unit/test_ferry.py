"""Two ranks in one process: real ferries, real control sockets, memory transport."""

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from msgspec.structs import replace

from stateferry.block_ids import BlockIds
from stateferry.config import Config, Verify
from stateferry.errors import ConfigError, TransportUnavailable
from stateferry.ids import RequestId
from stateferry.layout.spec import Pieces
from stateferry.session import GroupLoad, Load, Open, Orders, Outcome, VirtualClock
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.transport.base import Peer, Transfer, TransferState, TransportOptions
from stateferry.transport.memory import MemoryTransport
from stateferry.wire import RankAddress

TABLES = ((1, 2, 3), (4,))
"""40 tokens: three attention blocks; the state sits in column 2, block 4."""
LOCAL = ((5, 6, 7), (8,))


@pytest.fixture
def pair() -> Iterator[tuple[EngineRank, EngineRank]]:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        producer.write_tags(1)
        consumer.write_tags(2)
        yield producer, consumer


def assert_arrived(producer: EngineRank, consumer: EngineRank) -> None:
    for group, (theirs, ours) in enumerate(zip(TABLES, LOCAL, strict=True)):
        for remote, local in zip(theirs, ours, strict=True):
            assert consumer.page(group, local) == producer.page(group, remote)


def test_bytes_arrive_and_blocks_come_back(pair: tuple[EngineRank, EngineRank]) -> None:
    """F1.8."""
    producer, consumer = pair
    before = consumer.memory.bytes.copy()
    results = consumer.read("r", producer.grant(40, TABLES), LOCAL)
    assert not results.failed
    assert_arrived(producer, consumer)
    (report,) = results.reports
    assert report.outcome is Outcome.RECEIVED
    assert report.bytes_by_group == (3 * 512, 96 + 256)
    producer.wait_sent("prefill")
    # No byte outside the destinations changed.
    changed = (before != consumer.memory.bytes).nonzero()[0]
    attention, state = consumer.layout.groups[0].layers[0].tensors[0], consumer.layout.groups[1].layers[0]
    page = attention.block_stride_bytes
    assert {c // page for c in changed if c % page < 512} == {5, 6, 7}
    assert {c // page for c in changed if c % page >= state.tensors[0].offset_bytes} == {8}
    assert producer.ferry.open_count == consumer.ferry.open_count == 0


def test_nothing_is_read_or_kept_when_the_request_is_closed_before_its_load(
    pair: tuple[EngineRank, EngineRank],
) -> None:
    producer, consumer = pair
    before = consumer.memory.bytes.copy()
    consumer.open("r", producer.grant(40, TABLES))
    consumer.close("r")
    producer.wait_sent("prefill")
    assert (before == consumer.memory.bytes).all()
    assert not consumer.ferry.take().received


def test_a_claim_that_overtakes_its_grant_is_answered_when_the_grant_comes(
    pair: tuple[EngineRank, EngineRank],
) -> None:
    producer, consumer = pair
    offer = producer.offer(40, TABLES)
    consumer.open("r", offer)
    consumer.load("r", offer, LOCAL)
    assert not consumer.ferry.wait(0.3), "counted as received before the producer said yes"
    producer.submit_grant(offer)
    assert not consumer.wait_received("r").failed
    producer.wait_sent("prefill")


def test_an_offer_is_used_once(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    offer = producer.grant(40, TABLES)
    assert not consumer.read("first", offer, LOCAL).failed
    results = consumer.read("second", offer, LOCAL)
    assert results.failed == {"second"}
    assert "was released by d/first" in results.reports[-1].reason


def test_of_two_claimants_at_once_one_is_served(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    offer = producer.grant(40, TABLES)
    consumer.open("first", offer)
    consumer.open("second", offer)
    consumer.load("second", offer, ((9, 10, 11), (12,)))
    consumer.load("first", offer, LOCAL)
    seen = consumer.wait_received("first")
    outcomes = {r.request_id: r.outcome for r in seen.reports}
    if len(outcomes) < 2:
        outcomes |= {r.request_id: r.outcome for r in consumer.wait_received("second").reports}
    assert sorted(o.value for o in outcomes.values()) == ["failed", "received"]


def test_a_restarted_producer_refuses_offers_of_its_former_life() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        assert producer.address is not None
        port = producer.address.port
        producer.ferry.stop()
        with EngineRank("p", port=port) as reborn:
            results = consumer.read("r", offer, LOCAL)
            assert results.failed == {"r"}
            assert "it was restarted" in results.reports[-1].reason
            reborn.write_tags(7)
            assert not consumer.read("again", reborn.grant(40, TABLES, "p2"), LOCAL).failed
            assert_arrived(reborn, consumer)


def test_nobody_at_the_address_fails_the_request_within_the_hand_shake_timeout() -> None:
    with socket.socket() as holder, EngineRank("d", config=Config(handshake_timeout_s=0.3)) as consumer:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with EngineRank("p") as producer:
            offer = producer.offer(40, TABLES)
        address = RankAddress("127.0.0.1", holder.getsockname()[1], offer.ranks[0].epoch)
        gone = replace(offer, ranks=(address,))
        results = consumer.read("r", gone, LOCAL)
        assert results.failed == {"r"}
        assert "no answer to the hand-shake within 0.3 s" in results.reports[-1].reason
        # The next request need not wait: the address is known to be dead for a while.
        assert consumer.read("r2", gone, LOCAL).failed == {"r2"}


def test_an_engine_of_another_model_is_refused_by_name() -> None:
    other = small_layout("p")
    other.facts["model"] = "another"
    with EngineRank("p", layout=other) as producer, EngineRank("d") as consumer:
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        assert consumer.wait_lost("r").lost == {"r"}
        consumer.load("r", offer, LOCAL)
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        assert "model" in results.reports[-1].reason
        assert "another" in results.reports[-1].reason


def test_tensor_parallel_sizes_that_do_not_divide_are_refused() -> None:
    with EngineRank("p") as producer, EngineRank("d", layout=small_layout("d", tp_size=2)) as consumer:
        offer = producer.grant(40, TABLES)
        results = consumer.read("r", replace(offer, ranks=offer.ranks * 3), LOCAL)
        assert results.failed == {"r"}
        assert "do not divide" in results.reports[-1].reason


def test_a_producer_that_nobody_asks_gets_its_blocks_back_when_the_lease_ends() -> None:
    with EngineRank("p", config=Config(lease_s=0.3)) as producer:
        producer.grant(40, TABLES)
        producer.wait_sent("prefill")
        assert producer.ferry.open_count == 0


def test_a_lease_is_renewed_for_as_long_as_the_request_waits() -> None:
    clock = VirtualClock()
    with EngineRank("p", clock=clock) as producer, EngineRank("d", clock=clock) as consumer:
        producer.write_tags(3)
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        for renewals in range(1, 13):
            # Twelve times two fifths of a lease: nearly five leases.
            clock.advance(0.4 * producer.config.lease_s)
            wait_until(lambda at_least=renewals: producer.ferry.counters.renewed >= at_least)
        assert not producer.ferry.take().sent
        consumer.load("r", offer, LOCAL)
        assert not consumer.wait_received("r").failed
        assert_arrived(producer, consumer)


def test_a_lease_ends_on_both_sides_when_renewals_are_not_answered() -> None:
    theirs, ours = VirtualClock(), VirtualClock()
    with EngineRank("p", clock=theirs) as producer, EngineRank("d", clock=ours) as consumer:
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        theirs.advance(1.01 * producer.config.lease_s)  # the consumer was silent for too long
        producer.wait_sent("prefill")
        ours.advance(0.4 * producer.config.lease_s)
        assert consumer.wait_lost("r").lost == {"r"}
        consumer.load("r", offer, LOCAL)
        assert consumer.wait_received("r").failed == {"r"}
        assert producer.ferry.counters.late_renewals == 1


def test_a_read_that_outlasts_its_lease_is_a_failed_read() -> None:
    clock = VirtualClock()
    slow = MemoryTransport(TransportOptions(), polls=1 << 40)
    with EngineRank("p") as producer, EngineRank("d", transport=slow, clock=clock) as consumer:
        offer = producer.grant(40, TABLES)
        consumer.open("r", offer)
        consumer.load("r", offer, LOCAL)
        wait_until(lambda: producer.ferry.counters.claimed == 1)
        # As after a SIGSTOP of the consumer: its first look finds the lease over.
        clock.advance(1.01 * producer.config.lease_s)
        results = consumer.wait_received("r")
        assert results.failed == {"r"}
        # Its claim's answer may have come before that look, or not yet.
        reason = results.reports[-1].reason
        assert "lease" in reason or "did not answer the claim" in reason


@pytest.mark.parametrize("verify", [Verify.STATE, Verify.ALL])
def test_digests_pass_on_good_bytes(verify: Verify) -> None:
    with EngineRank("p") as producer, EngineRank("d", config=Config(verify=verify)) as consumer:
        producer.write_tags(1)
        assert not consumer.read("r", producer.grant(40, TABLES), LOCAL).failed
        assert_arrived(producer, consumer)


@pytest.mark.parametrize(
    ("verify", "damage", "caught"),
    [
        (Verify.OFF, {"withhold": "state"}, False),
        (Verify.STATE, {"withhold": "state"}, True),
        (Verify.STATE, {"withhold": "convolution"}, True),
        (Verify.STATE, {"withhold": "last_block"}, False),
        (Verify.ALL, {"withhold": "last_block"}, True),
        (Verify.ALL, {"swap": "heads"}, True),
    ],
)
def test_digests_catch_damage(verify: Verify, damage: dict[str, str], caught: bool) -> None:
    config = Config(verify=verify, testing=True)
    with EngineRank("p") as producer, EngineRank("d", config=config) as consumer:
        producer.write_tags(1)
        offer = replace(producer.grant(40, TABLES), tamper=damage)
        results = consumer.read("r", offer, LOCAL)
        assert bool(results.failed) is caught
        if caught:
            assert "digests" in results.reports[-1].reason


def test_garbage_on_the_control_port_is_survived(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    assert producer.address is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{producer.address.port}")
    for frames in ([b""], [b"\x00" * 100], [b"a", b"b", b"c"], [b"\x93" * 5000], [b"{}"]):
        dealer.send_multipart(frames)
    with socket.create_connection(("127.0.0.1", producer.address.port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    assert not consumer.read("r", producer.grant(40, TABLES), LOCAL).failed
    dealer.close(linger=0)
    context.destroy(linger=0)
    assert producer.ferry.alive


def test_a_port_that_is_taken_ends_the_start_with_its_number() -> None:
    with EngineRank("p") as producer:
        assert producer.address is not None
        with pytest.raises(ConfigError, match=str(producer.address.port)):
            EngineRank("q", port=producer.address.port).ferry.start()


def test_a_missing_library_ends_the_start() -> None:
    class Missing(MemoryTransport):
        def register(self, regions: object) -> bytes:
            raise TransportUnavailable("pip install stateferry[mooncake]")

    with pytest.raises(TransportUnavailable, match="mooncake"):
        EngineRank("p", transport=Missing(TransportOptions())).ferry.start()


def test_a_library_that_cannot_even_be_imported_ends_the_start() -> None:
    class Broken(MemoryTransport):
        def register(self, regions: object) -> bytes:
            raise SyntaxError("half-written file")

    with pytest.raises(SyntaxError, match="half-written"):
        EngineRank("p", transport=Broken(TransportOptions())).ferry.start()


def test_a_load_that_cannot_be_planned_fails_that_request_alone(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    bad = producer.grant(40, ((1, 2, 99), (4,)), "bad")
    results = consumer.read("r", bad, LOCAL)
    assert results.failed == {"r"}
    assert "99" in results.reports[-1].reason
    assert not consumer.read("s", producer.grant(40, TABLES), LOCAL).failed


def test_an_address_that_cannot_be_dialled_takes_nothing_from_the_other_orders_of_its_step(
    pair: tuple[EngineRank, EngineRank],
) -> None:
    producer, consumer = pair
    good = producer.grant(40, TABLES)
    nowhere = replace(good, ranks=(RankAddress("not a host!", 1, good.ranks[0].epoch),))
    opens = (Open(RequestId("bad"), nowhere), Open(RequestId("good"), good))
    consumer.ferry.submit(Orders(opens=opens))
    assert consumer.wait_lost("bad").lost == {"bad"}
    consumer.load("bad", nowhere, ((9, 10, 11), (12,)))
    assert consumer.wait_received("bad").failed == {"bad"}
    consumer.load("good", good, LOCAL)
    assert not consumer.wait_received("good").failed


class BrokenTransfer(Transfer):
    error = "the link broke"
    bytes_done = 0
    quiet = True

    def poll(self) -> TransferState:
        return TransferState.FAILED


class BrokenPeer(Peer):
    usable = False

    def post_read(self, pieces: Pieces) -> Transfer:
        return BrokenTransfer()

    def close(self) -> None:
        """Nothing to forget."""


class BrokenAtFirst(MemoryTransport):
    """The first connection breaks at its first read."""

    connects = 0

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        self.connects += 1
        return BrokenPeer() if self.connects == 1 else super().connect(registration, timeout_s)


def test_a_read_goes_on_over_a_fresh_connection_when_its_own_broke() -> None:
    transport = BrokenAtFirst(TransportOptions())
    with EngineRank("p") as producer, EngineRank("d", transport=transport) as consumer:
        producer.write_tags(1)
        results = consumer.read("r", producer.grant(40, TABLES), LOCAL)
        assert not results.failed
        assert_arrived(producer, consumer)
        assert results.reports[0].retries == 1
        assert transport.connects == 2


def test_a_connection_that_broke_is_made_anew_for_the_next_request() -> None:
    transport = BrokenAtFirst(TransportOptions())
    config = Config(read_retries=0)
    with EngineRank("p") as producer, EngineRank("d", transport=transport, config=config) as consumer:
        failed = consumer.read("r0", producer.grant(40, TABLES, "p0"), LOCAL)
        assert failed.failed == {"r0"}
        assert "the link broke" in failed.reports[-1].reason

        def served() -> bool:
            name = f"r{producer.ferry.counters.granted}"
            return not consumer.read(name, producer.grant(40, TABLES, name), LOCAL).failed

        wait_until(served)
        assert transport.connects == 2


def test_a_load_that_was_never_opened_is_reported_failed(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    consumer.load("r", producer.grant(40, TABLES), LOCAL)
    assert consumer.wait_received("r").failed == {"r"}


def test_many_hand_offs_at_once_leave_nothing_behind(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    offers = [producer.grant(40, TABLES, f"p{i}") for i in range(50)]
    for i, offer in enumerate(offers):
        consumer.open(f"r{i}", offer)
        if i % 3 == 0:
            consumer.close(f"r{i}")
        else:
            consumer.load(f"r{i}", offer, LOCAL)
    assert len(producer.wait_idle().sent) == 50
    seen = consumer.wait_idle()
    assert seen.received <= {f"r{i}" for i in range(50) if i % 3}
    assert len({r.request_id for r in seen.reports}) == 50
    assert not seen.failed


def test_submitting_and_taking_never_wait_for_the_ferry_thread(pair: tuple[EngineRank, EngineRank]) -> None:
    producer, consumer = pair
    held, go_on = threading.Event(), threading.Event()

    def hold() -> bool:
        held.set()
        go_on.wait(10.0)
        return True

    offer = producer.grant(40, TABLES)
    consumer.open("r", offer)
    groups = tuple(
        GroupLoad(i, offer.first_blocks[i], BlockIds(mine), offer.block_ids[i])
        for i, mine in enumerate(LOCAL)
    )
    consumer.ferry.submit(Orders(loads=(Load(RequestId("r"), 0, groups),)), hold)
    assert held.wait(10.0)
    # The ferry thread stands still in `hold`. Both calls must return all the same.
    consumer.ferry.submit(Orders())
    assert not consumer.ferry.take().received
    go_on.set()
    assert not consumer.wait_received("r").failed
