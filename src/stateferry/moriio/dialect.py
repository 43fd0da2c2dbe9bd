"""Offers in the words of MoRIIO's READ protocol, so that its proxies and routers carry them.

Attention's table comes first, then the recurrent groups'. Some proxies carry the whole dictionary to the
decode engine; others pick `remote_engine_id`, `remote_block_ids` and `transfer_id` out of it. For those
everything of ours stands a second time, in short, behind the address in `remote_engine_id`; the ranks'
addresses follow from the one in the request's id (or, without one, from that in `remote_engine_id`) by the
function that our own ranks bind by.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from stateferry.block_ids import BlockIds
from stateferry.config import control_port
from stateferry.errors import ConfigError, ProtocolError
from stateferry.layout.spec import Group, GroupKind
from stateferry.moriio.address import Address, addresses_in, port_in
from stateferry.wire import Offer, offer_to_params, parse_offer
from stateferry.wire.params import PARAMS_VERSION

MAX_ENGINE_ID = 16384
"""256 ranks take some 4 KB."""
MAX_TRANSFER_ID = 512
_SEPARATOR = "/"
_BYTES_16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_PRINTABLE = re.compile(r"[\x20-\x7e]+")


class _Short(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The `stateferry` part of the params without addresses. `parse_offer` checks what it becomes."""

    version: int
    transfer_id: _BYTES_16
    num_tokens: int
    first_blocks: Annotated[tuple[int, ...], msgspec.Meta(max_length=1024)]
    prefix_digest: _BYTES_16
    lease_s: float
    data_parallel_index: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    first_pod: bool
    """Whether the engine runs where its instance registered: a request's id then has its own address."""
    epochs: Annotated[tuple[int, ...], msgspec.Meta(max_length=256)]


class MoriioDialect:
    """Of one engine. See `wire.Dialect`."""

    def __init__(
        self,
        groups: Sequence[Group],
        address: Address,
        *,
        data_parallel_index: int = 0,
        data_parallel_size: int = 1,
        data_parallel_size_local: int = 1,
    ) -> None:
        moving = [index for index, group in enumerate(groups) if group.transfers]
        self._order = tuple(sorted(moving, key=lambda index: groups[index].kind is GroupKind.STATE))
        """Group of each table in `remote_block_ids`."""
        self._num_groups = len(groups)
        self._address = address
        self._index = data_parallel_index
        self._size = data_parallel_size
        self._size_local = data_parallel_size_local

    def write(self, offer: Offer, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The prefill engine's answer: all that a verbatim router needs, and all that a picking one does."""
        said = msgspec.structs.replace(
            offer,
            block_ids=tuple(offer.block_ids[index] for index in self._order),
            first_blocks=tuple(offer.first_blocks[index] for index in self._order),
        )
        return offer_to_params(said) | {
            "remote_engine_id": self._engine_id(said),
            "remote_host": self._address.host,
            "remote_handshake_port": self._address.handshake,
            "remote_notify_port": self._address.notify,
            "remote_dp_rank": self._index,
            "remote_dp_rank_override": True,
            "remote_dp_size": self._size,
            "remote_dp_size_local": self._size_local,
            "remote_tp_size": len(offer.ranks),
            "transfer_id": _transfer_id(asked, offer.request_id),
        }

    def refuse(self, reason: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """With the keys that picking proxies look for, and nothing in them."""
        return {
            "do_remote_prefill": False,
            "do_remote_decode": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": _transfer_id(asked, ""),
            "stateferry": {"not_offered": reason},
        }

    def read(self, params: Mapping[str, Any], request_id: str) -> Offer:
        """The decode engine's side, whichever kind of router carried it. Raises ProtocolError."""
        engine_id = params.get("remote_engine_id")
        if not isinstance(engine_id, str) or len(engine_id) > MAX_ENGINE_ID:
            raise ProtocolError(
                f"remote_engine_id is {str(engine_id)[:100]!r}: the prefill leg made no offer"
            )
        own, ours, short = engine_id.partition(_SEPARATOR)
        if not ours:
            raise ProtocolError(
                f"remote_engine_id {own[:100]!r} is not that of a StateFerry engine with MoRIIO's settings: "
                "both engines need them"
            )
        params = {**params, "remote_engine_id": own}
        if "stateferry" not in params:
            params |= self._unfold(own, short, params.get("transfer_id"), request_id)
        offer = parse_offer(params)
        if len(offer.block_ids) != len(self._order):
            raise ProtocolError(
                f"remote_block_ids has {len(offer.block_ids)} tables, this engine hands off "
                f"{len(self._order)} groups, attention first: run the same model with the same flags on both"
            )
        tables = [BlockIds()] * self._num_groups
        firsts = [0] * self._num_groups
        for index, table, first in zip(self._order, offer.block_ids, offer.first_blocks, strict=True):
            tables[index], firsts[index] = table, first
        return msgspec.structs.replace(offer, block_ids=tuple(tables), first_blocks=tuple(firsts))

    def promised_to(self, asked: Mapping[str, Any]) -> None:
        """Nothing: in READ mode these routers wait for the answer, and use a name again when they retry."""

    def promise(self, params: Mapping[str, Any]) -> None:
        """Nothing: every decode leg has its offer."""

    def _engine_id(self, said: Offer) -> str:
        short = _Short(
            PARAMS_VERSION,
            bytes.fromhex(said.transfer_id),
            said.num_tokens,
            said.first_blocks,
            bytes.fromhex(said.prefix_digest),
            said.lease_s,
            self._index,
            self._index < self._size_local,
            tuple(rank.epoch for rank in said.ranks),
        )
        text = base64.urlsafe_b64encode(msgspec.msgpack.encode(short)).decode()
        return f"{self._address.host}:{self._address.handshake}{_SEPARATOR}{text}"

    def _unfold(self, own: str, text: str, transfer_id: object, request_id: str) -> dict[str, Any]:
        """What a picking proxy dropped, from what it did not."""
        try:
            short: _Short = msgspec.msgpack.decode(base64.urlsafe_b64decode(text.encode()), type=_Short)
        except (ValueError, msgspec.MsgspecError) as e:
            raise ProtocolError(
                f"remote_engine_id '{own[:100]}…' is not one of ours ({e}): both engines must run StateFerry"
            ) from e
        named = addresses_in(request_id) if short.first_pod else None
        host, first_port = (named[0].host, named[0].handshake) if named else _own_address(own)
        try:
            ranks = [
                [host, control_port(first_port, short.data_parallel_index, len(short.epochs), rank), epoch]
                for rank, epoch in enumerate(short.epochs)
            ]
        except ConfigError as e:
            raise ProtocolError(f"the prefill engine's ports cannot be computed: {e}") from e
        return {
            "remote_request_id": transfer_id or "unnamed",
            "stateferry": {
                "version": short.version,
                "transfer_id": short.transfer_id.hex(),
                "num_tokens": short.num_tokens,
                "first_blocks": list(short.first_blocks),
                "prefix_digest": short.prefix_digest.hex(),
                "lease_s": short.lease_s,
                "ranks": ranks,
            },
        }


def _own_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port_in(port):
        raise ProtocolError(f"remote_engine_id begins with {text[:100]!r}: expected an address, 'IP:PORT'")
    return host, int(port)


def _transfer_id(asked: Mapping[str, Any], request_id: str) -> str:
    """The router's name for the transfer, told back; one made up where there is none that can be."""
    given = asked.get("transfer_id")
    good = isinstance(given, str) and len(given) <= MAX_TRANSFER_ID and _PRINTABLE.fullmatch(given)
    return str(given) if good else f"sidecar-{request_id}"[:MAX_TRANSFER_ID]
