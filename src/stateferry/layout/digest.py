"""Short names for what was computed (a prefix of tokens) and for what arrived (bytes)."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from stateferry.layout.spec import Pieces

_DIGEST_BYTES = 16


def _field(data: bytes) -> bytes:
    """`data` after its length, so that no two lists of fields give the same bytes."""
    return len(data).to_bytes(8, "little") + data


def _optional(text: str | None) -> bytes:
    return b"\x00" if text is None else b"\x01" + _field(text.encode("utf-8", "surrogatepass"))


def prefix_digest(
    token_ids: Sequence[int],
    lora: str | None,
    cache_salt: str | None,
    multimodal: Sequence[tuple[int, int, str]],
) -> str:
    """Name a prefix by everything that its KV and state depend on: 32 hexadecimal digits.

    `multimodal` is (first token position, token count, content hash) of every item in the prefix.
    """
    name = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"sferry-prefix")
    # Of a list this takes a quarter of the time that numpy takes, and an engine waits for it.
    name.update(_field(struct.pack(f"<{len(token_ids)}q", *token_ids)))
    name.update(_optional(lora))
    name.update(_optional(cache_salt))
    name.update(len(multimodal).to_bytes(8, "little"))
    for position, count, content in multimodal:
        name.update(np.asarray((position, count), dtype="<i8").tobytes())
        name.update(_field(content.encode("utf-8", "surrogatepass")))
    return name.hexdigest()


def table_digest(
    num_tokens: int,
    block_ids: Sequence[Sequence[int]],
    first_blocks: Sequence[int],
    prefix: str,
) -> str:
    """Name an offer's block tables and the prefix that they hold: 32 hexadecimal digits.

    The tables travel through a client. A producer compares the name of those that a consumer was given
    with the name of those it granted, so that a forged or mixed-up table is never read for good.
    """
    name = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"sferry-tables")
    name.update(num_tokens.to_bytes(8, "little"))
    name.update(_field(prefix.encode("utf-8", "surrogatepass")))
    name.update(_field(np.asarray(first_blocks, dtype="<i8").tobytes()))
    for ids in block_ids:
        name.update(_field(np.asarray(ids, dtype="<i8").tobytes()))
    return name.hexdigest()


def bytes_digest(
    pieces: Pieces, side: Literal["local", "remote"], read: Callable[[int, int, int], memoryview]
) -> str:
    """Name the bytes that one side of `pieces` holds, in their order: 32 hexadecimal digits.

    `read(region, offset, size)` gives the bytes. Two sides agree when they hash the same pieces in
    the same order; cutting or joining pieces does not matter, reordering does.
    """
    regions = pieces.local_regions if side == "local" else pieces.remote_regions
    offsets = pieces.local_offsets if side == "local" else pieces.remote_offsets
    name = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"sferry-bytes")
    name.update(pieces.total_bytes.to_bytes(8, "little"))
    for region, offset, size in zip(regions.tolist(), offsets.tolist(), pieces.sizes.tolist(), strict=True):
        name.update(read(region, offset, size))
    return name.hexdigest()
