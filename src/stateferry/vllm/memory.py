"""The cache's memory and the waiting room's as flat byte tensors: read, fill, copy."""

import numpy as np
import torch

from stateferry.layout.spec import Pieces
from stateferry.vllm.kv_cache import RegionMemory


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
            # What reads into these bytes next runs on a stream that does not wait for this one.
            torch.cuda.current_stream(self._flat[0].device).synchronize()

    def copy(self, pieces: Pieces) -> None:
        """Copy all pieces inside this process, remote side to local side. On a device this is queued behind
        what the calling thread queued before, and before what it queues next."""
        for local_region, local, remote_region, remote, size in zip(
            pieces.local_regions.tolist(),
            pieces.local_offsets.tolist(),
            pieces.remote_regions.tolist(),
            pieces.remote_offsets.tolist(),
            pieces.sizes.tolist(),
            strict=True,
        ):
            source = self._flat[remote_region][remote : remote + size]
            self._flat[local_region][local : local + size].copy_(source)


def room_memory(like: RegionMemory, size_bytes: int) -> RegionMemory:
    """New memory of the device that holds `like`."""
    storage = torch.empty(size_bytes, dtype=torch.uint8, device=like.storage.device)
    return RegionMemory(storage.data_ptr(), size_bytes, like.device, like.device_index, storage)
