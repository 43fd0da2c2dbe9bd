"""The half that lives in vLLM's scheduler process: decides what is offered, claimed and loaded.

It never waits and talks to no peer. Orders leave with a step's metadata; news come back with the
workers' output. vLLM calls everything here on the engine core's thread.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stateferry.block_ids import BlockIds
from stateferry.config import Config, LoadMode
from stateferry.errors import LayoutError, ProtocolError
from stateferry.ids import EngineId, RequestId, TransferId, new_transfer_id
from stateferry.layout.blocks import needed_blocks, pair
from stateferry.layout.spec import Group, GroupKind
from stateferry.session import Close, Grant, GroupLoad, Load, Open, Orders, Outcome, Place, Report
from stateferry.telemetry import Key
from stateferry.vllm.compat import RequestStatus
from stateferry.vllm.destinations import later_columns, not_held
from stateferry.vllm.metadata import StateFerryMetadata, StateFerryWorkerMetadata
from stateferry.vllm.partner import PartnerWatch
from stateferry.vllm.prompt import cut_last_token, digest_of_prefix, why_not_offered
from stateferry.vllm.spans import Spans, trace_of
from stateferry.vllm.stats import StateFerryStats, record_handoff
from stateferry.wire import Dialect, Offer, OwnDialect, RankAddress, is_decode_leg, is_prefill_leg

logger = logging.getLogger(__name__)

OURS = "stateferry"
MAX_USED = 8192
"""How many offers are remembered as used: far more than can be alive at a time."""
ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
Finished = tuple[bool, dict[str, Any] | None]
"""Whether vLLM keeps the blocks until we report them sent; what the response carries."""


@dataclass(slots=True)
class Claimable:
    """What this half knows of a decode leg's offer."""

    offer: Offer
    loading: bool = False
    """Blocks were ordered: the offer is used up, whatever becomes of it."""
    lost: bool = False
    waiting: int = 0
    """Ranks in whose waiting room it is, all of it and proven."""
    apart: int = 0
    """Ranks that want blocks first."""
    ahead: bool = False
    """It was placed from the waiting room."""
    reports: tuple[Report, ...] = ()
    """One per rank, when it is over."""


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
        self._config = config
        self._engine_id = engine_id
        self._groups = groups
        self._hash_block_tokens = hash_block_tokens
        self._produces = produces
        self._consumes = consumes
        self._dialect: Dialect = OwnDialect() if dialect is None else dialect
        self._cuts = any(g.kind is not GroupKind.ATTENTION and g.transfers for g in groups)
        """Whether prefill legs are cut to N-1 tokens: neither a recurrent state nor the front of a sliding
        window, whose blocks vLLM frees as it moves on, can be wound back by a token."""
        self._ranks: tuple[RankAddress, ...] = ()
        self._claimable: dict[RequestId, Claimable] = {}
        self._used: OrderedDict[TransferId, RequestId] = OrderedDict()
        """Offers that were opened here, whatever became of them, with the requests that had them."""
        self._prefills: dict[RequestId, str] = {}
        """Prefill legs that run, with why their result will not be offered ("": it will)."""
        self._granted: set[str] = set()
        """Finished prefills whose blocks wait for a consumer."""
        self._loading: set[str] = set()
        """Requests whose blocks are being read into."""
        self._loading_alone = 0
        """Of those: the request itself is over. Counted, because every step asks."""
        self._grants: list[Grant] = []
        self._opens: list[Open] = []
        self._loads: list[Load] = []
        self._places: list[Place] = []
        self._closes: list[Close] = []
        self._step = 0
        self._tp_size = tp_size
        self._reports: dict[RequestId, list[Report]] = {}
        """Of hand-offs that some ranks have ended and others not."""
        self._levels: dict[int, dict[Key, int]] = {}
        """How things stand, by rank."""
        self._stats = StateFerryStats()
        self._spans = Spans()
        self._partner = PartnerWatch(groups, tp_size, config.lease_s, produces=produces, consumes=consumes)
        self._standing: dict[Key, int] = {}
        """How things stand over all ranks, and in this half."""
        self._told: dict[Key, int] = {}

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Where this engine's workers listen, by tensor-parallel rank."""
        self._ranks = tuple(ranks)

    @property
    def open_count(self) -> int:
        """Prefill and decode legs that are not finished here, and blocks that ferries still hold."""
        legs = len(self._claimable) + self._loading_alone + len(self._prefills)
        return legs + len(self._granted)

    def reported(self, sent: set[str], received: set[str]) -> None:
        """vLLM heard from all ranks that these requests' blocks are held no more."""
        self._granted.difference_update(sent)
        ended = self._loading & received
        self._loading -= ended
        self._loading_alone -= len(ended.difference(self._claimable))

    # -- a request arrives -----------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Cut a prefill leg's prompt; open a decode leg's offer."""
        params = request.kv_transfer_params
        if self._produces and is_prefill_leg(params):
            reason = why_not_offered(request)
            self._prefills[RequestId(request.request_id)] = reason
            if self._cuts and not reason:
                cut_last_token(request, self._hash_block_tokens)
            request.max_tokens = 1
        elif self._consumes and is_decode_leg(params):
            self._partner.offer_came()
            self._open(request, params)

    def _open(self, request: Any, params: dict[str, Any]) -> None:
        try:
            offer = self._dialect.read(params, request.request_id)
            self._check_offer(request, offer)
        except (ProtocolError, LayoutError) as e:
            self._stats.add("stateferry_refused_offers", 1, "consumer")
            logger.warning("request=%s is computed here: %s", request.request_id, e)
            return
        if not self._config.testing and offer.tamper is not None:
            offer = msgspec.structs.replace(offer, tamper=None)
        request_id = RequestId(request.request_id)
        self._claimable[request_id] = Claimable(offer)
        self._used[offer.transfer_id] = request_id
        while len(self._used) > MAX_USED:
            self._used.popitem(last=False)
        self._opens.append(Open(request_id, offer, trace_of(request)))

    def _check_offer(self, request: Any, offer: Offer) -> None:
        """Raise unless the offer is for this very prompt and describes every block that is needed."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ProtocolError("its prompt has embeddings, which no offer covers")
        if offer.transfer_id in self._used:
            user = self._used[offer.transfer_id]
            raise ProtocolError(f"request {user} had this offer before, and an offer serves one request")
        if offer.num_tokens >= request.num_prompt_tokens:
            raise ProtocolError(
                f"the offer covers {offer.num_tokens} tokens, the prompt has {request.num_prompt_tokens}: "
                "at least one token must be left to compute"
            )
        if digest_of_prefix(request, offer.num_tokens) != offer.prefix_digest:
            raise ProtocolError(
                f"the offer is for another prompt: digest of the first {offer.num_tokens} tokens differs"
            )
        if len(offer.block_ids) != len(self._groups):
            raise LayoutError(
                f"the offer has {len(offer.block_ids)} KV-cache groups, this engine has {len(self._groups)}: "
                "run the same model with the same flags on both engines"
            )
        for group, table, first in zip(self._groups, offer.block_ids, offer.first_blocks, strict=True):
            if group.transfers:
                positions = needed_blocks(group, 0, offer.num_tokens)
                pair(group, positions, [1] * positions.stop, table, first)

    # -- vLLM schedules it -----------------------------------------------------------------------

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past the local prefix will be loaded, and whether after this step's forward.

        Claims only a live, unused offer. Under `load_mode: sync` nothing is claimed to be there before it
        is: None asks vLLM to come again.
        """
        claimable = self._claimable.get(request.request_id)
        if claimable is None or claimable.loading or claimable.lost:
            return 0, False
        external = claimable.offer.num_tokens - local_tokens
        if external <= 0:
            return 0, False
        if self._config.load_mode is LoadMode.SYNC and claimable.waiting + claimable.apart < self._tp_size:
            return None, False
        return external, not self._in_room(claimable)

    def _in_room(self, claimable: Claimable) -> bool:
        """Whether every rank can place it at once. Where one cannot, all take it as under `async`: a request
        that runs cannot be taken back in vLLM 0.32, so one whose bytes may yet fail must not run."""
        return claimable.waiting == self._tp_size

    def blocks_allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Order the load; or give the offer back when vLLM wants nothing from it."""
        request_id = RequestId(request.request_id)
        claimable = self._claimable.get(request_id)
        if claimable is None or claimable.loading:
            return
        claimable.loading = True
        if external_tokens == 0:
            claimable.reports = ()  # what was read ahead serves nobody
            self._closes.append(Close(request_id))
            return
        in_room = self._in_room(claimable)
        local_tokens = claimable.offer.num_tokens - external_tokens
        loads: tuple[GroupLoad, ...] = ()
        problem = ""
        # Whatever goes wrong: vLLM waits for these blocks now, so it must hear of them from the ferry.
        try:
            loads = self._group_loads(claimable.offer, blocks, local_tokens if in_room else None)
        except LayoutError as e:
            problem = str(e)
        except Exception as e:
            logger.exception("defect while pairing the blocks of request %s", request_id)
            problem = f"defect while pairing blocks: {e!r}"
        if in_room:
            claimable.ahead = True
            self._places.append(Place(request_id, loads, problem))
        else:
            self._loading.add(request_id)
            self._loads.append(Load(request_id, local_tokens, loads, problem))

    def _group_loads(self, offer: Offer, blocks: Any, hashed_from: int | None) -> tuple[GroupLoad, ...]:
        """Destinations and sources. `hashed_from`: vLLM has put its hashes on all blocks from this token on,
        because the request runs in this step; None: cached blocks are those that have one."""
        loads = []
        for index, group in enumerate(self._groups):
            table = blocks.blocks[index]
            positions = needed_blocks(group, 0, offer.num_tokens) if group.transfers else range(0)
            if group.kind is not GroupKind.STATE:
                positions = (
                    _not_cached(positions, table)
                    if hashed_from is None
                    else not_held(group, positions, table, hashed_from)
                )
            if not positions:
                continue
            local_table = [b.block_id for b in table]  # vLLM's blocks are objects: each must be asked
            ours, theirs = pair(
                group, positions, local_table, offer.block_ids[index], offer.first_blocks[index]
            )
            destinations = table[positions.start : positions.stop]
            hashed = hashed_from is None
            taken = next(
                (b.block_id for b in destinations if b.ref_cnt > 1 or (hashed and b.block_hash)), None
            )
            if taken is not None:
                raise LayoutError(f"group {index}: block {taken} is cached or shared with another request")
            if hashed_from is not None and group.kind is GroupKind.STATE:
                ours = np.append(ours, np.asarray(later_columns(group, positions, table), np.int64))
                theirs = np.repeat(theirs, len(ours))
            loads.append(GroupLoad(index, positions.start, BlockIds(ours), BlockIds(theirs)))
        return tuple(loads)

    def take_metadata(self) -> StateFerryMetadata:
        """This step's orders."""
        self._step += 1
        orders = Orders(
            tuple(self._grants),
            tuple(self._opens),
            tuple(self._loads),
            tuple(self._places),
            tuple(self._closes),
        )
        self._grants, self._opens, self._loads, self._places, self._closes = [], [], [], [], []
        return StateFerryMetadata(self._step, orders)

    # -- news from the workers -------------------------------------------------------------------

    def heard(self, news: StateFerryWorkerMetadata) -> None:
        """Remember how hand-offs ended, and which offers are worth nothing any more."""
        for request_id in news.lost:
            if request_id in self._claimable:
                self._claimable[request_id].lost = True
        for request_id in news.waiting:
            if request_id in self._claimable:
                self._claimable[request_id].waiting += 1
        for request_id in news.apart:
            if request_id in self._claimable:
                self._claimable[request_id].apart += 1
        for report in news.reports:
            claimable = self._claimable.get(report.request_id)
            if claimable is not None:
                claimable.reports += (report,)
        self._count(news)
        for report in news.reports:
            self._spans.handoff(report)
        for kept in news.kept:
            self._spans.offer(kept)

    def _count(self, news: StateFerryWorkerMetadata) -> None:
        for report in news.reports:
            so_far = self._reports.setdefault(report.request_id, [])
            so_far.append(report)
            if len(so_far) == self._tp_size:
                record_handoff(self._stats, self._groups, self._reports.pop(report.request_id))
        if news.levels:
            self._levels |= news.levels
            keys = {key for levels in self._levels.values() for key in levels}
            self._standing = {key: sum(of.get(key, 0) for of in self._levels.values()) for key in keys}
        for (name, label), number in news.counts.items():
            self._stats.add(name, number, label)
        self._partner.heard(news.counts)

    def take_stats(self) -> StateFerryStats | None:
        """What happened since the last call; None: nothing."""
        self._standing["stateferry_open_handoffs", "scheduler"] = self.open_count
        if self._standing != self._told:
            for (name, label), level in self._standing.items():
                if level != self._told.get((name, label), 0):
                    self._stats.set(name, level, label)
            self._told = dict(self._standing)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, StateFerryStats()
        return stats

    # -- it finishes -----------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> Finished:
        """Offer a finished prefill; end a decode leg. True: the blocks stay until reported sent."""
        request_id = RequestId(request.request_id)
        claimable = self._claimable.pop(request_id, None)
        if claimable is not None:
            self._loading_alone += request_id in self._loading
            self._closes.append(Close(request_id))
            return False, self._received(claimable)
        reason = self._prefills.pop(request_id, None)
        if reason is None:
            if request.status in ANSWERED:
                self._partner.answered(request.num_prompt_tokens)
            return False, None
        return self._offer(request, block_ids, reason)

    def _offer(self, request: Any, block_ids: tuple[list[int], ...], reason: str) -> Finished:
        # Nothing but a whole prefix may be offered; a stop token as P's only token does no harm to it.
        if request.status not in ANSWERED:
            return False, None
        num_tokens = request.num_prompt_tokens - (0 if self._cuts else 1)
        tables: list[BlockIds] = []
        firsts: list[int] = []
        try:
            if reason or not self._ranks:
                raise LayoutError(reason or "this engine's workers have published no address")
            for group, table in zip(self._groups, block_ids, strict=True):
                positions = needed_blocks(group, 0, num_tokens) if group.transfers else range(0)
                ids, _ = pair(group, positions, table, table, 0)
                tables.append(BlockIds(ids))
                firsts.append(positions.start)
        except LayoutError as e:
            self._stats.add("stateferry_refused_offers", 1, "producer")
            logger.info("request=%s is not offered: %s", request.request_id, e)
            return False, self._dialect.refuse(str(e), request.kv_transfer_params)
        offer = Offer(
            transfer_id=new_transfer_id(),
            engine_id=self._engine_id,
            request_id=RequestId(request.request_id),
            num_tokens=num_tokens,
            block_ids=tuple(tables),
            first_blocks=tuple(firsts),
            prefix_digest=digest_of_prefix(request, num_tokens),
            lease_s=self._config.lease_s,
            ranks=self._ranks,
        )
        self._granted.add(request.request_id)
        self._grants.append(
            Grant(
                offer.request_id,
                offer.transfer_id,
                num_tokens,
                offer.block_ids,
                offer.first_blocks,
                offer.prefix_digest,
                trace_of(request),
            )
        )
        return True, self._dialect.write(offer, request.kv_transfer_params)

    def _received(self, claimable: Claimable) -> dict[str, Any]:
        """What a decode leg's response says of its hand-off, summed over ranks."""
        reports = claimable.reports
        worst = next((r for r in reports if r.outcome is not Outcome.RECEIVED), None)
        if not reports:
            return {OURS: {"received": {"outcome": "unused"}}}
        bytes_by_kind: dict[str, int] = {}
        for report in reports:
            for group, size in zip(report.groups, report.bytes_by_group, strict=True):
                kind = self._groups[group].kind.value
                bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + size
        return {
            OURS: {
                "received": {
                    "outcome": (worst or reports[0]).outcome.value,
                    "reason": worst.reason if worst else "",
                    "tokens": reports[0].tokens,
                    **({"ahead": True} if claimable.ahead else {}),
                    "bytes": bytes_by_kind,
                    "pieces": sum(r.pieces for r in reports),
                    "retries": sum(r.retries for r in reports),
                    "milliseconds": round(max(r.total_s for r in reports) * 1e3, 3),
                    "wait_milliseconds": round(max(r.waited_s for r in reports) * 1e3, 3),
                    "plan_milliseconds": round(max(r.plan_s for r in reports) * 1e3, 3),
                    "post_milliseconds": round(max(r.post_s for r in reports) * 1e3, 3),
                    "wire_milliseconds": round(max(r.wire_s for r in reports) * 1e3, 3),
                }
            }
        }


def _not_cached(positions: range, table: Sequence[Any]) -> range:
    """Those of `positions` that follow the last block of `table` found in the local prefix cache.

    Groups hit differently far, and vLLM counts the attention group's hit only, so the count of local tokens
    does not tell what a window group has.
    """
    cached = [i for i in positions if i < len(table) and table[i].block_hash is not None]
    return range(cached[-1] + 1, positions.stop) if cached else positions
