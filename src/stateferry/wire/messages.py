"""Control messages between one consumer rank and one producer rank.

A consumer rank asks, a producer rank answers; nothing is sent unasked, so a producer needs no
address of its consumers. Each question carries the epoch it is meant for: an engine that was
restarted under the same address answers with `Refusal` and is met again.

    consumer                          producer
    Hello                       ->    Welcome | Refusal        once per epoch
    Claim                       ->    ClaimAnswer              once per hand-off
    Renewal (many at once)      ->    RenewalAnswer            every third of a lease
    DigestRequest               ->    DigestAnswer             only under `verify`
    Release                     ->    ReleaseAnswer            once per hand-off
"""

from typing import Annotated

import msgspec

from stateferry.ids import EngineId, Epoch, TransferId

PROTOCOL_VERSION = 1
"""Raised by every change that an older engine would misunderstand."""

Text = Annotated[str, msgspec.Meta(max_length=1024)]
TransferIds = Annotated[tuple[TransferId, ...], msgspec.Meta(max_length=65536)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Message, tag="hello", frozen=True, kw_only=True):
    """First message on a connection: who asks, and how its cache looks."""

    protocol: int
    software: Text
    engine_id: EngineId
    epoch: Epoch
    """The consumer's own epoch."""
    expects_epoch: Epoch
    """The producer's epoch as the offer named it."""
    transport: Text
    """Name of the transport that the consumer will read with."""
    layout: bytes
    """The consumer rank's encoded CacheLayout (see `layout.fingerprint`)."""


class Welcome(_Message, tag="welcome", frozen=True, kw_only=True):
    """The producer rank's side of the hand-shake."""

    protocol: int
    software: Text
    engine_id: EngineId
    epoch: Epoch
    layout: bytes
    registration: bytes
    """What the named transport needs to reach this rank's memory."""


class Refusal(_Message, tag="refusal", frozen=True, kw_only=True):
    """A question that cannot be answered. `reason` is written for a person."""

    reason: Text
    epoch: Epoch = Epoch(0)
    """The epoch of the engine that refuses; 0 when it did not say."""


class Claim(_Message, tag="claim", frozen=True, kw_only=True):
    """Take an offer: makes it single-use and starts the consumer's side of the lease."""

    epoch: Epoch
    transfer_id: TransferId
    claimant: Text
    """Same text on every rank of one consumer for one request; differs for any other."""
    tp_rank: int
    tp_size: int


class ClaimAnswer(_Message, tag="claim_answer", frozen=True, kw_only=True):
    """Whether the offer is now the claimant's. Without `reason` it is, for `lease_s` from the claim."""

    transfer_id: TransferId
    lease_s: float = 0.0
    reason: Text = ""


class Renewal(_Message, tag="renewal", frozen=True, kw_only=True):
    """Keep these hand-offs' blocks for another lease."""

    epoch: Epoch
    sequence: int
    """Comes back in the answer, so that a late answer is not taken for a newer renewal's."""
    transfer_ids: TransferIds


class RenewalAnswer(_Message, tag="renewal_answer", frozen=True, kw_only=True):
    """Which of them are still held. What is in neither list was never heard of and counts as lost."""

    sequence: int
    held: TransferIds
    lost: TransferIds
    lease_s: float


class DigestRequest(_Message, tag="digest_request", frozen=True, kw_only=True):
    """Hash what this hand-off read, as the producer sees it: its own blocks, its own plan."""

    epoch: Epoch
    transfer_id: TransferId
    groups: tuple[int, ...]
    first_blocks: tuple[int, ...]
    """First block position read, per entry of `groups`."""
    block_counts: tuple[int, ...]


class DigestAnswer(_Message, tag="digest_answer", frozen=True, kw_only=True):
    """One digest per asked group, or `reason`."""

    transfer_id: TransferId
    digests: tuple[str, ...] = ()
    reason: Text = ""


class Release(_Message, tag="release", frozen=True, kw_only=True):
    """The consumer rank needs the blocks no longer: everything is in, or it gave up."""

    epoch: Epoch
    transfer_id: TransferId
    claimant: Text
    tp_rank: int
    tp_size: int
    received: bool


class ReleaseAnswer(_Message, tag="release_answer", frozen=True, kw_only=True):
    """`known` is False for a release that came after the lease had ended."""

    transfer_id: TransferId
    known: bool


Message = (
    Hello
    | Welcome
    | Refusal
    | Claim
    | ClaimAnswer
    | Renewal
    | RenewalAnswer
    | DigestRequest
    | DigestAnswer
    | Release
    | ReleaseAnswer
)
