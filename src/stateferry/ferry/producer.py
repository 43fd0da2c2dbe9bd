"""The producer's half of the ferry: answers consumers on one socket and ends leases.

Everything that arrives is untrusted: what cannot be read is dropped and counted, what cannot be
granted is refused with a reason. Nothing here ends the thread.
"""

import logging
from collections import OrderedDict

import zmq

from stateferry.errors import StateFerryError
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.peer_log import PeerLog
from stateferry.ferry.quiet import LogLimit
from stateferry.ids import Epoch, RequestId, TransferId, shown
from stateferry.layout.digest import bytes_digest
from stateferry.layout.fingerprint import decode_layout
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.spec import CacheLayout
from stateferry.session import AwaitedOffers, Clock, Grant, Kept, Ledger, Withdrawal
from stateferry.telemetry import Key, Tally, refusal_label
from stateferry.wire import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    Await,
    Claim,
    DigestAnswer,
    DigestRequest,
    Hello,
    Message,
    Refusal,
    Release,
    Renewal,
    Welcome,
    decode_frames,
    encode_message,
)

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 256
"""Messages that are answered before hand-offs and leases get a turn."""
MAX_CONSUMERS = 1024
"""Connections of consumers whose layouts are remembered, for digests; of more, that one is forgotten that was
silent for the longest, as every connection is that broke."""


class ProducerService:
    """Owns the ledger and the listening socket's traffic. Ferry thread only."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        clock: Clock,
        layout: CacheLayout,
        encoded_layout: bytes,
        software: str,
        transport_name: str,
        registration: bytes,
        lease_s: float,
        memory: LocalMemory,
    ) -> None:
        self.ledger = Ledger(layout.epoch, layout.tp_size, lease_s)
        self.awaited = AwaitedOffers(layout.epoch, self.ledger)
        self.tally = Tally()
        self._refusals = LogLimit()
        self._deserters = PeerLog()
        self._socket = socket
        self._clock = clock
        self._layout = layout
        self._encoded_layout = encoded_layout
        self._software = software
        self._transport_name = transport_name
        self._registration = registration
        self._memory = memory
        self._consumers: OrderedDict[bytes, CacheLayout] = OrderedDict()
        self._plans: dict[bytes, Plan] = {}

    def grant(self, grant: Grant) -> None:
        """Keep a request's blocks; answer claims that came before, and tell those who wait for the offer."""
        for sender, answer in self.ledger.grant(grant, self._clock.now_s()):
            self._send(sender, answer)
        self._tell(grant.transfer_id)

    def withdraw(self, withdrawal: Withdrawal) -> None:
        """An offer will never be made; tell those who wait for it."""
        self.ledger.withdraw(withdrawal.transfer_id, withdrawal.reason, withdrawal.renounced)
        self._tell(withdrawal.transfer_id)

    def _tell(self, transfer_id: TransferId) -> None:
        for sender, answer in self.awaited.settled(transfer_id):
            self._send(sender, answer)

    def receive(self) -> None:
        """Answer what has arrived; the rest at the next turn, so that nobody can hold up the thread."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frames)

    def tick(self, heard_s: float) -> None:
        """End what nobody had claimed or renewed by `heard_s`: what had come by then was answered."""
        now_s = self._clock.now_s()
        self.awaited.expire(now_s)
        ended, answers = self.ledger.expire(heard_s)
        for holding in ended:
            # A claimant is an engine and its request.
            peer = holding.claimant.partition("/")[0] or "nobody"
            kind = "deserted" if holding.claimant else "unclaimed"
            if self._deserters.may_show(peer, kind, holding.grant.request_id, now_s):
                logger.warning(
                    "lease of transfer %s (request %s, claimed by %s) ended: blocks go back without a "
                    "release. Consumer gone, or lease_s too short for its queue",
                    shown(holding.grant.transfer_id),
                    holding.grant.request_id,
                    holding.claimant or "nobody",
                )
        for line in self._deserters.summaries(now_s):
            logger.warning("leases end without a release: %s", line)
        for sender, answer in answers:
            self._send(sender, answer)

    def take_finished(self) -> list[RequestId]:
        """Requests whose blocks may be freed."""
        return self.ledger.take_finished()

    def take_kept(self) -> list[Kept]:
        """How the blocks of traced requests were kept. In the turn in which that ended."""
        traced = self.ledger.take_traced()
        if not traced:
            return []
        now_s, unix_s, rank = self._clock.now_s(), self._clock.unix_s(), self._layout.tp_rank
        return [
            Kept(
                holding.grant.request_id,
                holding.grant.transfer_id,
                released,
                now_s - holding.granted_s,
                unix_s,
                holding.claimant,
                rank,
                holding.grant.trace,
            )
            for holding, released in traced
        ]

    def counts(self) -> dict[Key, int]:
        """What happened on this rank as a producer since its start. From any thread."""
        counters = self.ledger.counters
        return self.tally.counts() | {
            ("stateferry_grants", "released"): counters.released,
            ("stateferry_grants", "expired"): counters.expired,
            ("stateferry_renewals", "producer"): counters.renewed,
            ("stateferry_lease_losses", "producer"): counters.deserted,
            ("stateferry_refused_claims", ""): counters.refused_claims,
            ("stateferry_refused_peers", ""): counters.refused_peers,
        }

    def _handle(self, frames: list[bytes]) -> None:
        sender, *rest = frames
        try:
            answer = self._answer(sender, decode_frames(rest))
        except (StateFerryError, ValueError) as e:
            answer = self._refuse(str(e))
        except Exception as e:  # a defect, which one peer's message must not turn into everybody's
            logger.exception("could not answer a control message")
            answer = self._refuse(f"defect: {type(e).__name__}")
        if answer is not None:
            self._send(sender, answer)

    def _refuse(self, reason: str) -> Refusal:
        self.tally.add("stateferry_refused_messages")
        if self._refusals.may_log(self._clock.now_s()):
            logger.warning("refused a control message: %s%s", reason[:MAX_TEXT], self._refusals.left_out())
        return Refusal(reason=reason[:MAX_TEXT], epoch=self._layout.epoch)

    def _answer(self, sender: bytes, message: Message) -> Message | None:
        now_s = self._clock.now_s()
        if sender in self._consumers:
            self._consumers.move_to_end(sender)
        if isinstance(message, Hello):
            return self._greet(sender, message)
        if isinstance(message, Await):
            return self.awaited.ask(message, sender, now_s)
        if isinstance(message, Claim | Renewal | Release | DigestRequest):
            if message.epoch != self._layout.epoch:
                return self._restarted(message.epoch)
            if isinstance(message, Claim):
                return self.ledger.claim(message, sender, now_s)
            if isinstance(message, Renewal):
                return self.ledger.renew(message, now_s)
            if isinstance(message, Release):
                return self.ledger.release(message)
            return self._digest(sender, message)
        return Refusal(reason=f"{type(message).__name__} is not a question", epoch=self._layout.epoch)

    def _restarted(self, asked_for: Epoch) -> Refusal:
        epoch = self._layout.epoch
        return Refusal(
            reason=f"this engine is in epoch {epoch}, not {asked_for}: it was restarted", epoch=epoch
        )

    def _greet(self, sender: bytes, hello: Hello) -> Message:
        epoch = self._layout.epoch
        if hello.protocol != PROTOCOL_VERSION:
            reason = f"protocol {hello.protocol} asked for, {PROTOCOL_VERSION} spoken here ({self._software})"
            return self._does_not_fit("protocol", reason)
        if hello.expects_epoch != epoch:
            return self._does_not_fit("epoch", self._restarted(hello.expects_epoch).reason)
        if hello.transport != self._transport_name:
            reason = (
                f"this engine moves bytes with {self._transport_name!r}, the consumer with "
                f"{hello.transport!r}: set the same 'transport' on both"
            )
            return self._does_not_fit("transport", reason)
        self._consumers[sender] = decode_layout(hello.layout)
        self._plans.pop(sender, None)
        while len(self._consumers) > MAX_CONSUMERS:
            forgotten, _ = self._consumers.popitem(last=False)
            self._plans.pop(forgotten, None)
        return Welcome(
            protocol=PROTOCOL_VERSION,
            software=self._software,
            engine_id=self._layout.engine_id,
            epoch=epoch,
            layout=self._encoded_layout,
            registration=self._registration,
        )

    def _does_not_fit(self, field: str, reason: str) -> Refusal:
        self.tally.add("stateferry_refusals", refusal_label(field))
        return Refusal(reason=reason, epoch=self._layout.epoch)

    def _digest(self, sender: bytes, request: DigestRequest) -> DigestAnswer:
        """Hash what this side thinks was to be read: its own blocks by position, its own plan."""
        holding = self.ledger.held_for(request.transfer_id, request.claimant)
        if holding is None:
            return DigestAnswer(transfer_id=request.transfer_id, reason="the offer is not held for the asker")
        if len(set(request.groups)) != len(request.groups):
            return DigestAnswer(transfer_id=request.transfer_id, reason="a group is named twice")
        plan = self._plan_for(sender)
        digests = []
        for group, first, count in zip(
            request.groups, request.first_blocks, request.block_counts, strict=True
        ):
            if not 0 <= group < len(holding.grant.block_ids):
                return DigestAnswer(transfer_id=request.transfer_id, reason=f"there is no group {group}")
            start = first - holding.grant.first_blocks[group]
            ids = holding.grant.block_ids[group][start : start + count]
            if start < 0 or len(ids) != count:
                reason = f"group {group} has no blocks at positions {first} to {first + count - 1}"
                return DigestAnswer(transfer_id=request.transfer_id, reason=reason)
            digests.append(bytes_digest(plan.pieces(group, [0] * count, ids), "remote", self._memory.read))
        return DigestAnswer(transfer_id=request.transfer_id, digests=tuple(digests))

    def _plan_for(self, sender: bytes) -> Plan:
        """Raises ValueError for a stranger, who is refused and not answered: it may be a consumer whose
        connection broke and is back, which it does not know yet; it greets then, and asks again."""
        plan = self._plans.get(sender)
        if plan is None:
            consumer = self._consumers.get(sender)
            if consumer is None:
                raise ValueError("a digest was asked for before a hand-shake")
            plan = self._plans[sender] = make_plan(consumer, self._layout)
        return plan

    def _send(self, receiver: object, message: Message) -> None:
        """Answer without waiting. A consumer that went away is not an error."""
        assert isinstance(receiver, bytes)
        try:
            self._socket.send_multipart([receiver, encode_message(message)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            logger.debug("answer dropped, the consumer is gone: %s", e)
