"""What becomes of a socket's connections. ZeroMQ makes and mends them on a thread of its own, and tells of it
only where somebody asked."""

import itertools
import sys

import zmq

EVENTS_PER_TURN = 256
_numbers = itertools.count()
"""Never used again: ZeroMQ lets go of an address some time after its socket was closed."""


class SocketEvents:
    """Hears of one socket's events until `close`. One thread, the socket's own. Raises ZMQError where ZeroMQ
    has no more sockets or file descriptors."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", watched: "zmq.Socket[bytes]", events: int
    ) -> None:
        """`events`: ZeroMQ's EVENT_ numbers, added up."""
        address = f"inproc://stateferry.events.{next(_numbers)}"
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        """Readable when there is something to take."""
        self.socket.setsockopt(zmq.LINGER, 0)
        # No limit: where one is reached, ZeroMQ's own thread waits, and with it every connection.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        try:
            watched.monitor(address, events)
            self.socket.connect(address)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def take(self) -> list[int]:
        """ZeroMQ's EVENT_ numbers since the last call, at most `EVENTS_PER_TURN`. Never waits."""
        events: list[int] = []
        while len(events) < EVENTS_PER_TURN:
            try:
                event, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            # A number of two bytes, as this machine orders them; then a value that says nothing to us.
            events.append(int.from_bytes(event[:2], sys.byteorder))
        return events

    def close(self) -> None:
        """Stop listening; before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
