"""What a scheduler half orders from its worker half's ferry, and what comes back.

Orders travel in vLLM's connector metadata: only what changed in a step, nothing else. They are plain
frozen values that pickle well.
"""

import enum
from dataclasses import dataclass

from stateferry.ids import RequestId, TransferId
from stateferry.wire.params import Offer


@dataclass(frozen=True, slots=True)
class Grant:
    """Producer: keep this finished request's blocks for whoever claims them."""

    request_id: RequestId
    transfer_id: TransferId
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    prefix_digest: str


@dataclass(frozen=True, slots=True)
class Open:
    """Consumer: a request with this offer arrived; shake hands and claim it."""

    request_id: RequestId
    offer: Offer


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Which blocks of one group to read, paired by position."""

    group: int
    first_block: int
    """Position of the first block read, counted from the start of the prompt."""
    local_block_ids: tuple[int, ...]
    remote_block_ids: tuple[int, ...]


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
class Close:
    """Consumer: the request wants nothing (more) from its offer: release the producer's blocks."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Orders:
    """All of one step's orders, in the order in which they take effect."""

    grants: tuple[Grant, ...] = ()
    opens: tuple[Open, ...] = ()
    loads: tuple[Load, ...] = ()
    closes: tuple[Close, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.grants or self.opens or self.loads or self.closes)


class Outcome(enum.Enum):
    """How a consumer's hand-off ended."""

    RECEIVED = "received"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank's hand-off leaves behind. Times in seconds from the load order unless said."""

    request_id: RequestId
    transfer_id: TransferId
    outcome: Outcome
    reason: str = ""
    tokens: int = 0
    """Tokens that need not be computed here."""
    groups: tuple[int, ...] = ()
    bytes_by_group: tuple[int, ...] = ()
    """Received bytes, per entry of `groups`."""
    pieces: int = 0
    """Descriptors posted, after merging."""
    waited_s: float = 0.0
    """From load order to post: hand-shake and fence."""
    post_s: float = 0.0
    """How long the post call itself took (on the ferry thread)."""
    wire_s: float = 0.0
    """From post to the last byte."""
    total_s: float = 0.0
    retries: int = 0
    """Reads that were posted again after a failure."""


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
    reports: tuple[Report, ...] = ()


def refused(orders: Orders, reason: str) -> Results:
    """What to answer to orders that nobody will carry out: nothing is kept, read or claimed."""
    loads = frozenset(load.request_id for load in orders.loads)
    return Results(
        sent=frozenset(grant.request_id for grant in orders.grants),
        received=loads,
        failed=loads,
        lost=frozenset(order.request_id for order in orders.opens),
        reports=tuple(
            Report(load.request_id, TransferId(""), Outcome.FAILED, reason) for load in orders.loads
        ),
    )
