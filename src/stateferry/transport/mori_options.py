"""What can be set about MoRI-IO."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass


class MoriBackend(enum.Enum):
    """Which of MoRI's back ends moves the bytes."""

    RDMA = "rdma"
    XGMI = "xgmi"


TRY_S = 4.096e-6
RDMA_TIMEOUT, RDMA_RETRIES = 20, 7
"""The longest that MoRI configures: a queue pair that hears nothing tries 8 times, 4.096 us x 2^20 each."""
SLOW_CARD = 4
"""The InfiniBand specification lets a card take up to four times as long."""

QUIET_AFTER_S = {MoriBackend.RDMA: 140.0, MoriBackend.XGMI: 2.0}
"""How long after a failed request none of its bytes can land any more: see `mori_request`.

RDMA: when a queue pair has given up, see above. XGMI: copies that were queued on a stream before the one that
could not be; at most a few hundred MiB.
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

    def quiet_after_s(self, environment: Mapping[str, str]) -> float:
        """How long after its failure a request may still write; infinite where queue pairs try for ever.

        `environment`: MoRI's variables may make its queue pairs try for longer.
        """
        if self.quiet_s or self.backend is MoriBackend.XGMI:
            return self.quiet_s or QUIET_AFTER_S[self.backend]
        timeout = _number(environment.get("MORI_IO_QP_TIMEOUT"), RDMA_TIMEOUT)
        retries = _number(environment.get("MORI_IO_QP_RETRY_CNT"), RDMA_RETRIES)
        if timeout == 0:
            return math.inf
        # Never less than the default: versions that do not know these variables take no notice of them.
        return max(QUIET_AFTER_S[self.backend], TRY_S * 2.0**timeout * (retries + 1) * SLOW_CARD)


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() else default
