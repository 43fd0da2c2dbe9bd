"""Producer ranks that a consumer rank knows: met once per life, and again after a pause if that failed."""

import logging
from collections.abc import Callable

import zmq

from stateferry.config import Config
from stateferry.ferry.keys import ControlKey
from stateferry.ferry.link import Link, LinkState, open_socket
from stateferry.layout.spec import CacheLayout
from stateferry.session import Clock
from stateferry.transport.base import Transport
from stateferry.wire import RankAddress, Refusal, Welcome

logger = logging.getLogger(__name__)

IDLE_LINK_S = 600.0
"""A link that nobody used for this long is closed; the next request meets the producer again."""
MAX_LINKS = 512
"""Most links at a time: an offer comes through a client, who could name any number of addresses."""
MAX_PAUSE_S = 30.0
"""Longest pause before a peer that could not be met is tried again; then it is forgotten, too."""


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
    ) -> None:
        """`on_settled` hears of every link that has become ready or failed."""
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
        self._links: dict[RankAddress, Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def find(self, address: RankAddress) -> Link | None:
        """The link to that rank, if it is known."""
        return self._links.get(address)

    def of_socket(self, socket: object) -> Link | None:
        """The link that a socket belongs to."""
        return next((link for link in self._links.values() if link.socket is socket), None)

    def meet(self, address: RankAddress) -> Link:
        """The link to that rank; greets it if it is new, or if its pause after a failure is over.

        Raises ZMQError for an address that cannot be dialled, ValueError when too many are known.
        """
        now_s = self._clock.now_s()
        link = self._links.get(address)
        pause_s = self._config.retry_interval_s
        if link is not None:
            if link.state is not LinkState.FAILED or now_s < link.deadline_s or link.requests:
                return link
            pause_s = min(2 * link.pause_s, MAX_PAUSE_S)
            self._drop(link)
        if len(self._links) >= MAX_LINKS:
            raise ValueError(f"{MAX_LINKS} producer ranks are known already; this one is not met")
        deadline_s = now_s + self._config.handshake_timeout_s
        link = Link(address, open_socket(self._context, address, self._key), deadline_s, pause_s)
        self._links[address] = link
        self._poller.register(link.socket, zmq.POLLIN)
        link.greet(self._layout, self._encoded_layout, self._transport.name, self._software)
        return link

    def welcomed(self, link: Link, answer: Welcome | Refusal) -> None:
        """The producer answered the greeting."""
        link.welcomed(answer, self._layout, self._transport, self._config)
        if link.state is LinkState.FAILED:
            self.fail(link, link.reason)
        else:
            link.idle_since_s = self._clock.now_s()
            self._on_settled(link)

    def fail(self, link: Link, reason: str) -> None:
        """No hand-off can go over this link; the rank is met again after a pause."""
        link.fail(reason)
        link.deadline_s = self._clock.now_s() + link.pause_s
        logger.warning("%s; next try in %.1f s", link.reason, link.pause_s)
        self._on_settled(link)

    def tick(self, renew: Callable[[Link, float], None]) -> None:
        """Hand-shakes that took too long, renewals that are due, links that nobody needs."""
        now_s = self._clock.now_s()
        for link in list(self._links.values()):
            if link.state is LinkState.GREETING and now_s >= link.deadline_s:
                self.fail(link, self._no_answer())
            elif link.state is LinkState.READY and now_s >= link.next_renewal_s:
                renew(link, now_s)
            elif not link.requests and now_s >= self._forget_at_s(link):
                self._drop(link)

    def next_deadline_s(self) -> float:
        """When `tick` has a renewal to send or a hand-shake to give up; infinite if never."""
        return min(
            (
                link.next_renewal_s if link.state is LinkState.READY else link.deadline_s
                for link in self._links.values()
                if link.state is not LinkState.FAILED
            ),
            default=float("inf"),
        )

    def close(self) -> None:
        """Drop all links. No transfer may be pending."""
        for link in list(self._links.values()):
            self._drop(link)

    def _no_answer(self) -> str:
        who = "nobody listens there, or its auth_key_file holds another key or is not set"
        if self._key is None:
            who = "nobody listens there, or it wants a key (this engine has no auth_key_file)"
        return f"no answer to the hand-shake within {self._config.handshake_timeout_s:g} s: {who}"

    def _forget_at_s(self, link: Link) -> float:
        if link.state is LinkState.READY:
            return link.idle_since_s + IDLE_LINK_S
        # A failed one is kept a little past its pause, so that the next pause is longer.
        return link.deadline_s + MAX_PAUSE_S

    def _drop(self, link: Link) -> None:
        self._poller.unregister(link.socket)
        link.close()
        del self._links[link.address]
