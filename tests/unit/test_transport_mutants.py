"""The conformance suite catches broken transports: for every check there is one that only looks right."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from stateferry.errors import ProtocolError, TransportClosed, TransportUnavailable
from stateferry.layout.spec import Pieces
from stateferry.testing.conformance import CHECKS, SMALL
from stateferry.testing.transport_rigs import MemoryRig
from stateferry.transport import Peer, Transfer, TransferState
from stateferry.transport.memory import MemoryTransport

PATIENCE_S = 0.2
"""How long a check waits for a mutant that hangs."""

Post = Callable[["Shell", Pieces], Transfer]


class Veil(Transfer):
    """Passes everything on; mutants change what they lie about."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner

    @property
    def error(self) -> str:  # type: ignore[override]
        return self.inner.error

    @property
    def bytes_done(self) -> int:
        return self.inner.bytes_done

    @property
    def quiet(self) -> bool:
        return self.inner.quiet

    def poll(self) -> TransferState:
        return self.inner.poll()

    def cancel(self) -> None:
        self.inner.cancel()


class Shell(Peer):
    """A peer whose `post_read` is a mutant's."""

    def __init__(self, inner: Peer, post: Post) -> None:
        self.inner = inner
        self.post = post
        self.posted: list[Pieces] = []

    @property
    def usable(self) -> bool:
        return self.inner.usable

    def post_read(self, pieces: Pieces) -> Transfer:
        return self.post(self, pieces)

    def close(self) -> None:
        self.inner.close()


def honest(peer: Shell, pieces: Pieces) -> Transfer:
    return Veil(peer.inner.post_read(pieces))


def altered(alter: Callable[[Pieces], Pieces]) -> Post:
    """Reads other pieces than it was told, and counts the bytes that it was told."""

    class Counts(Veil):
        total = 0

        @property
        def bytes_done(self) -> int:
            return self.total if self.inner.poll() is TransferState.DONE else 0

    def post(peer: Shell, pieces: Pieces) -> Transfer:
        transfer = Counts(peer.inner.post_read(alter(pieces)))
        transfer.total = pieces.total_bytes
        return transfer

    return post


def veiled(veil: type[Veil]) -> Post:
    return lambda peer, pieces: veil(peer.inner.post_read(pieces))


def take(pieces: Pieces, rows: object) -> Pieces:
    return Pieces(*(getattr(pieces, f.name)[rows] for f in dataclasses.fields(pieces)))


def swapped_offsets(pieces: Pieces) -> Pieces:
    """The first two pieces read each other's place, as far as their sizes let them."""
    regions, offsets = pieces.remote_regions.copy(), pieces.remote_offsets.copy()
    if len(pieces) > 1:
        regions[:2] = regions[:2][::-1]
        offsets[:2] = np.minimum(offsets[:2][::-1], np.array(SMALL)[regions[:2]] - pieces.sizes[:2])
    return dataclasses.replace(pieces, remote_regions=regions, remote_offsets=offsets)


def neighbours_by_one_side(pieces: Pieces) -> Pieces:
    """Treats pieces that touch locally as touching remotely."""
    remote = pieces.remote_offsets.copy()
    for i in range(1, len(pieces)):
        if pieces.local_offsets[i - 1] + pieces.sizes[i - 1] == pieces.local_offsets[i]:
            remote[i] = remote[i - 1] + pieces.sizes[i - 1]
    inside = remote + pieces.sizes <= np.array(SMALL)[pieces.remote_regions]
    return dataclasses.replace(pieces, remote_offsets=np.where(inside, remote, pieces.remote_offsets))


class DoneEarly(Veil):
    def poll(self) -> TransferState:
        return TransferState.DONE


class DoneWhenGone(Veil):
    """Takes an error for an end."""

    def poll(self) -> TransferState:
        state = self.inner.poll()
        return TransferState.DONE if state is TransferState.FAILED else state


class PendingWhenGone(Veil):
    """Waits for a dead peer."""

    def poll(self) -> TransferState:
        state = self.inner.poll()
        return TransferState.PENDING if state is TransferState.FAILED else state


class PendingWhenEmpty(Veil):
    def poll(self) -> TransferState:
        return self.inner.poll() if self.inner.bytes_done else TransferState.PENDING


class QuietWhilePending(Veil):
    quiet = True  # type: ignore[assignment]


class QuietOnlyWhenDone(Veil):
    @property
    def quiet(self) -> bool:
        return self.inner.poll() is TransferState.DONE


class DeafToCancel(Veil):
    def cancel(self) -> None:
        self.inner.poll()


class FailsMute(Veil):
    error = ""  # type: ignore[assignment]


class Forgets(Veil):
    """DONE is told once."""

    told = False

    def poll(self) -> TransferState:
        state = TransferState.PENDING if self.told else self.inner.poll()
        self.told = state is TransferState.DONE
        return state


def last_post_wins(peer: Shell, pieces: Pieces) -> Transfer:
    """One buffer for all batches: a batch that is not over reads what the next one asks for."""
    peer.posted = [*peer.posted[-1:], pieces]
    return Veil(peer.inner.post_read(peer.posted[0] if len(pieces) < 100 else pieces))


def skips_bad_pieces(peer: Shell, pieces: Pieces) -> Transfer:
    try:
        return peer.inner.post_read(pieces)
    except ValueError:
        return peer.inner.post_read(take(pieces, slice(0, 1)))


def reads_before_it_checks(peer: Shell, pieces: Pieces) -> Transfer:
    try:
        return peer.inner.post_read(pieces)
    except ValueError:
        peer.inner.post_read(take(pieces, slice(0, 1))).poll()
        raise


def opens_again(peer: Shell, pieces: Pieces) -> Transfer:
    try:
        return peer.inner.post_read(pieces)
    except TransportClosed:
        peer.inner.closed = False  # type: ignore[attr-defined]
        return peer.inner.post_read(pieces)


def one_byte_more(pieces: Pieces) -> Pieces:
    room = (
        (pieces.sizes > 1) & (pieces.sizes < 4000) & (pieces.remote_offsets > 0) & (pieces.local_offsets > 0)
    )
    step = room.astype(np.int64)
    return dataclasses.replace(
        pieces,
        local_offsets=pieces.local_offsets - step,
        remote_offsets=pieces.remote_offsets - step,
        sizes=pieces.sizes + step,
    )


class MutantTransport(MemoryTransport):
    """A memory transport whose peers post as a mutant does."""

    def __init__(self, post: Post, polls: int = 1) -> None:
        super().__init__(polls=polls)
        self.post = post

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        return Shell(super().connect(registration, timeout_s), self.post)


class TakesAnything(MutantTransport):
    """Takes garbage for a peer that is away just now."""

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        try:
            return super().connect(registration, timeout_s)
        except ProtocolError as e:
            raise TransportUnavailable("try again later") from e


class TakesStale(MutantTransport):
    """Keeps what it knew of a peer after the peer ended."""

    known: dict[bytes, Peer]

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        self.known = getattr(self, "known", {})
        try:
            self.known[registration] = super().connect(registration, timeout_s)
        except TransportUnavailable:
            return self.known[registration]
        return self.known[registration]


def by_posts(post: Post, polls: int = 1) -> Callable[[], MemoryTransport]:
    return lambda: MutantTransport(post, polls)


MUTANTS: dict[str, tuple[Callable[[], MemoryTransport], tuple[str, ...]]] = {
    "drops the last piece": (
        by_posts(altered(lambda p: take(p, slice(0, len(p) - 1)))),
        ("exact_bytes", "one_piece", "adjacent_pieces", "many_transfers"),
    ),
    "swaps two offsets": (by_posts(altered(swapped_offsets)), ("exact_bytes",)),
    "one byte more": (by_posts(altered(one_byte_more)), ("exact_bytes", "adjacent_pieces")),
    "first 1,024 pieces": (by_posts(altered(lambda p: take(p, slice(0, 1024)))), ("many_pieces",)),
    "32 MiB a piece": (
        by_posts(altered(lambda p: dataclasses.replace(p, sizes=np.minimum(p.sizes, 32 << 20)))),
        ("large_piece",),
    ),
    "neighbours by one side": (by_posts(altered(neighbours_by_one_side)), ("adjacent_pieces",)),
    "last post wins": (by_posts(last_post_wins), ("many_transfers",)),
    "done early": (by_posts(veiled(DoneEarly)), ("exact_bytes", "one_piece", "large_piece")),
    "pending when empty": (by_posts(veiled(PendingWhenEmpty)), ("empty_batch",)),
    "done is told once": (by_posts(veiled(Forgets)), ("one_piece",)),
    "quiet while pending": (by_posts(veiled(QuietWhilePending), polls=3), ("pending_is_not_quiet",)),
    "deaf to cancel": (by_posts(veiled(DeafToCancel)), ("cancelled",)),
    "skips bad pieces": (by_posts(skips_bad_pieces), ("out_of_range",)),
    "reads before it checks": (by_posts(reads_before_it_checks), ("out_of_range",)),
    "takes garbage for a peer": (lambda: TakesAnything(honest), ("garbage_registration",)),
    "connects to the stale": (lambda: TakesStale(honest), ("peer_closed", "peer_killed")),
    "opens again": (by_posts(opens_again), ("closing",)),
    "done when gone": (by_posts(veiled(DoneWhenGone)), ("peer_closed", "peer_killed", "peer_killed_during")),
    "pending when gone": (by_posts(veiled(PendingWhenGone)), ("peer_killed", "peer_killed_during")),
    "quiet only when done": (by_posts(veiled(QuietOnlyWhenDone)), ("peer_killed", "peer_killed_during")),
    "fails without a word": (by_posts(veiled(FailsMute)), ("peer_closed", "cancelled")),
}


@pytest.mark.parametrize(
    ("mutant", "check"), [(name, check) for name, (_, checks) in MUTANTS.items() for check in checks]
)
def test_a_broken_transport_is_caught(mutant: str, check: str) -> None:
    make, _ = MUTANTS[mutant]
    with MemoryRig(make, mutant, timeout_s=PATIENCE_S) as rig, pytest.raises(AssertionError):
        CHECKS[check](rig)


def test_every_check_catches_some_mutant() -> None:
    assert {check for _, checks in MUTANTS.values() for check in checks} == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_what_the_mutants_are_made_of_is_sound(check: str) -> None:
    with MemoryRig(by_posts(honest, polls=3), "honest") as rig:
        CHECKS[check](rig)
