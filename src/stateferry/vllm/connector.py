"""`StateFerryConnector`: what vLLM loads. Passes each hook to the half that this process holds."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stateferry.config import Config, LoadMode
from stateferry.errors import ConfigError
from stateferry.ids import EngineId
from stateferry.telemetry import TOLD
from stateferry.vllm.bootstrap import Bootstrap
from stateferry.vllm.compat import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    is_tested,
    vllm_version,
)
from stateferry.vllm.description import SelfDescription
from stateferry.vllm.guard import guarded
from stateferry.vllm.kv_cache import outline
from stateferry.vllm.metadata import StateFerryHandshake, StateFerryMetadata, StateFerryWorkerMetadata
from stateferry.vllm.moriio import read_config
from stateferry.vllm.offering import Finished
from stateferry.vllm.scheduler import SchedulerHalf
from stateferry.vllm.stats import StateFerryPromMetrics, StateFerryStats
from stateferry.vllm.waits import sleep_between_looks
from stateferry.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class StateFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves attention KV and recurrent state from a prefill engine to a decode engine."""

    _cache_hit_source = CacheHitSource.P2P

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No (`kv_cache.refuse_unproven` says why). vLLM asks from 0.33 on."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        transfer = self._kv_transfer_config
        sleep_between_looks()  # no plugin does, where vLLM knows us by our module's path alone
        config, self._dropin = read_config(vllm_config)
        _refuse(config, vllm_config)
        engine_id = EngineId(transfer.engine_id)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._bootstrap = Bootstrap(config, vllm_config, drops_in=self._dropin is not None)
        self._description = SelfDescription(str(transfer.kv_role), self._bootstrap.port)
        if role is KVConnectorRole.SCHEDULER:
            groups = outline(kv_cache_config, vllm_config)
            self._scheduler = SchedulerHalf(
                config,
                engine_id,
                groups,
                kv_cache_config.hash_block_size,
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                dialect=self._dropin.dialect(groups) if self._dropin is not None else None,
            )
            self._bootstrap.start()
            _advise(transfer)
        else:
            self._worker = WorkerHalf(config, engine_id, vllm_config, kv_cache_config)

    # -- both halves -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End this process's half."""
        if self._dropin is not None:
            self._dropin.stop()
        self._bootstrap.stop()
        if self._worker is not None:
            self._worker.shutdown()

    # -- scheduler half --------------------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load brings the recurrent state whatever the attention groups hit locally."""
        return True

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """vLLM collected every worker's address and layout."""
        found = [m for _, m in sorted(metadata.items()) if isinstance(m, StateFerryHandshake)]
        if self._scheduler is not None:
            self._scheduler.set_ranks([m.address for m in found])
            self._description.learn(found)
            self._bootstrap.tell([m.address for m in found])
            if self._dropin is not None:
                self._dropin.register()

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        self._half().on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens will be loaded, and that it happens between steps."""
        return self._half().matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All: vLLM then zeroes none of the blocks that a load overwrites."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM allocated blocks."""
        self._half().blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's orders."""
        return self._half().take_metadata()

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """News from the workers."""
        self._half().reported(
            set(connector_output.finished_sending or ()), set(connector_output.finished_recving or ())
        )
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, StateFerryWorkerMetadata):
            self._half().heard(news)

    @guarded(lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finished:
        """A request is over."""
        keeps, params = self._half().request_finished(request, block_ids)
        return keeps, params if keeps or params is not None else self._description.answer(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> Finished:
        """As above, where vLLM runs without its hybrid memory allocator."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> StateFerryStats | None:
        """Numbers for `/metrics`; the scheduler half has those of all ranks."""
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StateFerryStats:
        """For vLLM's log line, in another process: a line that says nothing but what time it was is none."""
        return StateFerryStats(data={name: values for name, values in (data or {}).items() if name != TOLD})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StateFerryPromMetrics:
        """Register our metrics with vLLM's."""
        return StateFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool:
        """Nothing is cached here that a reset could drop."""
        return True

    def take_events(self) -> Iterable[Any]:
        """No cache events of our own."""
        return ()

    # -- worker half -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """vLLM allocated the cache. Raises at start-up what cannot be proven to move rightly."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This worker's address."""
        return self._worker.handshake() if self._worker is not None else None

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Earliest hook of a step: loads start before the forward. Safe because vLLM zeroes none of
        the blocks that it lists in `get_loaded_kv_cache_group_ids`."""
        if self._worker is not None and isinstance(kv_connector_metadata, StateFerryMetadata):
            self._worker.take_orders(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Place hand-offs of requests that this step runs; vLLM calls it before the forward if there are any
        (`load_mode: sync`). Otherwise for runners that do not call `handle_preemptions`."""
        if self.has_connector_metadata():
            self.handle_preemptions(self._get_connector_metadata())
            if self._worker is not None:
                self._worker.place()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load, or over bytes that were placed before."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: consumers read."""

    def wait_for_save(self) -> None:
        """Nothing to save: consumers read."""

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended since the last step."""
        assert self._worker is not None
        return self._worker.results()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> StateFerryWorkerMetadata | None:
        """News for the scheduler half."""
        return self._worker.news() if self._worker is not None else None

    # -- inside ----------------------------------------------------------------------------------

    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler hook was called in a worker"
        return self._scheduler


def _refuse(config: Config, vllm_config: Any) -> None:
    """Settings that are each right and not shown to be right together."""
    if config.load_mode is LoadMode.SYNC and vllm_config.speculative_config is not None:
        raise ConfigError(
            "key 'load_mode' is 'sync' and --speculative-config is set: drafts run on blocks that no sync "
            "load was shown to fill. Set 'load_mode' to 'async', or drop --speculative-config"
        )


def _advise(transfer: Any) -> None:
    """Say at start-up what an operator would otherwise find out from a failed request."""
    found = vllm_version()
    if not is_tested(found):
        logger.warning("vLLM %s was never tested with this connector; see docs/compat.md", found)
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a hand-off that fails gives its client an error. "
            "'recompute' computes the prompt here instead",
            transfer.kv_load_failure_policy,
        )


def _log_like_vllm() -> None:
    """Our log lines look like vLLM's and go where they go, unless the operator set up ours."""
    ours, theirs = logging.getLogger("stateferry"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False
        ours.setLevel(theirs.level)
