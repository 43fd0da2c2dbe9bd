"""The producer's part of the scheduler half: which prefills are offered, and whose blocks are kept."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.errors import LayoutError
from stateferry.ids import EngineId, RequestId, TransferId, new_transfer_id
from stateferry.layout.blocks import needed_blocks, pair
from stateferry.layout.spec import Group, GroupKind
from stateferry.session import Grant, Withdrawal
from stateferry.vllm.compat import RequestStatus
from stateferry.vllm.numbers import Numbers
from stateferry.vllm.prompt import cut_last_token, digest_of_prefix, why_not_offered
from stateferry.vllm.spans import trace_of
from stateferry.wire import Dialect, Offer, RankAddress

logger = logging.getLogger(__name__)

ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
Finished = tuple[bool, dict[str, Any] | None]
"""Whether vLLM keeps the blocks until we report them sent; what the response carries."""
MAX_PROMISED = 8192
"""How many transfers that routers named are remembered: far more than can be alive at a time."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill leg that runs."""

    reason: str
    """Why its result will not be offered; empty: it will."""
    promised: TransferId | None
    """The transfer whose decode leg waits for it already."""


class Offering:
    """Prefill legs from their arrival until their blocks are free. Engine core's thread."""

    def __init__(
        self,
        config: Config,
        engine_id: EngineId,
        groups: tuple[Group, ...],
        hash_block_tokens: int | None,
        dialect: Dialect,
        numbers: Numbers,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._groups = groups
        self._hash_block_tokens = hash_block_tokens
        self._dialect = dialect
        self._numbers = numbers
        self._cuts = any(g.kind is not GroupKind.ATTENTION and g.transfers for g in groups)
        """Whether prefill legs are cut to N-1 tokens: neither a recurrent state nor the front of a sliding
        window, whose blocks vLLM frees as it moves on, can be wound back by a token."""
        self._ranks: tuple[RankAddress, ...] = ()
        self._prefills: dict[RequestId, Prefill] = {}
        """Prefill legs that run."""
        self._granted: set[str] = set()
        """Finished prefills whose blocks wait for a consumer."""
        self._promised: OrderedDict[TransferId, RequestId] = OrderedDict()
        """Transfers that routers named, because their decode legs wait already, with the first prefill leg
        of that name. Later ones are not offered: a name serves one request."""
        self._renounced: OrderedDict[TransferId, None] = OrderedDict()
        """Transfers whose decode legs gave up. Only rank 0's ferry hears of that: without an offer no rank
        keeps blocks."""
        self._grants: list[Grant] = []
        self._withdrawals: list[Withdrawal] = []

    @property
    def open_count(self) -> int:
        """Prefill legs that run, and those whose blocks are kept."""
        return len(self._prefills) + len(self._granted)

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Where this engine's workers listen, by tensor-parallel rank."""
        self._ranks = tuple(ranks)

    def begin(self, request: Any) -> None:
        """A prefill leg arrived: cut its prompt, before anything is looked up for it."""
        request_id = RequestId(request.request_id)
        reason = why_not_offered(request)
        promised = self._dialect.promised_to(request.kv_transfer_params)
        if promised is not None and (owner := self._promised.setdefault(promised, request_id)) != request_id:
            reason = reason or f"its transfer_id was request {owner}'s before, and a name serves one request"
            promised = None
        while len(self._promised) > MAX_PROMISED:
            self._promised.popitem(last=False)
        self._prefills[request_id] = Prefill(reason, promised)
        if self._cuts and not reason:
            cut_last_token(request, self._hash_block_tokens)
        request.max_tokens = 1

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> Finished | None:
        """A request is over: offer it if all of it was computed. None: it was no prefill leg."""
        prefill = self._prefills.pop(RequestId(request.request_id), None)
        return None if prefill is None else self._offer(request, block_ids, prefill)

    def sent(self, request_ids: set[str]) -> None:
        """These requests' blocks are kept no more."""
        self._granted.difference_update(request_ids)

    def renounced(self, transfer_ids: Sequence[TransferId]) -> None:
        """Nobody will claim these offers, made or not."""
        for transfer_id in transfer_ids:
            if self._promised.get(transfer_id) in self._granted:
                reason = "was given back by its consumer before it was claimed"
                self._withdrawals.append(Withdrawal(transfer_id, reason, renounced=True))
        self._renounced.update(dict.fromkeys(transfer_ids))
        while len(self._renounced) > MAX_PROMISED:
            self._renounced.popitem(last=False)

    def take_grants(self) -> tuple[Grant, ...]:
        """Orders since the last call."""
        grants, self._grants = self._grants, []
        return tuple(grants)

    def take_withdrawals(self) -> tuple[Withdrawal, ...]:
        """Orders since the last call."""
        withdrawals, self._withdrawals = self._withdrawals, []
        return tuple(withdrawals)

    def _offer(self, request: Any, block_ids: tuple[list[int], ...], prefill: Prefill) -> Finished:
        reason, promised = prefill.reason, prefill.promised
        # Nothing but a whole prefix may be offered; a stop token as P's only token does no harm to it.
        if request.status not in ANSWERED:
            self._withdraw(promised, f"will not be made: its prefill ended as {request.status.name}")
            return False, None
        if promised is not None and promised in self._renounced:
            return False, self._dialect.refuse("its decode leg has gone", request.kv_transfer_params)
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
            self._numbers.count("stateferry_refused_offers", "producer")
            logger.info("request=%s is not offered: %s", request.request_id, e)
            self._withdraw(promised, f"will not be made: {e}")
            return False, self._dialect.refuse(str(e), request.kv_transfer_params)
        offer = Offer(
            transfer_id=promised or new_transfer_id(),
            engine_id=self._engine_id,
            request_id=RequestId(request.request_id),
            num_tokens=num_tokens,
            block_ids=tuple(tables),
            first_blocks=tuple(firsts),
            prefix_digest=digest_of_prefix(request, num_tokens),
            lease_s=self._config.lease_s,
            ranks=self._ranks,
        )
        params = self._dialect.write(offer, request.kv_transfer_params)
        self._grants.append(
            Grant(
                offer.request_id,
                offer.transfer_id,
                num_tokens,
                offer.block_ids,
                offer.first_blocks,
                offer.prefix_digest,
                trace_of(request),
                msgspec.msgpack.encode(params) if promised is not None else b"",
            )
        )
        self._granted.add(request.request_id)
        return True, params

    def _withdraw(self, promised: TransferId | None, reason: str) -> None:
        """Tell a decode leg that waits for this offer."""
        if promised is not None:
            self._withdrawals.append(Withdrawal(promised, reason))
