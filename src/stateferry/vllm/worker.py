"""The half that lives in each vLLM worker: owns the ferry, hands it orders, picks up results.

vLLM calls everything here on the worker's own thread, between and around forwards. Nothing waits.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from stateferry.config import Config, LoadMode, control_port
from stateferry.errors import TransportError
from stateferry.ferry import Fence, Ferry, FerrySetup, no_fence
from stateferry.ids import EngineId, RequestId, TransferId, new_epoch
from stateferry.layout.fingerprint import encode_layout
from stateferry.layout.room import room_layout
from stateferry.layout.spec import CacheLayout
from stateferry.session import Answered, Kept, Orders, Place, Report, Results
from stateferry.telemetry import Key
from stateferry.testing.mutants import tamper
from stateferry.transport import choose, create_transport
from stateferry.transport.base import MemoryKind, MemoryRegion, TransportOptions
from stateferry.transport.mori_options import MoriBackend, MoriOptions
from stateferry.vllm.compat import KVConnectorTransferResults, vllm_version
from stateferry.vllm.kv_cache import RegionMemory, describe
from stateferry.vllm.memory import TorchMemory, room_memory
from stateferry.vllm.metadata import StateFerryHandshake, StateFerryMetadata, StateFerryWorkerMetadata
from stateferry.vllm.placing import Placer

logger = logging.getLogger(__name__)


class WorkerHalf:
    """One per worker process."""

    def __init__(self, config: Config, engine_id: EngineId, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = config
        self._engine_id = engine_id
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._ferry: Ferry | None = None
        self._handshake: StateFerryHandshake | None = None
        self._device = MemoryKind.CPU
        self._last_step = 0
        self._reports: tuple[Report, ...] = ()
        self._lost: frozenset[RequestId] = frozenset()
        self._placer: Placer | None = None
        """Under `load_mode: sync`, on an engine that consumes."""
        self._places: tuple[Place, ...] = ()
        """What is to be copied before this step's forward."""
        self._placed: set[RequestId] = set()
        """Loads that vLLM waits for and that were copied out of the room."""
        self._waiting: tuple[RequestId, ...] = ()
        self._apart: tuple[RequestId, ...] = ()
        self._answered: tuple[Answered, ...] = ()
        self._renounced: tuple[TransferId, ...] = ()
        self._tp_rank = 0
        self._kept: tuple[Kept, ...] = ()
        self._told: tuple[dict[Key, int], dict[Key, int]] = ({}, {})
        """Counts and levels as the scheduler half last heard them."""

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Describe the cache, register its memory, start the ferry. Errors end the start-up."""
        parallel = self._vllm_config.parallel_config
        tp_size = parallel.tensor_parallel_size
        tp_rank = parallel.rank % tp_size
        self._tp_rank = tp_rank
        layout, regions = describe(
            self._kv_cache_config,
            self._vllm_config,
            kv_caches,
            engine_id=self._engine_id,
            epoch=new_epoch(),
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        room = self._room(layout, regions)
        memory = tuple(
            MemoryRegion(r.address, r.size_bytes, MemoryKind(r.device), r.device_index) for r in regions
        )
        self._device = memory[0].kind
        torch_memory = TorchMemory(regions)
        if room is not None:
            self._placer = Placer(layout, room, torch_memory)
        host = self._config.host
        rocm = self._device is MemoryKind.CUDA and _on_rocm()
        name = choose(self._config.transport.value, self._device, rocm)
        options = TransportOptions(
            nixl_backends=self._config.nixl_backends,
            mori=_mori_options(self._config),
            host=host,
            epoch=layout.epoch,
            transfer_timeout_s=self._config.transfer_timeout_s,
            rocm=rocm,
            faults=self._config.faults,
            memory_kind=self._device,
        )
        self._ferry = Ferry(
            FerrySetup(
                config=self._config,
                layout=layout,
                regions=memory,
                memory=torch_memory,
                make_transport=lambda: create_transport(name, options),
                host=host,
                bind_host=self._config.bind_host or host,
                port=control_port(self._config.port, parallel.data_parallel_index, tp_size, tp_rank),
                software=f"stateferry/{layout.facts.get('stateferry', '?')} vllm/{vllm_version()}",
                tamper=tamper if self._config.testing else None,
                room=room,
            )
        )
        address = self._ferry.start()
        self._handshake = StateFerryHandshake(address, encode_layout(layout))
        logger.info(
            "rank %d of %d listens on %s:%d, epoch %d, transport %s, %d region(s), %.1f MiB",
            tp_rank,
            tp_size,
            address.host,
            address.port,
            address.epoch,
            name,
            len(memory),
            sum(r.size_bytes for r in memory) / 2**20,
        )

    def handshake(self) -> StateFerryHandshake | None:
        """Where this worker listens and how its cache looks; None before the cache is registered."""
        return self._handshake

    def take_orders(self, metadata: StateFerryMetadata) -> None:
        """Hand a step's orders to the ferry, once, however many hooks show them to us."""
        if metadata.step <= self._last_step:
            return
        self._last_step = metadata.step
        if not metadata.orders:
            return
        assert self._ferry is not None, "orders came before register_kv_caches"
        orders = metadata.orders if self._placer is None else self._place_late(metadata.orders, self._placer)
        self._ferry.submit(orders, self._fence() if orders.loads or orders.placed else no_fence)

    def place(self) -> None:
        """Right before a forward: put hand-offs that wait in the room into the blocks of requests that this
        step runs. Raises StateFerryError where it must not run; see `Placer.place`."""
        places, self._places = self._places, ()
        if not places:
            return
        assert self._placer is not None
        assert self._ferry is not None
        for order in places:
            self._placer.place(order.request_id, order.groups, order.problem)
        self._ferry.submit(Orders(placed=tuple(order.request_id for order in places)), self._fence())

    def _place_late(self, orders: Orders, placer: Placer) -> Orders:
        """Keep what is for `place`. Loads of what waits here (on another rank it does not) are copied at
        once and reported; the ferry hears what is left."""
        self._places = orders.places
        loads, placed = [], []
        for load in orders.loads:
            try:
                if not placer.has(load.request_id) or load.problem:
                    loads.append(load)
                    continue
                placer.place(load.request_id, load.groups)
                placed.append(load.request_id)
            except Exception:  # a defect; the ferry knows no such hand-off any more and fails it
                logger.exception("could not place the hand-off of request %s", load.request_id)
                loads.append(load)
        for close in orders.closes:
            placer.forget(close.request_id)
        self._placed.update(placed)
        return replace(orders, places=(), loads=tuple(loads), placed=tuple(placed))

    def _room(self, layout: CacheLayout, regions: list[RegionMemory]) -> CacheLayout | None:
        """The waiting room, if this engine wants one; its memory joins `regions`."""
        consumes = self._vllm_config.kv_transfer_config.is_kv_consumer
        if self._config.load_mode is LoadMode.ASYNC or not consumes:
            return None
        room = room_layout(layout, self._config.room_mib << 20)
        regions.append(room_memory(regions[0], room.region_sizes_bytes[-1]))
        return room

    def results(self) -> KVConnectorTransferResults:
        """What vLLM may free or use now."""
        results = self._ferry.take() if self._ferry is not None else Results()
        self._reports += results.reports
        self._lost |= results.lost
        self._kept += results.kept
        self._apart += tuple(results.apart)
        self._answered += results.answered
        self._renounced += results.renounced
        self._waiting += tuple(load.request_id for load in results.waiting)
        if self._placer is not None:
            self._placer.arrived(results.waiting)
        placed, self._placed = self._placed, set()
        return KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received) | placed,
            failed_recving=set(results.failed),
        )

    def news(self) -> StateFerryWorkerMetadata | None:
        """What the scheduler half should know."""
        ferry = self._ferry
        if ferry is None:
            return None
        # In this order: whoever hears that nothing is open has heard of all that happened.
        levels, counts = ferry.levels(), ferry.counts()
        told_counts, told_levels = self._told
        same = counts == told_counts and levels == told_levels
        told = (self._reports, self._lost, self._kept, self._waiting, self._apart)
        hold = (*told, self._answered, self._renounced)
        if same and not any(hold):
            return None
        news = StateFerryWorkerMetadata(
            self._reports,
            self._lost,
            self._kept,
            {k: new for k, n in counts.items() if (new := n - told_counts.get(k, 0))},
            {} if levels == told_levels else {self._tp_rank: levels},
            self._waiting,
            self._apart,
            self._answered,
            self._renounced,
        )
        self._reports, self._lost, self._kept, self._told = (), frozenset(), (), (counts, levels)
        self._waiting, self._apart, self._answered, self._renounced = (), (), (), ()
        return news

    def shutdown(self) -> None:
        """Release what is open, deregister, end the thread."""
        if self._ferry is not None:
            self._ferry.stop()

    def _fence(self) -> Fence:
        """Device work queued before this moment may still write into blocks that it freed."""
        if self._device is MemoryKind.CPU:
            return no_fence
        import torch

        try:
            event = torch.cuda.Event()
            event.record()
        except RuntimeError as e:
            return partial(_never_told, f"the device failed: {e}")  # orders go all the same, and are answered
        return lambda: bool(event.query())


def _never_told(why: str) -> bool:
    raise TransportError(why)


def _on_rocm() -> bool:
    """Whether what torch calls CUDA is ROCm here."""
    import torch

    return torch.version.hip is not None


def _mori_options(config: Config) -> MoriOptions:
    return MoriOptions(
        backend=MoriBackend(config.mori_backend.value),
        qp_per_transfer=config.mori_qp_per_transfer,
        post_batch_size=config.mori_post_batch_size,
        num_workers=config.mori_num_workers,
        num_streams=config.mori_num_streams,
        num_events=config.mori_num_events,
        quiet_s=config.mori_quiet_s,
    )
