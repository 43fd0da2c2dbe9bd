"""One question for an offer that is not made yet, and the producer that is asked."""

from dataclasses import dataclass, field

import zmq

from stateferry.ferry.connection import send_without_waiting
from stateferry.ids import Epoch, TransferId
from stateferry.session import Expect
from stateferry.wire import Message


@dataclass(slots=True, eq=False)
class Place:
    """Rank 0 of a producer."""

    host: str
    port: int
    socket: "zmq.Socket[bytes]"
    used_s: float
    """When somebody was asked something last."""
    heard_s: float = float("-inf")
    """When it last answered a question."""
    releases: int = 0
    """Releases that were sent and not answered."""
    inquiries: dict[TransferId, "Inquiry"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.host}:{self.port}"

    def send(self, message: Message) -> bool:
        """Queue it without waiting. False: the queue is full."""
        return send_without_waiting(self.socket, message)


@dataclass(slots=True, eq=False)
class Inquiry:
    """One question."""

    expect: Expect
    place: Place
    asked_s: float
    epoch: Epoch | None = None
    """The life that said it would tell, or told."""
    left: bool = False
    """Its request ended before the producer said in which life it is: it is told then."""
    over: bool = False
    """It is answered for good, or nobody waits for it."""
