"""What was asked over one control connection and is not answered yet.

ZeroMQ mends a connection that broke, and what was on the wire is gone with the old one: the question, or the
answer to it. So whatever is not answered when the connection is back is asked again, and a producer answers
what it answered before. Renewals aside: two of three may be lost, and the next one says the same.
"""

from dataclasses import dataclass, field

from stateferry.ids import TransferId
from stateferry.wire import Claim, DigestRequest, Release

Question = Claim | DigestRequest | Release


@dataclass(slots=True)
class Asked:
    """One question."""

    question: Question
    until_s: float
    """When the answer is worth nothing any more."""
    sent: bool
    """False: it waits for a connection, or for room in the socket's queue."""


@dataclass(slots=True)
class Questions:
    """Ferry thread only. No I/O."""

    _asked: dict[tuple[type, TransferId, str], Asked] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._asked)

    def put(self, asked: Asked) -> None:
        """Remember it until it is answered. After a release nobody wants to know anything else."""
        question = asked.question
        if isinstance(question, Release):
            for kind in (Claim, DigestRequest):
                self._asked.pop((kind, question.transfer_id, question.claimant), None)
        self._asked[type(question), question.transfer_id, question.claimant] = asked

    def answered(self, kind: type[Question], transfer_id: TransferId, claimant: str | None = None) -> None:
        """An answer came. Some do not say whose question they answer: then it is the oldest one's."""
        for key in self._asked:
            if key[:2] == (kind, transfer_id) and claimant in (None, key[2]):
                del self._asked[key]
                return

    def due(self, now_s: float, again: bool) -> list[Asked]:
        """What to send now: what was not sent yet, or everything, where a connection broke and is back
        (`again`). In the order in which it was asked."""
        for key in [key for key, asked in self._asked.items() if now_s >= asked.until_s]:
            del self._asked[key]
        return [asked for asked in self._asked.values() if again or not asked.sent]
