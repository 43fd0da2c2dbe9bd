"""For `tools/multi_connector.py`: where vLLM's OffloadingConnector keeps blocks, for caches in host memory.

vLLM 0.32 ships copies between a GPU and the host only. Its connector takes another such part by name
(`spec_name`, `spec_module_path`): this one copies at once, on the engine's own thread. Everything else is
vLLM's: what is kept, found and evicted. Engines load it by module path, from this folder.
"""

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's own for CPU memory, with another worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Called once, with the engine's cache as rows of bytes."""
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk is {self.blocks_per_chunk}: only 1 is copied here")
        if self._worker is None:
            self._worker = HostCopies(kv_caches, self.num_chunks)
        return self._worker


class HostCopies(OffloadingWorker):
    """Blocks of the cache and chunks beside it: rows, copied by index."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self._caches = caches
        self._room = [torch.empty((chunks, t.tensor.shape[1]), dtype=torch.int8) for t in caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From blocks into chunks."""
        return self._copy(job_id, src_spec, dst_spec, into_cache=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From chunks into blocks."""
        return self._copy(job_id, dst_spec, src_spec, into_cache=True)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _copy(self, job_id: int, in_cache: Any, in_room: Any, *, into_cache: bool) -> bool:
        begin = moved = 0
        for refs, size in zip(self._caches.group_data_refs, in_cache.group_sizes, strict=True):
            blocks = torch.from_numpy(in_cache.block_ids[begin : begin + size]).long()
            chunks = torch.from_numpy(in_room.block_ids[begin : begin + size]).long()
            for ref in refs:
                cache, room = self._caches.tensors[ref.tensor_idx].tensor, self._room[ref.tensor_idx]
                page = ref.page_size_bytes
                if into_cache:
                    cache[blocks, :page] = room[chunks, :page]
                else:
                    room[chunks, :page] = cache[blocks, :page]
                moved += page * size
            begin += size
        self._finished.append(TransferResult(job_id, True, moved, 0.0))
        return True
