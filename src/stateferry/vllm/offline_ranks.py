"""Stand-ins for vLLM's process groups: a layer that is only built asks for sizes and talks to nobody."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator


class _Ranks:
    """As much of a torch process group as building a layer asks for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def _group(size: int) -> GroupCoordinator:
    """vLLM's own group without what `__init__` opens: rank 0 of `size`. Any communication over it fails."""
    group = GroupCoordinator.__new__(GroupCoordinator)
    group.unique_name = f"offline-{size}"
    group.ranks = list(range(size))
    group.rank = group.local_rank = group.rank_in_group = 0
    group.world_size = size
    group.cpu_group = group.device_group = _Ranks(size)
    group.device = torch.device("cpu")
    group.use_device_communicator = False
    group.device_communicator = None
    group.mq_broadcaster = None
    return group


@contextmanager
def stand_in_ranks(parallel: ParallelConfig) -> Iterator[None]:
    """Inside, vLLM takes this process for rank 0 of an engine of that size. Not thread-safe.

    All ranks of an engine have equal specs (vLLM asserts it), so rank 0 tells of all.
    """
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    context = parallel.prefill_context_parallel_size
    sizes = {
        "_WORLD": tensor * context * parallel.pipeline_parallel_size,
        "_TP": tensor,
        "_ETP": tensor,
        "_DCP": parallel.decode_context_parallel_size,
        "_PCP": context,
        "_PP": parallel.pipeline_parallel_size,
        "_DP": data,
        "_EP": tensor * context * data,
    }
    with ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(patch.object(parallel_state, name, _group(size)))
        yield
