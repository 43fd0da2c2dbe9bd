"""Reading what a peer's transport registered: bounded and typed, the same for all transports."""

from typing import TypeVar

import msgspec

from stateferry.errors import ProtocolError

MAX_REGISTRATION_BYTES = 1 << 20

T = TypeVar("T")


def decode_registration(transport: str, registration: bytes, kind: type[T]) -> T:
    """The peer's msgpack as `kind`. Raises ProtocolError that names the transport and what is wrong."""
    if len(registration) > MAX_REGISTRATION_BYTES:
        raise ProtocolError(f"{transport} registration: {len(registration)} bytes, at most 1 MiB is allowed")
    try:
        return msgspec.msgpack.decode(registration, type=kind)
    except msgspec.DecodeError as e:
        raise ProtocolError(f"{transport} registration: {e}") from e
