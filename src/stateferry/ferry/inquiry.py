"""One question for an offer that is not made yet, and the producer that is asked."""

from dataclasses import dataclass, field

import zmq

from stateferry.ferry.connection import send_without_waiting
from stateferry.ids import Epoch, TransferId
from stateferry.session import Expect
from stateferry.wire import Message, Release


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
    """Releases that were sent and not answered, each copy of them."""
    unheard: list[tuple[Release, float]] = field(default_factory=list)
    """Releases that are sent again until they are answered, and when that is not worth it any more."""
    inquiries: dict[TransferId, "Inquiry"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.host}:{self.port}"

    def send(self, message: Message) -> bool:
        """Queue it without waiting. False: the queue is full."""
        return send_without_waiting(self.socket, message)

    def release(self, release: Release) -> None:
        """Give an offer back."""
        self.releases += self.send(release)

    def release_answered(self, transfer_id: TransferId) -> None:
        """Answers come in the order of the releases."""
        self.releases = max(0, self.releases - 1)
        heard = next((one for one in self.unheard if one[0].transfer_id == transfer_id), None)
        if heard is not None:
            self.unheard.remove(heard)

    def release_again(self, now_s: float) -> None:
        """What nobody has answered."""
        self.unheard = [one for one in self.unheard if now_s < one[1]]
        for release, _ in self.unheard:
            self.release(release)


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
