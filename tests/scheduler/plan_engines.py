"""Engines that hold one case of `plan_cases` at any rank and size, filled from the unsharded model."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kv_caches import (
    BF16,
    FLASH,
    described,
    engine_config,
    states_of,
    torch,
)
from plan_cases import Case
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from stateferry.layout.plan import make_plan
from stateferry.layout.spec import CacheLayout, Pieces
from stateferry.testing.unsharded import Attention, Tags
from stateferry.vllm.kv_cache import RegionMemory

OURS, THEIRS = (2, 5), (4, 1)
"""Block ids on both sides."""


@dataclass
class Rank:
    """One rank's described cache."""

    layout: CacheLayout
    memory: list[RegionMemory]
    tensors: dict[str, Any]
    rank: int
    size: int

    @property
    def bytes(self) -> Any:
        """The only region, `uint8[size]`, in numpy."""
        return self.memory[0].storage.numpy()


class Engines:
    """One case in a pool with another kind of group, at any rank and size."""

    def __init__(self, case: Case, cache_layout: str = "LBHNC", alone: bool = False, dcp: int = 1) -> None:
        self.case, self.cache_layout, self.alone, self.dcp = case, cache_layout, alone, dcp
        self.layer = case.layer()
        self.names = ["layers.0", "layers.1"]

    def rank(self, rank: int, size: int, **changes: Any) -> Rank:
        config = engine_config(
            dict.fromkeys(self.names, self.case.backend) if self.case.backend else {"other": FLASH},
            self.cache_layout,
            self.case.total_kv_heads,
            self.dcp,
            **{**self.case.config, **changes},
        )
        kernel = [self.case.kernel_tokens] if self.case.kernel_tokens else None
        groups = self.groups(size)
        layout, memory, tensors = described(
            config, groups, tp_rank=rank, tp_size=size, kernel_block_sizes=kernel
        )
        return Rank(layout, memory, tensors, rank, size)

    def groups(self, size: int) -> list[KVCacheGroupSpec]:
        """The case's group first; beside it one that makes pages longer than the states in them."""
        spec = self.case.spec(size)
        if self.alone:
            return [KVCacheGroupSpec(self.names, spec)]
        page = -(-self.case.spec(1).page_size_bytes // 64) * 64 + 64
        other = MLAAttentionSpec(
            block_size=4, num_kv_heads=1, head_size=page // 8, dtype=BF16, max_tp_shards=1
        )
        padded = replace(spec, page_size_padded=page)
        return [KVCacheGroupSpec(self.names, padded), KVCacheGroupSpec(["other"], other)]

    def fill(self, rank: Rank, blocks: tuple[int, ...], digit: int) -> None:
        """Put the rank's share of the model into these blocks: one byte of each tag."""
        tag = 1
        for block in blocks:
            for name in self.names:
                held = self._held(rank, tag)
                for view, tags in zip(self._views(rank, name), held, strict=True):
                    values = torch.from_numpy(((tags >> np.uint32(8 * digit)) & 255).astype(np.uint8))
                    ratio = view.shape[0] // rank.layout.groups[0].layers[0].tensors[0].block_count
                    target = view[block * ratio : (block + 1) * ratio].view(torch.uint8)
                    target.copy_(values.reshape(target.shape))
                tag += sum(tensor.size_bytes for tensor in self.layer.tensors) * self.dcp

    def _views(self, rank: Rank, name: str) -> list[Any]:
        """Where vLLM has what `_held` gives."""
        spec, tensor = self.case.spec(rank.size), rank.tensors[name]
        if self.case.sides is not None:
            return list(self.case.sides(tensor, spec.num_kv_heads))
        return states_of(tensor, spec) if isinstance(spec, MambaSpec) else [tensor]

    def _held(self, rank: Rank, tag: int) -> list[Tags]:
        """What the rank holds of a layer's block, in the order of `_views`."""
        found = []
        for tensor in self.layer.tensors:
            tags = tensor.held(rank.rank, rank.size, tag)
            tag += tensor.size_bytes
            if not isinstance(self.layer, Attention):
                found.append(tags)
                continue
            if self.dcp > 1:
                tags = tags + np.uint32(rank.rank % self.dcp * tensor.size_bytes)
            for side in np.split(tags, 1 if self.case.sides is None else 2):
                heads, tokens, content, _ = side.shape
                kernel = self.case.kernel_tokens or tokens
                found.append(side.reshape(heads, tokens // kernel, kernel, content).swapaxes(0, 1))
        return found

    def wrong(self, ours: int, theirs: int) -> list[str]:
        """Hand the case's group over to every consumer rank and say what is not as it should be."""
        producers = [self.rank(rank, theirs) for rank in range(theirs)]
        found = []
        for number in range(ours):
            consumer, expected = self.rank(number, ours), self.rank(number, ours)
            reads = [make_plan(consumer.layout, producer.layout) for producer in producers]
            pieces = [plan.merged_pieces(0, OURS, THEIRS) for plan in reads]
            found += _written_once(pieces, consumer)
            for digit in range(3):
                self.fill(expected, OURS, digit)
                target = np.zeros_like(expected.bytes)
                for producer, part in zip(producers, pieces, strict=True):
                    if len(part):
                        self.fill(producer, THEIRS, digit)
                        _copy(part, producer.bytes, target)
                differ = np.flatnonzero(target != expected.bytes)
                if len(differ):
                    found.append(f"rank {number} of {ours} from {theirs}: byte {differ[0]}, digit {digit}")
        return found


def _copy(pieces: Pieces, source: Any, target: Any) -> None:
    columns = pieces.local_offsets.tolist(), pieces.remote_offsets.tolist(), pieces.sizes.tolist()
    for local, remote, size in zip(*columns, strict=True):
        target[local : local + size] = source[remote : remote + size]


def _written_once(pieces: list[Pieces], consumer: Rank) -> list[str]:
    writes = np.zeros(consumer.memory[0].size_bytes, np.uint8)
    for part in pieces:
        for start, size in zip(part.local_offsets.tolist(), part.sizes.tolist(), strict=True):
            writes[start : start + size] += 1
    tensors = [tensor for layer in consumer.layout.groups[0].layers for tensor in layer.tensors]
    needed = len(OURS) * sum(tensor.block_bytes for tensor in tensors)
    if int(writes.max()) == 1 and int(writes.sum()) == needed:
        return []
    return [f"{int(writes.sum())} bytes written up to {int(writes.max())} times; {needed} are needed"]
