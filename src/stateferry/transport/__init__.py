"""What moves bytes between two engines. `base.py` is the contract; one file per library beside it.

Importing this loads no transport's library: `create_transport` does, for the one that is asked for.
"""

from stateferry.transport.base import (
    Capabilities,
    MemoryKind,
    MemoryRegion,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
)
from stateferry.transport.registry import choose, create_transport, transport_names

__all__ = [
    "Capabilities",
    "MemoryKind",
    "MemoryRegion",
    "Peer",
    "Transfer",
    "TransferState",
    "Transport",
    "TransportOptions",
    "choose",
    "create_transport",
    "transport_names",
]
