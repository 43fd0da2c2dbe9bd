"""A describe request: an engine tells its caches' layouts instead of handing anything off.

    asked      kv_transfer_params: {"stateferry": {"describe": true}}
    answered   kv_transfer_params: {"stateferry": {"version": 1, "layouts": [base64 …],
                                                   "ranks": [[host, port, epoch] …],
                                                   "kv_role": "kv_producer" (or kv_consumer, kv_both),
                                                   "bootstrap_port": 8998 (0: none)}}

One entry a rank, by tensor-parallel rank. A layout here is bytes, as `layout.fingerprint` encodes it.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from stateferry.errors import ProtocolError
from stateferry.wire.params import MAX_RANKS, PARAMS_VERSION, RankAddress, is_decode_leg, is_prefill_leg

MAX_ROLE = 32
"""Characters of a role; vLLM's have eleven at most."""
DESCRIBE_PARAMS: Mapping[str, Any] = {"stateferry": {"describe": True}}
"""What a describe request sends as `kv_transfer_params`."""


class _Described(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    layouts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    ranks: Annotated[tuple[RankAddress, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    kv_role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE)] = ""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. Parallel tuples, by tensor-parallel rank."""

    layouts: tuple[bytes, ...]
    """Encoded layouts; nothing has looked inside them yet."""
    ranks: tuple[RankAddress, ...]
    kv_role: str = ""
    """vLLM's name of what it does in a hand-off; empty where an older engine does not say."""
    bootstrap_port: int = 0
    """Where it answers routers that send both legs at once; 0: nowhere."""


def is_describe(params: Any) -> bool:
    """Whether a request asks for the layouts and nothing else. Anything that is not exactly that is not."""
    if not isinstance(params, Mapping) or is_prefill_leg(params) or is_decode_leg(params):
        return False
    ours = params.get("stateferry")
    return isinstance(ours, Mapping) and ours.get("describe") is True


def description_to_params(
    layouts: Sequence[bytes], ranks: Sequence[RankAddress], kv_role: str, bootstrap_port: int = 0
) -> dict[str, Any]:
    """The dictionary that the answer to a describe request carries."""
    return {
        "stateferry": {
            "version": PARAMS_VERSION,
            "layouts": [base64.b64encode(layout).decode("ascii") for layout in layouts],
            "ranks": [[r.host, r.port, r.epoch] for r in ranks],
            "kv_role": kv_role,
            "bootstrap_port": bootstrap_port,
        }
    }


def parse_description(params: Any) -> Description:
    """Read the answer to a describe request. Raises ProtocolError that says what is wrong with it."""
    ours = params.get("stateferry") if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping) or "layouts" not in ours:
        raise ProtocolError(
            "the answer has no 'stateferry.layouts': the engine runs without StateFerryConnector, or with "
            "one that is too old to describe itself"
        )
    try:
        read = msgspec.convert(ours, _Described)
        layouts = tuple(base64.b64decode(text, validate=True) for text in read.layouts)
    except (msgspec.ValidationError, binascii.Error, ValueError, TypeError, RecursionError) as e:
        raise ProtocolError(f"the engine's description cannot be read: {e}") from e
    if read.version != PARAMS_VERSION:
        raise ProtocolError(
            f"the engine's description has version {read.version}, this StateFerry reads {PARAMS_VERSION}: "
            "install the same StateFerry here and there"
        )
    if len(layouts) != len(read.ranks):
        raise ProtocolError(
            f"the engine's description has {len(layouts)} layouts but {len(read.ranks)} addresses"
        )
    return Description(
        layouts=layouts, ranks=read.ranks, kv_role=read.kv_role, bootstrap_port=read.bootstrap_port
    )
