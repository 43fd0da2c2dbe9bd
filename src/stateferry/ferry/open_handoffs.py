"""The hand-offs that a consumer rank has open, how each of them ends, and what is told of it.

open --load--> reading --over, quiet--> ended
  |               +-- past its deadline, not quiet --> quarantine --quiet--> ended
  +-- worth nothing before blocks were given --> lost; it ends when its request closes it
"""

import logging

from stateferry.ferry.ahead import ReadAhead
from stateferry.ferry.asking import Asking
from stateferry.ferry.links import Links
from stateferry.ferry.outbox import Ended
from stateferry.ferry.reading import Reading
from stateferry.ferry.reports import peer_of, report_of
from stateferry.ids import RequestId, TransferId, shown
from stateferry.session import Cause, Clock, Handoff, Outcome, Report
from stateferry.transport.base import Peer

logger = logging.getLogger(__name__)


class OpenHandoffs:
    """Of one consumer rank. Ferry thread only."""

    def __init__(self, links: Links, asking: Asking, ahead: ReadAhead, tp_rank: int, clock: Clock) -> None:
        self.handoffs: dict[RequestId, Handoff] = {}
        self.readings: dict[RequestId, Reading] = {}
        """Of those hand-offs that have blocks, or slots of the waiting room."""
        self._links = links
        self._asking = asking
        self._ahead = ahead
        self._tp_rank = tp_rank
        self._clock = clock
        self._ended: list[Ended] = []
        self._lost: list[RequestId] = []

    # -- counts ----------------------------------------------------------------------------------

    @property
    def reading_count(self) -> int:
        """Hand-offs that have blocks and are not settled, those in quarantine aside."""
        return sum(not r.quarantined for r in self.readings.values())

    @property
    def quarantined_count(self) -> int:
        """Hand-offs past their deadline in whose blocks bytes may still land."""
        return sum(r.quarantined for r in self.readings.values()) + self._ahead.stuck_count

    @property
    def open_count(self) -> int:
        """Hand-offs that are not ended, loading or not."""
        return len(self.handoffs) + self._ahead.open_count

    @property
    def moving(self) -> bool:
        """Whether something was posted and may end any moment."""
        return any(r.posted and not r.quarantined for r in self.readings.values())

    def pending_peers(self) -> set[Peer]:
        """Connections over which bytes may still land."""
        parts = (part for reading in self.readings.values() for part in reading.parts)
        return {part.peer for part in parts if part.restless} | self._ahead.pending_peers()

    # -- what goes wrong -------------------------------------------------------------------------

    def fail(self, handoff: Handoff, reason: str, cause: Cause) -> None:
        """It cannot succeed any more."""
        before = handoff.failure
        handoff.fail(reason, cause)
        if not before:
            self.tell_if_lost(handoff)

    def tell_if_lost(self, handoff: Handoff) -> None:
        """It has just failed: better known before vLLM gives any blocks for it."""
        if handoff.load is None:
            self._lost.append(handoff.request_id)
            self._asking.release(handoff, received=False)

    def refuse(self, request_id: RequestId) -> None:
        """A load for a request of which nothing is known."""
        report = Report(request_id, TransferId(""), Outcome.FAILED, "was never opened", Cause.DEFECT)
        self._ended.append(Ended(report, had_blocks=True))

    def _quarantine(self, reading: Reading, now_s: float) -> None:
        """Nothing more can be done for it but wait. The producer need not: what it reads is worth nothing."""
        reading.quarantined = True
        handoff = reading.handoff
        logger.warning(
            "quarantine: request=%s transfer=%s peer=%s age_s=%.1f: its read does not end; "
            "its blocks stay out of use until it does. Reason: %s",
            handoff.request_id,
            shown(handoff.offer.transfer_id),
            peer_of(handoff),
            now_s - reading.ordered_s,
            handoff.failure or "its request was closed",
        )
        self._asking.release(handoff, received=False)
        if reading.ahead:
            self._ahead.keep_stuck(reading)
            self._without(reading)

    # -- the end ---------------------------------------------------------------------------------

    def settle(self, reading: Reading) -> None:
        """End a hand-off that is over; put one whose read does not end into quarantine."""
        now_s = self._clock.now_s()
        outcome = reading.settle(now_s)
        if outcome is not None and reading.ahead:
            self._end_ahead(reading, outcome)
        elif outcome is not None:
            self.end(reading.handoff, outcome, reading)
        elif reading.overdue(now_s) and not reading.quarantined:
            self._quarantine(reading, now_s)

    def end(self, handoff: Handoff, outcome: Outcome, reading: Reading | None) -> None:
        """Nothing can land in its blocks any more, if it has any (`reading`)."""
        # The release goes first: the producer's engine steps without pause until it has it.
        self._asking.release(handoff, received=outcome is Outcome.RECEIVED)
        for rank in handoff.ranks:
            link = self._links.find(handoff.offer.ranks[rank])
            if link is not None:
                link.requests.discard(handoff.request_id)
                link.claims_sent_s.pop(handoff.request_id, None)
                link.idle_since_s = self._clock.now_s()
                if link.peer is not None and not link.peer.usable:
                    self._links.greet_again(link)
        del self.handoffs[handoff.request_id]
        self.readings.pop(handoff.request_id, None)
        if reading is not None and reading.quarantined:
            logger.warning("quarantine over: request=%s: nothing can land any more", handoff.request_id)
        if handoff.cause is Cause.LEASE:
            self._links.tally.add("stateferry_lease_losses", "consumer")
        self._tell(handoff, outcome, reading)

    def _end_ahead(self, reading: Reading, outcome: Outcome) -> None:
        """vLLM has given no blocks yet, so nobody there waits to hear of it but our own scheduler half."""
        if outcome is Outcome.RECEIVED:
            self.end(reading.handoff, outcome, reading)
            self._ahead.arrived(reading)
            return
        self._ahead.gone(reading)
        self._asking.release(reading.handoff, received=False)
        self._without(reading)

    def _without(self, reading: Reading) -> None:
        """Go on with a hand-off whose read ahead came to nothing."""
        handoff = reading.handoff
        del self.readings[handoff.request_id]
        if handoff.closing:
            self.end(handoff, Outcome.ABANDONED, None)
            return
        self.handoffs[handoff.request_id] = self._ahead.fall_back(reading)
        if not reading.tried:
            self._lost.append(handoff.request_id)

    def _tell(self, handoff: Handoff, outcome: Outcome, reading: Reading | None) -> None:
        report = report_of(handoff, outcome, reading, self._tp_rank, self._clock)
        self._ended.append(Ended(report, had_blocks=reading is not None and not reading.ahead))

    # -- news ------------------------------------------------------------------------------------

    def take_ended(self) -> list[Ended]:
        """Hand-offs that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_lost(self) -> list[RequestId]:
        """Requests whose offer turned out to be worth nothing before blocks were given."""
        lost, self._lost = self._lost, []
        return lost

    # -- after a defect --------------------------------------------------------------------------

    def wind_down(self, reason: str) -> None:
        """Fail what is open, and report what nothing can land in any more. Leans on nothing but transfers.

        Called again until `open_count` is 0, which a read that never becomes quiet prevents.
        """
        self._ahead.wind_down()
        for handoff in list(self.handoffs.values()):
            handoff.fail(reason, Cause.DEFECT)
            reading = self.readings.get(handoff.request_id)
            if reading is None or (reading.ahead and _stilled(reading)):
                self._lost.append(handoff.request_id)
                self.readings.pop(handoff.request_id, None)
            elif _stilled(reading):
                self._tell(handoff, Outcome.FAILED, reading)
                del self.readings[handoff.request_id]
            elif reading.overdue(self._clock.now_s()) and not reading.quarantined:
                self._quarantine(reading, self._clock.now_s())
                continue
            else:
                continue
            del self.handoffs[handoff.request_id]

    def close(self) -> None:
        """Cancel transfers where the library can; tell producers that nothing is wanted any more."""
        for reading in self.readings.values():
            reading.cancel()
        self._ahead.cancel()
        for handoff in list(self.handoffs.values()):
            self._asking.release(handoff, received=False)


def _stilled(reading: Reading) -> bool:
    """Stop a read and look once, by its transfers alone. True: nothing can land any more."""
    reading.cancel()
    for part in reading.parts:
        part.transfer.poll()
    return not any(part.restless for part in reading.parts)
