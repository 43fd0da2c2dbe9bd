"""What the `mori` transport must do when MoRI does what MoRI does. Mutants must fail a scenario each."""

import gc
from collections.abc import Callable
from itertools import pairwise

from tests.unit.mori_pair import QUIET_S, SIZES, SOME, STEP_S, TIMEOUT_S, Pair

from stateferry.errors import TransportTimeout, TransportUnavailable
from stateferry.testing.mori_world import Behaviour, Code, Kind, World, sq_full
from stateferry.testing.transport_reads import pieces, raises
from stateferry.transport import MemoryRegion, TransferState
from stateferry.transport.mori_options import MoriBackend, MoriOptions
from stateferry.transport.mori_request import COMPLETED_QUIET_S
from stateferry.transport.mori_transfer import PART_BYTES


def full_queue_is_posted_again() -> None:
    """Section 2.5: 1 ms, then twice as long each time, up to 50 ms; then the bytes are there."""
    pair = Pair()
    pair.world.script.extend([sq_full()] * 9)
    transfer = pair.peer.post_read(SOME)
    times = [pair.world.clock()]
    while len(times) < 10:
        before = pair.posts()
        assert transfer.poll() is TransferState.PENDING, f"failed: {transfer.error}"
        assert pair.posts() - before <= 1, "posted more than once at a time"
        if pair.posts() > before:
            times.append(pair.world.clock())
        assert pair.world.clock() - times[0] < 1.0, f"posted {len(times)} times in a second"
        pair.world.advance(STEP_S / 5)
    pauses_ms = [round(1000 * (b - a)) for a, b in pairwise(times)]
    assert pauses_ms == [1, 2, 4, 8, 16, 32, 50, 50, 50], pauses_ms
    assert pair.drive(transfer, SOME)[-1] is TransferState.DONE
    assert pair.peer.usable, "a full send queue is no broken connection"


def full_queue_ends_with_the_read() -> None:
    """Section 2.5: under the request's deadline; it is told then, and the connection is as it was."""
    pair = Pair()
    pair.world.default = sq_full()
    transfer = pair.peer.post_read(SOME)
    started_s = pair.world.clock()
    assert pair.drive(transfer, SOME)[-1] is TransferState.FAILED
    assert "send queue stayed full for 10 s" in transfer.error
    assert TIMEOUT_S - 0.1 < pair.world.clock() - started_s < TIMEOUT_S + QUIET_S + 1
    assert pair.peer.usable


def other_failures_are_kept() -> None:
    """Section 2.5 and 6.3: a request larger than the queue, or a degraded endpoint, would fail again."""
    for message in ("SQ request exceeds capacity (batch)", "EP is degraded, rejecting new submissions"):
        pair = Pair()
        pair.world.script.append(Behaviour(Kind.REFUSED, message=message))
        transfer = pair.peer.post_read(SOME)
        assert transfer.poll() is TransferState.FAILED, "tried again"
        assert message in transfer.error
        assert pair.posts() == 1
        assert not pair.peer.usable


def failed_is_not_quiet() -> None:
    """Section 6.4: what was posted of a failed request lands later, and is waited for."""
    half = Behaviour(Kind.FAILS_WRITING, looks=1, part=0.5)
    for behaviour in (half, Behaviour(Kind.REFUSED, part=0.5), Behaviour(Kind.RAISES, part=0.5)):
        pair = Pair()
        pair.world.script.append(behaviour)
        transfer = pair.peer.post_read(SOME)
        seen = pair.drive(transfer, SOME, lands_at_s=QUIET_S * 0.9)
        assert seen[-1] is TransferState.FAILED
        assert transfer.quiet, "never quiet"
        assert transfer.bytes_done < SOME.total_bytes
        del transfer
        gc.collect()
        assert not pair.world.defects, pair.world.defects


def partly_posted_is_waited_for_although_the_next_try_is_done() -> None:
    """Section 6.3: a full queue may have taken a part. Without one queue pair only time proves it over."""
    for mori in (
        MoriOptions(quiet_s=QUIET_S, qp_per_transfer=2),
        MoriOptions(MoriBackend.XGMI, quiet_s=QUIET_S),
    ):
        pair = Pair(World(default=Behaviour(looks=1), in_order=False), mori)
        pair.world.script.append(sq_full(part=0.5))
        started_s = pair.world.clock()
        transfer = pair.peer.post_read(SOME)
        assert pair.drive(transfer, SOME, lands_at_s=QUIET_S * 0.9)[-1] is TransferState.DONE
        assert pair.world.clock() - started_s >= QUIET_S


def one_queue_pair_proves_it_over() -> None:
    """Work requests of one queue pair complete in order: a later success ends the wait."""
    pair = Pair()
    pair.world.script.append(sq_full(part=0.5))
    started_s = pair.world.clock()
    transfer = pair.peer.post_read(SOME)
    assert pair.drive(transfer, SOME)[-1] is TransferState.DONE
    assert pair.world.clock() - started_s < 0.1


def a_failed_completion_is_the_end_of_its_queue_pair() -> None:
    """Section 6.4: then nothing follows over it. Where there are several, others may go on."""
    for queues, least_s, most_s in ((1, COMPLETED_QUIET_S, COMPLETED_QUIET_S + 1), (2, QUIET_S, QUIET_S + 1)):
        pair = Pair(mori=MoriOptions(quiet_s=QUIET_S, qp_per_transfer=queues))
        message = "work completion error: transport retry counter exceeded"
        pair.world.script.append(Behaviour(Kind.FAILS_WRITING, message=message, part=0.5))
        started_s = pair.world.clock()
        transfer = pair.peer.post_read(SOME)
        seen = pair.drive(transfer, SOME, lands_at_s=COMPLETED_QUIET_S / 2 if queues == 1 else QUIET_S * 0.9)
        assert seen[-1] is TransferState.FAILED
        assert least_s <= pair.world.clock() - started_s <= most_s


def never_ends_is_never_quiet() -> None:
    """Section 6.4: there is no cancel, and the status must outlive whoever dropped the transfer."""
    pair = Pair()
    pair.world.script.append(Behaviour(Kind.NEVER))
    transfer = pair.peer.post_read(SOME)
    transfer.cancel()
    assert set(pair.drive(transfer, SOME, until_s=3 * QUIET_S)) == {TransferState.PENDING}
    assert not transfer.quiet
    del transfer
    again = pair.reader.connect(pair.registration, 1.0)
    pair.peer.close()
    pair.peer = again
    gc.collect()
    pair.drive(pair.peer.post_read(SOME), SOME)
    assert not pair.world.defects, pair.world.defects


def a_dropped_failure_keeps_its_status() -> None:
    """Section 6.4: the status lives until the request is over, although it has failed."""
    pair = Pair()
    pair.world.script.append(Behaviour(Kind.FAILS_WRITING, part=0.5))
    transfer = pair.peer.post_read(SOME)
    while transfer.poll() is TransferState.PENDING:
        pair.world.advance(STEP_S)
    del transfer
    pair.reader.connect(pair.registration, 1.0)
    gc.collect()
    assert not pair.world.defects, pair.world.defects
    pair.world.land_late()


def init_is_pending() -> None:
    """Section 6.5: INIT is no success and no failure."""
    pair = Pair()
    pair.world.script.append(Behaviour(init_looks=3))
    transfer = pair.peer.post_read(SOME)
    seen = pair.drive(transfer, SOME)
    assert seen[0] is TransferState.PENDING
    assert seen[-1] is TransferState.DONE, transfer.error


def pieces_above_32_bits_are_split() -> None:
    """Section 6.3 and W30: MoRI refuses a piece of more than UINT32_MAX bytes."""
    world = World(default=Behaviour(looks=1), moves_bytes=False)
    pair = Pair(world)
    size = (5 << 30) + 3
    far = [MemoryRegion(1 << 40, size)]
    reader, target = pair.transport(), pair.transport()
    reader.register(far)
    peer = reader.connect(target.register(far), 1.0)
    transfer = peer.post_read(pieces([(0, 0, 0, 0, size)]))
    while transfer.poll() is TransferState.PENDING:
        world.advance(STEP_S)
    assert transfer.poll() is TransferState.DONE, transfer.error
    sizes = [size for batch in world.posted for size in batch.sizes]
    assert max(sizes) <= PART_BYTES
    assert sum(sizes) == size
    ends = sorted((batch.local_offsets[0], batch.remote_offsets[0]) for batch in world.posted)
    assert ends == [(start, start) for start in range(0, size, PART_BYTES)]


def one_session_a_pair_of_regions() -> None:
    """F2.1: made once; those of equal numbers when connecting, others when first needed."""
    pair = Pair()
    world = pair.world
    assert len(world.sessions) == 1 + len(SIZES), "the cookie's, and one a region"
    for _ in range(3):
        for batch in (SOME, pieces([(1, 0, 1, 64, 64)]), pieces([(0, 0, 1, 64, 64)])):
            pair.local.reset()
            assert pair.drive(pair.peer.post_read(batch), batch)[-1] is TransferState.DONE
    assert len(world.sessions) == 2 + len(SIZES)
    assert len({(local.id, remote.id) for local, remote in world.sessions}) == len(world.sessions)


def no_session_is_an_answer() -> None:
    """Section 6.2: `create_session` gives None or raises, when connecting and later."""
    for how in ("none", "raise"):
        pair = Pair()
        pair.world.next_sessions.append(how)
        with raises(TransportUnavailable, "connect without a session"):
            pair.reader.connect(pair.registration, 1.0)
        pair.world.next_sessions.append(how)
        transfer = pair.peer.post_read(pieces([(0, 0, 1, 64, 64)]))
        assert transfer.poll() is TransferState.FAILED
        assert "no session" in transfer.error
        assert transfer.quiet
        assert not pair.posts()


def the_wrong_memory_is_noticed() -> None:
    """A peer whose life has ended, although its memory can be read still; or memory of another peer."""
    pair = Pair()
    assert pair.target._cookies is not None
    pair.target._cookies.wipe()
    transfer = pair.peer.post_read(SOME)
    assert pair.drive(transfer, SOME)[-1] is TransferState.FAILED
    assert "cookie" in transfer.error
    assert not pair.peer.usable
    with raises(TransportUnavailable, "connect to a wiped cookie"):
        pair.reader.connect(pair.registration, 1.0)


def the_cookie_is_asked_for_again() -> None:
    """A full send queue at the very end; and a landing is not used again while something may land there."""
    pair = Pair()
    pair.world.cookie_script.extend([sq_full(), sq_full(), Behaviour(looks=2)])
    assert pair.drive(pair.peer.post_read(SOME), SOME)[-1] is TransferState.DONE


def a_full_queue_does_not_keep_a_peer_away() -> None:
    """Others' reads may fill the queue while a connection is made."""
    pair = Pair()
    pair.world.cookie_script.extend([sq_full(), sq_full()])
    assert pair.reader.connect(pair.registration, 1.0).usable
    pair.world.cookie_script.extend([sq_full()] * 100)
    with raises(TransportTimeout, "connect over a queue that stays full"):
        pair.reader.connect(pair.registration, 1.0)


def reading_never_waits_in_mori() -> None:
    """F1.4: how a read stands is asked of its statuses, never of `wait_all`, whose zero wait is not free."""
    pair = Pair()
    before = list(pair.world.waits_ms)
    assert pair.drive(pair.peer.post_read(SOME), SOME)[-1] is TransferState.DONE
    assert pair.world.waits_ms == before


def failed_posts_stay_in_order() -> None:
    """Several requests at once, one of them refused for good: the rest ends, and then it is quiet."""
    pair = Pair()
    many = pieces([(0, 16 * i, 0, 16 * i, 16) for i in range(4000)])
    pair.world.script.extend([Behaviour(looks=5), Behaviour(Kind.REFUSED, message="no")])
    transfer = pair.peer.post_read(many)
    assert transfer.poll() is TransferState.FAILED
    assert not transfer.quiet
    assert pair.drive(transfer, many)[-1] is TransferState.FAILED
    assert transfer.quiet


def every_code_above_ten_is_a_failure() -> None:
    """Section 6.1."""
    for code in [code for code in Code if code > 10]:
        pair = Pair()
        pair.world.script.append(Behaviour(Kind.FAILS_WRITING, code=code, message="broken"))
        transfer = pair.peer.post_read(SOME)
        assert pair.drive(transfer, SOME)[-1] is TransferState.FAILED
        assert code.name in transfer.error
        assert "broken" in transfer.error


SCENARIOS: dict[str, Callable[[], None]] = {
    scenario.__name__: scenario
    for scenario in (
        full_queue_is_posted_again,
        full_queue_ends_with_the_read,
        other_failures_are_kept,
        failed_is_not_quiet,
        partly_posted_is_waited_for_although_the_next_try_is_done,
        one_queue_pair_proves_it_over,
        a_failed_completion_is_the_end_of_its_queue_pair,
        never_ends_is_never_quiet,
        a_dropped_failure_keeps_its_status,
        init_is_pending,
        pieces_above_32_bits_are_split,
        one_session_a_pair_of_regions,
        no_session_is_an_answer,
        the_wrong_memory_is_noticed,
        the_cookie_is_asked_for_again,
        a_full_queue_does_not_keep_a_peer_away,
        reading_never_waits_in_mori,
        failed_posts_stay_in_order,
        every_code_above_ten_is_a_failure,
    )
}
