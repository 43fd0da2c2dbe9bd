"""L0: every byte of every layer is planned exactly once, from a byte that means the same.

The caches are made up: the shape of each kind of model, small enough to follow every byte. The judge is
`layout.reference`, which shares no arithmetic with the planner.
"""

from typing import Any

from stateferry.layout.plan import make_plan
from stateferry.layout.reference import faults, meanings
from stateferry.layout.spec import GroupKind, Part, PartRule
from stateferry.testing.caches import Model, Tensor

RANKS = (1, 2, 4)
LOCAL, REMOTE = (3, 1), (0, 4)
"""Block ids on both sides."""


def _split(*sizes: int) -> tuple[Part, ...]:
    return tuple(Part(name=f"part{i}", size=size, rule=PartRule.SPLIT) for i, size in enumerate(sizes))


def _grouped(size: int, granules: int) -> tuple[Part, ...]:
    return tuple(Part(name=name, size=size, rule=PartRule.GROUPED, granules=granules) for name in ("B", "C"))


HEADS = _split(8)
MODELS: dict[str, Model] = {
    "gated delta net": Model(
        2 * ((Tensor("conv", (3, _split(8, 8, 8)), 2), Tensor("matrix", (HEADS, 4), 4)),)
    ),
    "gated delta net, dimension first": Model(
        ((Tensor("conv", (_split(8, 8, 8), 3), 2), Tensor("matrix", (HEADS, 4), 4)),)
    ),
    "Kimi delta attention": Model(
        ((*(Tensor(f"conv_{n}", (3, _split(8)), 2) for n in "qkv"), Tensor("matrix", (HEADS, 4), 4)),)
    ),
    "Mamba 2, one group": Model(
        2 * ((Tensor("conv", (3, (*_split(16), *_grouped(4, 1))), 2), Tensor("ssm", (HEADS, 2, 2), 4)),)
    ),
    "Mamba 2, two groups": Model(
        ((Tensor("conv", (3, (*_split(16), *_grouped(4, 2))), 2), Tensor("ssm", (HEADS, 2, 2), 4)),)
    ),
    "Mamba 1": Model(((Tensor("conv", (3, _split(8)), 2), Tensor("ssm", (_split(8), 4), 4)),)),
    "short convolution": Model(2 * ((Tensor("conv", (2, _split(16)), 2),),)),
    "attention": Model(2 * ((Tensor("heads", (_grouped(4, 4)[:1], 6), 2),),), kind=GroupKind.ATTENTION),
    "attention, fewer heads than ranks": Model(
        ((Tensor("heads", (_grouped(2, 2)[:1], 6), 2),),), kind=GroupKind.ATTENTION
    ),
    "latent attention": Model(((Tensor("latent", (6,), 4),),), kind=GroupKind.ATTENTION),
}
"""The caches that are planned."""


def check_structure() -> dict[str, Any]:
    """Plan every made-up cache between every pair of rank counts, and follow each byte."""
    found: list[str] = []
    planned = plans = 0
    for name, model in MODELS.items():
        for ours in RANKS:
            for theirs in RANKS:
                producers = [model.layout(rank, theirs, seed=ours + theirs) for rank in range(theirs)]
                for rank in range(ours):
                    consumer = model.layout(rank, ours, seed=0)
                    reads = {p.tp_rank: make_plan(consumer, p).pieces(0, LOCAL, REMOTE) for p in producers}
                    wrong = faults(consumer, producers, 0, LOCAL, REMOTE, reads)
                    found += [f"{name}, rank {rank} of {ours} from {theirs}: {text}" for text in wrong[:3]]
                    planned += len(meanings(consumer, 0, LOCAL))
                    plans += 1
    return {"passed": not found, "plans": plans, "bytes": planned, "faults": found[:20]}
