"""Made-up caches packed as vLLM packs them and described by the tables that describe vLLM's.

One pool of blocks; layer i of every group has the i-th place in it, so groups overlay one another and a
block belongs to one group at a time.
"""

from dataclasses import dataclass
from math import prod

from stateferry.ids import EngineId, Epoch
from stateferry.layout.shard import check_layout
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, LayerCache
from stateferry.testing.unsharded import SIDES, Attention, Layer, Recurrent, Slots
from stateferry.vllm.kv_tables import (
    Axis,
    StateShapes,
    attention_axis,
    inner_loops,
    side_loops,
    state_axes,
    total_kv_heads,
)


@dataclass(frozen=True, slots=True)
class Layers:
    """One group: its layers and how they read their block table."""

    layers: tuple[Layer, ...]
    kind: GroupKind = GroupKind.STATE
    block_tokens: int = 4


@dataclass(frozen=True, slots=True)
class Packing:
    """How one engine lays its pages; both engines of a hand-off may do so differently."""

    blocks: int = 5
    block_outermost: bool = False
    tokens_first: bool = False
    """Attention pages are [tokens, heads, content], else [heads, tokens, content]."""
    kernel_blocks: int = 1
    """Into how many kernel blocks an attention page is divided. Must be the same on both sides."""
    padding_bytes: int = 0
    """At the end of every page, beyond what the largest page of the rank needs."""
    lead_bytes: int = 0
    """Before the first page."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An unsharded model's groups."""

    groups: tuple[Layers, ...]
    conv_dim_first: bool = False
    dcp_ranks: int = 1
    """Above 1, ranks hold other tokens of an attention block: pages go whole, between equal ranks."""

    def layout(self, rank: int, size: int, packing: Packing) -> CacheLayout:
        """The cache of one rank. Raises LayoutError for what the tables do not know."""
        place = Place.of(self, rank, size, packing)
        groups = tuple(
            Group(
                kind=group.kind,
                block_tokens=group.block_tokens,
                window_tokens=2 * group.block_tokens if group.kind is GroupKind.WINDOW else 0,
                layers=tuple(
                    LayerCache(
                        name=f"group{number}.layer{slot}",
                        tensors=self._tensors(layer, slot, rank, size, place, packing),
                    )
                    for slot, layer in enumerate(group.layers)
                ),
            )
            for number, group in enumerate(self.groups)
        )
        layout = CacheLayout(
            engine_id=EngineId("made-up"),
            epoch=Epoch(1),
            tp_rank=rank,
            tp_size=size,
            groups=groups,
            region_sizes_bytes=(place.region_bytes,),
            facts={},
        )
        check_layout(layout)
        return layout

    def _tensors(
        self, layer: Layer, slot: int, rank: int, size: int, place: "Place", packing: Packing
    ) -> tuple[CacheTensor, ...]:
        offset = place.offset(slot)
        if isinstance(layer, Attention):
            return (self._attention(layer, offset, rank, size, place, packing),)
        shapes = tuple(tensor.shape(rank, size) for tensor in layer.tensors)
        known = StateShapes(shapes, size, self.conv_dim_first, layer.n_groups)
        found = []
        axes = state_axes(layer.mamba_type, layer.replicated, known)
        for axis, shape, tensor in zip(axes, shapes, layer.tensors, strict=True):
            strides = tuple(prod(shape[depth + 1 :]) * tensor.width for depth in range(len(shape)))
            found.append(_tensor(axis, shape, strides, tensor.width, tensor.width, offset, place))
            offset += prod(shape) * tensor.width
        return tuple(found)

    def _attention(
        self, layer: Attention, offset: int, rank: int, size: int, place: "Place", packing: Packing
    ) -> CacheTensor:
        held = layer.tensors[0].shape(rank, size)[0]
        heads = held if layer.slots is Slots.HEADS else held // 2
        slots = 2 if layer.slots in SIDES else held
        tokens, run = layer.tokens // packing.kernel_blocks, layer.content * layer.width * held // slots
        axis = attention_axis(
            layer.backend,
            heads,
            None if layer.slots is Slots.HEADS else slots,
            total_kv_heads(heads, size, layer.heads),
            layer.latent,
        )
        if self.dcp_ranks > 1:
            axis = Axis("page", opaque=True)
        rows = packing.tokens_first and layer.slots not in SIDES
        per_slot, per_token = (run, slots * run) if rows else (tokens * run, run)
        page = (packing.kernel_blocks, slots, tokens), (slots * tokens * run, per_slot, per_token), run
        return _tensor(axis, *side_loops(axis, heads, page), layer.width, offset, place)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the pages of one rank lie in its pool."""

    page_bytes: int
    slots: int
    packing: Packing

    @classmethod
    def of(cls, model: Packed, rank: int, size: int, packing: Packing) -> "Place":
        """Every page is as large as the largest, as vLLM pads them."""
        largest = max(page_bytes(layer, rank, size) for group in model.groups for layer in group.layers)
        slots = max(len(group.layers) for group in model.groups)
        return cls(largest + packing.padding_bytes, slots, packing)

    def offset(self, slot: int) -> int:
        """Where block 0 of a layer starts."""
        pages = slot if self.packing.block_outermost else slot * self.packing.blocks
        return self.packing.lead_bytes + pages * self.page_bytes

    @property
    def stride(self) -> int:
        """From a block of a layer to the next."""
        return self.page_bytes * (self.slots if self.packing.block_outermost else 1)

    @property
    def region_bytes(self) -> int:
        return self.packing.lead_bytes + self.packing.blocks * self.slots * self.page_bytes


def page_bytes(layer: Layer, rank: int, size: int) -> int:
    """What one block of the layer takes on one rank, without padding."""
    return sum(prod(tensor.shape(rank, size)) * tensor.width for tensor in layer.tensors)


def _tensor(
    axis: Axis,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    run_bytes: int,
    width: int,
    offset: int,
    place: Place,
) -> CacheTensor:
    loops, unit_bytes, number = inner_loops(shape, strides, run_bytes, axis)
    return CacheTensor(
        name=axis.name,
        region=0,
        offset_bytes=offset,
        block_stride_bytes=place.stride,
        block_count=place.packing.blocks,
        unit_bytes=unit_bytes,
        element_bytes=width,
        dtype=f"number{8 * width}",
        loops=loops,
        axis=number,
        parts=axis.parts,
        opaque=axis.opaque,
    )


def recurrent(*layers: Recurrent) -> Layers:
    """A group of recurrent layers."""
    return Layers(layers)
