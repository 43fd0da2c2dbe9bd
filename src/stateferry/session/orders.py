"""What a scheduler half orders from its worker half's ferry, and what comes back.

Orders travel in vLLM's connector metadata: only what changed in a step, nothing else. They are plain
frozen values that pickle well.
"""

import enum
from dataclasses import dataclass

from stateferry.block_ids import BlockIds
from stateferry.ids import RequestId, TransferId
from stateferry.wire import Offer, Promise

Trace = tuple[tuple[str, str], ...]
"""A request's W3C trace headers, name and value; empty where it is not traced."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Producer: keep this finished request's blocks for whoever claims them."""

    request_id: RequestId
    transfer_id: TransferId
    num_tokens: int
    block_ids: tuple[BlockIds, ...]
    first_blocks: tuple[int, ...]
    prefix_digest: str
    trace: Trace = ()
    params: bytes = b""
    """What the response carries, as MessagePack, if a consumer may ask for it ahead of the response."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Producer: an offer that a consumer may be waiting for will never be made."""

    transfer_id: TransferId
    reason: str
    renounced: bool = False
    """Its consumer told another rank that it wants nothing: if it is made, it goes, unless it is claimed."""


@dataclass(frozen=True, slots=True)
class Expect:
    """Consumer: a request arrived before its offer was made; ask for it."""

    request_id: RequestId
    promise: Promise


@dataclass(frozen=True, slots=True)
class Answered:
    """Consumer: what became of an offer that a request waits for."""

    request_id: RequestId
    params: bytes = b""
    """The prefill leg's `kv_transfer_params`, as MessagePack. Anybody may have written them."""
    reason: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True)
class Open:
    """Consumer: a request with this offer arrived; shake hands and claim it."""

    request_id: RequestId
    offer: Offer
    trace: Trace = ()
    ahead: bool = True
    """Whether it may be read into the waiting room, where there is one; else vLLM gives blocks first."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Which blocks of one group to read, paired by position."""

    group: int
    first_block: int
    """Position of the first block read, counted from the start of the prompt."""
    local_block_ids: BlockIds
    remote_block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class Load:
    """Consumer: vLLM allocated blocks; read into them. The blocks are the ferry's until reported."""

    request_id: RequestId
    local_tokens: int
    """Tokens that came from the local prefix cache; their blocks are not destinations."""
    groups: tuple[GroupLoad, ...]
    problem: str = ""
    """Why this load cannot be done. vLLM waits for it all the same, so it is ordered and fails."""


@dataclass(frozen=True, slots=True)
class Place:
    """Consumer, `load_mode: sync`: vLLM runs a request in this step whose hand-off waits in the room. The
    worker half copies it into these blocks before the forward."""

    request_id: RequestId
    groups: tuple[GroupLoad, ...]
    problem: str = ""
    """Why this cannot be done. The request runs in this very step, so the worker must not go on."""


@dataclass(frozen=True, slots=True)
class Close:
    """Consumer: the request wants nothing (more) from its offer: release the producer's blocks."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Orders:
    """All of one step's orders, in the order in which they take effect."""

    grants: tuple[Grant, ...] = ()
    withdrawals: tuple[Withdrawal, ...] = ()
    expects: tuple[Expect, ...] = ()
    """Only rank 0 asks."""
    opens: tuple[Open, ...] = ()
    loads: tuple[Load, ...] = ()
    places: tuple[Place, ...] = ()
    """Only for the worker half, before the step's forward."""
    closes: tuple[Close, ...] = ()
    placed: tuple[RequestId, ...] = ()
    """Only for the ferry, from the worker half: these hand-offs were copied out of the waiting room."""

    def __bool__(self) -> bool:
        return any(
            (
                *(self.grants, self.withdrawals, self.expects, self.opens),
                *(self.loads, self.places, self.closes, self.placed),
            )
        )


class Outcome(enum.Enum):
    """How a consumer's hand-off ended."""

    RECEIVED = "received"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Cause(enum.Enum):
    """Why a hand-off came to nothing, in one word; its reason says it in full."""

    NONE = ""
    """It did not, or its request wanted nothing (more) from it."""
    PEER = "peer"
    """A producer rank could not be met, or did not answer."""
    REFUSED = "refused"
    """A producer rank answered, and said no."""
    LEASE = "lease"
    """A producer rank's promise to keep the blocks ended first."""
    DEADLINE = "deadline"
    """`transfer_timeout_s` was over."""
    READ = "read"
    """The transport failed to read, every time it was tried."""
    DIGEST = "digest"
    """What arrived is not what was computed."""
    TABLES = "tables"
    """The blocks that were given and those that were offered do not fit each other."""
    DEFECT = "defect"
    """An error of ours, or a ferry that does not run any more."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank's hand-off leaves behind. Times in seconds from the load order unless said.

    opened --(shake hands)-- load order -- wait -- plan -- post -- last byte -- ended
                             |                             |---- wire ---|
                             |----------------------- total ------------------|
    """

    request_id: RequestId
    transfer_id: TransferId
    outcome: Outcome
    reason: str = ""
    cause: Cause = Cause.NONE
    tokens: int = 0
    """Tokens that need not be computed here."""
    groups: tuple[int, ...] = ()
    bytes_by_group: tuple[int, ...] = ()
    """Received bytes, per entry of `groups`."""
    pieces_by_group: tuple[int, ...] = ()
    """Descriptors posted, after merging, per entry of `groups`."""
    queued_s: float = 0.0
    """From the arrival of the request to the load order, or to the end if there was none."""
    handshake_s: float = 0.0
    """From the arrival of the request until every producer rank was met; 0 if they were already."""
    waited_s: float = 0.0
    """For the hand-shake, and for the fence."""
    plan_s: float = 0.0
    """To lay the plan over the block ids."""
    post_s: float = 0.0
    """How long the post call itself took (on the ferry thread)."""
    wire_s: float = 0.0
    """From post to the last byte."""
    total_s: float = 0.0
    retried_s: tuple[float, ...] = ()
    """When reads were posted again after a failure."""
    ended_unix_s: float = 0.0
    """The date of the end."""
    tp_rank: int = 0
    peer: str = ""
    """Where its producer ranks listen, as text."""
    trace: Trace = ()

    @property
    def pieces(self) -> int:
        """Descriptors posted, after merging."""
        return sum(self.pieces_by_group)

    @property
    def retries(self) -> int:
        """Reads that were posted again after a failure."""
        return len(self.retried_s)


@dataclass(frozen=True, slots=True)
class Kept:
    """How the blocks of one traced request were kept by one producer rank. Others leave only counts."""

    request_id: RequestId
    transfer_id: TransferId
    released: bool
    """False: the lease ended."""
    kept_s: float
    ended_unix_s: float
    claimant: str
    tp_rank: int
    trace: Trace


@dataclass(frozen=True, slots=True)
class Results:
    """What happened since the last look."""

    sent: frozenset[RequestId] = frozenset()
    """Producer: these requests' blocks may be freed."""
    received: frozenset[RequestId] = frozenset()
    """Consumer: nothing can land in these requests' blocks any more, well or badly."""
    failed: frozenset[RequestId] = frozenset()
    """Those of `received` whose blocks must not be used."""
    lost: frozenset[RequestId] = frozenset()
    """Consumer: these requests' offers turned out to be worth nothing before blocks were given."""
    waiting: tuple[Load, ...] = ()
    """Consumer: arrived in the waiting room. Its local block ids are slots of the room."""
    apart: frozenset[RequestId] = frozenset()
    """Consumer: these requests' hand-offs do not wait in the room, for want of room or because their read
    failed: vLLM must give blocks first."""
    answered: tuple[Answered, ...] = ()
    """Consumer: offers that requests waited for, or why there are none."""
    reports: tuple[Report, ...] = ()
    kept: tuple[Kept, ...] = ()
    """Producer: traced requests whose blocks are kept no more."""
    renounced: tuple[TransferId, ...] = ()
    """Producer: transfers whose consumers gave up before they had claimed anything."""

    def and_then(self, more: "Results") -> "Results":
        """These, and what happened after them."""
        return Results(
            sent=self.sent | more.sent,
            received=self.received | more.received,
            failed=self.failed | more.failed,
            lost=self.lost | more.lost,
            waiting=self.waiting + more.waiting,
            apart=self.apart | more.apart,
            answered=self.answered + more.answered,
            reports=self.reports + more.reports,
            kept=self.kept + more.kept,
            renounced=self.renounced + more.renounced,
        )


def refused(orders: Orders, reason: str) -> Results:
    """What to answer to orders that nobody will carry out: nothing is kept, read or claimed."""
    loads = frozenset(load.request_id for load in orders.loads)
    return Results(
        sent=frozenset(grant.request_id for grant in orders.grants),
        received=loads,
        failed=loads,
        lost=frozenset(order.request_id for order in orders.opens),
        answered=tuple(Answered(order.request_id, reason=reason) for order in orders.expects),
        reports=tuple(
            Report(load.request_id, TransferId(""), Outcome.FAILED, reason, Cause.DEFECT)
            for load in orders.loads
        ),
    )
