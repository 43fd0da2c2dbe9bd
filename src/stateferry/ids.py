"""Names for numbers and strings that must not be mixed up.

One request has different ids on the two engines, and a transfer has a third. Giving each its own
type turns a mix-up into a type error.
"""

import secrets
from typing import NewType

HEX_128 = r"\A[0-9a-f]{32}\Z"
"""How 128 bits are written: transfer ids and digests."""

RequestId = NewType("RequestId", str)
"""The id that one engine's scheduler knows a request by. Never compared across engines."""

TransferId = NewType("TransferId", str)
"""Names one hand-off. Made by the producer when it makes the offer; used once."""

EngineId = NewType("EngineId", str)
"""vLLM's `engine_id`: which engine, whatever its life."""

Epoch = NewType("Epoch", int)
"""One life of one worker: a restarted engine under the same address has another epoch."""


def new_transfer_id() -> TransferId:
    """Make the id of a new hand-off. 128 bits that nobody can guess: to know it is to be allowed to claim."""
    return TransferId(secrets.token_hex(16))


def shown(transfer_id: TransferId) -> str:
    """As logs name a hand-off: enough to tell it from others, too little to claim it."""
    return f"{transfer_id[:8]}…"


def new_epoch() -> Epoch:
    """Make the epoch of a worker that starts now.

    52 random bits and never 0, so that a router written in JavaScript carries it unharmed.
    """
    return Epoch(secrets.randbits(52) | 1)
