"""Engine ranks without vLLM: numpy memory, a layout, a real ferry. For tests of anything above a
transport, ours and yours.

    with EngineRank("p") as producer, EngineRank("d") as consumer:
        producer.write_tags(seed=1)
        offer = producer.grant(num_tokens=40, block_ids=((1, 2, 3), (4,)))
        results = consumer.read("request", offer, local=((5, 6, 7), (8,)))
        assert results.received == {"request"} and not results.failed
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.ferry import Ferry, FerrySetup
from stateferry.ids import EngineId, RequestId, new_epoch, new_transfer_id
from stateferry.layout.blocks import needed_blocks
from stateferry.layout.room import room_layout, slot_bytes
from stateferry.layout.spec import CacheLayout, CacheTensor, Group, GroupKind, LayerCache, Loop, Pieces
from stateferry.session import (
    Clock,
    Close,
    Grant,
    GroupLoad,
    Load,
    Open,
    Orders,
    Results,
    SystemClock,
)
from stateferry.testing.mutants import tamper
from stateferry.transport import create_transport
from stateferry.transport.base import MemoryRegion, Transport, TransportOptions
from stateferry.wire import Offer, RankAddress

BLOCK_TOKENS = 16
BLOCKS = 32


def small_layout(engine_id: str, *, tp_rank: int = 0, tp_size: int = 1, blocks: int = BLOCKS) -> CacheLayout:
    """One attention group and one recurrent group (convolution and matrix), in one region."""
    kv_bytes, conv_bytes, matrix_bytes = 512, 96, 256
    page = kv_bytes + conv_bytes + matrix_bytes

    def tensor(name: str, offset: int, size: int) -> CacheTensor:
        return CacheTensor(
            name=name,
            region=0,
            offset_bytes=offset,
            block_stride_bytes=page,
            block_count=blocks,
            unit_bytes=size // 4,
            element_bytes=2,
            dtype="bfloat16",
            loops=(Loop(count=4, stride_bytes=size // 4),),
        )

    attention = LayerCache(name="layers.1.attention", tensors=(tensor("kv", 0, kv_bytes),))
    states = (
        tensor("convolution", kv_bytes, conv_bytes),
        tensor("matrix", kv_bytes + conv_bytes, matrix_bytes),
    )
    recurrent = LayerCache(name="layers.0.mixer", tensors=states)
    return CacheLayout(
        engine_id=EngineId(engine_id),
        epoch=new_epoch(),
        tp_rank=tp_rank,
        tp_size=tp_size,
        groups=(
            Group(kind=GroupKind.ATTENTION, block_tokens=BLOCK_TOKENS, layers=(attention,)),
            Group(kind=GroupKind.STATE, block_tokens=BLOCK_TOKENS, layers=(recurrent,)),
        ),
        region_sizes_bytes=(blocks * page,),
        facts={"model": "small"},
    )


def wait_until(happened: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that another thread does. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"did not happen within {timeout_s:g} s")
        time.sleep(0.002)


class ArrayMemory:
    """A cache's region, and a waiting room's, as the ferry's LocalMemory."""

    def __init__(self, size_bytes: int, room_bytes: int = 0) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.zeros(size_bytes, np.uint8)
        self.room: npt.NDArray[np.uint8] = np.zeros(room_bytes, np.uint8)

    def read(self, region: int, offset: int, size: int) -> memoryview:
        """A view of the bytes."""
        return (self.room if region else self.bytes)[offset : offset + size].data

    def fill(self, pieces: Pieces, byte: int) -> None:
        """Overwrite the local side of all pieces."""
        for region, offset, size in zip(
            pieces.local_regions.tolist(), pieces.local_offsets.tolist(), pieces.sizes.tolist(), strict=True
        ):
            (self.room if region else self.bytes)[offset : offset + size] = byte


class EngineRank:
    """One rank of an engine: memory, layout and a running ferry. Use as a context manager."""

    def __init__(
        self,
        engine_id: str,
        *,
        config: Config | None = None,
        layout: CacheLayout | None = None,
        transport: str | Transport = "memory",
        clock: Clock | None = None,
        port: int = 0,
        bind_host: str = "127.0.0.1",
        room_slots: int = 0,
    ) -> None:
        """`room_slots`: read ahead into a waiting room of so many blocks."""
        self.config = config or Config()
        self.layout = layout or small_layout(engine_id)
        self.room = room_layout(self.layout, room_slots * slot_bytes(self.layout)) if room_slots else None
        room_bytes = self.room.region_sizes_bytes[-1] if self.room is not None else 0
        self.memory = ArrayMemory(self.layout.region_sizes_bytes[0], room_bytes)
        arrays = [self.memory.bytes, self.memory.room][: 2 if room_slots else 1]
        self.ferry = Ferry(
            FerrySetup(
                config=self.config,
                layout=self.layout,
                regions=tuple(MemoryRegion(array.ctypes.data, len(array)) for array in arrays),
                memory=self.memory,
                make_transport=lambda: (
                    create_transport(transport, TransportOptions())
                    if isinstance(transport, str)
                    else transport
                ),
                host="127.0.0.1",
                bind_host=bind_host,
                port=port,
                software="testing",
                tamper=tamper if self.config.testing else None,
                room=self.room,
                clock=clock or SystemClock(),
            )
        )
        self.address: RankAddress | None = None
        self._seen = Results()

    def __enter__(self) -> Self:
        self.address = self.ferry.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ferry.stop()

    def write_tags(self, seed: int) -> None:
        """Fill all memory with bytes that differ from place to place and seed to seed."""
        self.memory.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.memory.bytes), np.uint8)

    def page(self, group: int, block: int) -> bytes:
        """All bytes of one block of a group, tensor by tensor."""
        return _page(self.layout, self.memory.bytes, group, block)

    def room_page(self, group: int, slot: int) -> bytes:
        """As `page`, of a slot of the waiting room."""
        assert self.room is not None, "make it with room_slots"
        return _page(self.room, self.memory.room, group, slot)

    def offer(
        self, num_tokens: int, block_ids: Sequence[Sequence[int]], request_id: str = "prefill"
    ) -> Offer:
        """What this rank's response would carry, without telling its ferry (see `grant`)."""
        assert self.address is not None, "start it first: with EngineRank(…) as rank"
        return Offer(
            transfer_id=new_transfer_id(),
            engine_id=self.layout.engine_id,
            request_id=RequestId(request_id),
            num_tokens=num_tokens,
            block_ids=tuple(BlockIds(ids) for ids in block_ids),
            first_blocks=tuple(needed_blocks(group, 0, num_tokens).start for group in self.layout.groups),
            prefix_digest="0" * 32,
            lease_s=self.config.lease_s,
            ranks=(self.address,),
        )

    def grant(
        self, num_tokens: int, block_ids: Sequence[Sequence[int]], request_id: str = "prefill"
    ) -> Offer:
        """Make an offer and keep its blocks, as a finished prefill does."""
        offer = self.offer(num_tokens, block_ids, request_id)
        self.submit_grant(offer)
        return offer

    def submit_grant(self, offer: Offer) -> None:
        """Tell the ferry of an offer that was made before."""
        grant = Grant(
            offer.request_id,
            offer.transfer_id,
            offer.num_tokens,
            offer.block_ids,
            offer.first_blocks,
            offer.prefix_digest,
        )
        self.ferry.submit(Orders(grants=(grant,)))

    def open(self, request_id: str, offer: Offer) -> None:
        """A request with this offer arrived."""
        self.ferry.submit(Orders(opens=(Open(RequestId(request_id), offer),)))

    def load(self, request_id: str, offer: Offer, local: Sequence[Sequence[int]]) -> None:
        """vLLM allocated blocks `local` (all needed positions of every group)."""
        groups = tuple(
            GroupLoad(index, offer.first_blocks[index], BlockIds(mine), offer.block_ids[index])
            for index, mine in enumerate(local)
        )
        self.ferry.submit(Orders(loads=(Load(RequestId(request_id), 0, groups),)))

    def close(self, request_id: str) -> None:
        """The request wants nothing more."""
        self.ferry.submit(Orders(closes=(Close(RequestId(request_id)),)))

    def read(
        self, request_id: str, offer: Offer, local: Sequence[Sequence[int]], timeout_s: float = 20.0
    ) -> Results:
        """Open, load and wait for the end."""
        self.open(request_id, offer)
        self.load(request_id, offer, local)
        return self.wait_received(request_id, timeout_s)

    def wait_received(self, request_id: str, timeout_s: float = 20.0) -> Results:
        """Wait until the request is reported, well or badly; everything reported since the last wait."""
        return self._wait(lambda seen: request_id in seen.received, f"{request_id} received", timeout_s)

    def wait_sent(self, request_id: str, timeout_s: float = 20.0) -> Results:
        """Wait until the request's blocks may be freed."""
        return self._wait(lambda seen: request_id in seen.sent, f"{request_id} sent", timeout_s)

    def wait_lost(self, request_id: str, timeout_s: float = 20.0) -> Results:
        """Wait until the request's offer turns out to be worth nothing."""
        return self._wait(lambda seen: request_id in seen.lost, f"{request_id} lost", timeout_s)

    def wait_idle(self, timeout_s: float = 20.0) -> Results:
        """Wait until no hand-off is open; everything reported since the last wait."""
        wait_until(lambda: self.ferry.open_count == 0, timeout_s)
        return self._wait(lambda _: True, "idle", timeout_s)

    def _wait(self, happened: Callable[[Results], bool], what: str, timeout_s: float) -> Results:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._seen = self._seen.and_then(self.ferry.take())
            if happened(self._seen):
                break
            # Short, because being idle is not news.
            if not self.ferry.wait(0.05) and time.monotonic() > deadline_s:
                raise TimeoutError(f"not {what} within {timeout_s:g} s; so far {self._seen}")
        seen, self._seen = self._seen, Results()
        return seen


def _page(layout: CacheLayout, memory: npt.NDArray[np.uint8], group: int, block: int) -> bytes:
    parts = []
    for layer in layout.groups[group].layers:
        for t in layer.tensors:
            start = t.offset_bytes + block * t.block_stride_bytes
            parts.append(memory[start : start + t.block_bytes].tobytes())
    return b"".join(parts)
