"""Made-up caches: an unsharded model, laid out for one rank as an engine of its own might do it."""

import random
from dataclasses import dataclass

import msgspec

from stateferry.ids import EngineId, Epoch
from stateferry.layout.reference import units_held
from stateferry.layout.shard import check_layout
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, LayerCache, Loop, Part


@dataclass(frozen=True)
class Tensor:
    """A tensor of the unsharded model. Each of `dims` is a count, or the parts of the split axis."""

    name: str
    dims: tuple[int | tuple[Part, ...], ...]
    unit_bytes: int = 1


@dataclass(frozen=True)
class Model:
    """An unsharded cache: one group of layers, each a tuple of tensors in page order."""

    layers: tuple[tuple[Tensor, ...], ...]
    kind: GroupKind = GroupKind.STATE

    def layout(self, rank: int, size: int, seed: int = 0, blocks: int = 5) -> CacheLayout:
        """This model's cache on rank `rank` of `size`, `blocks` blocks of 4 tokens.

        Seed 0 is plain: layers outermost, no gaps, dimensions in their order, one region. Other seeds draw
        all that; gaps, order of layers and which of two regions holds a layer anew for each rank, the rest
        once for all ranks of an engine.
        """
        engine = random.Random(seed)
        own = random.Random(f"{seed} {rank}")
        block_outermost = bool(seed) and engine.random() < 0.5
        pages = [_page(layer, rank, size, engine if seed else None, own) for layer in self.layers]
        order = list(range(len(pages)))
        end = 0
        if seed:
            own.shuffle(order)
            end = own.choice((0, 7))
        offsets = [0] * len(pages)
        for number in order:
            offsets[number] = end
            end += pages[number][1] * (1 if block_outermost else blocks)
        regions = [own.randrange(2) if seed else 0 for _ in pages]
        packed = sum(page_bytes for _, page_bytes in pages)
        layers = tuple(
            LayerCache(
                name=f"layer{number}",
                tensors=tuple(
                    msgspec.structs.replace(
                        tensor,
                        region=regions[number],
                        offset_bytes=offsets[number] + tensor.offset_bytes,
                        block_stride_bytes=packed if block_outermost else page_bytes,
                        block_count=blocks,
                    )
                    for tensor in tensors
                ),
            )
            for number, (tensors, page_bytes) in enumerate(pages)
        )
        region_bytes = end + packed * (blocks - 1) if block_outermost else end
        layout = CacheLayout(
            engine_id=EngineId("made-up"),
            epoch=Epoch(1),
            tp_rank=rank,
            tp_size=size,
            groups=(Group(kind=self.kind, block_tokens=4, layers=layers),),
            region_sizes_bytes=(region_bytes,) * (2 if seed else 1),
            facts={},
        )
        check_layout(layout)
        return layout


def _page(
    layer: tuple[Tensor, ...], rank: int, size: int, engine: random.Random | None, own: random.Random
) -> tuple[list[CacheTensor], int]:
    """The layer's tensors, their offsets counted from the start of its page, and the page's size."""
    tensors = []
    end = 0
    for tensor in layer:
        end += own.choice((0, 0, 3)) if engine else 0
        tensors.append(_placed(tensor, rank, size, engine, end))
        end += tensors[-1].block_bytes
    return tensors, end + (own.choice((0, 5)) if engine else 0)


def _placed(tensor: Tensor, rank: int, size: int, engine: random.Random | None, offset: int) -> CacheTensor:
    axis = next((number for number, dim in enumerate(tensor.dims) if not isinstance(dim, int)), None)
    split = None if axis is None else tensor.dims[axis]
    counts = [
        dim if isinstance(dim, int) else sum(len(units_held(part, rank, size)) for part in dim)
        for dim in tensor.dims
    ]
    memory_order = list(range(len(counts)))
    if engine:
        engine.shuffle(memory_order)
    strides = [0] * len(counts)
    run = tensor.unit_bytes
    for dim in reversed(memory_order):
        strides[dim] = run
        run *= counts[dim]
    return CacheTensor(
        name=tensor.name,
        region=0,
        offset_bytes=offset,
        block_stride_bytes=run,
        block_count=1,
        unit_bytes=tensor.unit_bytes,
        element_bytes=1,
        dtype="uint8",
        loops=tuple(Loop(count=c, stride_bytes=s) for c, s in zip(counts, strides, strict=True)),
        axis=axis,
        parts=split if isinstance(split, tuple) else (),
    )
