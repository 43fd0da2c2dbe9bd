"""The reference must catch planners and reads that are wrong; otherwise its praise means nothing."""

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from stateferry.layout import plan
from stateferry.layout.blocks import concatenate, take
from stateferry.layout.plan import make_plan
from stateferry.layout.reference import faults, meanings
from stateferry.layout.spec import CacheLayout, Part, PartRule, Pieces
from stateferry.testing.caches import Model, Tensor


def split(name: str, size: int) -> Part:
    return Part(name=name, size=size, rule=PartRule.SPLIT)


CONV = Tensor("conv", ((split("Q", 8), split("K", 8), split("V", 16)), 3))
GDN = Model(((CONV, Tensor("matrix", ((split("heads", 8),),), 4)),))
LATENT = Model(((Tensor("latent", (), 36),),))


def read_all(
    consumer: CacheLayout, producers: list[CacheLayout], local: list[int], remote: list[int]
) -> dict[int, Pieces]:
    return {p.tp_rank: make_plan(consumer, p).pieces(0, local, remote) for p in producers}


def _wrong_reads() -> dict[str, Callable[[dict[int, Pieces]], dict[int, Pieces]]]:
    def changed(**shift: int) -> Callable[[dict[int, Pieces]], dict[int, Pieces]]:
        def apply(reads: dict[int, Pieces]) -> dict[int, Pieces]:
            return {
                r: dataclasses.replace(p, **{k: getattr(p, k) + v for k, v in shift.items()})
                for r, p in reads.items()
            }

        return apply

    return {
        "one byte late at the source": changed(remote_offsets=1),
        "one byte late at the target": changed(local_offsets=1),
        "a piece missing": lambda reads: {r: take(p, np.arange(len(p) - 1)) for r, p in reads.items()},
        "a piece twice": lambda reads: {r: concatenate([p, p]) for r, p in reads.items()},
        "pieces short by a byte": changed(sizes=-1),
        "from the other rank": lambda reads: {r: reads[(r + 1) % len(reads)] for r in reads},
        "blocks permuted": lambda reads: {
            r: dataclasses.replace(p, remote_offsets=p.remote_offsets[::-1].copy()) for r, p in reads.items()
        },
    }


@pytest.mark.parametrize("mutant", _wrong_reads())
def test_the_reference_catches_wrong_reads(mutant: str) -> None:
    consumer, producers = GDN.layout(0, 1), [GDN.layout(r, 2) for r in range(2)]
    reads = read_all(consumer, producers, [1, 3], [4, 2])
    assert faults(consumer, producers, 0, [1, 3], [4, 2], reads) == []
    wrong = _wrong_reads()[mutant](reads)
    assert faults(consumer, producers, 0, [1, 3], [4, 2], wrong)


def test_the_reference_catches_a_planner_that_slices_blindly() -> None:
    """A convolution cut as one run, without its parts, is wrong in most of its bytes."""
    model = Model(((CONV,),))
    blind = Model(((Tensor("conv", ((split("all", 32),), 3)),),))
    consumer, producers = model.layout(0, 2), [model.layout(0, 1)]
    reads = {0: make_plan(blind.layout(0, 2), blind.layout(0, 1)).pieces(0, [1], [2])}
    found = faults(consumer, producers, 0, [1], [2], reads)
    assert len(found) >= len(meanings(consumer, 0, [1])) // 3


def test_the_reference_catches_copies_read_from_every_rank() -> None:
    consumer, producers = LATENT.layout(0, 1), [LATENT.layout(r, 2) for r in range(2)]
    reads = read_all(consumer, producers, [1], [2])
    reads[1] = reads[0]
    assert faults(consumer, producers, 0, [1], [2], reads)


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_the_reference_catches_strips_joined_over_regions(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that would touch if they lay in the same region do not when one lies in another."""
    model = Model(((Tensor("a", (4,)),),) * 4)
    plain, scattered = model.layout(0, 1), model.layout(0, 1)
    group = scattered.groups[0]
    layers = tuple(
        msgspec.structs.replace(
            layer,
            tensors=tuple(msgspec.structs.replace(tensor, region=number // 2) for tensor in layer.tensors),
        )
        for number, layer in enumerate(group.layers)
    )
    scattered = msgspec.structs.replace(
        scattered,
        groups=(msgspec.structs.replace(group, layers=layers),),
        region_sizes_bytes=plain.region_sizes_bytes * 2,
    )
    # One block in the pool: layers follow each other without a gap.
    ours, theirs = (scattered, plain) if side == "ours" else (plain, scattered)
    ours, theirs = one_block(ours), one_block(theirs)
    reads = {0: make_plan(ours, theirs).pieces(0, [0], [0])}
    assert faults(ours, [theirs], 0, [0], [0], reads) == []
    right = plan.adjacent
    monkeypatch.setattr(plan, "adjacent", lambda labels, *arrays: right((), *arrays))
    reads = {0: make_plan(ours, theirs).pieces(0, [0], [0])}
    assert faults(ours, [theirs], 0, [0], [0], reads)


def one_block(layout: CacheLayout) -> CacheLayout:
    """The layout with one block of 4 bytes a layer, layer after layer."""
    group = layout.groups[0]
    layers = tuple(
        msgspec.structs.replace(
            layer,
            tensors=tuple(
                msgspec.structs.replace(tensor, block_count=1, offset_bytes=4 * number)
                for tensor in layer.tensors
            ),
        )
        for number, layer in enumerate(group.layers)
    )
    return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, layers=layers),))
