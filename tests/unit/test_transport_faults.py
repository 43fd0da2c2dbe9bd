"""Each fault does what the table in `transport.faults` says, and no more."""

from typing import Any

import numpy as np
import pytest

from stateferry.errors import ConfigError, ProtocolError
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import Link, MemoryRig
from stateferry.transport import TransferState, TransportOptions, create_transport
from stateferry.transport.faults import FaultKind, FaultsTransport
from stateferry.transport.memory import MemoryTransport

SIZES = (4096,)
BATCH = pieces([(0, 0, 0, 100, 64), (0, 200, 0, 300, 64), (0, 400, 0, 500, 64)])
WITHOUT_LAST = pieces([(0, 0, 0, 100, 64), (0, 200, 0, 300, 64)])
POLLS = 5


def link_with(rig: MemoryRig, **settings: Any) -> Link:
    rig._make = lambda: FaultsTransport(TransportOptions(faults=settings), MemoryTransport())
    return rig.link(SIZES)


def faulty(rig: MemoryRig, kind: FaultKind, **more: Any) -> Link:
    return link_with(rig, rules=[{"kind": kind.value, "polls": POLLS, **more}])


def arrived(link: Link, batch: Any) -> bool:
    return not link.local.differences(batch, link.target.content)


NOTHING = pieces([])


def test_failing_at_post_reads_nothing() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.FAIL)
        transfer = link.peer.post_read(BATCH)
        assert (transfer.poll(), transfer.quiet) == (TransferState.FAILED, True)
        assert arrived(link, NOTHING)
        assert link.peer.usable


def test_a_broken_connection_stays_broken_and_the_next_one_works() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.BREAK, reads=[1])
        link.peer.post_read(BATCH)
        link.peer.announce(2, ())
        assert link.peer.post_read(BATCH).poll() is TransferState.FAILED
        assert not link.peer.usable
        fresh = link.transport.connect(link.target.registration, 1.0)
        fresh.announce(3, ())
        assert fresh.post_read(BATCH).poll() is TransferState.DONE
        assert arrived(link, BATCH)


def test_failing_while_writing_lands_the_other_half_later() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.FAIL_WRITING)
        transfer = link.peer.post_read(BATCH)
        states = [transfer.poll() for _ in range(POLLS + 1)]
        assert states == [TransferState.PENDING] * POLLS + [TransferState.FAILED]
        assert not transfer.quiet
        assert arrived(link, WITHOUT_LAST)
        transfer.cancel()
        while not transfer.quiet:
            assert transfer.poll() is TransferState.FAILED
        assert arrived(link, BATCH), "nothing landed late: this fault tests nothing"


def test_landing_late_fails_first() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.LAND_LATE)
        transfer = link.peer.post_read(BATCH)
        assert (transfer.poll(), transfer.quiet) == (TransferState.FAILED, False)
        assert arrived(link, NOTHING)
        while not transfer.quiet:
            transfer.poll()
        assert arrived(link, BATCH)


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.TRUNCATE])
def test_a_short_read_is_counted_as_what_it_is(kind: FaultKind) -> None:
    with MemoryRig() as rig:
        link = faulty(rig, kind)
        transfer = link.peer.post_read(BATCH)
        assert transfer.poll() is TransferState.DONE
        assert transfer.bytes_done == {FaultKind.DROP: 128, FaultKind.TRUNCATE: 160}[kind]
        assert not arrived(link, BATCH)


@pytest.mark.parametrize("size", [2, 3, 64, 65])
def test_corruption_says_that_all_is_well(size: int) -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.CORRUPT)
        batch = pieces([(0, 0, 0, 100, 64), (0, 200, 0, 300, size)])
        transfer = link.peer.post_read(batch)
        assert transfer.poll() is TransferState.DONE
        assert transfer.bytes_done == batch.total_bytes
        assert not arrived(link, batch)
        assert arrived(link, pieces([(0, 0, 0, 100, 64)])) is False  # nothing was left out either
        local, remote = link.local.buffers[0], link.target.content[0]
        assert (local[:64] == remote[100:164]).all()
        assert sorted(local[200 : 200 + size]) == sorted(remote[300 : 300 + size])


def test_a_duplicate_ends_with_its_second_copy() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.DUPLICATE)
        transfer = link.peer.post_read(BATCH)
        assert transfer.poll() is TransferState.DONE
        assert transfer.bytes_done == BATCH.total_bytes
        assert arrived(link, BATCH)


def test_a_delayed_read_is_good_in_the_end() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.DELAY)
        transfer = link.peer.post_read(BATCH)
        assert [transfer.poll() for _ in range(POLLS)] == [TransferState.PENDING] * POLLS
        assert arrived(link, NOTHING)
        assert not transfer.quiet
        assert transfer.poll() is TransferState.DONE
        assert arrived(link, BATCH)


def test_a_hanging_read_hears_a_cancel_and_a_dead_one_does_not() -> None:
    with MemoryRig() as rig:
        for kind, hears in ((FaultKind.HANG, True), (FaultKind.NEVER, False)):
            transfer = faulty(rig, kind).peer.post_read(BATCH)
            assert {transfer.poll() for _ in range(1000)} == {TransferState.PENDING}
            transfer.cancel()
            assert transfer.quiet is hears
            assert transfer.poll() is (TransferState.FAILED if hears else TransferState.PENDING)


def test_rules_name_reads_of_a_hand_off_and_those_of_the_hand_off_come_first() -> None:
    with MemoryRig() as rig:
        link = faulty(rig, FaultKind.FAIL, reads=[3])
        states = []
        for read in (1, 2, 3, 4):
            link.peer.announce(read, ())
            states.append(link.peer.post_read(BATCH).poll())
        assert [s is TransferState.FAILED for s in states] == [False, False, True, False]
        link.peer.announce(3, [{"kind": "delay", "polls": 0}])
        assert link.peer.post_read(BATCH).poll() is TransferState.DONE
        link.peer.announce(1, [{"kind": "fail"}])
        assert link.peer.post_read(BATCH).poll() is TransferState.FAILED
        assert link.peer.post_read(BATCH).poll() is TransferState.DONE, "an order is for one read"


def test_a_rate_is_drawn_by_the_seed() -> None:
    def drawn(seed: int) -> list[bool]:
        with MemoryRig() as rig:
            link = link_with(rig, seed=seed, rules=[{"kind": "fail", "rate": 0.3}])
            return [link.peer.post_read(BATCH).poll() is TransferState.FAILED for _ in range(300)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 60 < np.sum(drawn(1)) < 120


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "faults"},
        {"transport": "pigeon"},
        {"seeds": 1},
        {"rules": [{"kind": "explode"}]},
        {"rules": [{"kind": "fail", "reads": [0]}]},
        {"rules": [{"kind": "fail", "rate": 2}]},
        {"rules": "fail"},
    ],
)
def test_settings_that_cannot_be_obeyed_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"faults|pigeon"):
        create_transport("faults", TransportOptions(faults=settings))


def test_orders_that_cannot_be_obeyed_are_refused() -> None:
    with MemoryRig() as rig:
        with pytest.raises(ProtocolError, match="explode"):
            link_with(rig).peer.announce(1, [{"kind": "explode"}])
        plain = MemoryRig().link(SIZES)
        plain.peer.announce(1, ())
        with pytest.raises(ProtocolError, match="transport 'faults'"):
            plain.peer.announce(1, [{"kind": "fail"}])


def test_the_peer_sees_what_is_wrapped() -> None:
    with create_transport("faults", TransportOptions(faults={"transport": "memory"})) as made:
        assert made.name == "memory"
        assert made.capabilities == MemoryTransport.capabilities
