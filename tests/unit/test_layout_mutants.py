"""The reference must catch planners and reads that are wrong; otherwise its praise means nothing."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

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
