"""Addresses as MoRIIO's routers write them, `host:IP,handshake:PORT,notify:PORT`, alone or in request ids."""

import re
from typing import NamedTuple

from stateferry.errors import ProtocolError

PREFILL = "___prefill_addr_"
DECODE = "___decode_addr_"
MAX_ID = 4096
"""Longest request id that is looked into; two addresses and vLLM's own additions take a few hundred."""
_TAIL = re.compile(r"(.+)_[0-9a-f]{32}(?:-.*)?", re.DOTALL)
"""The router's 32 digits, and what vLLM puts behind them (`-0-1a2b3c4d`)."""
_PORT = re.compile("[0-9]{1,5}")


class Address(NamedTuple):
    """Where an instance is reached: its host and the first of its ports of each kind."""

    host: str
    handshake: int
    notify: int

    def __str__(self) -> str:
        return f"host:{self.host},handshake:{self.handshake},notify:{self.notify}"


def parse_address(text: str) -> Address:
    """Read a `zmq_address`. Keys end at the first colon, so that an IPv6 host keeps its own.

    Raises ProtocolError.
    """
    parts = dict(part.partition(":")[::2] for part in text.split(","))
    handshake, notify = port_in(parts.get("handshake", "")), port_in(parts.get("notify", ""))
    if not parts.get("host") or not handshake or not notify:
        raise ProtocolError(
            f"Malformed zmq_address {text[:200]!r}: expected 'host:IP,handshake:PORT,notify:PORT'"
        )
    return Address(parts["host"], handshake, notify)


def port_in(text: str) -> int:
    """A port in decimal digits; 0: it is none."""
    return int(text) if _PORT.fullmatch(text) and int(text) <= 65535 else 0


def addresses_in(request_id: str) -> tuple[Address, Address] | None:
    """The prefill and the decode instance that a router named in a request's id; None: it named none.

    Raises ProtocolError for an id that names some, but not in a way that can be read.
    """
    _, found, rest = request_id[:MAX_ID].partition(PREFILL)
    prefill, both, rest = rest.partition(DECODE)
    decode = _TAIL.fullmatch(rest)
    if not found or not both or decode is None:
        return None
    return parse_address(prefill), parse_address(decode.group(1))


def request_id(prefill: Address, decode: Address, unique: str) -> str:
    """The id that a router makes. `unique`: 32 hexadecimal digits."""
    return f"{PREFILL}{prefill}{DECODE}{decode}_{unique}"
