"""The consumer's half of the ferry: carries out orders, moves reads on, keeps deadlines.

    orders -> ConsumerService -> OpenHandoffs -> Asking -> Links -> peers
                   Answers -------^                          |
                      ^--------------------------------------+

Per wake-up the work is: messages that came, hand-offs that are loading, links whose renewal is due.
Hand-offs that only wait cost nothing but their share of a renewal.
"""

import logging

import zmq

from stateferry.config import Config
from stateferry.ferry.ahead import ReadAhead
from stateferry.ferry.answers import Answers
from stateferry.ferry.asking import Asking
from stateferry.ferry.inquiries import Inquiries
from stateferry.ferry.keys import ControlKey
from stateferry.ferry.link import Link, LinkState
from stateferry.ferry.links import Links
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.open_handoffs import OpenHandoffs
from stateferry.ferry.reading import Fence, Reading, Tamper
from stateferry.layout.spec import CacheLayout
from stateferry.session import Cause, Clock, Close, Handoff, Load, Open, Outcome, producer_ranks
from stateferry.transport.base import Transport

logger = logging.getLogger(__name__)

LAPSE_LOOK_S = 0.05
"""How often hand-offs that only wait are looked at: there may be many, and a turn takes microseconds."""


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
        self.ahead = ReadAhead.into(room)
        self._asking = Asking(self._links, layout, clock)
        self.open_here = OpenHandoffs(self._links, self._asking, self.ahead, layout.tp_rank, clock)
        self.inquiries = Inquiries(context, poller, clock, config, layout, key, self._links.why_silent)
        self._answers = Answers(self._links, self._asking, self.open_here, clock)
        self._next_look_s = 0.0

    # -- orders from vLLM ------------------------------------------------------------------------

    def open(self, order: Open) -> None:
        """A request with an offer arrived: meet its producer and claim the offer."""
        self.inquiries.opened(order.request_id)
        offer = order.offer
        now_s = self._clock.now_s()
        handoff = Handoff(order.request_id, offer, (), opened_s=now_s, met_s=now_s, trace=order.trace)
        self.open_here.handoffs[order.request_id] = handoff
        links: list[Link] = []
        try:
            ranks = producer_ranks(self._layout.tp_rank, self._layout.tp_size, len(offer.ranks))
            for rank in ranks:
                links.append(self._links.meet(offer.ranks[rank]))
                links[-1].requests.add(order.request_id)  # so that the next one does not take its place
        except (ValueError, zmq.ZMQError) as e:
            for link in links:
                link.requests.discard(order.request_id)
            self.open_here.fail(handoff, str(e), Cause.PEER)
            return
        handoff.ranks = ranks
        for link in links:
            if link.refuses:
                link.requests.discard(order.request_id)  # should it answer, it is not asked for this one
                self.open_here.fail(handoff, link.reason, link.cause)
        for link in links:
            if link.state is LinkState.READY and not handoff.failure:
                self._asking.claim(link, handoff)
        reading = self.ahead.begin(
            handoff, self._clock.now_s(), self._config.transfer_timeout_s, allowed=order.ahead
        )
        if reading is not None:
            self.open_here.readings[order.request_id] = reading

    def load(self, order: Load, fence: Fence) -> None:
        """Blocks are there: read into them as soon as the links are ready."""
        handoff = self.open_here.handoffs.get(order.request_id)
        if handoff is None:
            logger.error("load ordered for request %s, which was never opened", order.request_id)
            self.open_here.refuse(order.request_id)
            return
        now_s = self._clock.now_s()
        handoff.order_load(order, now_s, self._config.transfer_timeout_s)
        if order.problem:
            handoff.fail(order.problem, Cause.TABLES)
        self.open_here.readings[order.request_id] = Reading(handoff, fence, now_s)

    def close_handoff(self, order: Close) -> None:
        """The request wants nothing more; blocks it was given stay ours until quiet."""
        self.ahead.close(order.request_id)
        self.inquiries.close(order.request_id)
        handoff = self.open_here.handoffs.get(order.request_id)
        if handoff is None:
            return
        handoff.close()
        reading = self.open_here.readings.get(order.request_id)
        if reading is not None:
            reading.cancel()
        elif handoff.settle(self._clock.now_s(), None, verified=True) is not None:
            self.open_here.end(handoff, Outcome.ABANDONED, None)

    # -- peers -----------------------------------------------------------------------------------

    def receive(self, socket: object) -> None:
        """Hear what a producer says."""
        if not self.inquiries.receive(socket):
            self._answers.receive(socket)

    @property
    def peers(self) -> dict[LinkState, int]:
        """How many producer ranks there are in each state."""
        return self._links.states()

    @property
    def link_count(self) -> int:
        """Producer ranks that are known."""
        return len(self._links)

    def _link_settled(self, link: Link) -> None:
        for request_id in list(link.requests):
            handoff = self.open_here.handoffs[request_id]
            if link.state is not LinkState.READY:
                self.open_here.fail(handoff, link.reason, link.cause)
            elif not handoff.failure:  # else another rank's failed, and the offer was given back
                handoff.met_s = self._clock.now_s()
                self._asking.claim(link, handoff)

    # -- time ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Post what can be posted, poll what was posted, settle what is over."""
        for reading in list(self.open_here.readings.values()):
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
                if not reading.defective:
                    logger.exception("could not go on with the hand-off of request %s", handoff.request_id)
                reading.defective = True
                handoff.fail(f"defect: {e!r}", Cause.DEFECT)
            self.open_here.settle(reading)
        self.ahead.look_after_stuck()

    def tick(self, heard_s: float) -> None:
        """Deadlines of links, and of claims and leases: better lost before vLLM gives any blocks. What peers
        had said by `heard_s` was read."""
        self.inquiries.tick(heard_s)
        self._links.tick(self._renew, heard_s)
        self._links.sweep(self.open_here.pending_peers)
        now_s = self._clock.now_s()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LAPSE_LOOK_S
        for handoff in self.open_here.handoffs.values():
            if handoff.failure:
                continue
            if handoff.claimed:
                why, cause = handoff.lapsed(now_s), Cause.LEASE
            else:
                patience_s = max(handoff.offer.lease_s, self._config.handshake_timeout_s)
                why, cause = self._asking.unanswered(handoff, now_s, patience_s), Cause.PEER
            if why:
                self.open_here.fail(handoff, why, cause)

    def next_deadline_s(self) -> float:
        """When `tick` has something to do; infinite if never."""
        return min(self._links.next_deadline_s(), self.inquiries.next_deadline_s())

    def close(self) -> None:
        """Drop all links. Pending transfers are cancelled where the library can."""
        self.open_here.close()
        self.inquiries.shut()
        self._links.close()

    def _renew(self, link: Link, now_s: float) -> None:
        self._asking.renew(link, [self.open_here.handoffs[r] for r in link.requests], now_s)
