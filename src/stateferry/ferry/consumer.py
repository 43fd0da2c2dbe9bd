"""The consumer's half of the ferry: links to producers, open hand-offs, reads in flight.

Per wake-up the work is: messages that came, hand-offs that are loading, links whose renewal is due.
Hand-offs that only wait cost nothing but their share of a renewal.
"""

import logging

import zmq

from stateferry.config import Config
from stateferry.errors import ProtocolError
from stateferry.ferry.ahead import ReadAhead
from stateferry.ferry.asking import claim_of, release_of
from stateferry.ferry.keys import ControlKey
from stateferry.ferry.link import Link, LinkState
from stateferry.ferry.links import Links
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.outbox import Ended
from stateferry.ferry.quiet import LogLimit
from stateferry.ferry.reading import Fence, Reading, Tamper
from stateferry.ferry.reports import peer_of, report_of
from stateferry.ids import RequestId, TransferId, shown
from stateferry.layout.spec import CacheLayout
from stateferry.session import (
    RENEWALS_PER_LEASE,
    Cause,
    Clock,
    Close,
    Handoff,
    Load,
    Open,
    Outcome,
    Report,
    claimant_name,
    producer_ranks,
)
from stateferry.transport.base import Peer, Transport
from stateferry.wire import (
    ClaimAnswer,
    Claimed,
    DigestAnswer,
    Message,
    Refusal,
    Renewal,
    RenewalAnswer,
    Welcome,
    decode_frames,
)

logger = logging.getLogger(__name__)

LAPSE_LOOK_S = 0.05
"""How often hand-offs that only wait are looked at: there may be many, and a turn takes microseconds."""

MESSAGES_PER_TURN = 256
"""Messages of one peer that are read before everybody else gets a turn."""


class ConsumerService:
    """All hand-offs that this rank reads. Ferry thread only."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        clock: Clock,
        config: Config,
        layout: CacheLayout,
        encoded_layout: bytes,
        software: str,
        transport: Transport,
        memory: LocalMemory,
        tamper: Tamper | None,
        key: ControlKey | None,
        room: CacheLayout | None = None,
    ) -> None:
        self.ahead = ReadAhead.into(room)
        self._clock = clock
        self._config = config
        self._layout = layout
        self._memory = memory
        self._tamper = tamper
        self._links = Links(
            context,
            poller,
            clock,
            config,
            layout,
            encoded_layout,
            software,
            transport,
            key,
            on_settled=self._link_settled,
            room=room,
        )
        self.tally = self._links.tally
        self._handoffs: dict[RequestId, Handoff] = {}
        self._readings: dict[RequestId, Reading] = {}
        self._ended: list[Ended] = []
        self._lost: list[RequestId] = []
        self._next_look_s = 0.0
        self._warnings = LogLimit()

    # -- orders from vLLM ------------------------------------------------------------------------

    def open(self, order: Open) -> None:
        """A request with an offer arrived: meet its producer and claim the offer."""
        offer = order.offer
        now_s = self._clock.now_s()
        handoff = Handoff(order.request_id, offer, (), opened_s=now_s, met_s=now_s, trace=order.trace)
        self._handoffs[order.request_id] = handoff
        try:
            ranks = producer_ranks(self._layout.tp_rank, self._layout.tp_size, len(offer.ranks))
            links = [self._links.meet(offer.ranks[rank]) for rank in ranks]
        except (ValueError, zmq.ZMQError) as e:
            self._fail(handoff, str(e), Cause.PEER)
            return
        handoff.ranks = ranks
        for link in links:
            link.requests.add(order.request_id)
            if link.state is LinkState.FAILED:
                self._fail(handoff, link.reason, link.cause)
            elif link.state is LinkState.READY:
                self._claim(link, handoff)
        reading = self.ahead.begin(handoff, self._clock.now_s(), self._config.transfer_timeout_s)
        if reading is not None:
            self._readings[order.request_id] = reading

    def load(self, order: Load, fence: Fence) -> None:
        """Blocks are there: read into them as soon as the links are ready."""
        handoff = self._handoffs.get(order.request_id)
        if handoff is None:
            logger.error("load ordered for request %s, which was never opened", order.request_id)
            report = Report(
                order.request_id, TransferId(""), Outcome.FAILED, "was never opened", Cause.DEFECT
            )
            self._ended.append(Ended(report, had_blocks=True))
            return
        now_s = self._clock.now_s()
        handoff.order_load(order, now_s, self._config.transfer_timeout_s)
        self._readings[order.request_id] = Reading(handoff, fence, now_s)
        if order.problem:
            handoff.fail(order.problem, Cause.TABLES)

    def close_handoff(self, order: Close) -> None:
        """The request wants nothing more; blocks it was given stay ours until quiet."""
        self.ahead.close(order.request_id)
        handoff = self._handoffs.get(order.request_id)
        if handoff is None:
            return
        handoff.close()
        reading = self._readings.get(order.request_id)
        if reading is not None:
            reading.cancel()
        elif handoff.settle(self._clock.now_s(), None, verified=True) is not None:
            self._end(handoff, Outcome.ABANDONED, None)

    # -- messages --------------------------------------------------------------------------------

    def receive(self, socket: object) -> None:
        """Read what a link's socket has; the rest at the next turn, so that nobody can hold up the thread."""
        link = self._links.of_socket(socket)
        for _ in range(MESSAGES_PER_TURN if link is not None else 0):
            assert link is not None
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                self._handle(link, decode_frames(frames))
            except ProtocolError as e:
                self._warn(link, f"sent what cannot be read: {e}")

    def _warn(self, link: Link, what: str) -> None:
        """Say what a peer did, but not as often as it likes."""
        if self._warnings.may_log(self._clock.now_s()):
            peer = f"{link.address.host}:{link.address.port}"
            logger.warning("%s %s%s", peer, what, self._warnings.left_out())

    def _handle(self, link: Link, message: Message) -> None:
        if link.state is LinkState.GREETING and isinstance(message, Welcome | Refusal):
            self._links.welcomed(link, message)
        elif isinstance(message, Welcome):
            if link.greeting_again:
                self._links.welcomed(link, message)
        elif isinstance(message, Refusal):
            if message.epoch not in (0, link.address.epoch):
                # The engine behind this address is another one now: nothing it said before holds.
                self._links.fail(link, message.reason)
            else:
                # One question of many; whoever asked it goes without an answer and has a deadline.
                self._warn(link, f"refused a question: {message.reason}")
        elif isinstance(message, ClaimAnswer):
            self._claim_answered(link, message)
        elif isinstance(message, RenewalAnswer):
            self._renewed(link, message)
        elif isinstance(message, DigestAnswer):
            for request_id in link.requests & self._readings.keys():
                reading = self._readings[request_id]
                if reading.handoff.offer.transfer_id == message.transfer_id:
                    reading.digest_answered(link, message)

    def _claim_answered(self, link: Link, answer: ClaimAnswer) -> None:
        for request_id in link.requests:
            handoff = self._handoffs[request_id]
            if (handoff.offer.transfer_id, self._name_for(handoff)) != (answer.transfer_id, answer.claimant):
                continue
            sent_s = link.claims_sent_s.pop(request_id, None)
            if sent_s is None:
                continue
            before = handoff.failure
            handoff.claim_answered(self._rank_of(link, handoff), answer, sent_s)
            if handoff.failure and not before:
                self._report_lost(handoff)
            link.next_renewal_s = min(
                link.next_renewal_s, sent_s + max(answer.lease_s, 0.001) / RENEWALS_PER_LEASE
            )
            return

    def _renewed(self, link: Link, answer: RenewalAnswer) -> None:
        sent_s = link.renewals_sent_s.pop(answer.sequence, None)
        if sent_s is None:
            return
        held, lost = set(answer.held), set(answer.lost)
        for request_id in list(link.requests):
            handoff = self._handoffs[request_id]
            rank = self._rank_of(link, handoff)
            if handoff.offer.transfer_id in held:
                handoff.renewed(rank, sent_s, answer.lease_s)
                self.tally.add("stateferry_renewals", "consumer")
            elif handoff.offer.transfer_id in lost and rank in handoff.leases:
                reason = f"producer rank {rank} does not hold transfer {shown(handoff.offer.transfer_id)}"
                self._fail(handoff, reason, Cause.LEASE)

    # -- time ------------------------------------------------------------------------------------

    @property
    def reading_count(self) -> int:
        """Hand-offs that have blocks and are not settled, those in quarantine aside."""
        return sum(not r.quarantined for r in self._readings.values())

    @property
    def quarantined_count(self) -> int:
        """Hand-offs past their deadline in whose blocks bytes may still land."""
        return sum(r.quarantined for r in self._readings.values()) + self.ahead.stuck_count

    @property
    def open_count(self) -> int:
        """Hand-offs that are not ended, loading or not."""
        return len(self._handoffs) + self.ahead.open_count

    @property
    def peers(self) -> dict[LinkState, int]:
        """How many producer ranks there are in each state."""
        return self._links.states()

    @property
    def link_count(self) -> int:
        """Producer ranks that are known."""
        return len(self._links)

    @property
    def moving(self) -> bool:
        """Whether something was posted and may end any moment: poll soon."""
        return any(r.posted and not r.quarantined for r in self._readings.values())

    def advance(self) -> None:
        """Post what can be posted, poll what was posted, settle what is over."""
        for reading in list(self._readings.values()):
            handoff = reading.handoff
            found = {rank: self._links.find(handoff.offer.ranks[rank]) for rank in handoff.ranks}
            try:
                reading.advance(
                    {rank: link for rank, link in found.items() if link is not None},
                    self.ahead.room.layout if reading.ahead and self.ahead.room else self._layout,
                    self._memory,
                    self._config,
                    self._tamper,
                    self._clock,
                    self._links.greet_again,
                )
            except Exception as e:  # a defect; it must not take the others' turn away
                logger.exception("could not go on with the hand-off of request %s", handoff.request_id)
                handoff.fail(f"defect: {e}", Cause.DEFECT)
            now_s = self._clock.now_s()
            outcome = reading.settle(now_s)
            if outcome is not None and reading.ahead:
                self._end_ahead(reading, outcome)
            elif outcome is not None:
                self._end(handoff, outcome, reading)
            elif reading.overdue(now_s) and not reading.quarantined:
                self._quarantine(reading, now_s)
        self.ahead.look_after_stuck()

    def tick(self) -> None:
        """Deadlines of links, and of claims and leases: better lost before vLLM gives any blocks."""
        self._links.tick(self._renew)
        self._links.sweep(self._pending_peers)
        now_s = self._clock.now_s()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LAPSE_LOOK_S
        for handoff in self._handoffs.values():
            if handoff.failure:
                continue
            if handoff.claimed:
                why, cause = handoff.lapsed(now_s), Cause.LEASE
            else:
                why, cause = self._unanswered(handoff, now_s), Cause.PEER
            if why:
                self._fail(handoff, why, cause)

    def next_deadline_s(self) -> float:
        """When `tick` has something to do; infinite if never."""
        return self._links.next_deadline_s()

    def take_ended(self) -> list[Ended]:
        """Hand-offs that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_lost(self) -> list[RequestId]:
        """Requests whose offer turned out to be worth nothing before blocks were given."""
        lost, self._lost = self._lost, []
        return lost

    def wind_down(self, reason: str) -> None:
        """After a defect of the ferry: fail what is open, and report what nothing can land in any more.

        Called again until `open_count` is 0, which a read that never becomes quiet prevents.
        """
        self.ahead.wind_down()
        for handoff in list(self._handoffs.values()):
            handoff.fail(reason, Cause.DEFECT)
            reading = self._readings.get(handoff.request_id)
            if reading is None or (reading.ahead and _stilled(reading)):
                self._lost.append(handoff.request_id)
                self._readings.pop(handoff.request_id, None)
            elif _stilled(reading):
                report = self._report(handoff, Outcome.FAILED, reading)
                self._ended.append(Ended(report, had_blocks=True))
                del self._readings[handoff.request_id]
            elif reading.overdue(self._clock.now_s()) and not reading.quarantined:
                self._quarantine(reading, self._clock.now_s())
                continue
            else:
                continue
            del self._handoffs[handoff.request_id]

    def close(self) -> None:
        """Drop all links. Pending transfers are cancelled where the library can."""
        for reading in self._readings.values():
            reading.cancel()
        self.ahead.cancel()
        for handoff in list(self._handoffs.values()):
            self._release(handoff, received=False)
        self._links.close()

    # -- inside ----------------------------------------------------------------------------------

    def _unanswered(self, handoff: Handoff, now_s: float) -> str:
        """Why to wait no longer for the answer to a claim; empty: go on waiting."""
        patience_s = max(handoff.offer.lease_s, self._config.handshake_timeout_s)
        for rank in handoff.ranks:
            link = self._links.find(handoff.offer.ranks[rank])
            sent_s = link.claims_sent_s.get(handoff.request_id, now_s) if link is not None else now_s
            if now_s - sent_s >= patience_s:
                return f"producer rank {rank} did not answer the claim within {patience_s:g} s"
        return ""

    def _link_settled(self, link: Link) -> None:
        for request_id in list(link.requests):
            handoff = self._handoffs[request_id]
            if link.state is LinkState.READY:
                handoff.met_s = self._clock.now_s()
                self._claim(link, handoff)
            else:
                self._fail(handoff, link.reason, link.cause)

    def _claim(self, link: Link, handoff: Handoff) -> None:
        link.claims_sent_s[handoff.request_id] = self._clock.now_s()
        link.send(claim_of(handoff, link.address, self._layout, self._name_for(handoff)))

    def _renew(self, link: Link, now_s: float) -> None:
        open_here = (self._handoffs[r] for r in link.requests)
        held = [h for h in open_here if self._rank_of(link, h) in h.leases and not h.released]
        if not held:
            link.next_renewal_s = float("inf")
            return
        link.sequence += 1
        lease_s = min(h.leases[self._rank_of(link, h)].lease_s for h in held)
        link.next_renewal_s = now_s + lease_s / RENEWALS_PER_LEASE
        claims = tuple(Claimed(h.offer.transfer_id, self._name_for(h)) for h in held)
        link.renew(Renewal(epoch=link.address.epoch, sequence=link.sequence, claims=claims), now_s)

    def _name_for(self, handoff: Handoff) -> str:
        return claimant_name(self._layout.engine_id, handoff.request_id)

    def _rank_of(self, link: Link, handoff: Handoff) -> int:
        return handoff.offer.ranks.index(link.address)

    def _fail(self, handoff: Handoff, reason: str, cause: Cause) -> None:
        before = handoff.failure
        handoff.fail(reason, cause)
        if not before:
            self._report_lost(handoff)

    def _report_lost(self, handoff: Handoff) -> None:
        if handoff.load is None:
            self._lost.append(handoff.request_id)
            self._release(handoff, received=False)

    def _quarantine(self, reading: Reading, now_s: float) -> None:
        """Nothing more can be done for it but wait. The producer need not: what it reads is worth nothing."""
        reading.quarantined = True
        handoff = reading.handoff
        logger.warning(
            "quarantine: request=%s transfer=%s peer=%s age_s=%.1f: its read does not end; "
            "its blocks stay out of use until it does. Reason: %s",
            handoff.request_id,
            shown(handoff.offer.transfer_id),
            peer_of(handoff),
            now_s - reading.ordered_s,
            handoff.failure or "its request was closed",
        )
        self._release(handoff, received=False)
        if reading.ahead:
            self.ahead.keep_stuck(reading)
            self._without(reading)

    def _end_ahead(self, reading: Reading, outcome: Outcome) -> None:
        """vLLM has given no blocks yet, so nobody there waits to hear of it but our own scheduler half."""
        if outcome is Outcome.RECEIVED:
            self._end(reading.handoff, outcome, reading)
            self.ahead.arrived(reading)
            return
        self.ahead.gone(reading)
        self._release(reading.handoff, received=False)
        self._without(reading)

    def _without(self, reading: Reading) -> None:
        """Go on with a hand-off whose read ahead came to nothing."""
        handoff = reading.handoff
        del self._readings[handoff.request_id]
        if handoff.closing:
            self._end(handoff, Outcome.ABANDONED, None)
            return
        self._handoffs[handoff.request_id] = self.ahead.fall_back(reading)
        if not reading.tried:
            self._lost.append(handoff.request_id)

    def _pending_peers(self) -> set[Peer]:
        parts = (part for reading in self._readings.values() for part in reading.parts)
        return {part.peer for part in parts if part.restless} | self.ahead.pending_peers()

    def _release(self, handoff: Handoff, received: bool) -> None:
        if handoff.released:
            return
        handoff.released = True
        for rank in handoff.ranks:
            link = self._links.find(handoff.offer.ranks[rank])
            if link is None or rank in handoff.refused:
                continue
            name = self._name_for(handoff)
            link.send(release_of(handoff, link.address, self._layout, name, received))

    def _end(self, handoff: Handoff, outcome: Outcome, reading: Reading | None) -> None:
        # The release goes first: the producer's engine steps without pause until it has it.
        self._release(handoff, received=outcome is Outcome.RECEIVED)
        for rank in handoff.ranks:
            link = self._links.find(handoff.offer.ranks[rank])
            if link is not None:
                link.requests.discard(handoff.request_id)
                link.claims_sent_s.pop(handoff.request_id, None)
                link.idle_since_s = self._clock.now_s()
                if link.peer is not None and not link.peer.usable:
                    self._links.greet_again(link)
        del self._handoffs[handoff.request_id]
        self._readings.pop(handoff.request_id, None)
        if reading is not None and reading.quarantined:
            logger.warning("quarantine over: request=%s: nothing can land any more", handoff.request_id)
        if handoff.cause is Cause.LEASE:
            self.tally.add("stateferry_lease_losses", "consumer")
        report = self._report(handoff, outcome, reading)
        self._ended.append(Ended(report, had_blocks=reading is not None and not reading.ahead))

    def _report(self, handoff: Handoff, outcome: Outcome, reading: Reading | None) -> Report:
        return report_of(handoff, outcome, reading, self._layout.tp_rank, self._clock)


def _stilled(reading: Reading) -> bool:
    """Stop a read and look once, by its transfers alone. True: nothing can land any more."""
    reading.cancel()
    for part in reading.parts:
        part.transfer.poll()
    return not any(part.restless for part in reading.parts)
