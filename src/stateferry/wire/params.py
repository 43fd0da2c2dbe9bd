"""`kv_transfer_params`: the dictionary that a router carries from the prefill leg to the decode leg.

The top-level names are the ones that routers and vLLM know; everything of ours sits under
`stateferry`, so that another connector's dictionary is never mistaken for ours. A client can send
anything here: parsing never raises anything but ProtocolError.
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from stateferry.block_ids import MAX_BLOCK_ID, BlockIds
from stateferry.errors import ProtocolError
from stateferry.ids import HEX_128, EngineId, Epoch, RequestId, TransferId

PARAMS_VERSION = 1
MAX_RANKS = 256
"""Most ranks of one producer: an offer makes its consumer dial as many addresses."""
MAX_TEXT = 512

Printable = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=MAX_TEXT, pattern=r"\A[^\x00-\x1f\x7f\u2028\u2029\ud800-\udfff]+\Z"
    ),
]
"""No line break that would forge a log line, no half of a character that cannot be sent."""
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[0-9A-Za-z.:_%-]+\Z")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]


class RankAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one producer rank listens, and in which life it made the offer."""

    host: Host
    port: Port
    epoch: Annotated[Epoch, msgspec.Meta(ge=1, le=(1 << 53) - 1)]


def authority(host: str, port: int | str) -> str:
    """`HOST:PORT` as it stands in a URL: an IPv6 address in brackets (RFC 3986, section 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Ours(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    transfer_id: Annotated[str, msgspec.Meta(pattern=HEX_128)]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    first_blocks: tuple[Count, ...]
    prefix_digest: Annotated[str, msgspec.Meta(pattern=HEX_128)]
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    ranks: Annotated[tuple[RankAddress, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    tamper: dict[str, Any] | None = None


class _Params(msgspec.Struct, frozen=True, kw_only=True):
    do_remote_prefill: bool
    remote_engine_id: Printable
    remote_request_id: Printable
    remote_block_ids: Annotated[tuple[tuple[BlockId, ...], ...], msgspec.Meta(min_length=1, max_length=1024)]
    stateferry: _Ours


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer's response describes: a prefix of `num_tokens` tokens, its blocks and state."""

    transfer_id: TransferId
    engine_id: EngineId
    request_id: RequestId
    """The producer's own name for the request: for logs."""
    num_tokens: int
    """K: tokens that were computed. The recurrent state on offer is h(K)."""
    block_ids: tuple[BlockIds, ...]
    """One table per vLLM group, in vLLM's order."""
    first_blocks: tuple[int, ...]
    """Block position of each table's first entry."""
    prefix_digest: str
    """Of the K tokens and everything else that decides the cache (see `layout.digest`)."""
    lease_s: float
    ranks: tuple[RankAddress, ...]
    """Every rank of the producer, by tensor-parallel rank."""
    tamper: dict[str, Any] | None = None
    """A damage to make on purpose. Honoured only by engines under test."""


def is_prefill_leg(params: Mapping[str, Any] | None) -> bool:
    """Whether the router asks this engine to compute and offer."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def is_decode_leg(params: Mapping[str, Any] | None) -> bool:
    """Whether the router asks this engine to fetch a prefix from another."""
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


def offer_to_params(offer: Offer) -> dict[str, Any]:
    """The dictionary that the producer's response carries."""
    first = offer.ranks[0]
    ours: dict[str, Any] = {
        "version": PARAMS_VERSION,
        "transfer_id": offer.transfer_id,
        "num_tokens": offer.num_tokens,
        "first_blocks": list(offer.first_blocks),
        "prefix_digest": offer.prefix_digest,
        "lease_s": offer.lease_s,
        "ranks": [[r.host, r.port, r.epoch] for r in offer.ranks],
    }
    if offer.tamper is not None:
        ours["tamper"] = offer.tamper
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine_id,
        "remote_request_id": offer.request_id[:MAX_TEXT],
        "remote_block_ids": [ids.tolist() for ids in offer.block_ids],
        "remote_host": first.host,
        "remote_port": first.port,
        "tp_size": len(offer.ranks),
        "stateferry": ours,
    }


def parse_offer(params: Mapping[str, Any]) -> Offer:
    """Read a decode leg's dictionary. Raises ProtocolError that names the field."""
    if "stateferry" not in params:
        raise ProtocolError(
            "kv_transfer_params have no 'stateferry' entry: they come from another connector, or a "
            "router dropped it; both engines must run StateFerryConnector"
        )
    try:
        read = msgspec.convert(params, _Params)
    except (msgspec.ValidationError, RecursionError, TypeError, ValueError) as e:
        raise ProtocolError(f"kv_transfer_params cannot be used: {e}") from e
    ours = read.stateferry
    if ours.version != PARAMS_VERSION:
        raise ProtocolError(
            f"kv_transfer_params have version {ours.version}, this engine reads {PARAMS_VERSION}: "
            "run the same StateFerry on both engines"
        )
    if len(ours.first_blocks) != len(read.remote_block_ids):
        raise ProtocolError(
            f"kv_transfer_params name {len(read.remote_block_ids)} block tables in remote_block_ids but "
            f"{len(ours.first_blocks)} positions in stateferry.first_blocks"
        )
    for rank in ours.ranks:
        try:
            ipaddress.ip_address(rank.host)
        except ValueError as e:
            # A name would be looked up by the thread that carries everybody's messages, at a client's word.
            raise ProtocolError(
                f"kv_transfer_params name a rank at {rank.host!r}, which is no address"
            ) from e
    if len({(rank.host, rank.port) for rank in ours.ranks}) != len(ours.ranks):
        raise ProtocolError("kv_transfer_params name the same address for two ranks in stateferry.ranks")
    return Offer(
        transfer_id=TransferId(ours.transfer_id),
        engine_id=EngineId(read.remote_engine_id),
        request_id=RequestId(read.remote_request_id),
        num_tokens=ours.num_tokens,
        block_ids=tuple(BlockIds(ids) for ids in read.remote_block_ids),
        first_blocks=ours.first_blocks,
        prefix_digest=ours.prefix_digest,
        lease_s=ours.lease_s,
        ranks=ours.ranks,
        tamper=ours.tamper,
    )
