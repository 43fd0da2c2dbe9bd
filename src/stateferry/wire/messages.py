"""Control messages between one consumer rank and one producer rank.

A consumer rank asks, a producer rank answers; nothing is sent unasked, so a producer needs no
address of its consumers. What is not answered when a connection broke and came back is asked again, and
answered as before. Each question carries the epoch it is meant for: an engine that was
restarted under the same address answers with `Refusal` and is met again.

    consumer                          producer
    Hello                       ->    Welcome | Refusal        once per epoch, and on every new connection
    Claim                       ->    ClaimAnswer              once per hand-off
    Renewal (many at once)      ->    RenewalAnswer            every third of a lease
    DigestRequest               ->    DigestAnswer             only under `verify`
    Release                     ->    ReleaseAnswer            once per hand-off
    Await (again and again)     ->    AwaitAnswer, and one more when the offer is there
                                                               only where both legs are sent at once
"""

from typing import Annotated

import msgspec

from stateferry import ids

PROTOCOL_VERSION = 2
"""Raised by every change that an older engine would misunderstand."""

MAX_TEXT = 1024
MAX_RANKS = 4096
MAX_GROUPS = 1024

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Claimant = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
EngineId = Annotated[ids.EngineId, msgspec.Meta(max_length=MAX_TEXT)]
Epoch = Annotated[ids.Epoch, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
TransferId = Annotated[ids.TransferId, msgspec.Meta(pattern=ids.HEX_128)]
"""Always of one length: a producer remembers ids that a peer made up, for a while."""
TransferIds = Annotated[tuple[TransferId, ...], msgspec.Meta(max_length=65536)]
Digest = Annotated[str, msgspec.Meta(pattern=ids.HEX_128)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Sequence = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
RankCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_GROUPS)]
LeaseS = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Layout = Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
Registration = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Params = Annotated[bytes, msgspec.Meta(max_length=8 << 20)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Message, tag="hello", frozen=True, kw_only=True):
    """First message on a connection: who asks, and how its cache looks."""

    protocol: Number
    software: Text
    engine_id: EngineId
    epoch: Epoch
    """The consumer's own epoch."""
    expects_epoch: Epoch
    """The producer's epoch as the offer named it."""
    transport: Text
    """Name of the transport that the consumer will read with."""
    layout: Layout
    """The consumer rank's encoded CacheLayout (see `layout.fingerprint`)."""


class Welcome(_Message, tag="welcome", frozen=True, kw_only=True):
    """The producer rank's side of the hand-shake."""

    protocol: Number
    software: Text
    engine_id: EngineId
    epoch: Epoch
    layout: Layout
    registration: Registration
    """What the named transport needs to reach this rank's memory."""


class Refusal(_Message, tag="refusal", frozen=True, kw_only=True):
    """A question that cannot be answered. `reason` is written for a person."""

    reason: Text
    epoch: Epoch = ids.Epoch(0)
    """The epoch of the engine that refuses; 0 when it did not say."""


class Claim(_Message, tag="claim", frozen=True, kw_only=True):
    """Take an offer: makes it single-use and starts the consumer's side of the lease."""

    epoch: Epoch
    transfer_id: TransferId
    claimant: Claimant
    """Same text on every rank of one consumer for one request; differs for any other."""
    tp_rank: Rank
    tp_size: RankCount
    table_digest: Digest
    """Of the block tables that the consumer was given, which came through a client (see `layout.digest`)."""


class ClaimAnswer(_Message, tag="claim_answer", frozen=True, kw_only=True):
    """Whether the offer is now the claimant's. Without `reason` it is, for `lease_s` from the claim."""

    transfer_id: TransferId
    claimant: Claimant
    """Whose claim this answers: one consumer may have several requests after the same offer."""
    lease_s: LeaseS = 0.0
    reason: Text = ""


class Claimed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A hand-off, and who claimed it: nobody keeps what another claimed."""

    transfer_id: TransferId
    claimant: Claimant


class Renewal(_Message, tag="renewal", frozen=True, kw_only=True):
    """Keep these hand-offs' blocks for another lease."""

    epoch: Epoch
    sequence: Sequence
    """Comes back in the answer, so that a late answer is not taken for a newer renewal's."""
    claims: Annotated[tuple[Claimed, ...], msgspec.Meta(max_length=65536)]


class RenewalAnswer(_Message, tag="renewal_answer", frozen=True, kw_only=True):
    """Which of them are still held for the asker. What is in neither list keeps the lease that it has."""

    sequence: Sequence
    held: TransferIds
    lost: TransferIds
    lease_s: LeaseS


class DigestRequest(_Message, tag="digest_request", frozen=True, kw_only=True):
    """Hash what this hand-off read, as the producer sees it: its own blocks, its own plan."""

    epoch: Epoch
    transfer_id: TransferId
    claimant: Claimant
    groups: Numbers
    first_blocks: Numbers
    """First block position read, per entry of `groups`."""
    block_counts: Numbers


class DigestAnswer(_Message, tag="digest_answer", frozen=True, kw_only=True):
    """One digest per asked group, or `reason`."""

    transfer_id: TransferId
    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    reason: Text = ""


class Release(_Message, tag="release", frozen=True, kw_only=True):
    """The consumer rank needs the blocks no longer: everything is in, or it gave up."""

    epoch: Epoch
    transfer_id: TransferId
    claimant: Claimant
    tp_rank: Rank
    tp_size: RankCount
    received: bool


class ReleaseAnswer(_Message, tag="release_answer", frozen=True, kw_only=True):
    """`known` is False for a release that came after the lease had ended."""

    transfer_id: TransferId
    known: bool


class Await(_Message, tag="await", frozen=True, kw_only=True):
    """Tell me of this offer once it is made. Needs no hand-shake, and is meant for any life of the engine."""

    transfer_id: TransferId


class AwaitAnswer(_Message, tag="await_answer", frozen=True, kw_only=True):
    """The offer, or why it will never be; with neither, it is not made yet."""

    epoch: Epoch
    transfer_id: TransferId
    params: Params = b""
    """The `kv_transfer_params` that the prefill leg's response carries, as MessagePack."""
    reason: Text = ""


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
    | Await
    | AwaitAnswer
)
