"""The half that lives in vLLM's scheduler process: decides what is offered, claimed and loaded.

It never waits and talks to no peer. Orders leave with a step's metadata; news come back with the
workers' output. vLLM calls everything here on the engine core's thread.

    SchedulerHalf -- Offering   prefill legs, what a producer grants
                  -- Taking     decode legs, what a consumer opens, loads and closes
                  -- Numbers    what either counts
                  -- PartnerWatch   whether either ever hears of another engine
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stateferry.config import Config
from stateferry.ids import EngineId, RequestId
from stateferry.layout.spec import Group
from stateferry.session import SystemClock
from stateferry.vllm.metadata import StateFerryMetadata, StateFerryWorkerMetadata
from stateferry.vllm.numbers import Numbers
from stateferry.vllm.offering import ANSWERED, Finished, Offering
from stateferry.vllm.partner import PartnerWatch
from stateferry.vllm.spans import Spans
from stateferry.vllm.stats import StateFerryStats
from stateferry.vllm.taking import Taking
from stateferry.wire import Dialect, OwnDialect, RankAddress, is_decode_leg, is_prefill_leg


class SchedulerHalf:
    """One per engine."""

    def __init__(
        self,
        config: Config,
        engine_id: EngineId,
        groups: tuple[Group, ...],
        hash_block_tokens: int | None,
        *,
        tp_size: int = 1,
        produces: bool,
        consumes: bool,
        dialect: Dialect | None = None,
    ) -> None:
        spoken: Dialect = OwnDialect() if dialect is None else dialect
        clock = SystemClock()
        self.numbers = Numbers(groups, tp_size, clock)
        self.offering = Offering(config, engine_id, groups, hash_block_tokens, spoken, self.numbers)
        self.taking = Taking(config, groups, tp_size, spoken, self.numbers)
        self.spans = Spans()
        self._partner = PartnerWatch(
            groups, tp_size, config.lease_s, clock, produces=produces, consumes=consumes
        )
        self._produces = produces
        self._consumes = consumes
        self._step = 0

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Where this engine's workers listen, by tensor-parallel rank."""
        self.offering.set_ranks(ranks)

    @property
    def open_count(self) -> int:
        """Prefill and decode legs that are not finished here, and blocks that ferries still hold."""
        return self.offering.open_count + self.taking.open_count

    def on_new_request(self, request: Any) -> None:
        """Cut a prefill leg's prompt; open a decode leg's offer."""
        params = request.kv_transfer_params
        if self._produces and is_prefill_leg(params):
            self.offering.begin(request)
        elif self._consumes and is_decode_leg(params):
            self._partner.offer_came()
            self.taking.begin(request, params)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past the local prefix will be loaded, and whether after this step's forward."""
        return self.taking.matched_tokens(request, local_tokens)

    def blocks_allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Order the load; or give the offer back when vLLM wants nothing from it."""
        self.taking.blocks_allocated(request, blocks, external_tokens)

    def take_metadata(self) -> StateFerryMetadata:
        """This step's orders."""
        self._step += 1
        orders = self.taking.take_orders()
        grants, withdrawals = self.offering.take_grants(), self.offering.take_withdrawals()
        if grants or withdrawals:
            orders = replace(orders, grants=grants, withdrawals=withdrawals)
        return StateFerryMetadata(self._step, orders)

    def reported(self, sent: set[str], received: set[str]) -> None:
        """vLLM heard from all ranks that these requests' blocks are held no more."""
        self.offering.sent(sent)
        self.taking.freed(received)

    def heard(self, news: StateFerryWorkerMetadata) -> None:
        """News from the workers."""
        self.taking.heard(news)
        self.offering.renounced(news.renounced)
        self.numbers.heard(news)
        self._partner.heard(news.counts)
        for report in news.reports:
            self.spans.handoff(report)
        for kept in news.kept:
            self.spans.offer(kept)

    def take_stats(self) -> StateFerryStats | None:
        """What happened since the last call; None: nothing."""
        return self.numbers.take(self.open_count)

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> Finished:
        """Offer a finished prefill; end a decode leg. True: the blocks stay until reported sent."""
        said = self.taking.finish(RequestId(request.request_id))
        if said is not None:
            return False, said
        finished = self.offering.finish(request, block_ids)
        if finished is not None:
            return finished
        if request.status in ANSWERED:
            self._partner.answered(request.num_prompt_tokens)
        return False, None
