"""One hand-off that has blocks: from vLLM's load order to its outcome.

wait for links and fence -> plan -> post -> poll, try again -> digests (if asked) -> settle
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateferry.config import Config, Verify
from stateferry.errors import StateFerryError, TransportError
from stateferry.ferry.link import Link, LinkState
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.part import Part, Poster
from stateferry.ids import shown
from stateferry.layout.blocks import concatenate
from stateferry.layout.digest import bytes_digest
from stateferry.layout.plan import Plan
from stateferry.layout.spec import CacheLayout, GroupKind, Pieces
from stateferry.session import (
    Cause,
    Clock,
    GroupLoad,
    Handoff,
    Outcome,
    ReadStatus,
    Recovery,
    claimant_name,
)
from stateferry.transport.base import Peer, Transfer
from stateferry.wire import DigestAnswer, DigestRequest

logger = logging.getLogger(__name__)

Fence = Callable[[], bool]
"""True once earlier device work can no longer write into the destination blocks. Does not block."""

Tamper = Callable[[Mapping[str, Any], CacheLayout, Plan, tuple[GroupLoad, ...]], list[Pieces]]
"""Damage on purpose: (what to do, our layout, plan with one tensor a strip, loads) -> pieces a group."""


def no_fence() -> bool:
    """For memory that only the CPU writes."""
    return True


@dataclass(slots=True)
class Reading:
    """What is known of one load. Ferry thread only."""

    handoff: Handoff
    fence: Fence
    ordered_s: float
    planned_s: float = 0.0
    """When the plan was begun; 0: it was not."""
    parts: list[Part] = field(default_factory=list)
    """One per producer rank, from the post on."""
    posted: bool = False
    posted_s: float = 0.0
    post_s: float = 0.0
    done_s: float = 0.0
    pieces_by_group: tuple[int, ...] = ()
    retried_s: list[float] = field(default_factory=list)
    bytes_by_group: tuple[int, ...] = ()
    expected_digests: dict[int, tuple[str, ...]] | None = None
    """Our own digests by producer rank, once the bytes are in; None before, or if none are needed."""
    verified: bool = False
    cancelled: bool = False
    ahead: bool = False
    """It reads into the waiting room, before vLLM has given any blocks."""
    tried: bool = False
    """Producers were there and the read was to be posted, whatever came of it."""
    quarantined: bool = False
    """Its deadline is over and bytes may still land: nobody gets its blocks before they cannot."""
    defective: bool = False
    """Going on with it met a defect, which is logged once: it may be met again in every turn."""

    def advance(
        self,
        links: Mapping[int, Link],
        layout: CacheLayout,
        memory: LocalMemory,
        config: Config,
        tamper: Tamper | None,
        clock: Clock,
        greet_again: Callable[[Link], None],
    ) -> None:
        """Do what can be done now. `links` are by producer rank, those that are known.

        Errors end up in the hand-off, not in the caller.
        """
        if self.handoff.failure and not self.cancelled:
            self.cancel()
        if not self.posted:
            ready = [links[r] for r in self.handoff.ranks if r in links and links[r].state is LinkState.READY]
            if len(ready) == len(self.handoff.ranks) and not self.handoff.failure and not self.cancelled:
                self._post(ready, layout, memory, config, tamper, clock)
            return
        hopeful = self.handoff.hopeful(clock.now_s())
        for part in self.parts:
            link = links.get(part.rank)
            if part.advance(link, hopeful, greet_again) and link is not None:
                if config.testing:
                    memory.fill(part.batch, 0xFF)
                self.retried_s.append(clock.now_s())
                part.post_again(link, self._poster(config))
        if not self.done_s and all(part.done for part in self.parts):
            self.done_s = clock.now_s()
            self.verified = self._verify(config) is Verify.OFF
        # Before a claim is answered the producer rank may not have heard of the offer itself yet.
        held = self.handoff.claimed and not self.handoff.failure
        if self.done_s and held and not self.verified and self.expected_digests is None:
            self._ask_digests(links, layout, memory, self._verify(config))

    def settle(self, now_s: float) -> Outcome | None:
        """The outcome, if this hand-off is over."""
        return self.handoff.settle(now_s, self.status(), self.verified)

    def overdue(self, now_s: float) -> bool:
        """Whether bytes may land past the deadline."""
        return self.handoff.overdue(now_s, self.status())

    def cancel(self) -> None:
        """Stop early where the library can."""
        self.cancelled = True
        for part in self.parts:
            part.transfer.cancel()

    def digest_answered(self, link: Link, answer: DigestAnswer) -> None:
        """Compare the producer's digests with ours; the last good one makes the hand-off verified."""
        if self.expected_digests is None:
            return
        rank = self.handoff.offer.ranks.index(link.address)
        expected = self.expected_digests.pop(rank, None)
        if answer.reason:
            self.handoff.fail(f"producer rank {rank} gave no digest: {answer.reason}", Cause.DIGEST)
        elif expected is not None and expected != answer.digests:
            groups = [i for i, (a, b) in enumerate(zip(expected, answer.digests, strict=False)) if a != b]
            self.handoff.fail(
                f"digests of entries {groups} of transfer {shown(self.handoff.offer.transfer_id)} differ: "
                "the bytes that arrived are not the bytes that were computed",
                Cause.DIGEST,
            )
        elif not self.expected_digests:
            self.verified = True

    def status(self) -> ReadStatus | None:
        """What all parts say together, as of the last `advance`; None: nothing was posted."""
        if not self.posted:
            return None
        done = all(part.done for part in self.parts)
        error = next((part.error for part in self.parts if part.error), "")
        arrived = sum(part.transfer.bytes_done for part in self.parts)
        if done and arrived != sum(self.bytes_by_group):
            error = error or f"{arrived} bytes arrived, {sum(self.bytes_by_group)} were expected"
        return ReadStatus(done=done, quiet=not any(part.restless for part in self.parts), error=error)

    def _post(
        self,
        links: Sequence[Link],
        layout: CacheLayout,
        memory: LocalMemory,
        config: Config,
        tamper: Tamper | None,
        clock: Clock,
    ) -> None:
        load, offer = self.handoff.load, self.handoff.offer
        assert load is not None
        try:
            if not self.fence():
                return
            self.tried = True
            self.planned_s = clock.now_s()
            plans = [link.room_plan if self.ahead else link.plan for link in links]
            by_link = [_merged_pieces(plan, load.groups) for plan in plans]
            self.bytes_by_group = _check_bytes(layout, load.groups, by_link)
            # Faults are the transport's; what else is ordered is done to the pieces here.
            damage = {key: what for key, what in (offer.tamper or {}).items() if key != "faults"}
            if config.testing:
                for pieces in by_link:
                    memory.fill(concatenate(pieces), 0x00 if damage else 0xFF)
            if config.testing and tamper is not None and damage:
                by_link = [tamper(damage, layout, plan, load.groups) for plan in plans if plan]
                self.bytes_by_group = tuple(
                    sum(pieces[i].total_bytes for pieces in by_link) for i in range(len(load.groups))
                )
            batches = [concatenate(pieces) for pieces in by_link]
            self.posted_s = clock.now_s()
            post = self._poster(config)
            for rank, link, batch in zip(self.handoff.ranks, links, batches, strict=True):
                assert link.peer is not None
                transfer = post(link.peer, batch, 1)
                recovery = Recovery(config.read_retries)
                self.parts.append(Part(rank, batch, link.peer, link.connections, transfer, recovery))
                self.posted = True
            self.post_s = clock.now_s() - self.posted_s
            self.pieces_by_group = tuple(
                sum(len(pieces[i]) for pieces in by_link) for i in range(len(load.groups))
            )
        except (StateFerryError, ValueError) as e:  # tables that do not fit; no defect of ours
            # What the transport refuses to begin is a read that failed; all else are tables.
            cause = Cause.READ if isinstance(e, TransportError) else Cause.TABLES
            self.handoff.fail(f"could not post: {e}", cause)
        except Exception as e:  # a defect must fail this request, not the thread
            logger.exception("could not post the reads of request %s", self.handoff.request_id)
            self.handoff.fail(f"could not post: {e}", Cause.DEFECT)

    def _poster(self, config: Config) -> Poster:
        orders = (self.handoff.offer.tamper or {}).get("faults", ()) if config.testing else ()

        def post(peer: Peer, batch: Pieces, read: int) -> Transfer:
            if config.testing:
                peer.announce(read, orders)
            return peer.post_read(batch)

        return post

    def _verify(self, config: Config) -> Verify:
        """Under test a hand-off may ask for digests, so that one engine is tried with and without."""
        wanted = (self.handoff.offer.tamper or {}).get("verify") if config.testing else None
        return next((level for level in Verify if level.value == wanted), config.verify)

    def _ask_digests(
        self, links: Mapping[int, Link], layout: CacheLayout, memory: LocalMemory, verify: Verify
    ) -> None:
        load = self.handoff.load
        assert load is not None
        groups = [
            g for g in load.groups if verify is Verify.ALL or layout.groups[g.group].kind is GroupKind.STATE
        ]
        self.expected_digests = {}
        for rank in self.handoff.ranks:
            link = links[rank]
            self.expected_digests[rank] = tuple(
                bytes_digest(pieces, "local", memory.read)
                for pieces in _plan_pieces(link.room_digest_plan if self.ahead else link.digest_plan, groups)
            )
            link.ask(
                DigestRequest(
                    epoch=link.address.epoch,
                    transfer_id=self.handoff.offer.transfer_id,
                    claimant=claimant_name(layout.engine_id, self.handoff.request_id),
                    groups=tuple(g.group for g in groups),
                    first_blocks=tuple(g.first_block for g in groups),
                    block_counts=tuple(len(g.remote_block_ids) for g in groups),
                )
            )


def _plan_pieces(plan: Plan | None, groups: Sequence[GroupLoad]) -> list[Pieces]:
    assert plan is not None
    return [plan.pieces(g.group, g.local_block_ids, g.remote_block_ids) for g in groups]


def _merged_pieces(plan: Plan | None, groups: Sequence[GroupLoad]) -> list[Pieces]:
    assert plan is not None
    return [plan.merged_pieces(g.group, g.local_block_ids, g.remote_block_ids) for g in groups]


def _check_bytes(
    layout: CacheLayout, groups: Sequence[GroupLoad], by_link: Sequence[Sequence[Pieces]]
) -> tuple[int, ...]:
    """Bytes per group as our own layout says, which all links together must fill exactly.

    Raises ValueError where they do not: a block would keep stale bytes.
    """
    totals = []
    for i, load in enumerate(groups):
        expected = len(load.local_block_ids) * sum(
            t.block_bytes for layer in layout.groups[load.group].layers for t in layer.tensors
        )
        planned = sum(pieces[i].total_bytes for pieces in by_link)
        if planned != expected:
            raise ValueError(f"group {load.group}: {planned} bytes planned, its blocks hold {expected}")
        totals.append(planned)
    return tuple(totals)
