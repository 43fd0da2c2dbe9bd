"""The consumer's side of both legs at once: asks producers for offers that are not made yet.

asked --offer--> told --its request opens it--> the hand-off's
  |               +---- its request ends, or cannot use it ----> forgotten; the producer is told
  |----- why there will be none -----------------------> answered, with the reason
  |----- no word from the producer, or time over -----> answered, with the reason; the producer is told
  +----- its request ended --------------------------> forgotten; the producer is told, once it has answered

The question is repeated, so that a connection that broke is noticed on either side. The producer is asked
before any hand-shake: its life is not known yet, and the offer says it.
"""

import heapq
import itertools
import logging
from collections.abc import Callable

import zmq

from stateferry.config import Config
from stateferry.errors import ProtocolError
from stateferry.ferry.connection import open_socket
from stateferry.ferry.inquiry import Inquiry, Place
from stateferry.ferry.keys import ControlKey
from stateferry.ids import RequestId
from stateferry.layout.spec import CacheLayout
from stateferry.session import Answered, Clock, Expect, claimant_name
from stateferry.wire import Await, AwaitAnswer, Message, Refusal, Release, ReleaseAnswer, decode_frames

logger = logging.getLogger(__name__)

REPEAT_S = 2.0
SOON_S = 0.05
"""When a question is asked again that found the queue of a producer full that answers."""
MAX_PLACES = 512
"""Most producers that are asked at a time: a client could name any number of addresses."""
IDLE_PLACE_S = 60.0
MESSAGES_PER_TURN = 256
QUESTIONS_PER_TURN = 256
"""More at once than a producer takes up in a few of its turns would be lost, always the same ones."""


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
        why_silent: Callable[[str, int], str] = lambda host, port: "",
    ) -> None:
        """`why_silent`: why nobody at a host and port is going to answer, where that is known."""
        self._why_silent = why_silent
        self._context = context
        self._poller = poller
        self._clock = clock
        self._config = config
        self._layout = layout
        self._key = key
        self._places: dict[tuple[str, int], Place] = {}
        self._by_socket: dict[object, Place] = {}
        self._waiting: dict[RequestId, Inquiry] = {}
        self._told: dict[RequestId, Inquiry] = {}
        """Offers that came, until their requests open them."""
        self._due: list[tuple[float, int, Inquiry]] = []
        """A heap: when to look at which question. One entry for each, which outlives it."""
        self._numbers = itertools.count()
        self._answered: list[Answered] = []
        self._look_at_s = float("inf")
        """When to look for producers that nobody asks any more."""
        self._release_again_at_s = float("inf")

    @property
    def open_count(self) -> int:
        """Questions that are not answered."""
        return len(self._waiting)

    def ask(self, expect: Expect) -> None:
        """A request waits for an offer that its router named. `tick` sends the question."""
        if self._layout.tp_rank:
            return
        promise, now_s = expect.promise, self._clock.now_s()
        host, port = promise.address.host, promise.address.port
        try:
            place = self._places.get((host, port)) or self._meet(expect, now_s)
        except (ValueError, zmq.ZMQError) as e:
            self._tell(expect, f"{host}:{port} cannot be asked for its offer: {e}")
            return
        other = place.inquiries.get(promise.transfer_id)
        if other is not None and other.left:
            self._end(other)
        elif other is not None:
            # Told apart by their scheduler half, which forgets; each must hear what becomes of it.
            self._tell(expect, f"request {other.expect.request_id} waits for this offer already")
            return
        inquiry = Inquiry(expect, place, now_s)
        place.inquiries[promise.transfer_id] = self._waiting[expect.request_id] = inquiry
        self._look_again(inquiry, now_s)
        lately = now_s < place.heard_s + self._config.handshake_timeout_s
        if not lately and (why := self._why_silent(host, port)):
            self.close(expect.request_id)  # asked all the same: what it offers when it answers is given back
            self._tell(expect, f"the prefill engine at {why}")

    def opened(self, request_id: RequestId) -> None:
        """The request took the offer that came: it is the hand-off's to give back."""
        self._told.pop(request_id, None)

    def close(self, request_id: RequestId) -> None:
        """The request ended first, or cannot use what came. Its offer, if it is made, need not be kept."""
        inquiry = self._told.pop(request_id, None) or self._waiting.pop(request_id, None)
        if inquiry is not None and inquiry.epoch is None:
            inquiry.left = True
        elif inquiry is not None:
            self._end(inquiry)
            self._release(inquiry)

    def receive(self, socket: object) -> bool:
        """Read what a producer says. False: the socket is not of ours."""
        place = self._by_socket.get(socket)
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
            except Exception as e:  # a defect, which one peer's message must not turn into everybody's
                logger.exception("could not take what %s said of an offer", place.name)
                self._give_up(place, f"said what ended in a defect here: {e!r}")
        return True

    def tick(self, heard_s: float) -> None:
        """Ask again, give up those who had not answered by `heard_s`, and forget producers whom nobody asks
        any more."""
        now_s = self._clock.now_s()
        unread: list[Inquiry] = []
        for _ in range(QUESTIONS_PER_TURN):
            if not self._due or self._due[0][0] > now_s:
                break
            _, _, inquiry = heapq.heappop(self._due)
            if inquiry.over:
                continue
            if heard_s < min(self._ends_s(inquiry)) <= now_s:
                unread.append(inquiry)
            elif why := self._why_over(inquiry, now_s):
                self._end(inquiry)
                self._release(inquiry)
                self._answer(inquiry, f"the prefill engine at {inquiry.place.name} {why}")
            else:
                self._ask_now(inquiry, now_s)
        for inquiry in unread:
            self._look_again(inquiry, now_s)
        if now_s >= self._release_again_at_s:
            for place in self._places.values():
                place.release_again(now_s)
            unheard = any(place.unheard for place in self._places.values())
            self._release_again_at_s = now_s + REPEAT_S if unheard else float("inf")
        if now_s >= self._look_at_s:
            for place in list(self._places.values()):
                if not place.inquiries and now_s >= place.used_s + IDLE_PLACE_S:
                    self._drop(place)
            self._look_at_s = now_s + IDLE_PLACE_S if self._places else float("inf")

    def next_deadline_s(self) -> float:
        """When `tick` has something to do; infinite if never."""
        due_s = self._due[0][0] if self._due else float("inf")
        return min(due_s, self._look_at_s, self._release_again_at_s)

    def take_answered(self) -> list[Answered]:
        """What became of offers that requests wait for, since the last call."""
        answered, self._answered = self._answered, []
        return answered

    def wind_down(self, reason: str) -> None:
        """Nobody will ask any more."""
        for inquiry in list(self._waiting.values()):
            self._end(inquiry)
            self._answer(inquiry, reason)

    def shut(self) -> None:
        """Tell all producers that nothing is waited for any more, and close all connections."""
        for request_id in [*self._waiting, *self._told]:
            self.close(request_id)
        for place in list(self._places.values()):
            self._drop(place)

    def _meet(self, expect: Expect, now_s: float) -> Place:
        """Raises ZMQError for an address that cannot be dialled, ValueError when too many are asked."""
        address = expect.promise.address
        if len(self._places) >= MAX_PLACES:
            idle = [place for place in self._places.values() if not place.inquiries]
            if not idle:
                raise ValueError(f"{MAX_PLACES} prefill engines are asked already; this one is not")
            self._drop(min(idle, key=lambda place: place.used_s))
        place = Place(address.host, address.port, open_socket(self._context, address, self._key), now_s)
        self._places[address.host, address.port] = self._by_socket[place.socket] = place
        self._poller.register(place.socket, zmq.POLLIN)
        self._look_at_s = min(self._look_at_s, now_s + IDLE_PLACE_S)
        return place

    def _ask_now(self, inquiry: Inquiry, now_s: float) -> None:
        place = inquiry.place
        place.used_s = now_s
        sent = place.send(Await(transfer_id=inquiry.expect.promise.transfer_id))
        busy = not sent and now_s < place.heard_s + REPEAT_S
        self._look_again(inquiry, min(now_s + (SOON_S if busy else REPEAT_S), *self._ends_s(inquiry)))

    def _look_again(self, inquiry: Inquiry, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), inquiry))

    def _ends_s(self, inquiry: Inquiry) -> tuple[float, float]:
        """When its producer has been silent for too long, and when the offer comes too late."""
        silent_since_s = max(inquiry.asked_s, inquiry.place.heard_s)
        return (
            silent_since_s + self._config.handshake_timeout_s,
            inquiry.asked_s + self._config.offer_timeout_s,
        )

    def _why_over(self, inquiry: Inquiry, now_s: float) -> str:
        silent_s, late_s = self._ends_s(inquiry)
        if now_s >= silent_s:
            return (
                f"has not answered for {self._config.handshake_timeout_s:g} s: nobody listens there, or it "
                + (
                    "wants a key (this engine has no auth_key_file)"
                    if self._key is None
                    else "has another auth_key_file"
                )
            )
        if now_s >= late_s:
            return f"has made no offer within offer_timeout_s = {self._config.offer_timeout_s:g} s"
        return ""

    def _handle(self, place: Place, message: Message) -> None:
        if isinstance(message, Refusal):
            if place.releases:
                # It may be the answer to one of those: meant for a life that is over, which harms nobody.
                place.releases -= 1
            else:
                self._give_up(place, f"refused to tell of its offer: {message.reason}")
            return
        if isinstance(message, ReleaseAnswer):
            place.release_answered(message.transfer_id)
        if not isinstance(message, AwaitAnswer):
            return
        # One answer shows for all questions that it lives: many at once wait for their turn there.
        place.heard_s = self._clock.now_s()
        inquiry = place.inquiries.get(message.transfer_id)
        if inquiry is None:
            return
        before, inquiry.epoch = inquiry.epoch, message.epoch
        if inquiry.left:
            self._end(inquiry)
            self._release(inquiry)
        elif message.params or message.reason:
            self._end(inquiry)
            if not message.reason:
                self._told[inquiry.expect.request_id] = inquiry
            self._answer(inquiry, message.reason, message.params)
        elif before not in (None, message.epoch):
            self._end(inquiry)
            self._answer(inquiry, "the prefill engine was restarted before it made its offer")

    def _give_up(self, place: Place, reason: str) -> None:
        """What such a peer says next means nothing either."""
        for inquiry in list(place.inquiries.values()):
            self._end(inquiry)
            self._answer(inquiry, f"the prefill engine at {place.name} {reason}")

    def _end(self, inquiry: Inquiry) -> None:
        """Nothing is asked for it any more."""
        inquiry.over = True
        request_id, transfer_id = inquiry.expect.request_id, inquiry.expect.promise.transfer_id
        if self._waiting.get(request_id) is inquiry:
            del self._waiting[request_id]
        if inquiry.place.inquiries.get(transfer_id) is inquiry:
            del inquiry.place.inquiries[transfer_id]

    def _answer(self, inquiry: Inquiry, reason: str, params: bytes = b"") -> None:
        if not inquiry.left:
            self._tell(inquiry.expect, reason, params)

    def _tell(self, expect: Expect, reason: str, params: bytes = b"") -> None:
        self._answered.append(Answered(expect.request_id, b"" if reason else params, reason))

    def _release(self, inquiry: Inquiry) -> None:
        """For all our ranks, which claimed nothing: a producer frees its blocks when as many as will read
        them say so. Unheard, it keeps them for a lease, and no longer."""
        if inquiry.epoch is None:
            return
        place, now_s = inquiry.place, self._clock.now_s()
        self._release_again_at_s = min(self._release_again_at_s, now_s + REPEAT_S)
        for tp_rank in range(self._layout.tp_size):
            release = Release(
                epoch=inquiry.epoch,
                transfer_id=inquiry.expect.promise.transfer_id,
                claimant=claimant_name(self._layout.engine_id, inquiry.expect.request_id),
                tp_rank=tp_rank,
                tp_size=self._layout.tp_size,
                received=False,
            )
            place.unheard.append((release, now_s + self._config.lease_s))
            place.release(release)

    def _drop(self, place: Place) -> None:
        del self._places[place.host, place.port], self._by_socket[place.socket]
        self._poller.unregister(place.socket)
        place.socket.close(linger=1000)
