"""What producer ranks say to a consumer rank, and what follows from it for its hand-offs.

Peers are untrusted: what cannot be read, or was not asked for, changes nothing and is logged now and then.
"""

import logging

import zmq

from stateferry.errors import ProtocolError
from stateferry.ferry.asking import Asking, rank_of
from stateferry.ferry.link import Link, LinkState
from stateferry.ferry.links import Links
from stateferry.ferry.open_handoffs import OpenHandoffs
from stateferry.ferry.quiet import LogLimit
from stateferry.ids import shown
from stateferry.session import Cause, Clock
from stateferry.wire import (
    Claim,
    ClaimAnswer,
    DigestAnswer,
    DigestRequest,
    Message,
    Refusal,
    Release,
    ReleaseAnswer,
    RenewalAnswer,
    Welcome,
    decode_frames,
)

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 256
"""Messages of one peer that are read before everybody else gets a turn."""


class Answers:
    """To one consumer rank. Ferry thread only."""

    def __init__(self, links: Links, asking: Asking, open_here: OpenHandoffs, clock: Clock) -> None:
        self._links = links
        self._asking = asking
        self._open = open_here
        self._clock = clock
        self._warnings = LogLimit()

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
            except Exception:  # a defect, which one peer's message must not turn into everybody's
                logger.exception("could not take what %s:%d said", link.address.host, link.address.port)

    def _warn(self, link: Link, what: str) -> None:
        """Say what a peer did, but not as often as it likes."""
        if self._warnings.may_log(self._clock.now_s()):
            peer = f"{link.address.host}:{link.address.port}"
            logger.warning("%s %s%s", peer, what, self._warnings.left_out())

    def _handle(self, link: Link, message: Message) -> None:
        if link.asks and isinstance(message, Welcome | Refusal):
            self._links.welcomed(link, message)
        elif isinstance(message, Welcome):
            if link.greeting_again:
                self._links.welcomed(link, message)
        elif isinstance(message, Refusal):
            if message.epoch not in (0, link.address.epoch):
                # The engine behind this address is another one now: nothing it said before holds. It says so
                # to everything that was queued for its former life; that is one failure, and one pause.
                if link.state is not LinkState.FAILED:
                    self._links.fail(link, message.reason)
            else:
                # One question of many; whoever asked it goes without an answer and has a deadline.
                self._warn(link, f"refused a question: {message.reason}")
        elif isinstance(message, ClaimAnswer):
            link.questions.answered(Claim, message.transfer_id, message.claimant)
            self._claim_answered(link, message)
        elif isinstance(message, RenewalAnswer):
            self._renewed(link, message)
        elif isinstance(message, ReleaseAnswer):
            link.questions.answered(Release, message.transfer_id)
        elif isinstance(message, DigestAnswer):
            link.questions.answered(DigestRequest, message.transfer_id)
            for request_id in link.requests & self._open.readings.keys():
                reading = self._open.readings[request_id]
                if reading.handoff.offer.transfer_id == message.transfer_id:
                    reading.digest_answered(link, message)

    def _claim_answered(self, link: Link, answer: ClaimAnswer) -> None:
        for request_id in link.requests:
            handoff = self._open.handoffs[request_id]
            asked = (handoff.offer.transfer_id, self._asking.name_for(handoff))
            if asked != (answer.transfer_id, answer.claimant):
                continue
            sent_s = link.claims_sent_s.pop(request_id, None)
            if sent_s is None:
                continue
            before = handoff.failure
            handoff.claim_answered(rank_of(link, handoff), answer, sent_s)
            if handoff.failure and not before:
                self._open.tell_if_lost(handoff)
            self._asking.renew_in_time(link, sent_s, answer.lease_s)
            return

    def _renewed(self, link: Link, answer: RenewalAnswer) -> None:
        sent_s = link.renewals_sent_s.pop(answer.sequence, None)
        if sent_s is None:
            return
        held, lost = set(answer.held), set(answer.lost)
        for request_id in list(link.requests):
            handoff = self._open.handoffs[request_id]
            rank = rank_of(link, handoff)
            if rank not in handoff.leases:
                continue  # another request's claim on the same offer was granted
            if handoff.offer.transfer_id in held:
                handoff.renewed(rank, sent_s, answer.lease_s)
                self._links.tally.add("stateferry_renewals", "consumer")
            elif handoff.offer.transfer_id in lost:
                reason = f"producer rank {rank} does not hold transfer {shown(handoff.offer.transfer_id)}"
                self._open.fail(handoff, reason, Cause.LEASE)
