"""A model that computes nothing but knows what every byte of its cache must be.

    c(0) = seed of the request      c(n) = hash(c(n-1), token n-1)
    attention cell of token s       c(s+1), spelled out for the layer
    recurrent state h(n)            c(n), spelled out for the layer
    sampled token after n tokens    a number made from c(n)

So a page tells which tokens it was computed from, and an answer that was computed from wrong pages differs
from what `answer` says.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

LINK_BYTES = 8
VOCABULARY = 50_000
WRONG_TOKEN = VOCABULARY + 1
"""Sampled when a page that was read does not hold what it must."""


@functools.lru_cache(200_000)
def link(before: bytes, token: int) -> bytes:
    """c(n) from c(n-1)."""
    return hashlib.blake2b(before + token.to_bytes(8, "little"), digest_size=LINK_BYTES).digest()


def seed(lora: str | None = None) -> bytes:
    """c(0): other weights give other contents."""
    return hashlib.blake2b(str(lora).encode(), digest_size=LINK_BYTES).digest()


def chain(tokens: Sequence[int], start: bytes) -> list[bytes]:
    """c(0) … c(len(tokens))."""
    links = [start]
    for token in tokens:
        links.append(link(links[-1], token))
    return links


@functools.lru_cache(200_000)
def spelled(value: bytes, layer: str, size: int) -> Bytes:
    """`uint8[size]`: what a layer stores for c(n)."""
    rest = hashlib.shake_128(value + layer.encode()).digest(size - LINK_BYTES)
    return np.frombuffer(value + rest, np.uint8)


def sampled(value: bytes) -> int:
    """The token that follows c(n)."""
    return int.from_bytes(value, "little") % VOCABULARY


def answer(prompt: Sequence[int], count: int, start: bytes | None = None) -> list[int]:
    """What an engine that makes no mistake answers."""
    value = chain(prompt, start if start is not None else seed())[-1]
    tokens = []
    for _ in range(count):
        tokens.append(sampled(value))
        value = link(value, tokens[-1])
    return tokens


class Layer:
    """One layer's cache as bytes."""

    def __init__(self, name: str, tensor: Any, content_bytes: int) -> None:
        self.name = name
        self.pages: NDArray[np.uint8] = tensor.view(_byte_type()).numpy()
        """`uint8[blocks, heads, tokens or 1, bytes]`, a view."""
        self.content_bytes = content_bytes

    def page(self, block: int) -> bytes:
        """All bytes of a block, as a copy."""
        return self.pages[block].tobytes()

    def fill(self, block: int, value: int) -> None:
        """Overwrite a block."""
        self.pages[block] = value

    def copy(self, source: int, target: int) -> None:
        """Copy a block inside this cache."""
        self.pages[target] = self.pages[source]


class AttentionLayer(Layer):
    """One cell for each token of a block."""

    def write(self, block: int, offset: int, value: bytes) -> None:
        """Store a token."""
        self.pages[block, :, offset, :] = spelled(value, self.name, self.pages.shape[3])

    def wrong(
        self, table: Sequence[int], block_tokens: int, seen: range, links: list[bytes]
    ) -> Iterator[str]:
        """Tokens among `seen` whose cell is not what it must be."""
        if not seen:
            return
        blocks = [table[token // block_tokens] for token in seen]
        cells = self.pages[blocks, :, [token % block_tokens for token in seen], :]
        right = np.stack([spelled(links[token + 1], self.name, cells.shape[2]) for token in seen])
        for i in np.flatnonzero((cells != right[:, None, :]).any(axis=(1, 2))):
            yield f"{self.name}: token {seen[i]} in block {blocks[i]}"


class StateLayer(Layer):
    """One state for each block."""

    def write(self, block: int, value: bytes) -> None:
        """Store h(n)."""
        self.pages[block].reshape(-1)[: self.content_bytes] = spelled(value, self.name, self.content_bytes)

    def wrong(self, block: int, tokens: int, links: list[bytes]) -> Iterator[str]:
        """Whether the block is not h(tokens); says of which length it is, if of any."""
        found = self.pages[block].reshape(-1)[: self.content_bytes]
        if not np.array_equal(found, spelled(links[tokens], self.name, self.content_bytes)):
            value = found[:LINK_BYTES].tobytes()
            holds = f"h({links.index(value)})" if value in links else "no state of this prompt"
            yield f"{self.name}: block {block} should be h({tokens}) and holds {holds}"


def _byte_type() -> Any:
    import torch

    return torch.uint8
