"""Producer ranks that a consumer rank knows: met once per life, and again after a pause if that failed."""

import logging
import random
import time
from collections.abc import Callable, Collection

import zmq

from stateferry.config import Config
from stateferry.ferry.connection import Connection, open_watched_socket
from stateferry.ferry.keys import ControlKey
from stateferry.ferry.link import Link, LinkState
from stateferry.layout.spec import CacheLayout
from stateferry.session import Cause, Clock, pause_s
from stateferry.telemetry import Tally, refusal_label
from stateferry.transport.base import Peer, Transport
from stateferry.wire import RankAddress, Refusal, Welcome

logger = logging.getLogger(__name__)

IDLE_LINK_S = 600.0
"""A link that nobody used for this long is closed; the next request meets the producer again."""
MAX_LINKS = 512
"""Most links at a time: an offer comes through a client, who could name any number of addresses."""
MAX_PAUSE_S = 30.0
"""Longest pause before a peer that could not be met is tried again; then it is forgotten, too."""
LOOK_S = 0.25
"""How often connections are looked after: there may be many links, and a turn takes microseconds."""
GONE = "its connection broke and it cannot be dialled: its engine ended, or its machine is cut off"
REPEAT_S = 1.0
"""A greeting without an answer is repeated after so long, and then after twice that, and so on: a connection
that breaks while machines are busy takes the messages on it along, and ZeroMQ makes a new one silently.
Not while there is no connection: it waits in the socket's queue then, and whoever comes back needs one."""


class Links:
    """Owner of every link and its socket. Ferry thread only."""

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
        key: ControlKey | None,
        on_settled: Callable[[Link], None],
        room: CacheLayout | None = None,
    ) -> None:
        """`on_settled` hears of every link that has become ready or failed."""
        self._room = room
        self._context = context
        self._poller = poller
        self._clock = clock
        self._config = config
        self._layout = layout
        self._encoded_layout = encoded_layout
        self._software = software
        self._transport = transport
        self._key = key
        self._on_settled = on_settled
        self.tally = Tally()
        self._links: dict[RankAddress, Link] = {}
        self._next_look_s = 0.0
        self._retired: list[Peer] = []
        """Connections that got a successor, or whose link was dropped, until nothing is pending over them."""

    def __len__(self) -> int:
        return len(self._links)

    def states(self) -> dict[LinkState, int]:
        """How many links are in each state."""
        states = [link.state for link in self._links.values()]
        return {state: states.count(state) for state in LinkState}

    def find(self, address: RankAddress) -> Link | None:
        """The link to that rank, if it is known."""
        return self._links.get(address)

    def of_socket(self, socket: object) -> Link | None:
        """The link that a socket belongs to."""
        return next((link for link in self._links.values() if link.socket is socket), None)

    def why_silent(self, host: str, port: int) -> str:
        """Since when a rank there, which was ready before, has not answered; empty: that is not known, or it
        may have begun another life since."""
        there = [n for n in self._links.values() if (n.address.host, n.address.port) == (host, port)]
        if any(not link.refuses for link in there):
            return ""
        return next((link.reason for link in there if link.state is LinkState.SILENT), "")

    def meet(self, address: RankAddress) -> Link:
        """The link to that rank; greets it if it is new, or if its pause after a failure is over.

        Raises ZMQError for an address that cannot be dialled, ValueError when too many are known.
        """
        now_s = self._clock.now_s()
        link = self._links.get(address)
        failures = 0
        if link is not None:
            if link.state is not LinkState.FAILED or now_s < link.deadline_s:
                return link
            failures = link.failures
            self._drop(link)
        if len(self._links) >= MAX_LINKS:
            self._make_room()
        deadline_s = now_s + self._config.handshake_timeout_s
        socket, events = open_watched_socket(self._context, address, self._key)
        link = Link(address, socket, events, deadline_s, failures=failures, room=self._room)
        self._links[address] = link
        self._poller.register(link.socket, zmq.POLLIN)
        self._greet(link)
        return link

    def greet_again(self, link: Link) -> None:
        """Ask for a fresh connection to the same life of the peer. The link stays ready."""
        if link.state is LinkState.READY and not link.greeting_again:
            link.greeting_again = True
            self._greet(link)

    def welcomed(self, link: Link, answer: Welcome | Refusal) -> None:
        """The producer answered a greeting."""
        if link.state is LinkState.READY:
            replaced = link.reconnect(answer, self._layout, self._transport, self._config)
            if replaced is not None:
                self._retired.append(replaced)
                logger.info("%s:%d: connection %d", link.address.host, link.address.port, link.connections)
            else:
                self._not_again(link, link.reason)
            self._count_refusal(link)
            return
        if link.state is LinkState.SILENT:
            logger.warning("%s:%d answers again", link.address.host, link.address.port)
        link.welcomed(answer, self._layout, self._transport, self._config)
        self._count_refusal(link)
        if link.state is LinkState.FAILED:
            self.fail(link, link.reason, link.cause)
        else:
            link.failures = 0
            link.idle_since_s = self._clock.now_s()
            self._on_settled(link)

    def fail(self, link: Link, reason: str, cause: Cause = Cause.PEER) -> None:
        """No hand-off can go over this link; the rank is met again after a pause."""
        link.fail(reason, cause)
        link.failures += 1
        pause = pause_s(link.failures, self._config.retry_interval_s, MAX_PAUSE_S, random.random())
        link.deadline_s = self._clock.now_s() + pause
        logger.warning("%s; next try in %.1f s", link.reason, pause)
        self._settled_badly(link)

    def _settled_badly(self, link: Link) -> None:
        self._on_settled(link)
        # They have failed. A request that lives on here must not keep others from meeting the peer anew.
        link.requests.clear()
        link.claims_sent_s.clear()

    def tick(self, renew: Callable[[Link, float], None], heard_s: float) -> None:
        """Hand-shakes without an answer by `heard_s` that took too long, renewals that are due, links that
        nobody needs."""
        now_s = self._clock.now_s()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look_at_connections(now_s)
        for link in list(self._links.values()):
            if why := self._waits_in_vain(link, heard_s):
                self._give_up_greeting(link, why)
            elif link.waits_for_welcome and now_s >= link.repeat_at_s:
                if link.connection is Connection.UP:
                    self._send_greeting(link, 2 * link.repeat_pause_s)
                else:
                    link.repeat_at_s = now_s + link.repeat_pause_s
            elif link.state is LinkState.READY and now_s >= link.next_renewal_s:
                renew(link, now_s)
            elif not link.requests and now_s >= self._forget_at_s(link):
                self._drop(link)

    def sweep(self, pending: Callable[[], Collection[Peer]]) -> None:
        """Close replaced connections that none of `pending` (connections with transfers) is."""
        if self._retired:
            busy = pending()
            for peer in [p for p in self._retired if p not in busy]:
                peer.close()
            self._retired = [p for p in self._retired if p in busy]

    def next_deadline_s(self) -> float:
        """When `tick` has a renewal to send, a greeting to repeat or to give up; infinite if never."""
        return min((_due_s(link) for link in self._links.values()), default=float("inf"))

    def close(self) -> None:
        """Drop all links. No transfer may be pending."""
        for link in list(self._links.values()):
            self._drop(link)
        self.sweep(tuple)

    def _look_at_connections(self, now_s: float) -> None:
        """Doubt links whose connection broke: their peers died, or were restarted, or live on.

        Not while a hand-off is open over one: its lease and its deadlines decide, and a peer that comes back
        in time is still the one that it claimed from.
        """
        for link in self._links.values():
            came_back = link.look(now_s)
            if link.broke and link.state is LinkState.READY and not link.requests:
                logger.info("%s:%d: connection broke; greeting again", link.address.host, link.address.port)
                self._retire(link)
                link.state, link.greeting_again = LinkState.GREETING, False
                link.doubted_unix_s = self._clock.unix_s()
                link.deadline_s = now_s + self._config.handshake_timeout_s
                self._greet(link)
            elif came_back and self._is_a_stranger(link):
                self._send_greeting(link, REPEAT_S)
            elif link.state is LinkState.SILENT and link.connection is Connection.REFUSED:
                self.fail(link, GONE)
            link.ask_again(now_s, came_back)
            if came_back and link.requests:
                # Renewals went with the connection. The lease may be over when the next one is due.
                link.next_renewal_s = min(link.next_renewal_s, now_s)

    def _is_a_stranger(self, link: Link) -> bool:
        """Whether its producer, to whom every connection is another consumer, was not told who asks over this
        one and is not about to be."""
        return link.state is LinkState.READY or (link.asks and link.greeting_lost)

    def _count_refusal(self, link: Link) -> None:
        if link.refused_field:
            self.tally.add("stateferry_refusals", refusal_label(link.refused_field))
            link.refused_field = ""

    def _waits_in_vain(self, link: Link, heard_s: float) -> str:
        """Why nobody is going to answer its greeting; empty: somebody may, or it has none."""
        if not link.waits_for_welcome:
            return ""
        if link.requests and link.connection is Connection.REFUSED:
            return GONE
        return self._no_answer() if heard_s >= link.greeted_s + self._config.handshake_timeout_s else ""

    def _give_up_greeting(self, link: Link, why: str) -> None:
        if link.state is not LinkState.GREETING:
            link.greeting_again, link.cause = False, Cause.PEER
            self._not_again(link, why)
        elif link.connections and link.connection is not Connection.REFUSED:
            # Nobody refuses our calls: it may be there again any moment, as whom it was, and is greeted then.
            link.fall_silent(time.strftime("%H:%M:%S UTC", time.gmtime(link.doubted_unix_s)))
            logger.warning("%s. Hand-offs from there fail at once until it answers", link.reason)
            self._settled_badly(link)
        else:
            self.fail(link, why)

    def _no_answer(self) -> str:
        who = "nobody listens there, or its auth_key_file holds another key or is not set"
        if self._key is None:
            who = "nobody listens there, or it wants a key (this engine has no auth_key_file)"
        return f"no answer to the hand-shake within {self._config.handshake_timeout_s:g} s: {who}"

    def _forget_at_s(self, link: Link) -> float:
        if link.state in (LinkState.READY, LinkState.SILENT):
            return link.idle_since_s + IDLE_LINK_S
        # A failed one is kept a little past its pause, so that the next pause is longer.
        return link.deadline_s + MAX_PAUSE_S

    def _greet(self, link: Link) -> None:
        link.greeted_s = self._clock.now_s()
        self._send_greeting(link, REPEAT_S)

    def _send_greeting(self, link: Link, pause_s: float) -> None:
        if link.asks:
            link.broke = False  # whoever answers this one is there
        link.repeat_pause_s = pause_s
        link.repeat_at_s = self._clock.now_s() + pause_s
        link.greet(self._layout, self._encoded_layout, self._transport.name, self._software)

    def _not_again(self, link: Link, reason: str) -> None:
        """There is no fresh connection. Whoever waits for it looks at the link and gives up; the old one
        stays for those that it still serves."""
        if link.peer is None or not link.peer.usable:
            self.fail(link, reason, link.cause)
        else:
            link.reason = reason

    def _make_room(self) -> None:
        """Forget the link that is missed least: a client who names dead addresses must not keep others from
        meeting their producers. Raises ValueError where hand-offs are open over all."""
        unused = [link for link in self._links.values() if not link.requests]
        if not unused:
            raise ValueError(f"{MAX_LINKS} producer ranks are known already; this one is not met")
        self._drop(min(unused, key=lambda link: (link.state is LinkState.READY, link.idle_since_s)))

    def _drop(self, link: Link) -> None:
        self._poller.unregister(link.socket)
        self._retire(link)
        link.close()
        del self._links[link.address]

    def _retire(self, link: Link) -> None:
        """Its connection of the transport is closed once nothing is pending over it."""
        if link.peer is not None:
            self._retired.append(link.peer)
            link.peer = None


def _due_s(link: Link) -> float:
    if link.refuses:
        return float("inf")
    due_s = link.next_renewal_s if link.state is LinkState.READY else link.deadline_s
    return min(due_s, link.repeat_at_s) if link.waits_for_welcome else due_s
