"""A control connection to a producer rank: how it is dialled, and what is known of it.

    dialled --met--> up --broke--> broken --nobody listens--> refused
                      ^-------------+-------------------------+

ZeroMQ dials again by itself, and keeps what was not sent yet. Whoever only reads and writes the socket learns
none of that.
"""

import enum

import zmq

from stateferry.ferry.guard import secure_client
from stateferry.ferry.keys import ControlKey
from stateferry.ferry.socket_events import SocketEvents
from stateferry.wire import MAX_MESSAGE_BYTES, Message, RankAddress, authority, encode_message

PATIENCE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 4000,
}
"""How long a connection lives over which nothing comes. Bytes that the other machine does not acknowledge for
4 s end it, where Linux would try for a quarter of an hour: a firewall that forgot the connection drops them
silently, and a new one would do. Without bytes under way the other machine is asked after 15 s of silence."""
SIGN_OF_LIFE = {zmq.HEARTBEAT_IVL: 5_000, zmq.HEARTBEAT_TIMEOUT: 10_000}
"""Milliseconds. The kernel of a process that hangs acknowledges all the same. So ZeroMQ asks the other one,
each on a thread of its own: how often, and how long without a byte until the connection is ended, and dialled
again."""
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECTED
"""Events that `Connection.after` knows. CLOSED is a dial that came to nothing."""


class Connection(enum.Enum):
    """What ZeroMQ has told of a socket's connection."""

    DIALLED = "dialled"
    """It was never there."""
    UP = "up"
    BROKEN = "broken"
    """It was there; nothing says that the peer is gone for good."""
    REFUSED = "refused"
    """It was there, and nobody listens at its other end any more. A process that is only slow, or
    stopped, does not come to this: its kernel takes calls for it."""

    def after(self, event: int) -> "Connection":
        """What it is after one of ZeroMQ's EVENT_ numbers."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return Connection.UP
        if self is Connection.DIALLED:
            return self
        if event == zmq.EVENT_DISCONNECTED:
            return Connection.BROKEN
        if event == zmq.EVENT_CLOSED:
            return Connection.REFUSED
        # Somebody takes calls there. Whether it is up, its own hand-shake says.
        return Connection.BROKEN if self is Connection.REFUSED else self


def open_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", address: RankAddress, key: ControlKey | None
) -> "zmq.Socket[bytes]":
    """A socket that connects in the background and never blocks. Bad addresses raise ZMQError."""
    socket = _make_socket(context, address, key)
    try:
        _dial(socket, address)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket


def open_watched_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", address: RankAddress, key: ControlKey | None
) -> "tuple[zmq.Socket[bytes], SocketEvents]":
    """As `open_socket`, and its events from before it is dialled, so that none is missed. It breaks where the
    other process gives no `SIGN_OF_LIFE`."""
    socket = _make_socket(context, address, key)
    for option, value in SIGN_OF_LIFE.items():
        socket.setsockopt(option, value)
    try:
        events = SocketEvents(context, socket, WATCHED)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    try:
        _dial(socket, address)
    except zmq.ZMQError:
        events.close()
        socket.close(linger=0)
        raise
    return socket, events


def send_without_waiting(socket: "zmq.Socket[bytes]", message: Message) -> bool:
    """Queue a message. False: the queue is full, the peer is gone or stuck."""
    try:
        socket.send(encode_message(message), zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def lose_patience(socket: "zmq.Socket[bytes]") -> None:
    """Before dialling or binding: end connections that are no more. Asks the peer's kernel, not the peer: an
    engine that is slow to answer keeps its connection, a machine that is gone loses it."""
    for option, value in PATIENCE.items():
        socket.setsockopt(option, value)


def _make_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", address: RankAddress, key: ControlKey | None
) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    secure_client(socket, key)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.IMMEDIATE, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    lose_patience(socket)
    socket.setsockopt(zmq.IPV6, 1 if ":" in address.host else 0)
    return socket


def _dial(socket: "zmq.Socket[bytes]", address: RankAddress) -> None:
    socket.connect(f"tcp://{authority(address.host, address.port)}")
