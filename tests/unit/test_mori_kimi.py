"""Kimi-Linear and Kimi-K3 with eight ranks on each side, over the `mori` transport's double.

Once in full size, where bytes are only counted; once with small heads and all layers, where they are moved
and compared with the slow reference.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from stateferry.ids import EngineId, new_epoch
from stateferry.layout import reference
from stateferry.layout.spec import CacheLayout, GroupKind, Pieces
from stateferry.testing.kimi import KIMI_K3, KIMI_LINEAR
from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import Behaviour, Posted, World
from stateferry.testing.packed import Layers, Packed, Packing
from stateferry.testing.peers import EngineRank
from stateferry.testing.unsharded import gated_delta, latent_attention
from stateferry.transport import TransportOptions
from stateferry.transport.mori import MoriTransport
from stateferry.wire import Offer

RANKS = 8
REMOTE = ((1,), (2,), (3,), (4, 5))
LOCAL = ((6,), (5,), (4,), (1, 3))
"""Blocks of the three recurrent groups, and of the latents; on the producer two in a row, on us not."""

FORBIDDEN = re.compile(
    r"traceback|EngineCore|regist\w+ fail|fail\w* to regist|flush|HSA|TransferError", re.IGNORECASE
)
"""What the log of a good run must be free of."""


def small(recurrent_layers: int, latent_layers: int, dcp_ranks: int) -> Packed:
    """The layers and groups of a Kimi, with heads of two numbers."""
    count = -(-recurrent_layers // latent_layers)
    state = gated_delta(RANKS, RANKS, 2, 2, 3, False, (2, 4))
    groups = [
        Layers((state,) * len(range(number, recurrent_layers, count)), block_tokens=2)
        for number in range(count)
    ]
    latents = (latent_attention(2, 3, 2),) * latent_layers
    return Packed((*groups, Layers(latents, GroupKind.ATTENTION, 2 * dcp_ranks)), dcp_ranks=dcp_ranks)


@dataclass(frozen=True)
class Case:
    model: Packed
    moves_bytes: bool

    @property
    def tokens(self) -> int:
        """Two whole blocks of latents."""
        return 2 * self.model.groups[3].block_tokens


CASES = {
    "Kimi-Linear": Case(KIMI_LINEAR.packed([RANKS]), False),
    "Kimi-K3": Case(KIMI_K3.packed([RANKS], dcp_ranks=RANKS), False),
    "Kimi-Linear, small": Case(small(20, 7, 1), True),
    "Kimi-K3, small": Case(small(69, 24, RANKS), True),
}


class Engines:
    """Eight producers and eight consumers, and the hand-off of one request."""

    def __init__(self, case: Case, stack: ExitStack) -> None:
        self.world = World(default=Behaviour(looks=1), real_time=True, moves_bytes=case.moves_bytes)
        self._double = MoriDouble(self.world)
        self._case = case
        self.producers = [stack.enter_context(self._rank("p", rank)) for rank in range(RANKS)]
        self.consumers = [stack.enter_context(self._rank("d", rank)) for rank in range(RANKS)]

    def _rank(self, name: str, rank: int) -> EngineRank:
        layout = self._case.model.layout(rank, RANKS, Packing(blocks=8))
        layout = msgspec.structs.replace(layout, engine_id=EngineId(name), epoch=new_epoch())
        options = TransportOptions(epoch=layout.epoch)
        transport = MoriTransport(options, io=self._double)
        return EngineRank(name, layout=layout, transport=transport)

    def hand_off(self) -> tuple[set[int], set[int]]:
        """Ranks of the consumer that received, and that failed."""
        offer = self._offer()
        for producer in self.producers:
            producer.submit_grant(offer)
        for consumer in self.consumers:
            consumer.open("request", offer)
            consumer.load("request", offer, LOCAL)
        results = [consumer.wait_received("request") for consumer in self.consumers]
        failed = {rank for rank, result in enumerate(results) if result.failed}
        if not failed:
            assert all(producer.wait_sent("prefill").sent for producer in self.producers)
        return set(range(RANKS)) - failed, failed

    def posted(self, rank: int) -> list[Posted]:
        """What one consumer rank posted, in order."""
        epoch = f"{self.consumers[rank].layout.epoch:x}"
        return [batch for batch in self.world.posted if batch.engine.split("-")[1] == epoch]

    def _offer(self) -> Offer:
        offer = self.producers[0].offer(self._case.tokens, REMOTE)
        addresses = tuple(producer.address for producer in self.producers)
        return msgspec.structs.replace(offer, ranks=addresses)


@pytest.fixture(params=CASES)
def engines(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Engines]:
    caplog.set_level(logging.DEBUG)
    with ExitStack() as stack:
        yield Engines(CASES[request.param], stack)


def runs(rows: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(local offset, remote offset, size) with neighbours on both sides joined, by place."""
    joined: list[tuple[int, int, int]] = []
    for local, remote, size in sorted(rows):
        if joined and joined[-1][0] + joined[-1][2] == local and joined[-1][1] + joined[-1][2] == remote:
            before = joined.pop()
            joined.append((before[0], before[1], before[2] + size))
        else:
            joined.append((local, remote, size))
    return joined


def expected(consumer: CacheLayout, producer: CacheLayout) -> list[tuple[int, int, int]]:
    """From the layouts' own words, tensor by tensor: at equal ranks a tensor's block is one run."""
    rows = []
    for ours, theirs, local, remote in zip(consumer.groups, producer.groups, LOCAL, REMOTE, strict=True):
        for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
            for mine, its in zip(our_layer.tensors, their_layer.tensors, strict=True):
                rows += [
                    (
                        mine.offset_bytes + here * mine.block_stride_bytes,
                        its.offset_bytes + there * its.block_stride_bytes,
                        mine.block_bytes,
                    )
                    for here, there in zip(local, remote, strict=True)
                ]
    return rows


def rows_of(batches: Sequence[Posted]) -> list[tuple[int, int, int]]:
    return [row for b in batches for row in zip(b.local_offsets, b.remote_offsets, b.sizes, strict=True)]


def test_every_rank_reads_exactly_what_it_should(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """F3.9 and F3.15: all ranks shake hands and hand off; every read has the expected offsets, and no other
    is posted; one region a rank is registered, whatever the layers; the log is clean."""
    received, failed = engines.hand_off()
    assert received == set(range(RANKS)), f"ranks {failed} failed"
    for rank, (consumer, producer) in enumerate(zip(engines.consumers, engines.producers, strict=True)):
        batches = engines.posted(rank)
        assert runs(rows_of(batches)) == runs(expected(consumer.layout, producer.layout))
        assert {b.remote.engine_key.split("-")[1] for b in batches} == {f"{producer.layout.epoch:x}"}
    registered = [desc.engine_key for desc in engines.world.registrations]
    assert sorted(registered) == sorted(2 * [*dict.fromkeys(registered)]), "one region, and the cookie's"
    assert len(set(registered)) == 2 * RANKS
    assert len(engines.world.sessions) == 2 * RANKS, "one session a rank, and the cookie's"
    assert engines.world.defects == []
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert not [line for line in lines if FORBIDDEN.search(line)]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["Kimi-Linear, small", "Kimi-K3, small"])
def test_every_byte_is_the_one_that_the_reference_wants(name: str) -> None:
    """F3.9: offsets against `layout/reference.py`, and the bytes that arrived."""
    with ExitStack() as stack:
        engines = Engines(CASES[name], stack)
        for number, producer in enumerate(engines.producers):
            producer.write_tags(seed=number)
        assert engines.hand_off()[0] == set(range(RANKS))
        for rank, consumer in enumerate(engines.consumers):
            for group in range(4):
                assert faults(engines, rank, group) == []
                pages = zip(LOCAL[group], REMOTE[group], strict=True)
                for local, remote in pages:
                    assert consumer.page(group, local) == engines.producers[rank].page(group, remote)


def faults(engines: Engines, rank: int, group: int, shift: int = 0) -> list[str]:
    """What the reference says of one group's reads."""
    consumer = engines.consumers[rank].layout
    wanted = reference.meanings(consumer, group, LOCAL[group])
    rows = [row for row in rows_of(engines.posted(rank)) if (0, row[0]) in wanted]
    table = np.array(rows, np.int64).reshape(-1, 3)
    nothing = Pieces(*(np.empty(0, np.int64) for _ in range(5)))
    where = np.zeros(len(table), np.int64)
    mine = Pieces(where, table[:, 0], where, table[:, 1] + shift, table[:, 2])
    producers = [producer.layout for producer in engines.producers]
    reads = {number: mine if number == rank else nothing for number in range(RANKS)}
    return reference.faults(consumer, producers, group, LOCAL[group], REMOTE[group], reads)


def test_an_offset_that_is_wrong_by_a_byte_is_caught() -> None:
    """The mutant of both tests above."""
    with ExitStack() as stack:
        engines = Engines(CASES["Kimi-Linear, small"], stack)
        engines.hand_off()
        assert faults(engines, 3, 0, shift=1)
        consumer, producer = engines.consumers[3].layout, engines.producers[3].layout
        (batch,) = engines.posted(3)
        batch.remote_offsets[5] += 1
        assert runs(rows_of([batch])) != runs(expected(consumer, producer))


def test_a_rank_without_a_session_fails_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The mutant of the clean log: one rank cannot connect; it fails alone, and the log says so."""
    with ExitStack() as stack:
        engines = Engines(CASES["Kimi-Linear, small"], stack)
        engines.world.next_sessions.append("none")
        received, failed = engines.hand_off()
        assert len(failed) == 1
        assert len(received) == RANKS - 1
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("no session" in line for line in warned)


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "EngineCore encountered a fatal error",
        "MR registration failed",
        "failed to register memory region",
        "Work Request Flushed Error",
        "HSA exception",
        "TransferError: 1/3 transfers failed",
    ],
)
def test_a_forbidden_line_is_caught(line: str) -> None:
    """F3.15."""
    assert FORBIDDEN.search(line)
