"""What a consumer rank says to producer ranks about hand-offs: claims, renewals, releases."""

from collections.abc import Sequence

from stateferry.ferry.link import Link
from stateferry.ferry.links import Links
from stateferry.layout.spec import CacheLayout
from stateferry.session import RENEWALS_PER_LEASE, Clock, Handoff, claimant_name
from stateferry.wire import Claim, Claimed, Release, Renewal


def rank_of(link: Link, handoff: Handoff) -> int:
    """Which of the hand-off's producer ranks listens behind the link."""
    return handoff.offer.ranks.index(link.address)


class Asking:
    """In the name of one consumer rank. Sends without waiting. Ferry thread only."""

    def __init__(self, links: Links, layout: CacheLayout, clock: Clock) -> None:
        self._links = links
        self._layout = layout
        self._clock = clock

    def name_for(self, handoff: Handoff) -> str:
        """Whom we claim it for."""
        return claimant_name(self._layout.engine_id, handoff.request_id)

    def claim(self, link: Link, handoff: Handoff) -> None:
        """The offer is to be ours, by the tables that we were given."""
        link.claims_sent_s[handoff.request_id] = self._clock.now_s()
        link.ask(
            Claim(
                epoch=link.address.epoch,
                transfer_id=handoff.offer.transfer_id,
                claimant=self.name_for(handoff),
                tp_rank=self._layout.tp_rank,
                tp_size=self._layout.tp_size,
                table_digest=handoff.table_digest,
            )
        )

    def renew_in_time(self, link: Link, sent_s: float, lease_s: float) -> None:
        """A claim that was sent at `sent_s` was answered: its lease counts from then."""
        link.next_renewal_s = min(link.next_renewal_s, _due_s(sent_s, lease_s))

    def renew(self, link: Link, handoffs: Sequence[Handoff], now_s: float) -> None:
        """Keep the blocks of those of `handoffs`, which are open over the link, that have a lease there."""
        held = [h for h in handoffs if rank_of(link, h) in h.leases and not h.released]
        if not held:
            link.next_renewal_s = float("inf")
            return
        link.sequence += 1
        link.next_renewal_s = _due_s(now_s, min(h.leases[rank_of(link, h)].lease_s for h in held))
        claims = tuple(Claimed(h.offer.transfer_id, self.name_for(h)) for h in held)
        link.renew(Renewal(epoch=link.address.epoch, sequence=link.sequence, claims=claims), now_s)

    def release(self, handoff: Handoff, received: bool) -> None:
        """We want nothing (more) from the offer. Once only, and to nobody who refused us."""
        if handoff.released:
            return
        handoff.released = True
        for rank in handoff.ranks:
            link = self._links.find(handoff.offer.ranks[rank])
            if link is None or rank in handoff.refused:
                continue
            link.ask(
                Release(
                    epoch=link.address.epoch,
                    transfer_id=handoff.offer.transfer_id,
                    claimant=self.name_for(handoff),
                    tp_rank=self._layout.tp_rank,
                    tp_size=self._layout.tp_size,
                    received=received,
                ),
                # Unheard, the blocks are kept as long as they are promised, and no longer.
                until_s=self._clock.now_s() + handoff.offer.lease_s,
            )

    def unanswered(self, handoff: Handoff, now_s: float, patience_s: float) -> str:
        """Why to wait no longer for the answer to a claim; empty: go on waiting. Its link is doubted then."""
        for rank in handoff.ranks:
            link = self._links.find(handoff.offer.ranks[rank])
            sent_s = link.claims_sent_s.get(handoff.request_id, now_s) if link is not None else now_s
            if link is not None and now_s - sent_s >= patience_s:
                link.broke = True
                return f"producer rank {rank} did not answer the claim within {patience_s:g} s"
        return ""


def _due_s(sent_s: float, lease_s: float) -> float:
    return sent_s + max(lease_s, 0.001) / RENEWALS_PER_LEASE
