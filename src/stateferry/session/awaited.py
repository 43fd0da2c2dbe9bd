"""The producer's side of both legs at once: which consumers wait for an offer that is not made yet."""

from collections import OrderedDict
from collections.abc import Hashable

from stateferry.ids import Epoch, TransferId
from stateferry.session.orders import Grant
from stateferry.session.producer import Ledger
from stateferry.wire import MAX_TEXT, Await, AwaitAnswer

REMEMBER_S = 15.0
"""A consumer that waits asks again far more often; one that has gone is forgotten after so long."""
LOOK_S = 1.0
"""How often those are looked for: many may wait, and the ferry asks in every turn."""
MAX_AWAITED = 8192
"""Offers that are waited for; the one asked for first is forgotten first, and asked for again."""
MAX_ASKERS = 8
"""Consumers that wait for one offer. It serves one; more are a mistake, or somebody who guesses."""


class AwaitedOffers:
    """On rank 0 of a producer. One thread. No I/O.

    Answers are (who asked, what to say). The offer itself stays the ledger's.
    """

    def __init__(self, epoch: Epoch, ledger: Ledger) -> None:
        self._epoch = epoch
        self._ledger = ledger
        self._askers: OrderedDict[TransferId, dict[Hashable, float]] = OrderedDict()
        """Who waits for what, and until when they are remembered."""
        self._look_at_s = 0.0

    @property
    def count(self) -> int:
        """Offers that somebody waits for."""
        return len(self._askers)

    def ask(self, question: Await, sender: Hashable, now_s: float) -> AwaitAnswer:
        """The offer if there is one, or what became of it; else the asker is told when it is made."""
        made = self._ledger.made(question.transfer_id)
        if made is None:
            askers = self._askers.setdefault(question.transfer_id, {})
            if sender in askers or len(askers) < MAX_ASKERS:
                askers[sender] = now_s + REMEMBER_S
            while len(self._askers) > MAX_AWAITED:
                self._askers.popitem(last=False)
        return self._answer(question.transfer_id, made)

    def settled(self, transfer_id: TransferId) -> list[tuple[Hashable, AwaitAnswer]]:
        """An offer was made, or will never be: what to tell those who wait for it."""
        askers = self._askers.pop(transfer_id, {})
        answer = self._answer(transfer_id, self._ledger.made(transfer_id))
        return [(sender, answer) for sender in askers]

    def expire(self, now_s: float) -> None:
        """Forget those who have not asked again."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        for transfer_id, askers in list(self._askers.items()):
            left = {sender: until_s for sender, until_s in askers.items() if until_s > now_s}
            if left:
                self._askers[transfer_id] = left
            else:
                del self._askers[transfer_id]

    def _answer(self, transfer_id: TransferId, made: Grant | str | None) -> AwaitAnswer:
        params, reason = b"", ""
        if isinstance(made, Grant):
            params = made.params
            reason = "" if params else "it was made for a router that waits for the answer"
        elif made is not None:
            reason = f"the offer {made}"[:MAX_TEXT]
        return AwaitAnswer(epoch=self._epoch, transfer_id=transfer_id, params=params, reason=reason)
