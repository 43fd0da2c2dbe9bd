"""What transports register: our own memory once, and what a peer sent, bounded and typed."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from stateferry.errors import ProtocolError, TransportClosed, TransportError, TransportUnavailable
from stateferry.transport.base import MemoryKind, MemoryRegion

MAX_REGISTRATION_BYTES = 1 << 20

T = TypeVar("T")


def check_first(transport: str, *, closed: bool, registered: bool) -> None:
    """Raise unless `register` is called for the first time, and before `close`."""
    if closed:
        raise TransportClosed(f"{transport}: register after close")
    if registered:
        raise TransportError(f"{transport}: register was called before; it works once")


def cpu_spans(transport: str, regions: Sequence[MemoryRegion], why: str) -> list[tuple[int, int]]:
    """(address, size in bytes) of all regions. Raises TransportUnavailable, which says `why`, unless all are
    the processor's memory."""
    for index, region in enumerate(regions):
        if region.kind is not MemoryKind.CPU:
            raise TransportUnavailable(
                f"{transport}: region {index} is {region.kind.value} memory; {why}, use nixl"
            )
    return [(region.address, region.size_bytes) for region in regions]


def decode_registration(transport: str, registration: bytes, kind: type[T]) -> T:
    """The peer's msgpack as `kind`. Raises ProtocolError that names the transport and what is wrong."""
    if len(registration) > MAX_REGISTRATION_BYTES:
        raise ProtocolError(f"{transport} registration: {len(registration)} bytes, at most 1 MiB is allowed")
    try:
        return msgspec.msgpack.decode(registration, type=kind)
    except msgspec.DecodeError as e:
        raise ProtocolError(f"{transport} registration: {e}") from e
