"""Ledger, hand-offs and leases together: any order of events, with messages lost, late, twice or swapped.

The machine is the ferries' part, as small as it can be: it carries messages and looks at reads. What it
checks after every step is what StateFerry promises.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stateferry.block_ids import BlockIds
from stateferry.ids import EngineId, Epoch, RequestId, TransferId
from stateferry.session import (
    Cause,
    Grant,
    Handoff,
    Ledger,
    Load,
    Next,
    Outcome,
    ReadStatus,
    Recovery,
    VirtualClock,
)
from stateferry.session.producer import PARK_S
from stateferry.wire import (
    Claim,
    ClaimAnswer,
    Claimed,
    Offer,
    RankAddress,
    Release,
    Renewal,
    RenewalAnswer,
)

LEASE_S = 15.0
TIMEOUT_S = 40.0
AHEAD_S = 5000.0
"""How much the consumers' clock is ahead of the producer's: nobody may compare the two."""
MAX_OPEN = 4
MAX_READERS = 6

EPOCH = Epoch(1)
NUMBERS = itertools.count()
CLOCK = VirtualClock()
"""The consumers' clock."""


def offer_of(name: str) -> Offer:
    return Offer(
        transfer_id=TransferId(name),
        engine_id=EngineId("p"),
        request_id=RequestId(f"request-{name}"),
        num_tokens=40,
        block_ids=(BlockIds((1, 2, 3)),),
        first_blocks=(0,),
        prefix_digest="0" * 32,
        lease_s=LEASE_S,
        ranks=(RankAddress("127.0.0.1", 1, EPOCH),),
    )


@dataclass
class Try:
    """One posted read."""

    state: str = "pending"
    quiet: bool = False


@dataclass
class Reader:
    """One consumer rank's hand-off, as its ferry knows it."""

    handoff: Handoff
    claimant: str
    rank: int
    size: int
    claim_sent_s: float | None = None
    renewals_sent_s: dict[int, float] = field(default_factory=dict)
    tries: list[Try] = field(default_factory=list)
    recovery: Recovery = field(default_factory=lambda: Recovery(2))
    error: str = ""
    stale: bool = False
    """Bytes came from blocks that the producer had freed."""
    outcome: Outcome | None = None

    @property
    def transfer_id(self) -> TransferId:
        return self.handoff.offer.transfer_id

    @property
    def status(self) -> ReadStatus | None:
        if not self.tries:
            return None
        done = self.tries[-1].state == "done"
        return ReadStatus(done, all(t.quiet for t in self.tries), self.error)

    def live(self, now_s: float) -> bool:
        """Whether it may still be received, and knows that the offer is its own."""
        return (
            self.outcome is None and bool(self.tries) and self.handoff.claimed and self.handoff.hopeful(now_s)
        )


Envelope = tuple[Reader, Any]
"""A message to or from that reader."""


class Together(RuleBasedStateMachine):
    """One producer rank, two consumers of one or two ranks each, and the wire between them."""

    steps = 0
    received = 0
    """Over all runs, to show that something happens."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(EPOCH, 1, LEASE_S)
        self.offers: list[Offer] = []
        self.ungranted: list[Offer] = []
        self.granted: set[str] = set()
        self.freed: set[str] = set()
        self.readers: list[Reader] = []
        self.ended: list[Reader] = []
        self.questions: list[Envelope] = []
        self.answers: list[Envelope] = []
        self.winners: dict[TransferId, set[str]] = {}
        self.broken = False

    # -- time and the producer ---------------------------------------------------------------------------

    @property
    def producer_now_s(self) -> float:
        return CLOCK.now_s() - AHEAD_S

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 8.0, 16.0]), expires=st.booleans())
    def wait(self, seconds: float, expires: bool) -> None:
        CLOCK.advance(seconds)
        if expires:
            self.expire()

    @rule()
    def expire(self) -> None:
        _, answers = self.ledger.expire(self.producer_now_s)
        self.answers += answers  # type: ignore[arg-type]

    @precondition(lambda self: len(self.offers) < MAX_OPEN)
    @rule(at_once=st.booleans())
    def finish_a_prefill(self, at_once: bool) -> None:
        offer = offer_of(f"t{next(NUMBERS)}")
        self.offers.append(offer)
        self.ungranted.append(offer)
        if at_once:
            self.grant(0)

    @precondition(lambda self: self.ungranted)
    @rule(pick=st.integers(0, 3))
    def grant(self, pick: int) -> None:
        offer = self.ungranted.pop(-1 - pick % len(self.ungranted))
        self.granted.add(offer.request_id)
        order = Grant(
            offer.request_id,
            offer.transfer_id,
            offer.num_tokens,
            offer.block_ids,
            offer.first_blocks,
            offer.prefix_digest,
        )
        self.answers += self.ledger.grant(order, self.producer_now_s)  # type: ignore[arg-type]

    # -- the wire ----------------------------------------------------------------------------------------

    def _take(self, pick: int) -> tuple[list[Envelope], int]:
        """A message in either direction, by number; the oldest is 0."""
        at = pick % (len(self.questions) + len(self.answers))
        if at < len(self.questions):
            return self.questions, at
        return self.answers, at - len(self.questions)

    @precondition(lambda self: self.questions or self.answers)
    @rule(pick=st.integers(0, 5), twice=st.booleans())
    def deliver(self, pick: int, twice: bool) -> None:
        where, at = self._take(pick)
        envelope = where[at] if twice and len(where) < 8 else where.pop(at)
        if where is self.questions:
            self._ask(*envelope)
        else:
            self._hear(*envelope)

    @rule(late_s=st.sampled_from([0.0, 0.0, 4.0, 9.0]))
    def deliver_all(self, late_s: float) -> None:
        """All questions, and then, perhaps a while later, all answers."""
        while self.questions:
            self._ask(*self.questions.pop(0))
        CLOCK.advance(late_s)
        while self.answers:
            self._hear(*self.answers.pop(0))

    @precondition(lambda self: self.questions or self.answers)
    @rule(pick=st.integers(0, 5))
    def lose(self, pick: int) -> None:
        where, at = self._take(pick)
        del where[at]

    def _ask(self, reader: Reader, question: Any) -> None:
        now_s = self.producer_now_s
        answer: Any
        if isinstance(question, Claim):
            answer = self.ledger.claim(question, reader, now_s)
        elif isinstance(question, Renewal):
            answer = self.ledger.renew(question, now_s)
        else:
            answer = self.ledger.release(question)
        if isinstance(answer, ClaimAnswer | RenewalAnswer):
            self.answers.append((reader, answer))

    def _hear(self, reader: Reader, answer: Any) -> None:
        if reader.outcome is not None:
            return
        if isinstance(answer, ClaimAnswer):
            mine = (answer.transfer_id, answer.claimant) == (reader.transfer_id, reader.claimant)
            if mine and reader.claim_sent_s is not None:
                reader.handoff.claim_answered(0, answer, reader.claim_sent_s)
                reader.claim_sent_s = None
        else:
            sent_s = reader.renewals_sent_s.pop(answer.sequence, None)
            if sent_s is not None and reader.transfer_id in answer.held:
                reader.handoff.renewed(0, sent_s, answer.lease_s)
            elif sent_s is not None and reader.handoff.leases:
                reader.handoff.fail("lost", Cause.LEASE)

    # -- consumers ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.offers and len(self.readers) < MAX_READERS)
    @rule(pick=st.integers(0, 3), engine=st.sampled_from("de"), size=st.sampled_from([1, 2]))
    def open(self, pick: int, engine: str, size: int) -> None:
        offer = self.offers[-1 - pick % len(self.offers)]
        claimant = f"{engine}/{next(NUMBERS)}"
        for rank in range(size):
            handoff = Handoff(RequestId(claimant), offer, (0,))
            reader = Reader(handoff, claimant, rank, size, CLOCK.now_s())
            self.readers.append(reader)
            claim = Claim(
                epoch=EPOCH,
                transfer_id=offer.transfer_id,
                claimant=claimant,
                tp_rank=rank,
                tp_size=size,
                table_digest=handoff.table_digest,
            )
            self.questions.append((reader, claim))

    @precondition(lambda self: len(self.offers) < MAX_OPEN and len(self.readers) < MAX_READERS)
    @rule(
        size=st.sampled_from([1, 2]),
        loads=st.booleans(),
        late_s=st.sampled_from([0.0, 0.0, 8.0]),
        rivals=st.booleans(),
    )
    def begin(self, size: int, loads: bool, late_s: float, rivals: bool) -> None:
        """Everything goes well so far: most that can go wrong needs a hand-off that is under way."""
        self.finish_a_prefill(True)
        before = len(self.readers)
        for engine in "de" if rivals else "d":
            self.open(0, engine, size)
        self.deliver_all(late_s)
        for reader in self.readers[before:] if loads else ():
            self._load(reader)

    @precondition(lambda self: any(not t.quiet for r in self.readers for t in r.tries))
    @rule(what=st.sampled_from(["done", "done", "fails", "fails writing"]))
    def move_all(self, what: str) -> None:
        """The same happens to every read that is under way: a peer's good day, or a bad one."""
        for pick in range(len(self.readers)):
            self.move(pick, what)
        self.look()

    def _some(self, pick: int) -> Reader:
        return self.readers[pick % len(self.readers)]

    @precondition(lambda self: self.readers)
    @rule(late_s=st.sampled_from([0.0, 9.0]))
    def renew_all(self, late_s: float) -> None:
        for pick in range(len(self.readers)):
            self.renew(pick)
        self.deliver_all(late_s)

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 5))
    def renew(self, pick: int) -> None:
        reader = self._some(pick)
        if reader.handoff.leases and not reader.handoff.released:
            sequence = next(NUMBERS)
            reader.renewals_sent_s[sequence] = CLOCK.now_s()
            claims = (Claimed(reader.transfer_id, reader.claimant),)
            self.questions.append((reader, Renewal(epoch=EPOCH, sequence=sequence, claims=claims)))

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 5), at_once=st.booleans())
    def load(self, pick: int, at_once: bool) -> None:
        self._load(self._some(pick))
        if at_once:
            self.move(pick, "done")

    def _load(self, reader: Reader) -> None:
        if reader.handoff.load is None and not reader.handoff.closing:
            reader.handoff.order_load(Load(RequestId(reader.claimant), 0, ()), CLOCK.now_s(), TIMEOUT_S)
            if not reader.handoff.failure:
                reader.tries.append(Try())

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 5), what=st.sampled_from(["part", "done", "done", "fails", "fails writing"]))
    def move(self, pick: int, what: str) -> None:
        """Something happens to a read that is under way. A failed one may go on writing, too."""
        reader = self._some(pick)
        moving = [t for t in reader.tries if not t.quiet]
        if not moving:
            return
        reader.stale |= reader.handoff.offer.request_id in self.freed
        last = moving[-1]
        if last.state == "failed":
            last.quiet = what != "part"
        elif what != "part":
            last.state = "done" if what == "done" else "failed"
            last.quiet = what != "fails writing"

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 5))
    def close(self, pick: int) -> None:
        self._some(pick).handoff.close()

    @rule()
    def look(self) -> None:
        """The consumers' ferries take a turn. Between two of them anything may have happened."""
        for reader in list(self.readers):
            self._try_again(reader)
            now_s = CLOCK.now_s()
            handoff = reader.handoff
            if handoff.load is None and not handoff.failure and handoff.lapsed(now_s):
                handoff.fail("lapsed", Cause.LEASE)
            if handoff.load is None and handoff.failure:
                self._release(reader, received=False)
            if handoff.overdue(now_s, reader.status):
                self._release(reader, received=False)
            outcome = handoff.settle(now_s, reader.status, verified=True)
            if outcome is not None:
                self._report(reader, outcome)

    def _try_again(self, reader: Reader) -> None:
        if not reader.tries or reader.tries[-1].state != "failed" or reader.error:
            return
        hopeful = reader.handoff.hopeful(CLOCK.now_s())
        step = reader.recovery.after_failure(quiet=reader.tries[-1].quiet, usable=True, hopeful=hopeful)
        if step is Next.GIVE_UP:
            reader.error = "gave up"
        elif step is not Next.WAIT:
            reader.recovery.posted()
            reader.tries.append(Try())

    def _report(self, reader: Reader, outcome: Outcome) -> None:
        self._promise(reader.outcome is None, "reported twice")
        self._promise(all(t.quiet for t in reader.tries), "a byte may land in blocks that were reported")
        reader.outcome = outcome
        if outcome is Outcome.RECEIVED:
            Together.received += 1
            self._promise(not reader.stale, "received bytes of blocks that had been freed")
            held = reader.handoff.offer.request_id not in self.freed
            self._promise(held, "received, but freed before: its lease did not hold to the end")
            self.winners.setdefault(reader.transfer_id, set()).add(reader.claimant)
        self._release(reader, received=outcome is Outcome.RECEIVED)
        self.readers.remove(reader)
        self.ended.append(reader)

    def _release(self, reader: Reader, received: bool) -> None:
        if reader.handoff.released or 0 in reader.handoff.refused:
            return
        reader.handoff.released = True
        release = Release(
            epoch=EPOCH,
            transfer_id=reader.transfer_id,
            claimant=reader.claimant,
            tp_rank=reader.rank,
            tp_size=reader.size,
            received=received,
        )
        self.questions.append((reader, release))

    # -- what must hold after every step -----------------------------------------------------------------

    @invariant()
    def promises_hold(self) -> None:
        Together.steps += 1
        self.ledger.check_integrity()
        for request_id in self.ledger.take_finished():
            self._promise(request_id in self.granted, "freed, but never granted")
            self._promise(request_id not in self.freed, "freed twice")
            self.freed.add(request_id)
            for reader in self.readers:
                if reader.handoff.offer.request_id == request_id:
                    self._promise(not reader.live(CLOCK.now_s()), "freed under a live reader")
            self.offers = [o for o in self.offers if o.request_id != request_id]
        for reader in self.readers:
            writing = sum(not t.quiet for t in reader.tries)
            self._promise(writing <= 1, "two reads write into the same blocks")
        for transfer_id, claimants in self.winners.items():
            self._promise(len(claimants) == 1, f"{transfer_id} served {claimants}")

    def _promise(self, kept: bool, what: str) -> None:
        self.broken |= not kept
        assert kept, what

    def teardown(self) -> None:
        """Everybody goes home; nothing may be left anywhere."""
        if self.broken:
            return
        while self.ungranted:
            self.grant(0)
        for reader in self.readers:
            reader.handoff.close()
            for read in reader.tries:
                read.quiet = True
        self.look()
        assert not self.readers
        self.promises_hold()
        self.questions.clear()
        CLOCK.advance(LEASE_S + PARK_S)
        self.expire()
        self.promises_hold()
        assert self.ledger.open_count == self.ledger.parked_count == 0, "something is left in the ledger"
        assert self.freed == self.granted, "not all that was granted came back"


def run(examples: int, steps: int = 50) -> None:
    """A bounded search, the same every time. Raises AssertionError where a promise is broken."""
    run_state_machine_as_test(
        Together,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )
