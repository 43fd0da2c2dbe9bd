"""The consumer's side of one hand-off on one rank, as a state machine without I/O.

    opened --load--> loading --posted--> reading --all bytes, claims, digests--> RECEIVED
       |               |                    |
       +-- close ------+--- any failure ----+--- wait until nothing can land ---> FAILED | ABANDONED

The owner (the ferry) tells it what happened and asks `settle` what follows. A hand-off that was given
blocks ends only when no byte can land in them any more, whatever else went wrong.
"""

import hashlib
from dataclasses import dataclass, field

from stateferry.ids import EngineId, RequestId, shown
from stateferry.layout.digest import table_digest
from stateferry.session.lease import Lease
from stateferry.session.orders import Cause, Load, Outcome, Trace
from stateferry.wire.messages import ClaimAnswer
from stateferry.wire.params import Offer


def producer_ranks(tp_rank: int, tp_size: int, producer_tp_size: int) -> tuple[int, ...]:
    """The producer ranks that consumer rank `tp_rank` of `tp_size` claims, reads and releases.

    Raises ValueError where neither size divides the other.
    """
    if tp_size % producer_tp_size == 0:
        return (tp_rank // (tp_size // producer_tp_size),)
    if producer_tp_size % tp_size == 0:
        share = producer_tp_size // tp_size
        return tuple(range(tp_rank * share, (tp_rank + 1) * share))
    raise ValueError(
        f"tensor parallel sizes {producer_tp_size} (producer) and {tp_size} (consumer) do not divide "
        "one another: choose sizes where one is a multiple of the other"
    )


MAX_NAME = 256
"""A client may choose its request's id; a longer one must not make a claim that is too long to be read."""


def claimant_name(engine_id: EngineId, request_id: RequestId) -> str:
    """Who claims: the same on every rank of one consumer for one request. ASCII, at most `MAX_NAME` long."""
    name = f"{engine_id}/{request_id}"
    plain = name.encode("ascii", "backslashreplace").decode()
    if plain == name and plain.isprintable() and len(name) <= MAX_NAME:
        return name
    tail = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{''.join(c for c in plain if c.isprintable())[: MAX_NAME - len(tail) - 1]}#{tail}"


@dataclass(slots=True)
class ReadStatus:
    """What all transfers of one hand-off say together."""

    done: bool
    quiet: bool
    error: str = ""


@dataclass(slots=True)
class Handoff:
    """One request's hand-off on one consumer rank."""

    request_id: RequestId
    offer: Offer
    ranks: tuple[int, ...]
    """Producer ranks that this rank deals with."""
    opened_s: float = 0.0
    met_s: float = 0.0
    """When the last of the producer ranks was met."""
    trace: Trace = ()
    leases: dict[int, Lease] = field(default_factory=dict)
    """By producer rank, from the answered claim on."""
    refused: frozenset[int] = frozenset()
    """Producer ranks that said no: what they hold is not ours to release."""
    load: Load | None = None
    deadline_s: float = float("inf")
    """Set with the load: when the request is failed if its bytes are not in."""
    failure: str = ""
    cause: Cause = Cause.NONE
    closing: bool = False
    released: bool = False
    """The producer was told that nothing (more) is wanted: its blocks are not to be counted on."""

    @property
    def table_digest(self) -> str:
        """Name of the tables that this side was given, for the producer to compare."""
        offer = self.offer
        return table_digest(offer.num_tokens, offer.block_ids, offer.first_blocks, offer.prefix_digest)

    def claim_answered(self, rank: int, answer: ClaimAnswer, sent_s: float) -> None:
        """The producer rank granted or refused the claim that was sent at `sent_s`."""
        if answer.reason:
            self.refused |= {rank}
            self.fail(
                f"producer rank {rank} refused transfer {shown(self.offer.transfer_id)}: {answer.reason}",
                Cause.REFUSED,
            )
        elif rank in self.ranks:
            self.leases[rank] = Lease.from_claim(sent_s, answer.lease_s)

    def renewed(self, rank: int, sent_s: float, lease_s: float) -> None:
        """The producer rank answered a renewal that was sent at `sent_s`."""
        if rank in self.leases:
            self.leases[rank].renewed(sent_s, lease_s)

    def lapsed(self, now_s: float) -> str:
        """Why the offer is worth nothing any more, as far as leases go; empty: they hold, or none has
        begun. A producer that died answers no renewal, so this is how its consumer hears of it."""
        for rank, lease in self.leases.items():
            if not lease.alive(now_s):
                return (
                    f"the lease of producer rank {rank} on transfer {shown(self.offer.transfer_id)} ended "
                    f"{now_s - lease.ends_s:.3f} s ago: what was read may belong to another request"
                )
        return ""

    def fail(self, reason: str, cause: Cause) -> None:
        """This hand-off cannot succeed any more. The first reason is kept."""
        if not self.failure:
            self.failure, self.cause = reason, cause

    def order_load(self, load: Load, now_s: float, timeout_s: float) -> None:
        """vLLM allocated blocks: from now on they are ours until `settle` gives an outcome."""
        self.load = load
        self.deadline_s = now_s + timeout_s

    def close(self) -> None:
        """The request wants nothing (more) from the offer."""
        self.closing = True

    def hopeful(self, now_s: float) -> bool:
        """Whether it can still succeed: what failed may then be tried again."""
        given_up = bool(self.failure) or self.closing
        return not given_up and now_s < self.deadline_s and not self.lapsed(now_s)

    def overdue(self, now_s: float, reads: ReadStatus | None) -> bool:
        """Whether its deadline is over and bytes may land all the same: its blocks are in quarantine."""
        return now_s >= self.deadline_s and reads is not None and not reads.quiet

    @property
    def claimed(self) -> bool:
        """Whether every producer rank has answered that the offer is ours."""
        return len(self.leases) == len(self.ranks)

    def settle(self, now_s: float, reads: ReadStatus | None, verified: bool) -> Outcome | None:
        """What follows from everything known at `now_s`; None: go on waiting.

        `reads` is None until something was posted. `verified` says that digests were compared, or
        need not be.
        """
        if self.load is None:
            return Outcome.ABANDONED if self.closing else None
        self._look_for_failure(now_s, reads)
        if self.failure or self.closing:
            if reads is not None and not reads.quiet:
                return None
            return Outcome.ABANDONED if self.closing else Outcome.FAILED
        if reads is not None and reads.done and self.claimed and verified:
            return Outcome.RECEIVED
        return None

    def _look_for_failure(self, now_s: float, reads: ReadStatus | None) -> None:
        # First what forbids another try: a read gives up because of it, and is not the reason.
        if lapsed := self.lapsed(now_s):
            self.fail(lapsed, Cause.LEASE)
        if now_s >= self.deadline_s:
            missing = "end of the read" if self.claimed else "answer to the claim"
            reason = f"no {missing} from {self.offer.engine_id} within transfer_timeout_s"
            self.fail(reason, Cause.DEADLINE)
        if reads is not None and reads.error:
            self.fail(reads.error, Cause.READ)
