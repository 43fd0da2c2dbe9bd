"""Who may talk to our control sockets: ZeroMQ's CURVE with one key pair for all engines.

A producer's listener asks us about every client that proved to own a key (ZAP, RFC 27), and tells us of
every connection whose hand-shake failed before that: another key, none at all, or no ZeroMQ.
"""

import logging

import zmq

from stateferry.ferry.keys import ControlKey
from stateferry.ferry.quiet import LogLimit
from stateferry.ferry.socket_events import EVENTS_PER_TURN, SocketEvents
from stateferry.session import Clock, Counters

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"stateferry"
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def secure_client(socket: "zmq.Socket[bytes]", key: ControlKey | None) -> None:
    """Before connecting: talk only to a server that has our key, and show it ours."""
    if key is not None:
        socket.curve_publickey = key.public
        socket.curve_secretkey = key.secret
        socket.curve_serverkey = key.public


class Guard:
    """Watches a listener that is not bound yet. Ferry thread only."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        listener: "zmq.Socket[bytes]",
        key: ControlKey | None,
        clock: Clock,
    ) -> None:
        self._key = key
        self._clock = clock
        self._log = LogLimit()
        self._zap: zmq.Socket[bytes] | None = None
        if key is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(ZAP_ADDRESS)
            listener.zap_domain = ZAP_DOMAIN
            # Without this, a listener that found no judge would let everybody in.
            listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            listener.curve_server = True
            listener.curve_secretkey = key.secret
        self._failures = SocketEvents(context, listener, FAILED)

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """What the ferry must poll for us."""
        failures = self._failures.socket
        return [failures] if self._zap is None else [self._zap, failures]

    def receive(self, counters: Counters) -> None:
        """Judge who wants in; count who was turned away."""
        if self._zap is not None:
            self._judge(self._zap, counters)
        for _ in self._failures.take():
            self._turned_away(counters, "it has another key or none, or speaks something else")

    def close(self) -> None:
        """Stop watching; before the listener is closed."""
        self._failures.close()
        if self._zap is not None:
            self._zap.close(linger=0)

    def _judge(self, zap: "zmq.Socket[bytes]", counters: Counters) -> None:
        for _ in range(EVENTS_PER_TURN):
            try:
                frames = zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # version, request id, domain, address, identity, mechanism, credentials
            good = (
                self._key is not None
                and len(frames) == 7
                and frames[0] == b"1.0"
                and frames[2] == ZAP_DOMAIN
                and frames[5:] == [b"CURVE", self._key.public_bytes]
            )
            request_id = frames[1] if len(frames) > 1 else b""
            status = [b"200", b"OK"] if good else [b"400", b"another key"]
            zap.send_multipart([b"1.0", request_id, *status, b"", b""])
            if not good:
                address = frames[3].decode(errors="replace") if len(frames) > 3 else "?"
                self._turned_away(counters, f"{address} showed another key")

    def _turned_away(self, counters: Counters, why: str) -> None:
        counters.refused_peers += 1
        if self._log.may_log(self._clock.now_s()):
            key = (
                "auth_key_file is set: peers need the same file"
                if self._key
                else "no auth_key_file is set here"
            )
            logger.warning("turned a peer away: %s; %s%s", why, key, self._log.left_out())
