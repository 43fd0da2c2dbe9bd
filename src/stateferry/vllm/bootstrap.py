"""What routers that send both legs at once hear of an engine, and which process tells them.

One answers for all data-parallel engines behind one HTTP port, as these routers expect: the first of them.
Where the others listen follows from `port`, by the rule that they bind by.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from stateferry.bootstrap import BootstrapService, query_answer
from stateferry.config import Config, control_port
from stateferry.errors import ConfigError
from stateferry.ids import EngineId
from stateferry.vllm.moriio import fronts_http
from stateferry.wire import RankAddress

logger = logging.getLogger(__name__)

MOONCAKES_VARIABLE = "VLLM_MOONCAKE_BOOTSTRAP_PORT"


class Bootstrap:
    """`/query` of one engine. The scheduler half starts and tells it; a worker half only has it refused."""

    def __init__(self, config: Config, vllm_config: Any, *, drops_in: bool) -> None:
        """`drops_in`: settings are in MoRIIO's words. Raises ConfigError for an engine that has nothing to
        say there, or whose neighbours are not known."""
        transfer = vllm_config.kv_transfer_config
        self._config = config
        self._engine_id = str(transfer.engine_id)
        self._parallel = vllm_config.parallel_config
        self._produces: bool = transfer.is_kv_producer
        self._service: BootstrapService | None = None
        if not config.bootstrap_port:
            return
        if not self._produces:
            raise ConfigError(
                f"key 'bootstrap_port' is set on an engine with kv_role {transfer.kv_role!r}: routers ask "
                "prefill engines only. Set it on those, and leave it out here"
            )
        if drops_in:
            raise ConfigError(
                "key 'bootstrap_port' is set beside settings for MoRIIO, whose routers wait for the prefill "
                "engine's answer: take one or the other"
            )
        _refuse_unknown_neighbours(self._parallel)

    @property
    def port(self) -> int:
        """Where routers ask; 0: nowhere."""
        return self._config.bootstrap_port

    def start(self) -> None:
        """Listen, if this engine is the one that answers; nothing is known yet. Raises ConfigError for a port
        that cannot be bound."""
        if not self.port:
            if self._produces and MOONCAKES_VARIABLE in os.environ:
                logger.warning(
                    "%s is set, which is for the Mooncake connector: this engine answers no /query. Routers "
                    "that send both legs at once need 'bootstrap_port' in kv_connector_extra_config",
                    MOONCAKES_VARIABLE,
                )
            return
        if not fronts_http(self._parallel):
            return
        self._service = BootstrapService(self._config.bind_host or self._config.host, self.port)
        self._service.start()

    def tell(self, ranks: Sequence[RankAddress]) -> None:
        """The engine's workers have said where they listen, by tensor-parallel rank."""
        if self._service is None or not ranks:
            return
        engines = {rank: self._neighbour(rank, ranks) for rank in range(_engines_behind(self._parallel))}
        self._service.tell(query_answer(engines))
        logger.info(
            "routers that send both legs at once may ask http://%s:%d/query for %s",
            self._config.host,
            self.port,
            ", ".join(f"{first.host}:{first.port}" for _, (first, *_) in engines.values()),
        )

    def stop(self) -> None:
        """Answer no more. Idempotent."""
        if self._service is not None:
            self._service.stop()

    def _neighbour(self, rank: int, ranks: Sequence[RankAddress]) -> tuple[EngineId, tuple[RankAddress, ...]]:
        """The engine of that rank among those behind one HTTP port, of which this is the first."""
        if rank == 0:
            return EngineId(self._engine_id), tuple(ranks)
        own = self._parallel.data_parallel_index
        addresses = tuple(
            RankAddress(
                address.host, control_port(self._config.port, own + rank, len(ranks), place), address.epoch
            )
            for place, address in enumerate(ranks)
        )
        # vLLM ends their names like this.
        return EngineId(f"{self._engine_id.removesuffix(f'_dp{own}')}_dp{own + rank}"), addresses


def _engines_behind(parallel: Any) -> int:
    """How many engines share this one's HTTP port, itself included."""
    return 1 if parallel.data_parallel_external_lb else max(1, parallel.data_parallel_size_local)


def _refuse_unknown_neighbours(parallel: Any) -> None:
    """Raise ConfigError where the engine that answers cannot know all that it has to answer for.

    vLLM makes data-parallel engines of dense models think that they are alone: the first one cannot see that
    it is not, but each other one can, and ends the start of all.
    """
    if parallel.data_parallel_external_lb:
        return
    alone = parallel.data_parallel_size_local == 1
    dense = alone and not fronts_http(parallel)
    apart = not parallel.data_parallel_hybrid_lb and (
        parallel.data_parallel_size_local < parallel.data_parallel_size
    )
    if dense or apart:
        raise ConfigError(
            f"key 'bootstrap_port' is set on data-parallel engine {parallel.data_parallel_index} behind an "
            "HTTP port that it shares, and the engine that answers there would not know "
            f"{'where the machines of the others are' if apart else 'of it'}. Give each engine an HTTP port "
            "and a 'bootstrap_port' of its own (--data-parallel-external-lb, or one server an engine)"
        )
