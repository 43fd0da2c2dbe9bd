"""What engines say to each other, and what travels through the router. No sockets here."""

from stateferry.wire.codec import MAX_MESSAGE_BYTES, decode_message, encode_message
from stateferry.wire.messages import (
    PROTOCOL_VERSION,
    Claim,
    ClaimAnswer,
    DigestAnswer,
    DigestRequest,
    Hello,
    Message,
    Refusal,
    Release,
    ReleaseAnswer,
    Renewal,
    RenewalAnswer,
    Welcome,
)
from stateferry.wire.params import (
    Offer,
    RankAddress,
    is_decode_leg,
    is_prefill_leg,
    offer_to_params,
    parse_offer,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "Claim",
    "ClaimAnswer",
    "DigestAnswer",
    "DigestRequest",
    "Hello",
    "Message",
    "Offer",
    "RankAddress",
    "Refusal",
    "Release",
    "ReleaseAnswer",
    "Renewal",
    "RenewalAnswer",
    "Welcome",
    "decode_message",
    "encode_message",
    "is_decode_leg",
    "is_prefill_leg",
    "offer_to_params",
    "parse_offer",
]
