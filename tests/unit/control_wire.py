"""A TCP proxy between two ranks that reads their control messages and cuts connections where a test wants."""

import enum
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from msgspec.structs import replace

from stateferry.errors import ProtocolError
from stateferry.wire import Message, Offer, decode_message

GREETING_BYTES = 64
"""What each side of ZMTP 3 says before its first frame."""
LONG, COMMAND = 2, 4
"""Flags of a frame: its size is of eight bytes, not of one; it is ZeroMQ's own."""
PONG = b"\x04PONG"
"""ZeroMQ's own sign of life, as it begins after its frame's head."""


class Fate(enum.Enum):
    """What becomes of a message, and of the connection that it is on."""

    PASS = "passes"
    GONE = "is lost, and its connection goes on for now"
    LOST = "lost with its connection"
    LAST = "last on its connection"


Judge = Callable[[Message], Fate]
"""Called on the wire's thread for every control message, in either direction."""


@dataclass
class Stream:
    """One direction of one connection."""

    to: socket.socket
    buffer: bytes = b""
    greeting_left: int = GREETING_BYTES
    """Passed on as it comes: both sides wait for the other's first bytes before they send the rest."""
    pongs: int = 0

    def pass_on(self, data: bytes, judge: Judge) -> bool:
        """Forward what is whole. False: cut the connection here."""
        greeting, data = data[: self.greeting_left], data[self.greeting_left :]
        self.greeting_left -= len(greeting)
        self.to.sendall(greeting)
        self.buffer += data
        while (size := self._whole()) is not None:
            frame, self.buffer = self.buffer[:size], self.buffer[size:]
            fate = self._judged(frame, judge)
            if fate in (Fate.PASS, Fate.LAST):
                self.to.sendall(frame)
            if fate in (Fate.LOST, Fate.LAST):
                return False
        return True

    def _whole(self) -> int | None:
        """Size of the first frame; None: it is not all there."""
        if len(self.buffer) < 2 or (self.buffer[0] & LONG and len(self.buffer) < 9):
            return None
        long = bool(self.buffer[0] & LONG)
        size = 9 + int.from_bytes(self.buffer[1:9], "big") if long else 2 + self.buffer[1]
        return size if len(self.buffer) >= size else None

    def _judged(self, frame: bytes, judge: Judge) -> Fate:
        if frame[0] & COMMAND:
            self.pongs += frame[2:7] == PONG
            return Fate.PASS
        try:
            return judge(decode_message(frame[9 if frame[0] & LONG else 2 :]))
        except ProtocolError:
            return Fate.PASS


@dataclass
class ControlWire:
    """Use as a context manager: it has a thread."""

    port_behind: int
    judge: Judge
    connections: int = 0
    """How many were made so far."""
    mends: bool = True
    """Whether a new connection is taken up; else it waits until that is set."""
    hangs: bool = False
    """Whether nothing is carried, as by a process that is stopped: its kernel takes calls, and bytes."""
    _streams: dict[socket.socket, Stream] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for end in list(self._streams):
            end.close()
        self._listener.close()
        self._selector.close()

    def through(self, offer: Offer) -> Offer:
        """The offer, with its rank 0 to be reached over this wire."""
        (address,) = offer.ranks
        return replace(offer, ranks=(replace(address, port=self.port),))

    @property
    def pongs(self) -> int:
        """Signs of life that were carried over connections that stand."""
        return sum(stream.pongs for stream in list(self._streams.values()))

    def _run(self) -> None:
        while not self._over.is_set():
            for key, _ in self._selector.select(0.02):
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if self.hangs or (end is self._listener and not self.mends):
                    self._over.wait(0.01)
                elif end is self._listener:
                    self._meet()
                elif end in self._streams:
                    self._carry(end)

    def _meet(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.port_behind))
        except OSError:
            near.close()
            return
        self.connections += 1
        self._streams |= {near: Stream(far), far: Stream(near)}
        for end in (near, far):
            self._selector.register(end, selectors.EVENT_READ)

    def _carry(self, end: socket.socket) -> None:
        stream = self._streams[end]
        try:
            data = end.recv(1 << 20)
            goes_on = bool(data) and stream.pass_on(data, self.judge)
        except OSError:
            goes_on = False
        if not goes_on:
            for one in (end, stream.to):
                self._selector.unregister(one)
                del self._streams[one]
                one.close()
