"""A block of one rank drawn as text: what lies where, in bytes and to scale."""

from collections.abc import Sequence
from dataclasses import dataclass

from stateferry.layout.spec import CacheTensor, Group

WIDTH = 48
"""Columns of the bar. A stretch takes at least one, however small it is."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a block. Offsets count from the start of the block."""

    name: str
    start: int
    end: int
    size_bytes: int
    """Less than `end - start` where other heads or layers lie in between."""


def stretches(group: Group) -> list[Stretch]:
    """What lies in one block of the group, gaps included, in the order of offsets.

    Where layers lie behind each other, each with all its blocks, that is the first layer's block; where
    blocks are outermost, it is all layers.
    """
    tensors = [(layer.name, tensor) for layer in group.layers for tensor in layer.tensors]
    if not tensors:
        return []
    base = min(tensor.offset_bytes for _, tensor in tensors)
    stride = tensors[0][1].block_stride_bytes
    inside = [(name, t) for name, t in tensors if t.offset_bytes - base < stride]
    several = len({name for name, _ in inside}) > 1
    found = sorted(
        (
            Stretch(
                f"{name} {tensor.name}" if several else tensor.name,
                tensor.offset_bytes - base,
                tensor.offset_bytes - base + _span_bytes(tensor),
                tensor.block_bytes,
            )
            for name, tensor in inside
        ),
        key=lambda stretch: (stretch.start, stretch.end),
    )
    filled: list[Stretch] = []
    reached = 0
    for stretch in found:
        if stretch.start > reached:
            filled.append(_gap(reached, stretch.start))
        filled.append(stretch)
        reached = max(reached, stretch.end)
    if reached < stride:
        filled.append(_gap(reached, stride))
    return filled


def _gap(start: int, end: int) -> Stretch:
    return Stretch("", start, end, end - start)


def _span_bytes(tensor: CacheTensor) -> int:
    """From the tensor's first to its last byte in a block."""
    return tensor.unit_bytes + sum((loop.count - 1) * loop.stride_bytes for loop in tensor.loops)


def picture(group: Group, width: int = WIDTH) -> list[str]:
    """The ladder, a line a stretch: offset, bar to scale, name, bytes, share of the block."""
    parts = stretches(group)
    total = max((part.end for part in parts), default=0)
    names = [part.name or "padding" for part in parts]
    room = max((len(name) for name in names), default=0)
    lines = []
    for part, name in zip(parts, names, strict=True):
        lines.append(
            f"{part.start:>12,}  {_bar(part, total, width)}  {name:<{room}}  {part.size_bytes:>12,} bytes  "
            f"{100 * part.size_bytes / total:5.1f} %"
        )
    return lines


def _bar(part: Stretch, total: int, width: int) -> str:
    first = min(width - 1, part.start * width // total)
    last = max(first + 1, round(part.end * width / total))
    mark = "█" if part.name else "·"
    return " " * first + mark * (last - first) + " " * (width - last)


def layers_drawn(group: Group) -> int:
    """How many of the group's layers the picture shows."""
    base = min((t.offset_bytes for layer in group.layers for t in layer.tensors), default=0)
    return sum(
        any(t.offset_bytes - base < t.block_stride_bytes for t in layer.tensors) for layer in group.layers
    )


def names_of(layers: Sequence[str]) -> str:
    """Layer names in little room: the first, and how many follow."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
