"""Tables of what a cache holds and what a hand-off moves; shared by `inspect` and `doctor`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from stateferry.cli.page_picture import layers_drawn, names_of, picture
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, Part, PartRule
from stateferry.layout.survey import Survey

MAX_NAMES = 4
"""Layers of a group that are listed."""

Shapes = Mapping[str, Sequence[Sequence[int]]]
"""Layer name -> the shape of each of its tensors, where known."""


def show_groups(console: Console, layout: CacheLayout) -> None:
    """vLLM's KV-cache groups: one block table each."""
    table = _table("KV-cache groups: each has its own block table", "group", "kind", "layers")
    for heading in ("tokens a block", "bytes a block"):
        table.add_column(heading, justify="right")
    for number, group in enumerate(layout.groups):
        names = [layer.name for layer in group.layers]
        table.add_row(
            str(number),
            _kind(group),
            _listed(names) or "kept out of hand-offs by vLLM",
            f"{group.block_tokens:,}",
            f"{sum(t.block_bytes for layer in group.layers for t in layer.tensors):,}",
        )
    console.print(table)


def show_tensors(console: Console, layout: CacheLayout, shapes: Shapes | None = None) -> None:
    """Every tensor of the first layer of each kind, as one rank holds it."""
    table = _table(
        f"Tensors of rank 0 of {layout.tp_size}, in one block", "layers", "tensor", "shape", "dtype"
    )
    table.add_column("bytes", justify="right")
    table.add_column("split over ranks")
    for names, tensors, first in _alike(layout, shapes):
        for tensor, shape in zip(tensors, first, strict=True):
            table.add_row(
                names if tensor is tensors[0] else "",
                tensor.name,
                " x ".join(str(count) for count in shape),
                tensor.dtype,
                f"{tensor.block_bytes:,}",
                _split(tensor),
            )
    console.print(table)


def show_pictures(console: Console, layout: CacheLayout) -> None:
    """One block of each group to scale; groups that look alike are drawn once."""
    drawn: dict[tuple[str, ...], list[int]] = {}
    for number, group in enumerate(layout.groups):
        if group.layers:
            drawn.setdefault((_kind(group), *picture(group)), []).append(number)
    for (kind, *lines), numbers in drawn.items():
        group = layout.groups[numbers[0]]
        what = f"group {numbers[0]}" if len(numbers) == 1 else f"groups {', '.join(map(str, numbers))}"
        names = [layer.name for layer in group.layers][: layers_drawn(group)]
        console.print(f"\nOne block of {what} ({kind}), {names_of(names)}", markup=False, highlight=False)
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()


def show_moves(console: Console, surveys: Sequence[Survey], layout: CacheLayout) -> None:
    """Bytes and blocks of hand-offs, by length of the prompt. Sizes that move the same share rows."""
    groups = _moving(layout)
    table = _table("Moved by one hand-off", "ranks of P → D")
    for heading in ("prompt tokens", "state", "attention KV", "all"):
        table.add_column(heading, justify="right")
    table.add_column(f"blocks a rank, of groups {', '.join(map(str, groups))}")
    for same in _same((found.lengths, found) for found in surveys):
        for length in same[0].lengths:
            first = length is same[0].lengths[0]
            table.add_row(
                ", ".join(_sizes(found) for found in same) if first else "",
                f"{length.prompt_tokens:,}",
                size(length.state_bytes),
                size(length.attention_bytes),
                size(length.state_bytes + length.attention_bytes),
                ", ".join(f"{length.blocks[number]:,}" for number in groups),
            )
        table.add_section()
    console.print(table)


def show_pairs(console: Console, surveys: Sequence[Survey], layout: CacheLayout) -> None:
    """Strips and reads of every pair of ranks; pairs with the same numbers share a row."""
    groups = _moving(layout)
    table = _table("Strips and reads of each pair of ranks", "ranks of P → D", "rank → rank")
    for heading in ("group", "bytes a block", "strips"):
        table.add_column(heading, justify="right")
    for length in surveys[0].lengths:
        table.add_column(f"reads at {length.prompt_tokens:,}", justify="right")
    for found in surveys:
        keyed = (((p.block_bytes, p.strips, p.merged_strips, p.pieces), p) for p in found.pairs)
        for pairs in _same(keyed):
            first = pairs[0]
            table.add_row(
                _sizes(found),
                ", ".join(f"{pair.producer_rank}→{pair.consumer_rank}" for pair in pairs),
                "\n".join(map(str, groups)),
                "\n".join(f"{first.block_bytes[n]:,}" for n in groups),
                "\n".join(f"{first.strips[n]} → {first.merged_strips[n]}" for n in groups),
                *(f"{p.unmerged:,}\n→ {p.scattered:,}\n→ {p.consecutive:,}" for p in first.pieces),
            )
        table.add_section()
    table.caption = (
        "strips: stretches of a block that are dense on both sides → merged with their neighbours\n"
        "reads: one a strip and block → strips merged → and blocks, where they lie in a row on both sides"
    )
    table.caption_justify = "left"
    console.print(table)


def size(count: int) -> str:
    """Bytes for eyes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,} B"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _listed(names: Sequence[str]) -> str:
    shown = names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"and {len(names) - MAX_NAMES} more"]
    return "\n".join(shown)


def _kind(group: Group) -> str:
    if not group.transfers:
        return "not handed off"
    if group.kind is GroupKind.WINDOW:
        return f"window of {group.window_tokens:,} tokens"
    scratch = f", {group.scratch_slots} scratch slots" if group.scratch_slots else ""
    return f"{group.kind.value}{scratch}"


def _alike(
    layout: CacheLayout, shapes: Shapes | None
) -> Iterable[tuple[str, tuple[CacheTensor, ...], list[Sequence[int]]]]:
    """Layers whose tensors look alike, as (names, tensors of the first, their shapes)."""
    found: dict[tuple[object, ...], list[tuple[str, tuple[CacheTensor, ...]]]] = {}
    for group in layout.groups:
        for layer in group.layers:
            look = tuple((t.name, t.dtype, t.unit_bytes, t.loops, t.parts, t.opaque) for t in layer.tensors)
            found.setdefault(look, []).append((layer.name, layer.tensors))
    for layers in found.values():
        name, tensors = layers[0]
        known = list((shapes or {}).get(name, ()))
        yield names_of([n for n, _ in layers]), tensors, known or [_shape(tensor) for tensor in tensors]


def _shape(tensor: CacheTensor) -> list[int]:
    """As the layout has it: dimensions that lie densely inside the innermost unit are one."""
    return [*(loop.count for loop in tensor.loops), tensor.unit_bytes // tensor.element_bytes]


def _split(tensor: CacheTensor) -> str:
    if tensor.opaque:
        return "unknown inside: equal sizes only"
    if tensor.axis is None:
        return "whole on every rank"
    return " | ".join(_part(part) for part in tensor.parts)


def _part(part: Part) -> str:
    """The part as the whole model has it, and how it goes over ranks where that is not an even split."""
    if part.rule is PartRule.SPLIT:
        return f"{part.name} {part.size:,}"
    if part.rule is PartRule.REPLICATED:
        return f"{part.name} {part.size:,} on every rank"
    runs = "" if part.granules == part.size else f" in {part.granules}"
    return f"{part.name} {part.size:,}{runs}, copied past {part.granules} ranks"


def _moving(layout: CacheLayout) -> list[int]:
    return [number for number, group in enumerate(layout.groups) if group.transfers]


def _sizes(found: Survey) -> str:
    return f"{found.producer_size} → {found.consumer_size}"


T = TypeVar("T")


def _same(keyed: Iterable[tuple[object, T]]) -> list[list[T]]:
    """Values with equal keys together, in order."""
    rows: dict[object, list[T]] = {}
    for key, value in keyed:
        rows.setdefault(key, []).append(value)
    return list(rows.values())
