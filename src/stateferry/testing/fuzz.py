"""Live services that damaged messages are sent to. For the fuzz tests and `tools/fuzz_wire.py`.

with ProducerTarget() as target:
    target.send([damaged_frame(message, choose) for message in target.messages()])
# leaving it checks that another consumer's hand-off was not harmed
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec
import zmq

from stateferry.config import Config
from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.layout.digest import table_digest
from stateferry.layout.fingerprint import encode_layout
from stateferry.session import claimant_name
from stateferry.testing.peers import EngineRank, wait_until
from stateferry.wire import (
    PROTOCOL_VERSION,
    Await,
    Claim,
    ClaimAnswer,
    Claimed,
    DigestAnswer,
    DigestRequest,
    Hello,
    Message,
    Offer,
    RankAddress,
    Refusal,
    Release,
    ReleaseAnswer,
    Renewal,
    RenewalAnswer,
    Welcome,
    decode_message,
    encode_message,
)

PATIENCE_MS = 20_000
TABLES, LOCAL = ((1, 2, 3), (4,)), ((5, 6, 7), (8,))
VICTIM = RequestId("victim")
VICTIM_TABLES, VICTIM_LOCAL = ((9, 10, 11), (12,)), ((13, 14, 15), (16,))


class Defects(logging.Handler):
    """What must never be logged because of a message: an error of ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        error = record.exc_info[1] if record.exc_info else None
        self.found.append(f"{record.getMessage()}: {error!r}")


class _Target:
    """A producer and a consumer with one hand-off open between them, which nobody else may harm."""

    def __init__(self) -> None:
        config = Config(lease_s=3600, handshake_timeout_s=30, transfer_timeout_s=120, retry_interval_s=0.01)
        self.producer = EngineRank("p", config=config)
        self.consumer = EngineRank("d", config=config)
        self.defects = Defects()
        self._stack = ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __enter__(self) -> Self:
        logging.getLogger("stateferry").addHandler(self.defects)
        self._stack.callback(logging.getLogger("stateferry").removeHandler, self.defects)
        self._stack.callback(self._context.destroy, linger=0)
        self._stack.enter_context(self.producer)
        self._stack.enter_context(self.consumer)
        self.producer.write_tags(1)
        self.consumer.write_tags(2)
        self._before = self.consumer.memory.bytes.copy()
        self.victim = self.producer.grant(40, VICTIM_TABLES, VICTIM)
        self.consumer.open(VICTIM, self.victim)
        wait_until(lambda: self.producer.ferry.counters.claimed == 1)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack:
            if exc is None:
                self.check()

    def check(self) -> None:
        """Both threads live, nothing was a defect, and the victim's hand-off arrives whole."""
        assert self.producer.ferry.alive
        assert self.consumer.ferry.alive
        assert not self.defects.found, self.defects.found
        assert self.victim_is_held(), "the victim's blocks were given back"
        self.consumer.load(VICTIM, self.victim, VICTIM_LOCAL)
        seen = self.consumer.wait_received(VICTIM)
        assert VICTIM not in seen.failed, seen.reports
        for group, (theirs, ours) in enumerate(zip(VICTIM_TABLES, VICTIM_LOCAL, strict=True)):
            for remote, local in zip(theirs, ours, strict=True):
                assert self.consumer.page(group, local) == self.producer.page(group, remote)
        page = self.consumer.layout.groups[0].layers[0].tensors[0].block_stride_bytes
        changed = {int(place) // page for place in (self._before != self.consumer.memory.bytes).nonzero()[0]}
        assert changed <= {b for ids in (*LOCAL, *VICTIM_LOCAL) for b in ids}, "bytes landed elsewhere"

    def victim_is_held(self) -> bool:
        """Whether the producer keeps the victim's blocks for the victim."""
        claim = Claimed(self.victim.transfer_id, claimant_name(self.consumer.layout.engine_id, VICTIM))
        asker = self._stranger()
        asker.send(encode_message(Renewal(epoch=self.producer.layout.epoch, sequence=1, claims=(claim,))))
        answer = decode_message(receive(asker)[0])
        asker.close(linger=0)
        return isinstance(answer, RenewalAnswer) and answer.held == (self.victim.transfer_id,)

    def welcome(self, epoch: Epoch, registration: bytes) -> Welcome:
        """What this producer says at a hand-shake, in a life of our choice."""
        layout = msgspec.structs.replace(self.producer.layout, epoch=epoch)
        return Welcome(
            protocol=PROTOCOL_VERSION,
            software="fuzz",
            engine_id=layout.engine_id,
            epoch=epoch,
            layout=encode_layout(layout),
            registration=registration,
        )

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            software="fuzz",
            engine_id=self.consumer.layout.engine_id,
            epoch=self.consumer.layout.epoch,
            expects_epoch=self.producer.layout.epoch,
            transport="memory",
            layout=encode_layout(self.consumer.layout),
        )

    def _stranger(self) -> "zmq.Socket[bytes]":
        assert self.producer.address is not None
        socket = self._context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{self.producer.address.port}")
        return socket


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The next message's frames. Raises TimeoutError when none comes."""
    if not socket.poll(PATIENCE_MS):
        raise TimeoutError(f"nothing was received within {PATIENCE_MS} ms")
    return socket.recv_multipart()


class ProducerTarget(_Target):
    """A stranger on the producer's control socket, who knows everything but others' transfer ids."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._socket = self._stranger()
        self._sequence = 0
        self._own = self.producer.grant(40, TABLES, "own")
        return self

    def messages(self) -> list[Message]:
        """One good message of each kind, about a new hand-off of the stranger's own."""
        epoch = self.producer.layout.epoch
        over = Release(
            epoch=epoch,
            transfer_id=self._own.transfer_id,
            claimant="s/r",
            tp_rank=0,
            tp_size=1,
            received=False,
        )
        self.send([encode_message(over)])
        granted = self.producer.ferry.counters.granted
        self._own = self.producer.grant(40, TABLES, f"own{self._sequence}")
        wait_until(lambda: self.producer.ferry.counters.granted > granted)
        own = self._own.transfer_id
        victims_name = claimant_name(self.consumer.layout.engine_id, VICTIM)
        tables = table_digest(40, self._own.block_ids, self._own.first_blocks, self._own.prefix_digest)
        return [
            self._hello(),
            Claim(epoch=epoch, transfer_id=own, claimant="s/r", tp_rank=0, tp_size=1, table_digest=tables),
            Renewal(epoch=epoch, sequence=1, claims=(Claimed(own, "s/r"), Claimed(own, victims_name))),
            DigestRequest(
                epoch=epoch,
                transfer_id=own,
                claimant="s/r",
                groups=(0, 1),
                first_blocks=(0, 2),
                block_counts=(3, 1),
            ),
            Release(epoch=epoch, transfer_id=own, claimant="s/r", tp_rank=0, tp_size=1, received=True),
            Await(transfer_id=own),
            *self._answers(own, epoch),
        ]

    def _answers(self, own: TransferId, epoch: Epoch) -> list[Message]:
        return [
            self.welcome(epoch, b"\x00" * 40),
            Refusal(reason="no", epoch=epoch),
            ClaimAnswer(transfer_id=own, claimant="s/r", lease_s=15.0),
            RenewalAnswer(sequence=1, held=(own,), lost=(), lease_s=15.0),
            DigestAnswer(transfer_id=own, digests=("0" * 32,)),
            ReleaseAnswer(transfer_id=own, known=True),
        ]

    def send(self, frames: Sequence[bytes]) -> list[Message]:
        """Send frames, each as a message, and wait until all were dealt with; what was answered."""
        for frame in frames:
            self._socket.send(frame)
        self._sequence += 1
        last = Renewal(epoch=self.producer.layout.epoch, sequence=self._sequence + (1 << 40), claims=())
        self._socket.send(encode_message(last))
        answers = []
        while True:
            (frame,) = receive(self._socket)
            answer = decode_message(frame)
            if isinstance(answer, RenewalAnswer) and answer.sequence == last.sequence:
                break
            answers.append(answer)
        assert self.producer.ferry.alive
        assert not self.defects.found, self.defects.found
        return answers


class ConsumerTarget(_Target):
    """A producer that says anything, and a consumer that was sent there by an offer."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._router = self._context.socket(zmq.ROUTER)
        self._port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._number = 0
        asker = self._stranger()
        asker.send(encode_message(self._hello()))
        answer = decode_message(receive(asker)[0])
        asker.close(linger=0)
        assert isinstance(answer, Welcome), answer
        self._registration = answer.registration
        return self

    @property
    def _request_id(self) -> RequestId:
        return RequestId(f"fuzzed{self._number}")

    def offer(self) -> Offer:
        """A new offer of the liar's, in a life of its own, so that its consumer makes a new connection."""
        self._number += 1
        address = RankAddress("127.0.0.1", self._port, Epoch(self._number))
        return msgspec.structs.replace(self.producer.offer(40, TABLES), ranks=(address,))

    def messages(self, offer: Offer) -> list[Message]:
        """One good message of each kind that a producer, or nobody, would send."""
        own, epoch = offer.transfer_id, offer.ranks[0].epoch
        name = claimant_name(self.consumer.layout.engine_id, self._request_id)
        return [
            self.welcome(epoch, self._registration),
            ClaimAnswer(transfer_id=own, claimant=name, lease_s=15.0),
            ClaimAnswer(transfer_id=own, claimant=name, reason="no"),
            RenewalAnswer(sequence=1, held=(own,), lost=(), lease_s=15.0),
            RenewalAnswer(sequence=1, held=(), lost=(own, self.victim.transfer_id), lease_s=0.0),
            DigestAnswer(transfer_id=own, digests=("0" * 32,)),
            DigestAnswer(transfer_id=self.victim.transfer_id, reason="no"),
            ReleaseAnswer(transfer_id=own, known=True),
            Refusal(reason="no", epoch=epoch),
            self._hello(),
            Claim(epoch=epoch, transfer_id=own, claimant="s", tp_rank=0, tp_size=1, table_digest="0" * 32),
        ]

    def serve(self, offer: Offer, frames: Sequence[bytes], load: bool) -> None:
        """Have the consumer take the offer, answer with `frames`, end with a refusal; wait for the end."""
        name, epoch = self._request_id, offer.ranks[0].epoch
        self.consumer.open(name, offer)
        if load:
            self.consumer.load(name, offer, LOCAL)
        while True:
            caller, frame = receive(self._router)
            hello = decode_message(frame)
            if isinstance(hello, Hello) and hello.expects_epoch == epoch:
                break
        for frame in frames:
            self._router.send_multipart([caller, frame])
        end = Refusal(reason="another engine now", epoch=Epoch(epoch + 1))
        self._router.send_multipart([caller, encode_message(end)])
        if load:
            self.consumer.wait_received(name)
        else:
            self.consumer.wait_lost(name)
        self.consumer.close(name)
        wait_until(lambda: self.consumer.ferry.open_count == 1)
        assert self.consumer.ferry.alive
        assert not self.defects.found, self.defects.found
