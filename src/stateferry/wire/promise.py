"""Both legs at once: what a router says when it sends the decode leg before there is an offer.

It makes up a name for the transfer, `transfer_id`, and gives it to both legs. The prefill leg's offer then
has an id that follows from the name; the decode leg says by `remote_engine_id` where the offer is to be asked
for. Routers address vLLM's Mooncake connector with the same keys; what else they send is not looked at
(`docs/routers.md`).
"""

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from stateferry.errors import ProtocolError
from stateferry.ids import Epoch, TransferId
from stateferry.wire.params import RankAddress

MAX_NAME = 512
ANY_LIFE = Epoch(1)
"""A promise names no life of the engine: whichever answers makes the offer, and that names its own."""
_PLACE = re.compile(r"@(\[?)([0-9A-Za-z.:_%-]{1,64})(\]?):([0-9]{1,5})\Z")
"""An IPv6 address may stand in brackets, and end in the name of a network interface."""


class Promise(msgspec.Struct, frozen=True):
    """An offer that does not exist yet."""

    transfer_id: TransferId
    address: RankAddress
    """Where rank 0 of its producer listens; the epoch says nothing."""
    tamper: dict[str, Any] | None = None
    """A damage to make on purpose. Honoured only by engines under test."""


def transfer_of(name: str) -> TransferId:
    """The id of the transfer that a router named: 128 bits, whatever the name's form.

    To know the name is to be allowed to claim, so it must not be guessable.
    """
    return TransferId(hashlib.blake2b(name.encode(errors="replace"), digest_size=16).hexdigest())


def engine_place(engine_id: str, address: RankAddress) -> str:
    """`remote_engine_id` as a decode leg names the engine whose rank 0 listens at `address`."""
    return f"{engine_id}@{address.host}:{address.port}"


def promised_to(asked: Mapping[str, Any]) -> TransferId | None:
    """The id that a prefill leg's offer must have, because its decode leg is told of it already; None: its
    router waits for the answer."""
    name = asked.get("transfer_id")
    return transfer_of(name) if isinstance(name, str) and 0 < len(name) <= MAX_NAME else None


def parse_promise(params: Mapping[str, Any]) -> Promise | None:
    """Read a decode leg's dictionary; None: it has an offer, or nothing. Raises ProtocolError."""
    name = params.get("transfer_id")
    if params.get("remote_block_ids") is not None or not isinstance(name, str):
        return None
    if not 0 < len(name) <= MAX_NAME:
        raise ProtocolError(f"transfer_id has {len(name)} characters; 1 to {MAX_NAME} can be used")
    engine_id = params.get("remote_engine_id")
    place = _PLACE.search(engine_id) if isinstance(engine_id, str) else None
    if place is None or bool(place.group(1)) != bool(place.group(3)):
        raise ProtocolError(
            f"remote_engine_id is {str(engine_id)[:100]!r} and there are no remote_block_ids: a decode leg "
            "that is sent before its offer names the prefill engine as NAME@IP:PORT, its first control port"
        )
    host, port = place.group(2), int(place.group(4))
    try:
        ipaddress.ip_address(host)
    except ValueError as e:
        raise ProtocolError(f"remote_engine_id names the host {host!r}, which is no address") from e
    if not 1 <= port <= 65535:
        raise ProtocolError(f"remote_engine_id names port {port}, which does not exist")
    ours = params.get("stateferry")
    tamper = ours.get("tamper") if isinstance(ours, Mapping) else None
    return Promise(
        transfer_of(name),
        RankAddress(host, port, ANY_LIFE),
        dict(tamper) if isinstance(tamper, Mapping) else None,
    )
