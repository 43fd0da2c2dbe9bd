"""The consumer's side of both legs at once: asks producers for offers that are not made yet.

asked --offer, or why there will be none--> answered
  |----- no word from the producer, or time over -----> answered, with the reason
  +----- its request ended --------------------------> forgotten; the producer is told

The question is repeated, so that a connection that broke is noticed on either side. The producer is asked
before any hand-shake: its life is not known yet, and the offer says it.
"""

from dataclasses import dataclass, field

import zmq

from stateferry.config import Config
from stateferry.errors import ProtocolError
from stateferry.ferry.keys import ControlKey
from stateferry.ferry.link import open_socket
from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.layout.spec import CacheLayout
from stateferry.session import Answered, Clock, Expect, claimant_name
from stateferry.wire import Await, AwaitAnswer, Message, Refusal, Release, decode_frames, encode_message

REPEAT_S = 2.0
MAX_PLACES = 512
"""Most producers that are asked at a time: a client could name any number of addresses."""
IDLE_PLACE_S = 60.0
MESSAGES_PER_TURN = 256


@dataclass(slots=True)
class Inquiry:
    """One question that is not answered for good."""

    expect: Expect
    asked_s: float
    heard_s: float
    """When the producer last showed that it lives; at first, when it was asked."""
    epoch: Epoch | None = None
    """The life that said it would tell."""


@dataclass(slots=True)
class Place:
    """Rank 0 of a producer."""

    socket: "zmq.Socket[bytes]"
    used_s: float
    inquiries: dict[TransferId, Inquiry] = field(default_factory=dict)

    def send(self, message: Message) -> None:
        """Queue it without waiting; what does not fit is asked again."""
        try:
            self.socket.send(encode_message(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return


class Inquiries:
    """Of rank 0 of a consumer; other ranks ask nothing. Ferry thread only."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        clock: Clock,
        config: Config,
        layout: CacheLayout,
        key: ControlKey | None,
    ) -> None:
        self._context = context
        self._poller = poller
        self._clock = clock
        self._config = config
        self._layout = layout
        self._key = key
        self._places: dict[tuple[str, int], Place] = {}
        self._answered: list[Answered] = []
        self._repeat_at_s = float("inf")

    @property
    def open_count(self) -> int:
        """Questions that are not answered."""
        return sum(len(place.inquiries) for place in self._places.values())

    def ask(self, expect: Expect) -> None:
        """A request waits for an offer that its router named."""
        if self._layout.tp_rank:
            return
        promise, now_s = expect.promise, self._clock.now_s()
        where = (promise.address.host, promise.address.port)
        place = self._places.get(where)
        if place is None:
            try:
                if len(self._places) >= MAX_PLACES:
                    raise ValueError(f"{MAX_PLACES} prefill engines are asked already; this one is not")
                place = Place(open_socket(self._context, promise.address, self._key), now_s)
            except (ValueError, zmq.ZMQError) as e:
                self._answer(expect, f"{where[0]}:{where[1]} cannot be asked for its offer: {e}")
                return
            self._places[where] = place
            self._poller.register(place.socket, zmq.POLLIN)
        place.inquiries[promise.transfer_id] = Inquiry(expect, now_s, now_s)
        place.send(Await(transfer_id=promise.transfer_id))
        self._repeat_at_s = min(self._repeat_at_s, now_s + REPEAT_S)

    def close(self, request_id: RequestId) -> None:
        """The request ended first. Its offer, if it is made yet, need not be kept for it."""
        for place in self._places.values():
            for transfer_id, inquiry in list(place.inquiries.items()):
                if inquiry.expect.request_id == request_id:
                    del place.inquiries[transfer_id]
                    if inquiry.epoch is not None:
                        place.send(self._release(transfer_id, inquiry))

    def receive(self, socket: object) -> bool:
        """Read what a producer says. False: the socket is not of ours."""
        place = next((p for p in self._places.values() if p.socket is socket), None)
        if place is None:
            return False
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = place.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            try:
                self._handle(place, decode_frames(frames))
            except ProtocolError as e:
                self._give_up(place, f"sent what cannot be read: {e}")
        return True

    def tick(self) -> None:
        """Ask again, give up, and forget producers whom nobody asks any more."""
        now_s = self._clock.now_s()
        if now_s < self._repeat_at_s:
            return
        self._repeat_at_s = float("inf")
        for where, place in list(self._places.items()):
            for transfer_id, inquiry in list(place.inquiries.items()):
                if why := self._over(inquiry, now_s):
                    del place.inquiries[transfer_id]
                    self._answer(inquiry.expect, f"the prefill engine at {where[0]}:{where[1]} {why}")
                else:
                    place.send(Await(transfer_id=transfer_id))
            if place.inquiries:
                place.used_s = now_s
            elif now_s >= place.used_s + IDLE_PLACE_S:
                self._drop(where)
        if self._places:
            self._repeat_at_s = now_s + REPEAT_S

    def next_deadline_s(self) -> float:
        """When `tick` has something to do; infinite if never."""
        return self._repeat_at_s

    def take_answered(self) -> list[Answered]:
        """What became of offers that requests wait for, since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def wind_down(self, reason: str) -> None:
        """Nobody will ask any more."""
        for place in self._places.values():
            for inquiry in place.inquiries.values():
                self._answer(inquiry.expect, reason)
            place.inquiries.clear()

    def shut(self) -> None:
        """Close all connections."""
        for where in list(self._places):
            self._drop(where)

    def _over(self, inquiry: Inquiry, now_s: float) -> str:
        if now_s >= inquiry.heard_s + self._config.handshake_timeout_s:
            return (
                f"has not answered for {self._config.handshake_timeout_s:g} s: nobody listens there, or it "
                + (
                    "wants a key (this engine has no auth_key_file)"
                    if self._key is None
                    else "has another auth_key_file"
                )
            )
        if now_s >= inquiry.asked_s + self._config.offer_timeout_s:
            return f"has made no offer within offer_timeout_s = {self._config.offer_timeout_s:g} s"
        return ""

    def _handle(self, place: Place, message: Message) -> None:
        if isinstance(message, Refusal):
            self._give_up(place, f"refused to tell of its offer: {message.reason}")
            return
        inquiry = place.inquiries.get(message.transfer_id) if isinstance(message, AwaitAnswer) else None
        if inquiry is None:
            return
        assert isinstance(message, AwaitAnswer)
        if message.params or message.reason:
            del place.inquiries[message.transfer_id]
            self._answer(inquiry.expect, message.reason, message.params)
        elif inquiry.epoch not in (None, message.epoch):
            del place.inquiries[message.transfer_id]
            self._answer(inquiry.expect, "the prefill engine was restarted before it made its offer")
        else:
            inquiry.epoch, inquiry.heard_s = message.epoch, self._clock.now_s()

    def _give_up(self, place: Place, reason: str) -> None:
        """What such a peer says next means nothing either."""
        for inquiry in place.inquiries.values():
            host, port = inquiry.expect.promise.address.host, inquiry.expect.promise.address.port
            self._answer(inquiry.expect, f"the prefill engine at {host}:{port} {reason}")
        place.inquiries.clear()

    def _answer(self, expect: Expect, reason: str, params: bytes = b"") -> None:
        self._answered.append(Answered(expect.request_id, b"" if reason else params, reason))

    def _release(self, transfer_id: TransferId, inquiry: Inquiry) -> Release:
        assert inquiry.epoch is not None
        return Release(
            epoch=inquiry.epoch,
            transfer_id=transfer_id,
            claimant=claimant_name(self._layout.engine_id, inquiry.expect.request_id),
            tp_rank=self._layout.tp_rank,
            tp_size=self._layout.tp_size,
            received=False,
        )

    def _drop(self, where: tuple[str, int]) -> None:
        place = self._places.pop(where)
        self._poller.unregister(place.socket)
        place.socket.close(linger=1000)
