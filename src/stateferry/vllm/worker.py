"""The half that lives in each vLLM worker: owns the ferry, hands it orders, picks up results.

vLLM calls everything here on the worker's own thread, between and around forwards. Nothing waits.
"""

import logging
from typing import Any

import numpy as np

from stateferry.config import Config, control_port
from stateferry.ferry import Fence, Ferry, FerrySetup, no_fence
from stateferry.ids import EngineId, RequestId, new_epoch
from stateferry.layout.fingerprint import encode_layout
from stateferry.layout.spec import Pieces
from stateferry.session import Kept, Report, Results
from stateferry.telemetry import Key
from stateferry.testing.mutants import tamper
from stateferry.transport import choose, create_transport
from stateferry.transport.base import MemoryKind, MemoryRegion, TransportOptions
from stateferry.transport.mori_options import MoriBackend, MoriOptions
from stateferry.vllm.compat import KVConnectorTransferResults, vllm_version
from stateferry.vllm.kv_cache import RegionMemory, describe
from stateferry.vllm.metadata import StateFerryHandshake, StateFerryMetadata, StateFerryWorkerMetadata

logger = logging.getLogger(__name__)


class TorchMemory:
    """The registered regions as flat byte tensors."""

    def __init__(self, regions: list[RegionMemory]) -> None:
        self._flat = [r.storage for r in regions]

    def read(self, region: int, offset: int, size: int) -> memoryview:
        """Bytes as they are now; a copy where the memory is a device's."""
        return memoryview(self._flat[region][offset : offset + size].cpu().numpy()).cast("B")

    def fill(self, pieces: Pieces, byte: int) -> None:
        """Overwrite the local side of all pieces."""
        for region, offset, size in zip(
            pieces.local_regions.tolist(), pieces.local_offsets.tolist(), pieces.sizes.tolist(), strict=True
        ):
            self._flat[region][offset : offset + size] = int(np.array(byte, np.uint8))
        if self._flat and self._flat[0].is_cuda:
            import torch

            # What reads into these bytes next runs on a stream that does not wait for this one.
            torch.cuda.current_stream(self._flat[0].device).synchronize()


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
        memory = tuple(
            MemoryRegion(r.address, r.size_bytes, MemoryKind(r.device), r.device_index) for r in regions
        )
        self._device = memory[0].kind
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
                memory=TorchMemory(regions),
                make_transport=lambda: create_transport(name, options),
                host=host,
                bind_host=self._config.bind_host or host,
                port=control_port(self._config.port, parallel.data_parallel_index, tp_size, tp_rank),
                software=f"stateferry/{layout.facts.get('stateferry', '?')} vllm/{vllm_version()}",
                tamper=tamper if self._config.testing else None,
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
        self._ferry.submit(metadata.orders, self._fence() if metadata.orders.loads else no_fence)

    def results(self) -> KVConnectorTransferResults:
        """What vLLM may free or use now."""
        results = self._ferry.take() if self._ferry is not None else Results()
        self._reports += results.reports
        self._lost |= results.lost
        self._kept += results.kept
        return KVConnectorTransferResults(
            finished_sending=set(results.sent),
            finished_recving=set(results.received),
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
        if same and not (self._reports or self._lost or self._kept):
            return None
        news = StateFerryWorkerMetadata(
            self._reports,
            self._lost,
            self._kept,
            {k: new for k, n in counts.items() if (new := n - told_counts.get(k, 0))},
            {} if levels == told_levels else {self._tp_rank: levels},
        )
        self._reports, self._lost, self._kept, self._told = (), frozenset(), (), (counts, levels)
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

        event = torch.cuda.Event()
        event.record()
        return lambda: bool(event.query())


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
