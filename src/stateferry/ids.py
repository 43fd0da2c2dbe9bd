"""Names for numbers and strings that must not be mixed up.

One request has different ids on the two engines, and a transfer has a third. Giving each its own
type turns a mix-up into a type error.
"""

import uuid
from typing import NewType

RequestId = NewType("RequestId", str)
"""The id that one engine's scheduler knows a request by. Never compared across engines."""

TransferId = NewType("TransferId", str)
"""Names one hand-off. Made by the producer when it makes the offer; used once."""

EngineId = NewType("EngineId", str)
"""vLLM's `engine_id`: which engine, whatever its life."""

Epoch = NewType("Epoch", int)
"""One life of one worker: a restarted engine under the same address has another epoch."""


def new_transfer_id() -> TransferId:
    """Make the id of a new hand-off. 122 random bits: no two engines make the same one."""
    return TransferId(uuid.uuid4().hex)


def new_epoch() -> Epoch:
    """Make the epoch of a worker that starts now.

    52 random bits and never 0, so that a router written in JavaScript carries it unharmed.
    """
    return Epoch((uuid.uuid4().int >> 76) | 1)
