"""A consumer rank's connection to one producer rank, for one life of it.

greeting --Welcome, layouts fit, transport connects--> ready
    |   ^------control connection broke, nothing open------+
    |
    +--no answer, though it was ready before--> silent (until it answers: then as above, or below)
    +--Refusal, mismatch, deadline, transport refuses--> failed (tried again after a pause)

A ready link whose transport's connection broke greets again and stays ready meanwhile: what is under way over
the old connection is not disturbed by another hand-off's trouble.
"""

import enum
from dataclasses import dataclass, field

import zmq

from stateferry.config import Config
from stateferry.errors import LayoutError, OfferRefused, ProtocolError, StateFerryError
from stateferry.ferry.connection import Connection, send_without_waiting
from stateferry.ferry.questions import Asked, Question, Questions
from stateferry.ferry.socket_events import SocketEvents
from stateferry.ids import RequestId
from stateferry.layout.fingerprint import compare, decode_layout
from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.spec import CacheLayout
from stateferry.session import RENEWALS_PER_LEASE, Cause
from stateferry.telemetry import OTHER_FIELD
from stateferry.transport.base import Peer, Transport
from stateferry.wire import (
    MAX_TEXT,
    PROTOCOL_VERSION,
    Hello,
    Message,
    RankAddress,
    Refusal,
    Renewal,
    Welcome,
)


class LinkState(enum.Enum):
    """Whether hand-offs can go over a link."""

    GREETING = "greeting"
    READY = "ready"
    SILENT = "silent"
    FAILED = "failed"


@dataclass(slots=True)
class Link:
    """One producer rank as this consumer rank knows it. Ferry thread only."""

    address: RankAddress
    socket: "zmq.Socket[bytes]"
    events: SocketEvents
    """Of the socket's connection."""
    deadline_s: float
    """Of the hand-shake while greeting; when to try again once failed."""
    state: LinkState = LinkState.GREETING
    reason: str = ""
    cause: Cause = Cause.PEER
    """The reason in one word."""
    refused_field: str = ""
    """In what its peer does not fit, when that is the reason."""
    plan: Plan | None = None
    digest_plan: Plan | None = None
    room: CacheLayout | None = None
    """Our waiting room, if hand-offs are read into one; the next two plan reads into it."""
    room_plan: Plan | None = None
    room_digest_plan: Plan | None = None
    peer: Peer | None = None
    connections: int = 0
    """How many were made; `peer` is the last."""
    greeting_again: bool = False
    """Whether a ready link waits for the hand-shake of its next connection."""
    connection: Connection = Connection.DIALLED
    """As of the last `look`."""
    broke: bool = False
    """Whether the socket's connection broke since the greeting that made the link ready, or is to; or a claim
    was not answered."""
    doubted_unix_s: float = 0.0
    """When a ready link was greeted again because of that."""
    greeted_s: float = 0.0
    greeting_sent: bool = False
    """Whether the last greeting went out over a connection; else it waits in the socket's queue for one."""
    greeting_lost: bool = False
    """Whether that connection broke since."""
    repeat_at_s: float = float("inf")
    repeat_pause_s: float = 0.0
    """When an unanswered greeting is repeated, and how long after the last one that is."""
    failures: int = 0
    """In a row, the current one included."""
    requests: set[RequestId] = field(default_factory=set)
    """Hand-offs that are open over this link."""
    questions: Questions = field(default_factory=Questions)
    claims_sent_s: dict[RequestId, float] = field(default_factory=dict)
    """Unanswered claims, by when they were sent first: a lease counts from then."""
    renewals_sent_s: dict[int, float] = field(default_factory=dict)
    """Unanswered renewals by sequence number; at most a few (see `RENEWALS_PER_LEASE`)."""
    sequence: int = 0
    next_renewal_s: float = float("inf")
    idle_since_s: float = 0.0

    @property
    def waits_for_welcome(self) -> bool:
        """Whether a greeting is not answered yet."""
        return self.state is LinkState.GREETING or self.greeting_again

    @property
    def asks(self) -> bool:
        """Whether the answer to a greeting decides what it is."""
        return self.state in (LinkState.GREETING, LinkState.SILENT)

    @property
    def refuses(self) -> bool:
        """Whether hand-offs over it fail at once, for its reason."""
        return self.state in (LinkState.SILENT, LinkState.FAILED)

    @property
    def away(self) -> bool:
        """Whether the connection was there and is not, as of the last `look`."""
        return self.connection in (Connection.BROKEN, Connection.REFUSED)

    def look(self, now_s: float) -> bool:
        """Learn what became of the socket's connection. True: it broke, and is back."""
        before, was_away = self.connection, self.away
        for event in self.events.take():
            if self.connection is Connection.UP and event == zmq.EVENT_DISCONNECTED:
                was_away = self.broke = True
                self.greeting_lost = self.greeting_sent
            self.connection = self.connection.after(event)
            self.greeting_sent |= self.connection is Connection.UP
        if self.connection is Connection.UP and before is not Connection.UP:
            # What waited for it was sent just now: from here on an answer may be expected.
            self.repeat_at_s = now_s + self.repeat_pause_s
        return was_away and self.connection is Connection.UP

    def send(self, message: Message) -> bool:
        """Queue a message without waiting. False: the queue is full, the peer is gone or stuck."""
        return send_without_waiting(self.socket, message)

    def ask(self, question: Question, until_s: float = float("inf")) -> None:
        """Ask, and again when the connection breaks and comes back before there is an answer."""
        # Where there is no connection it waits here: whoever comes back is greeted first.
        self.questions.put(Asked(question, until_s, sent=not self.away and self.send(question)))

    def ask_again(self, now_s: float, came_back: bool) -> None:
        """Send what waits, and what an answer may have been lost to."""
        if not self.away:
            for asked in self.questions.due(now_s, came_back):
                asked.sent = self.send(asked.question)

    def greet(self, layout: CacheLayout, encoded: bytes, transport_name: str, software: str) -> None:
        """Send the first message of a connection."""
        self.greeting_sent, self.greeting_lost = self.connection is Connection.UP, False
        self.send(
            Hello(
                protocol=PROTOCOL_VERSION,
                software=software,
                engine_id=layout.engine_id,
                epoch=layout.epoch,
                expects_epoch=self.address.epoch,
                transport=transport_name,
                layout=encoded,
            )
        )

    def welcomed(
        self, answer: Welcome | Refusal, ours: CacheLayout, transport: Transport, config: Config
    ) -> None:
        """Judge the producer's answer: the link is then ready or failed. Never raises StateFerryError."""
        try:
            self._accept(answer, ours, transport, config)
            self.state = LinkState.READY
        except (StateFerryError, ValueError) as e:
            self._refused(e)
            self.state = LinkState.FAILED

    def reconnect(
        self, answer: Welcome | Refusal, ours: CacheLayout, transport: Transport, config: Config
    ) -> Peer | None:
        """Judge the answer to a second greeting. Returns the connection that the new one replaces; None:
        there is no new one, and `reason` says why. Never raises StateFerryError."""
        self.greeting_again = False
        before = self.peer
        try:
            self._accept(answer, ours, transport, config)
        except (StateFerryError, ValueError) as e:
            self._refused(e)
            return None
        return before

    def fail(self, reason: str, cause: Cause) -> None:
        """No hand-off can go over this link now."""
        self.cause = cause
        self.greeting_again = False
        self.state = LinkState.FAILED
        # What is wrong comes first: tables and exemplars show how a reason begins. A layout that differs may
        # be quoted whole, and its peer chose how long that is.
        self.reason = f"{reason[:MAX_TEXT]} (producer rank at {self.address.host}:{self.address.port})"

    def fall_silent(self, since: str) -> None:
        """It was ready, and whoever was there does not answer any more."""
        self.cause = Cause.PEER
        self.state = LinkState.SILENT
        # Its address comes first here: who hangs, and since when, is to be seen in tables and exemplars.
        self.reason = (
            f"{self.address.host}:{self.address.port} has not answered since {since}: its process hangs, or "
            "its machine is cut off"
        )

    def renew(self, renewal: Renewal, now_s: float) -> None:
        """Send a renewal and remember when."""
        self.renewals_sent_s[renewal.sequence] = now_s
        while len(self.renewals_sent_s) > 8:
            self.renewals_sent_s.pop(next(iter(self.renewals_sent_s)))
        self.send(renewal)

    def close(self) -> None:
        """Close the socket; its peer is for whoever knows what is pending over it."""
        self.events.close()
        self.socket.close(linger=1000)

    def _refused(self, error: Exception) -> None:
        self.reason = str(error)
        says_no = isinstance(error, LayoutError | ProtocolError | OfferRefused)
        self.cause = Cause.REFUSED if says_no else Cause.PEER
        # Who refuses counts it: what the producer refused, it has counted itself.
        fits = isinstance(error, OfferRefused) or not says_no
        self.refused_field = "" if fits else getattr(error, "field", "") or OTHER_FIELD

    def _accept(
        self, answer: Welcome | Refusal, ours: CacheLayout, transport: Transport, config: Config
    ) -> None:
        if isinstance(answer, Refusal):
            raise OfferRefused(answer.reason)
        if answer.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"speaks protocol {answer.protocol}, this engine speaks {PROTOCOL_VERSION}", "protocol"
            )
        if answer.epoch != self.address.epoch:
            raise ProtocolError(
                f"is in epoch {answer.epoch}; the offer was made in {self.address.epoch}", "epoch"
            )
        theirs = decode_layout(answer.layout)
        if theirs.engine_id != answer.engine_id or theirs.epoch != answer.epoch:
            raise LayoutError("sent the layout of another engine or epoch")
        compare(ours, theirs)
        self.digest_plan = make_plan(ours, theirs)
        self.plan = make_plan(ours, theirs, merge=False) if config.testing else self.digest_plan
        if self.room is not None:
            self.room_digest_plan = make_plan(self.room, theirs)
            self.room_plan = (
                make_plan(self.room, theirs, merge=False) if config.testing else self.room_digest_plan
            )
        self.peer = transport.connect(answer.registration, _longest_connect_s(config))
        self.connections += 1


def _longest_connect_s(config: Config) -> float:
    """How long a transport may try to reach a peer: less than from one renewal to the next, because none is
    sent meanwhile, nor anything else done, and the ranks of one engine are connected one by one."""
    return min(config.handshake_timeout_s, config.lease_s / (RENEWALS_PER_LEASE + 1))
