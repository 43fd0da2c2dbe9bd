"""Answers to describe requests: what this engine's workers said of their caches before the first request.

Such a request is computed like any other. It claims nothing and keeps no blocks; only its response differs.
"""

import logging
from collections.abc import Sequence
from typing import Any

from stateferry.vllm.metadata import StateFerryHandshake
from stateferry.wire import description_to_params, is_describe

logger = logging.getLogger(__name__)


class SelfDescription:
    """Lives in the scheduler's process. vLLM calls everything here on the engine core's thread."""

    def __init__(self, kv_role: str, bootstrap_port: int = 0) -> None:
        self._kv_role = kv_role
        self._bootstrap_port = bootstrap_port
        self._params: dict[str, Any] | None = None

    def learn(self, handshakes: Sequence[StateFerryHandshake]) -> None:
        """All workers' handshakes, by rank."""
        self._params = description_to_params(
            [handshake.layout for handshake in handshakes],
            [handshake.address for handshake in handshakes],
            self._kv_role,
            self._bootstrap_port,
        )

    def answer(self, request: Any) -> dict[str, Any] | None:
        """What the response of a finished request carries; None unless it asked for a description."""
        if not is_describe(request.kv_transfer_params):
            return None
        if self._params is None:
            logger.info("request=%s is not answered: no worker has described its cache", request.request_id)
        return self._params
