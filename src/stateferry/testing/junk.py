"""Damage to messages at the level of their fields and of their bytes.

`choose(n)` gives a number from 0 to n - 1, such as `Random(seed).randrange` or a fuzzer's next byte.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from stateferry.wire import Message, encode_message

Choose = Callable[[int], int]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 15, 4096, 1 << 31, (1 << 31) + 1, 1 << 48, 1 << 53, (1 << 63) - 1),
    *(1 << 63, (1 << 64) - 1, -(1 << 63), 0.0, -0.5, 1e300, math.nan, math.inf, -math.inf),
    *("", "0" * 32, "f" * 32, "x" * 1025, "\x00", "a\nb", "ä" * 40, b"", b"\x00" * 40, b"\xff" * 3000),
    *([], {}, [[]], [1] * 1100, ["0" * 32] * 3, {"a": {"b": [1]}}, _nested(40), _nested(600)),
)
_NESTED = ("layout", "registration")
"""Fields whose bytes are msgpack themselves."""


def damaged(value: Any, choose: Choose) -> Any:
    """A tree of builtin values with one place changed, at any depth; the original stays as it is."""
    if isinstance(value, dict) and value and choose(8):
        keys = sorted(value, key=str)
        key = keys[choose(len(keys))]
        what = choose(12)
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return {**value, "surprise": JUNK[choose(len(JUNK))]}
        if what == 2:
            return {**value, key: value[keys[choose(len(keys))]]}
        return {**value, key: _damaged_field(key, value[key], choose)}
    if isinstance(value, list | tuple) and value and choose(6):
        items, place, what = list(value), choose(len(value)), choose(8)
        if what == 0:
            del items[place]
        elif what == 1:
            items.insert(place, items[choose(len(items))])
        elif what == 2:
            other = choose(len(items))
            items[place], items[other] = items[other], items[place]
        else:
            items[place] = damaged(items[place], choose)
        return items
    if isinstance(value, int) and not isinstance(value, bool) and choose(2):
        return min(max(value + (1, -1, 16, -16)[choose(4)], -(1 << 63)), (1 << 64) - 1)
    return JUNK[choose(len(JUNK))]


def _damaged_field(key: Any, value: Any, choose: Choose) -> Any:
    if key in _NESTED and isinstance(value, bytes) and choose(4):
        try:
            inner = msgspec.msgpack.decode(value)
        except msgspec.DecodeError:
            return damaged_bytes(value, choose)
        return msgspec.msgpack.encode(damaged(inner, choose))
    return damaged(value, choose)


def damaged_bytes(frame: bytes, choose: Choose) -> bytes:
    """A few bytes of a frame changed, cut off, put in or doubled."""
    found = bytearray(frame)
    for _ in range(1 + choose(4)):
        place, what = choose(len(found) + 1), choose(5)
        if what == 0:
            del found[place:]
        elif what == 1:
            found.insert(place, choose(256))
        elif what == 2:
            found += found[place:]
        elif found:
            found[place % len(found)] = choose(256)
    return bytes(found)


def damaged_frame(message: Message, choose: Choose) -> bytes:
    """One message with damage at the level of its fields or of its bytes; now and then none."""
    frame = encode_message(message)
    what = choose(8)
    if what == 0:
        return frame
    if what < 3:
        return damaged_bytes(frame, choose)
    tree = msgspec.msgpack.decode(frame)
    for _ in range(1 + choose(2)):
        tree = damaged(tree, choose)
    return msgspec.msgpack.encode(tree)
