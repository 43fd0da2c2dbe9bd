"""Hand one group's tagged blocks over and say which bytes are wrong.

Every producer rank's memory is filled from the unsharded model, the plans' pieces are copied, and the
consumer rank's memory is compared with what the unsharded model has there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stateferry.layout.plan import Plan, make_plan
from stateferry.layout.spec import CacheLayout, Pieces
from stateferry.testing.packed import Packed, Packing, Place
from stateferry.testing.unsharded import SIDES, Attention, Layer, Slots, Tags

Memory = npt.NDArray[np.unsignedinteger]
"""One entry a byte of a region: its tag (or a part of it), 0 where nothing lies."""

PlanWith = Callable[[CacheLayout, CacheLayout], Plan]


@dataclass(frozen=True, slots=True)
class Handover:
    """One group of a model, between two engines."""

    model: Packed
    consumer_size: int
    producer_size: int
    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    group: int = 0
    consumer_packing: Packing = field(default_factory=Packing)
    producer_packing: Packing = field(default_factory=Packing)
    tag_type: type[np.uint32] | type[np.uint16] = np.uint32
    """uint16 keeps a hash of each tag: for shapes whose tags would not fit into memory."""

    def consumer(self, rank: int) -> CacheLayout:
        """The layout of one consumer rank."""
        return self.model.layout(rank, self.consumer_size, self.consumer_packing)

    def producers(self) -> list[CacheLayout]:
        """The layouts of all producer ranks."""
        return [
            self.model.layout(rank, self.producer_size, self.producer_packing)
            for rank in range(self.producer_size)
        ]

    def reads(self, rank: int, plan_with: PlanWith = make_plan, in_runs: bool = False) -> dict[int, Pieces]:
        """What the consumer rank reads from each producer rank; `in_runs`: `Plan.merged_pieces`."""
        consumer = self.consumer(rank)
        found = {}
        for producer in self.producers():
            plan = plan_with(consumer, producer)
            lay = plan.merged_pieces if in_runs else plan.pieces
            found[producer.tp_rank] = lay(self.group, self.local_blocks, self.remote_blocks)
        return found

    def wrong_bytes(self, rank: int, reads: dict[int, Pieces]) -> list[str]:
        """What is wrong in the consumer rank's memory after `reads`; empty when every byte is right."""
        expected = self._memory(rank, self.consumer_size, self.consumer_packing, self.local_blocks)
        target = np.zeros_like(expected)
        writes = np.zeros(len(expected), np.uint8)
        found = []
        for producer, pieces in reads.items():
            if len(pieces):
                source = self._memory(producer, self.producer_size, self.producer_packing, self.remote_blocks)
                found += _copy(pieces, source, target, writes)
        return [
            *found,
            *_told("holds another byte of the model", target != expected),
            *_told("is written more than once", writes > 1),
            *_told("is not written", (writes == 0) & (expected != 0)),
            *_told("is written, but belongs to no destination", (writes > 0) & (expected == 0)),
        ]

    def _memory(self, rank: int, size: int, packing: Packing, blocks: Sequence[int]) -> Memory:
        """A rank's pool with these blocks in place; the i-th of them is position i of the request."""
        place = Place.of(self.model, rank, size, packing)
        memory = np.zeros(place.region_bytes, self.tag_type)
        tag = 1
        for block in blocks:
            for slot, layer in enumerate(self.model.groups[self.group].layers):
                start = place.offset(slot) + block * place.stride
                for tensor in self._held(layer, rank, size, packing, tag):
                    memory[start : start + tensor.size] = self._shortened(tensor.ravel())
                    start += tensor.size
                tag += sum(tensor.size_bytes for tensor in layer.tensors) * self.model.dcp_ranks
        return memory

    def _held(self, layer: Layer, rank: int, size: int, packing: Packing, tag: int) -> list[Tags]:
        """The tensors of a layer's page, one after the other as vLLM packs them."""
        found = []
        for tensor in layer.tensors:
            tags = tensor.held(rank, size, tag)
            tag += tensor.size_bytes
            if isinstance(layer, Attention):
                if (
                    self.model.dcp_ranks > 1
                ):  # block i of all these ranks together: each has tokens of its own
                    tags = tags + np.uint32(rank % self.model.dcp_ranks * tensor.size_bytes)
                tags = in_page(layer, tags, packing)
            found.append(tags)
        return found

    def _shortened(self, tags: Tags) -> Memory:
        if self.tag_type is np.uint32:
            return tags
        return (tags * np.uint32(2654435761) >> np.uint32(16)).astype(np.uint16) | np.uint16(1)


def in_page(layer: Attention, tags: Tags, packing: Packing) -> Tags:
    """`tags` `[heads (K and V apart: twice as many), tokens, content, width]` in the order of the page."""
    held, tokens, *number = tags.shape
    kernel_blocks = packing.kernel_blocks
    sides = 2 if layer.slots in SIDES else 1
    page = tags.reshape(sides, held // sides, kernel_blocks, tokens // kernel_blocks, *number)
    rows = layer.slots is Slots.SIDES_ROWS or (packing.tokens_first and sides == 1)
    order = (2, 0, 3, 1, 4, 5) if rows else (2, 0, 1, 3, 4, 5)
    return np.ascontiguousarray(page.transpose(order))


def _copy(pieces: Pieces, source: Memory, target: Memory, writes: npt.NDArray[np.uint8]) -> list[str]:
    """Copy what lies inside both memories; the rest is told."""
    ends = pieces.local_offsets + pieces.sizes > len(target)
    ends |= pieces.remote_offsets + pieces.sizes > len(source)
    places = (pieces.local_offsets, pieces.remote_offsets, pieces.sizes)
    for local, remote, size in zip(*(place[~ends].tolist() for place in places), strict=True):
        target[local : local + size] = source[remote : remote + size]
        writes[local : local + size] += 1
    return [f"{int(ends.sum())} pieces reach past the end of a region"] if ends.any() else []


def _told(what: str, wrong: npt.NDArray[np.bool_]) -> list[str]:
    where = np.flatnonzero(wrong)
    return [f"byte {where[0]} {what}, and {len(where) - 1} more"] if len(where) else []
