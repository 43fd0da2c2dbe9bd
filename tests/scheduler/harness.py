"""vLLM's real scheduler with both real halves of the connector, over a simulated model, in this process.

    pair = Pair(HYBRID)                           a producer and a consumer
    params = pair.prefill(prompt)                 what the producer's response carries
    pair.consumer.add(prompt, params=params, max_tokens=3)
    pair.run()                                    until both engines have nothing to do
    pair.check_idle()                             everything is free, every map is empty, nothing was wrong

Hooks run where and in the order in which vLLM runs them; what crosses a process in vLLM is pickled here. On
every step an engine checks that loads go only to blocks that are the request's own.
"""

import copy
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from engine_parts import CacheModel, make_cache, make_config, make_rank
from simulated_model import answer
from simulated_worker import SimulatedWorker, groups_of
from steered_transport import Tap
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import FinishReason, Request, RequestStatus

from stateferry.session import Load, Place
from stateferry.vllm.connector import StateFerryConnector

POISON = 0xEE
"""What free blocks hold, so that a byte that was never sent, or is sent too late, shows."""
PATIENCE_S = 45.0
"""For a busy machine; where it is quiet everything here takes milliseconds."""

HYBRID = CacheModel(states=3)
HYBRID_SPECULATIVE = CacheModel(states=3, scratch=2)
HYBRID_DRAFTING = CacheModel(states=3, scratch=2, drafting="ngram")
HYBRID_FINE = CacheModel(states=2, block=8, hash_block=4)
"""Prefix hits may end inside a block."""
HYBRID_UNCACHED = CacheModel(states=3, mode="none")
ATTENTION = CacheModel(states=0)
WINDOW = CacheModel(states=0, window=6)


@dataclass
class Finish:
    """How a request ended, as a client sees it."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    params: dict[str, Any] | None = None


class LoudLog(logging.Handler):
    """Collects what must not be logged: errors of the connector and of its ferry."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += f": {record.exc_info[1]!r}"
        self.errors.append(text)


class Engine:
    """One engine: scheduler, both halves of the connector, a simulated worker for each rank.

    `worker`, `worker_half`, `ferry` and `tap` are the first rank's; the plurals have them all.
    """

    def __init__(self, role: str, model: CacheModel, runner: str = "v1", **settings: Any) -> None:
        self.config = make_config(role, model, **settings)
        self.cache_config, block_size, hash_block_size = make_cache(self.config, model)
        scheduler_class = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=self.cache_config,
            structured_output_manager=_NoGrammar(),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self.connector: StateFerryConnector = self.scheduler.connector
        self.half = self.connector._scheduler
        ranks = self.config.parallel_config.tensor_parallel_size
        self.taps = [Tap() for _ in range(ranks)]
        self.worker_halves: list[StateFerryConnector] = []
        self.workers: list[SimulatedWorker] = []
        for rank, tap in enumerate(self.taps):
            half, tensors = make_rank(self.config, self.cache_config, rank, tap)
            self.worker_halves.append(half)
            self.workers.append(SimulatedWorker(groups_of(self.cache_config, tensors, rank), half, runner))
        self.workers[-1].before_forward = self._keep_placed_pages
        handshakes = [pickle.dumps(half.get_handshake_metadata()) for half in self.worker_halves]
        self.connector.set_xfer_handshake_metadata(dict(enumerate(map(pickle.loads, handshakes))))
        self.told: list[dict[str, Any]] = []
        """What the connector gave for `/metrics`, as vLLM carries it to the API server, in order."""
        self._listen()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self.ferries = [half._worker._ferry for half in self.worker_halves]
        self.tap, self.worker_half, self.worker = self.taps[0], self.worker_halves[0], self.workers[0]
        self.ferry = self.ferries[0]
        self.finished: dict[str, Finish] = {}
        self.loads: list[Load] = []
        self.places: list[Place] = []
        self.scheduled: dict[str, list[tuple[int, int]]] = {}
        """Per request: (tokens computed before, tokens scheduled) of every step."""
        self.loaded_pages: dict[str, dict[tuple[int, int], list[bytes]]] = {}
        """Per loaded request, group and position: the pages as they were when the load was reported."""
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block_size, sha256)
        self._in_flight: list[Any] = []
        self._poisoned: set[int] = set()
        self._numbers = iter(range(1_000_000))
        self.all_free = self.pool.get_num_free_blocks()
        self._poison_free_blocks()

    # -- requests --------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        *,
        params: Any = None,
        max_tokens: int = 1,
        request_id: str | None = None,
        lora: str | None = None,
        salt: str | None = None,
        stop: int | None = None,
        prompt_logprobs: int | None = None,
        **more: Any,
    ) -> Request:
        """A request arrives."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[stop] if stop is not None else None,
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        request = Request(
            request_id=request_id or f"r{next(self._numbers)}",
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            lora_request=LoRARequest(lora, 1, "nowhere") if lora else None,
            cache_salt=salt,
            block_hasher=self._hasher,
            **more,
        )
        self.finished[request.request_id] = Finish()
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def status(self, request_id: str) -> RequestStatus | None:
        """The scheduler's idea of a request, None once it knows nothing of it."""
        request = self.scheduler.requests.get(request_id)
        return request.status if request is not None else None

    def computed_here(self, request_id: str) -> int:
        """How many tokens of a request's prompt and answer this engine has scheduled."""
        return sum(count for _, count in self.scheduled.get(request_id, ()))

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> int:
        """One step as the engine core takes it; returns how many tokens were computed.

        With async scheduling a step is scheduled before the one before it has run.
        """
        deep = self.config.max_concurrent_batches
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._poisoned &= self._unused_blocks()
            self._watch(output)
            self._in_flight.append(output)
            if len(self._in_flight) < deep and output.total_num_scheduled_tokens:
                return output.total_num_scheduled_tokens
        if not self._in_flight:
            return 0
        output = self._in_flight.pop(0)
        results = [worker.execute(output) for worker in self.workers]
        result = self._aggregator.aggregate(results) if len(results) > 1 else results[0]
        self._keep_loaded_pages(result.kv_connector_output)
        outputs = self.scheduler.update_from_output(output, result)
        for engine_outputs in outputs.values():
            for piece in engine_outputs.outputs:
                finish = self.finished[piece.request_id]
                finish.tokens += piece.new_token_ids
                finish.reason = piece.finish_reason
                finish.params = copy.deepcopy(piece.kv_transfer_params)
        if self.config.speculative_config is not None:
            self._draft(result)
        self._poison_free_blocks()
        return output.total_num_scheduled_tokens

    def _draft(self, result: Any) -> None:
        """What vLLM's drafter does between two steps: some drafts are right, most are not all."""
        count = self.config.num_speculative_tokens
        drafts = []
        for request_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            right = answer(self.worker.rows[request_id].tokens, count) if tokens else []
            keep = sum(tokens) % (count + 1)
            drafts.append([token if i < keep else token + 1 for i, token in enumerate(right)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(result.req_ids), drafts))

    @property
    def busy(self) -> bool:
        """Whether the engine core would step."""
        return bool(self._in_flight) or self.scheduler.has_requests()

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        """Blocks that a new request could get."""
        return self.pool.get_num_free_blocks()

    def pages(self, group: int, block: int) -> list[bytes]:
        """A block's bytes, rank by rank and layer by layer."""
        return [layer.page(block) for worker in self.workers for layer in worker.groups[group].layers]

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        """Block ids of a request that is held."""
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix."""
        assert self.scheduler.reset_prefix_cache()
        self._poison_free_blocks()

    def shut_down(self) -> None:
        """End the ferries."""
        for half in self.worker_halves:
            half.shutdown()
        self.scheduler.shutdown()

    # -- checks ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        right = self.connector.get_kv_connector_stats

        def told() -> Any:
            stats = right()
            if stats is not None:
                self.told.append(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())))
            return stats

        self.connector.get_kv_connector_stats = told

    def check_idle(self) -> None:
        """Nothing is held by anybody."""
        assert not self.busy
        assert self.free_blocks == self.all_free
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert self.half.open_count == 0
        assert not self.half.take_metadata().orders
        assert not self.scheduler.requests
        wait(lambda: not any(ferry.open_count for ferry in self.ferries), "ferries to have nothing open")
        assert not [what for worker in self.workers for what in worker.wrong]
        self.check_free_blocks()

    def check_free_blocks(self) -> None:
        """No byte came into a block that is free."""
        for block in self._poisoned:
            for group in range(len(self.worker.groups)):
                for page in self.pages(group, block):
                    assert page == bytes([POISON]) * len(page), f"block {block} was written while it was free"

    def _watch(self, output: Any) -> None:
        """Note what is scheduled, and that loads overwrite nobody's blocks but the request's own."""
        for new in output.scheduled_new_reqs:
            done = (new.num_computed_tokens, output.num_scheduled_tokens[new.req_id])
            self.scheduled.setdefault(new.req_id, []).append(done)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            done = (computed, output.num_scheduled_tokens[request_id])
            self.scheduled.setdefault(request_id, []).append(done)
        orders = output.kv_connector_metadata.orders
        self.loads += orders.loads
        self.places += orders.places
        assert output.has_sync_kv_loads == bool(orders.places), "vLLM's hook would come at the wrong time"
        for load in (*orders.loads, *orders.places):
            tables = self.tables(load.request_id)
            for part in load.groups:
                positions = slice(part.first_block, part.first_block + len(part.local_block_ids))
                # A state is also placed in later columns; between them there may be null blocks.
                assert [i for i in tables[part.group][positions] if i] == list(part.local_block_ids) or set(
                    part.local_block_ids
                ) <= set(tables[part.group][part.first_block :])
                for block in (self.pool.blocks[i] for i in part.local_block_ids):
                    assert not block.is_null, "a load goes to the null block"
                    owners = 1 + self._hits_in(output, block.block_id, load.request_id)
                    assert block.ref_cnt == owners, f"a load goes to block {block.block_id}, which is shared"
                    if load in orders.loads:
                        assert block.block_hash is None, (
                            f"a load goes to block {block.block_id}, which is cached"
                        )

    def _hits_in(self, output: Any, block: int, owner: str) -> int:
        """Requests that got a block of `owner` in the very step that places it."""
        new = (r for r in output.scheduled_new_reqs if r.req_id != owner)
        return sum(block in ids for r in new for ids in r.block_ids)

    def _keep_loaded_pages(self, output: Any) -> None:
        for request_id in (output.finished_recving or set()) - output.failed_recving:
            self._keep_pages(next(load for load in reversed(self.loads) if load.request_id == request_id))

    def _keep_placed_pages(self, output: Any) -> None:
        for place in output.kv_connector_metadata.orders.places:
            self._keep_pages(place)

    def _keep_pages(self, load: Load | Place) -> None:
        self.loaded_pages[load.request_id] = {
            (part.group, part.first_block + i): self.pages(part.group, block)
            for part in load.groups
            for i, block in enumerate(part.local_block_ids[: len(set(part.remote_block_ids))])
        }

    def _unused_blocks(self) -> set[int]:
        """Blocks that nobody holds and whose contents nobody may find again."""
        return {
            block.block_id
            for block in self.pool.blocks
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
        }

    def _poison_free_blocks(self) -> None:
        free = self._unused_blocks()
        layers = [layer for worker in self.workers for group in worker.groups for layer in group.layers]
        for block in free - self._poisoned:
            for layer in layers:
                layer.fill(block, POISON)
        self._poisoned = free


class Pair:
    """A producer and a consumer of one model."""

    def __init__(
        self,
        model: CacheModel,
        *,
        role: str | None = None,
        producer: dict[str, Any] | None = None,
        consumer: dict[str, Any] | None = None,
        **both: Any,
    ) -> None:
        self.model = model
        self.log = LoudLog()
        logging.getLogger("stateferry").addHandler(self.log)
        self.producer = Engine(role or "kv_producer", model, **(both | (producer or {})))
        self.consumer = Engine(role or "kv_consumer", model, **(both | (consumer or {})))
        self.offered_pages: dict[str, dict[tuple[int, int], list[bytes]]] = {}
        """Per transfer, group and position: the producer's pages when it made the offer."""

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.producer.shut_down()
        self.consumer.shut_down()
        logging.getLogger("stateferry").removeHandler(self.log)

    def prefill(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """The prefill leg; returns the response's parameters."""
        request = self.producer.add(prompt, params={"do_remote_decode": True}, **more)
        request_id = request.request_id
        self.run_until(lambda: self.producer.finished[request_id].reason is not None, "the prefill")
        params = self.producer.finished[request_id].params
        assert params is not None
        if params["do_remote_prefill"]:
            self._keep_offered_pages(params)
        return params

    def hand_off(self, prompt: Sequence[int], max_tokens: int = 2, **more: Any) -> str:
        """Both legs to their end; returns the consumer's request id."""
        params = self.prefill(prompt)
        request = self.consumer.add(prompt, params=params, max_tokens=max_tokens, **more)
        self.run()
        return request.request_id

    def step(self) -> int:
        """One step of each engine."""
        return self.producer.step() + self.consumer.step()

    def run(self) -> None:
        """Until neither engine has anything to do."""
        self.run_until(lambda: not (self.producer.busy or self.consumer.busy), "both engines to be idle")

    def run_until(self, condition: Callable[[], bool], what: str, step_s: float = 0.0) -> None:
        """Step both engines until something is so.

        `step_s` is the least that a step takes: without it, a request that is to outlast what is waited
        for may be through its tokens before a ferry's thread gets a turn on a busy machine.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if not self.step() or step_s:
                time.sleep(max(step_s, 0.0002))
            assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"

    def check_idle(self) -> None:
        """Everything is over: no block, no map entry, no complaint is left on either side."""
        self.producer.check_idle()
        self.consumer.check_idle()
        assert self.log.errors == []

    def check_pages(self, request_id: str, params: dict[str, Any]) -> None:
        """What the consumer loaded is, byte for byte, what the producer offered at the same positions."""
        offered = self.offered_pages[params["stateferry"]["transfer_id"]]
        for place, pages in self.consumer.loaded_pages[request_id].items():
            assert pages == offered[place], f"group and position {place} differ"

    def _keep_offered_pages(self, params: dict[str, Any]) -> None:
        ours = params["stateferry"]
        self.offered_pages[ours["transfer_id"]] = {
            (group, first + i): self.producer.pages(group, block)
            for group, (first, ids) in enumerate(
                zip(ours["first_blocks"], params["remote_block_ids"], strict=True)
            )
            for i, block in enumerate(ids)
        }


class _NoGrammar:
    """Stands in for the manager of structured output, which nothing here asks for."""

    def accept_tokens(self, request: Any, token_ids: list[int]) -> bool:
        return True

    def validate_tokens(self, request: Any, token_ids: list[int]) -> list[int]:
        return token_ids


def wait(condition: Callable[[], bool], what: str) -> None:
    """Until a ferry's thread has come so far; no engine steps."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        time.sleep(0.0005)
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
