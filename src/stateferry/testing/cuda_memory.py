"""Memory on a CUDA device for the transport conformance suite. Imports torch."""

from collections.abc import Sequence

import numpy as np
import torch

from stateferry.testing.transport_rigs import SENTINEL, Buffer, Local
from stateferry.transport import MemoryKind, MemoryRegion


def on_device(buffers: Sequence[Buffer], device: int) -> tuple[list[torch.Tensor], list[MemoryRegion]]:
    """Copies of the buffers on a device, and the regions to register. The caller keeps the tensors."""
    tensors = [torch.from_numpy(np.ascontiguousarray(buffer)).to(f"cuda:{device}") for buffer in buffers]
    torch.cuda.synchronize(device)
    return tensors, [MemoryRegion(t.data_ptr(), t.numel(), MemoryKind.CUDA, device) for t in tensors]


class CudaLocal(Local):
    """The reader's memory, on the current device."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._tensors, self._regions = on_device(super().buffers, torch.cuda.current_device())

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        # No synchronisation of the device but the copy's own: DONE must mean that the bytes are there.
        return tuple(tensor.cpu().numpy() for tensor in self._tensors)

    def regions(self) -> list[MemoryRegion]:
        return self._regions

    def reset(self) -> None:
        for tensor in self._tensors:
            tensor.fill_(SENTINEL)
        torch.cuda.synchronize()
