"""What can be set about MoRI-IO."""

import enum
from dataclasses import dataclass


class MoriBackend(enum.Enum):
    """Which of MoRI's back ends moves the bytes."""

    RDMA = "rdma"
    XGMI = "xgmi"


QUIET_AFTER_S = {MoriBackend.RDMA: 40.0, MoriBackend.XGMI: 2.0}
"""How long after a failed request none of its bytes can land any more: see `mori_request`.

RDMA: a queue pair that hears nothing tries for up to 34 s (8 times 4.3 s, the longest that MoRI configures).
XGMI: copies that were queued on a stream before the one that could not be; at most a few hundred MiB.
"""


@dataclass(frozen=True, slots=True)
class MoriOptions:
    """Numbers that MoRI's back ends are made with. Defaults are those of vLLM's MoRIIO connector."""

    backend: MoriBackend = MoriBackend.RDMA
    qp_per_transfer: int = 1
    """RDMA queue pairs a request is spread over. With 1, a later success proves an earlier request over."""
    post_batch_size: int = -1
    """RDMA work requests posted at a time; -1: all of a request."""
    num_workers: int = 1
    """Threads that post RDMA work requests."""
    num_streams: int = 64
    """XGMI."""
    num_events: int = 64
    """XGMI."""
    quiet_s: float = 0.0
    """Instead of `QUIET_AFTER_S`; 0: by the back end."""

    @property
    def quiet_after_s(self) -> float:
        """How long after its failure a request may still write."""
        return self.quiet_s or QUIET_AFTER_S[self.backend]
