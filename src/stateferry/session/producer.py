"""The producer's side of every hand-off of one rank: which blocks are kept for whom, until when.

    granted --claim--> claimed --release(s)--> finished
       |                  |
       +----- lease ends -+------------------> finished (expired)

A claim may overtake its grant: the response reaches the consumer while this rank's worker is still
in the step before the one that carries the grant. Such a claim is parked for `PARK_S`. A release may,
too, when the consumer wants nothing from the offer: then the grant ends as soon as it comes.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.layout.digest import table_digest
from stateferry.session.orders import Grant
from stateferry.wire.messages import (
    MAX_TEXT,
    Claim,
    ClaimAnswer,
    Release,
    ReleaseAnswer,
    Renewal,
    RenewalAnswer,
)

PARK_S = 5.0
MAX_PARKED = 4096
MAX_ENDED = 8192
"""How many ended hand-offs are remembered, so that a late claim is told what became of its offer."""


@dataclass(slots=True)
class Holding:
    """One hand-off whose blocks this rank keeps."""

    grant: Grant
    granted_s: float
    expires_s: float
    claimant: str = ""
    claimant_ranks: int = 0
    """The claimant's tensor-parallel size, as its first claim or release said."""
    claimed_ranks: frozenset[int] = frozenset()
    released_ranks: frozenset[int] = frozenset()

    @property
    def table_digest(self) -> str:
        """Name of the tables that were offered."""
        grant = self.grant
        return table_digest(grant.num_tokens, grant.block_ids, grant.first_blocks, grant.prefix_digest)


@dataclass(frozen=True, slots=True)
class Parked:
    """A claim that waits for its grant."""

    sender: Hashable
    claim: Claim
    until_s: float


@dataclass(slots=True)
class Counters:
    """What happened on this rank since start."""

    granted: int = 0
    claimed: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0
    deserted: int = 0
    """Of those: somebody had claimed them."""
    refused_claims: int = 0
    late_releases: int = 0
    late_renewals: int = 0
    refused_peers: int = 0
    """Connections that were turned away before their first message."""


def _may_be_of(holding: Holding, message: Claim | Release) -> bool:
    """Whether this hand-off is the sender's, or nobody's yet."""
    theirs = (message.claimant, message.tp_size)
    return not holding.claimant or (holding.claimant, holding.claimant_ranks) == theirs


def releases_expected(consumer_tp_size: int, producer_tp_size: int) -> int:
    """How many consumer ranks release one producer rank.

    Consumer rank d stands to producer ranks as the ranges do: with more consumers, several release
    one producer; with fewer, each releases several producers, once each.
    """
    return max(1, consumer_tp_size // producer_tp_size)


class Ledger:
    """All hand-offs that this rank has granted and not finished. One thread. No I/O."""

    def __init__(self, epoch: Epoch, tp_size: int, lease_s: float) -> None:
        self.counters = Counters()
        self._epoch = epoch
        self._tp_size = tp_size
        self._lease_s = lease_s
        self._holdings: dict[TransferId, Holding] = {}
        self._parked: OrderedDict[TransferId, list[Parked]] = OrderedDict()
        self._ended: OrderedDict[TransferId, str] = OrderedDict()
        self._look_at_s = float("inf")
        """Nothing ends before, for want of a renewal or a grant."""
        self._finished: list[RequestId] = []
        self._traced: list[tuple[Holding, bool]] = []
        self._renounced: list[TransferId] = []

    @property
    def open_count(self) -> int:
        """Hand-offs whose blocks are kept."""
        return len(self._holdings)

    @property
    def parked_count(self) -> int:
        """Claims that wait for their grant."""
        return sum(len(p) for p in self._parked.values())

    def grant(self, grant: Grant, now_s: float) -> list[tuple[Hashable, ClaimAnswer]]:
        """Start to keep a request's blocks. Returns answers to claims that were waiting for it."""
        self.counters.granted += 1
        if grant.transfer_id in self._ended or grant.transfer_id in self._holdings:
            # Given up before it was made, or a router gave one name to two prefills.
            self.counters.released += 1
            self._finished.append(grant.request_id)
            return []
        self._holdings[grant.transfer_id] = Holding(grant, now_s, now_s + self._lease_s)
        self._look_at_s = min(self._look_at_s, now_s + self._lease_s)
        waiting = self._parked.pop(grant.transfer_id, [])
        return [(p.sender, self._claim(p.claim, now_s)) for p in waiting]

    def withdraw(self, transfer_id: TransferId, reason: str, renounced: bool = False) -> None:
        """An offer that was promised will never be made; or, `renounced`, nobody will claim it."""
        holding = self._holdings.get(transfer_id)
        if holding is None:
            self._remember(transfer_id, reason)
        elif renounced and not holding.claimant:
            self.counters.released += 1
            self._end(holding, reason, released=True)

    def made(self, transfer_id: TransferId) -> Grant | str | None:
        """The offer if it is there to be claimed; what became of it; None: not heard of yet."""
        holding = self._holdings.get(transfer_id)
        return self._ended.get(transfer_id) if holding is None else holding.grant

    def claim(self, claim: Claim, sender: Hashable, now_s: float) -> ClaimAnswer | None:
        """Answer a claim; None: it is parked and will be answered by `grant` or `expire`."""
        known = claim.transfer_id in self._holdings or claim.transfer_id in self._ended
        if known or self.parked_count >= MAX_PARKED:
            return self._claim(claim, now_s)
        parked = self._parked.setdefault(claim.transfer_id, [])
        again = [p for p in parked if (p.claim.claimant, p.claim.tp_rank) == (claim.claimant, claim.tp_rank)]
        for former in again:
            # Its connection broke: over this one it will hear the answer.
            parked[parked.index(former)] = Parked(sender, claim, former.until_s)
        if not again:
            parked.append(Parked(sender, claim, now_s + PARK_S))
        self._look_at_s = min(self._look_at_s, now_s + PARK_S)
        return None

    def renew(self, renewal: Renewal, now_s: float) -> RenewalAnswer:
        """Extend leases. What has ended, or is another's, is named as lost, so that its reader stops."""
        held, lost = [], []
        for claim in renewal.claims:
            holding = self.held_for(claim.transfer_id, claim.claimant)
            if holding is None:
                lost.append(claim.transfer_id)
                self.counters.late_renewals += 1
            else:
                holding.expires_s = now_s + self._lease_s
                held.append(claim.transfer_id)
                self.counters.renewed += 1
        return RenewalAnswer(
            sequence=renewal.sequence, held=tuple(held), lost=tuple(lost), lease_s=self._lease_s
        )

    def release(self, release: Release) -> ReleaseAnswer:
        """One consumer rank needs the blocks no longer."""
        holding = self._holdings.get(release.transfer_id)
        if release.tp_rank >= release.tp_size:
            return ReleaseAnswer(transfer_id=release.transfer_id, known=False)
        if holding is None or not _may_be_of(holding, release):
            if holding is None and release.transfer_id not in self._ended:
                self._release_early(release)
            else:
                self.counters.late_releases += 1
            return ReleaseAnswer(transfer_id=release.transfer_id, known=False)
        holding.claimant, holding.claimant_ranks = release.claimant, release.tp_size
        holding.released_ranks |= {release.tp_rank}
        if len(holding.released_ranks) >= releases_expected(release.tp_size, self._tp_size):
            self.counters.released += 1
            self._end(holding, "was released by " + release.claimant, released=True)
            if not holding.claimed_ranks:
                self._renounced.append(release.transfer_id)
        return ReleaseAnswer(transfer_id=release.transfer_id, known=True)

    def expire(self, now_s: float) -> tuple[list[Holding], list[tuple[Hashable, ClaimAnswer]]]:
        """End what nobody renewed. Returns the hand-offs that ended and answers to parked claims.

        Looks only when something may end: the ferry calls it in every turn, and many may be kept.
        """
        if now_s < self._look_at_s:
            return [], []
        ended = [h for h in self._holdings.values() if h.expires_s <= now_s]
        for holding in ended:
            self.counters.expired += 1
            self.counters.deserted += bool(holding.claimant)
            self._end(holding, f"ended {self._lease_s:g} s after it was last heard of", released=False)
        answers: list[tuple[Hashable, ClaimAnswer]] = []
        for transfer_id in [t for t, ps in self._parked.items() if ps[0].until_s <= now_s]:
            answers += [(p.sender, self._claim(p.claim, now_s)) for p in self._parked.pop(transfer_id)]
        due_s = self.next_deadline_s()
        self._look_at_s = float("inf") if due_s is None else due_s
        return ended, answers

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        deadlines = [h.expires_s for h in self._holdings.values()]
        deadlines += [p[0].until_s for p in self._parked.values()]
        return min(deadlines, default=None)

    def held_for(self, transfer_id: TransferId, claimant: str) -> Holding | None:
        """The hand-off, while its blocks are kept for this claimant."""
        holding = self._holdings.get(transfer_id)
        return holding if holding is not None and holding.claimant == claimant != "" else None

    def take_finished(self) -> list[RequestId]:
        """Requests whose blocks may be freed, each once."""
        finished, self._finished = self._finished, []
        return finished

    def take_traced(self) -> list[tuple[Holding, bool]]:
        """Hand-offs of traced requests that ended, each once, and whether they were released."""
        traced, self._traced = self._traced, []
        return traced

    def take_renounced(self) -> list[TransferId]:
        """Transfers that were given back before they were granted or claimed, each once."""
        renounced, self._renounced = self._renounced, []
        return renounced

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other. For tests."""
        assert not self._holdings.keys() & self._ended.keys()
        assert not self._holdings.keys() & self._parked.keys()
        assert all(self._parked.values())
        assert len(self._ended) <= MAX_ENDED

    def _claim(self, claim: Claim, now_s: float) -> ClaimAnswer:
        holding = self._holdings.get(claim.transfer_id)
        if holding is None:
            became = self._ended.get(claim.transfer_id, "was never made by this engine")
            return self._refuse(claim, f"the offer {became}")
        if claim.tp_rank >= claim.tp_size:
            return self._refuse(
                claim, f"rank {claim.tp_rank} of {claim.tp_size} of {claim.claimant!r} is nobody"
            )
        if claim.table_digest != holding.table_digest:
            return self._refuse(
                claim,
                "the block tables that came with the offer are not those that this engine gave out: "
                "kv_transfer_params were changed on their way",
            )
        if not _may_be_of(holding, claim):
            return self._refuse(claim, f"the offer is already taken by {holding.claimant}")
        if claim.tp_rank in holding.released_ranks:
            return self._refuse(claim, f"rank {claim.tp_rank} of {claim.claimant} has released it before")
        # Whoever claimed it and did not hear so asks again, and is told the same.
        self.counters.claimed += claim.tp_rank not in holding.claimed_ranks
        holding.claimant, holding.claimant_ranks = claim.claimant, claim.tp_size
        holding.claimed_ranks |= {claim.tp_rank}
        holding.expires_s = now_s + self._lease_s
        return ClaimAnswer(transfer_id=claim.transfer_id, claimant=claim.claimant, lease_s=self._lease_s)

    def _refuse(self, claim: Claim, reason: str) -> ClaimAnswer:
        self.counters.refused_claims += 1
        return ClaimAnswer(transfer_id=claim.transfer_id, claimant=claim.claimant, reason=reason[:MAX_TEXT])

    def _release_early(self, release: Release) -> None:
        """A release overtook the grant: nothing was read yet, so one rank that gave up speaks for all.
        Its other ranks' claims stay parked, and are refused when their time is over.
        Another claimant, who waits for the same grant, may still have the offer."""
        parked = self._parked.pop(release.transfer_id, [])
        gone = (release.claimant, release.tp_rank)
        others = [p for p in parked if (p.claim.claimant, p.claim.tp_rank) != gone]
        if others:
            self._parked[release.transfer_id] = others
        if all(p.claim.claimant == release.claimant for p in others):
            self._remember(release.transfer_id, f"was released by {release.claimant} before it was granted")
            self._renounced.append(release.transfer_id)

    def _end(self, holding: Holding, became: str, released: bool) -> None:
        transfer_id = holding.grant.transfer_id
        if holding.grant.trace:
            self._traced.append((holding, released))
        del self._holdings[transfer_id]
        self._finished.append(holding.grant.request_id)
        self._remember(transfer_id, became)

    def _remember(self, transfer_id: TransferId, became: str) -> None:
        self._ended[transfer_id] = became
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
