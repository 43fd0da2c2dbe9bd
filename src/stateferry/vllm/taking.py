"""The consumer's part of the scheduler half: which offers are taken, and what is loaded from them."""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stateferry.config import Config, LoadMode
from stateferry.errors import LayoutError, ProtocolError
from stateferry.ids import RequestId, TransferId
from stateferry.layout.blocks import needed_blocks, pair
from stateferry.layout.spec import Group, GroupKind
from stateferry.session import Answered, Close, Expect, GroupLoad, Load, Open, Orders, Place, Report
from stateferry.vllm.destinations import group_loads
from stateferry.vllm.metadata import StateFerryWorkerMetadata
from stateferry.vllm.numbers import Numbers
from stateferry.vllm.prompt import digest_of_prefix
from stateferry.vllm.received import received
from stateferry.vllm.spans import trace_of
from stateferry.wire import Dialect, Offer, Promise

logger = logging.getLogger(__name__)

MAX_USED = 8192
"""How many offers are remembered as used: far more than can be alive at a time."""


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


@dataclass(frozen=True, slots=True)
class Expected:
    """A decode leg that was sent together with its prefill leg: its offer is not made yet."""

    request: Any
    promise: Promise


class Taking:
    """Decode legs from their arrival until nothing of them is open. Engine core's thread."""

    def __init__(
        self,
        config: Config,
        groups: tuple[Group, ...],
        tp_size: int,
        dialect: Dialect,
        numbers: Numbers,
    ) -> None:
        self._config = config
        self._groups = groups
        self._tp_size = tp_size
        self._dialect = dialect
        self._numbers = numbers
        self.claimable: dict[RequestId, Claimable] = {}
        self.used: OrderedDict[TransferId, RequestId] = OrderedDict()
        """Offers that were opened or are waited for here, with the requests that have or had them."""
        self.expected: dict[RequestId, Expected] = {}
        self._loading: set[str] = set()
        """Requests whose blocks are being read into."""
        self._loading_alone = 0
        """Of those: the request itself is over. Counted, because every step asks."""
        self._expects: list[Expect] = []
        self._opens: list[Open] = []
        self._loads: list[Load] = []
        self._places: list[Place] = []
        self._closes: list[Close] = []

    @property
    def open_count(self) -> int:
        """Decode legs that are not finished, and blocks that ferries still hold."""
        return len(self.expected) + len(self.claimable) + self._loading_alone

    # -- a request arrives -----------------------------------------------------------------------

    def begin(self, request: Any, params: Mapping[str, Any]) -> None:
        """A decode leg arrived: open its offer, unless it is not for this request; or ask for the offer, if
        its router did not wait for it."""
        try:
            promise = self._dialect.promise(params)
            if promise is None:
                self._open(request, self._dialect.read(params, request.request_id))
            else:
                self._expect(request, promise)
        except (ProtocolError, LayoutError) as e:
            self._compute(request, str(e))

    def _compute(self, request: Any, why: str) -> None:
        self._numbers.count("stateferry_refused_offers", "consumer")
        logger.warning("request=%s is computed here: %s", request.request_id, why)

    def _expect(self, request: Any, promise: Promise) -> None:
        self._use(request, promise.transfer_id)
        request_id = RequestId(request.request_id)
        self.expected[request_id] = Expected(request, promise)
        self._expects.append(Expect(request_id, promise))

    def _offer_came(self, answer: Answered) -> None:
        """Go on with a request as if its router had brought what its producer's ferry says."""
        expected = self.expected.pop(answer.request_id, None)
        if expected is None:
            return
        request, promise = expected.request, expected.promise
        try:
            if answer.reason:
                raise ProtocolError(answer.reason)
            offer = self._dialect.read(msgspec.msgpack.decode(answer.params, type=dict), request.request_id)
            if offer.transfer_id != promise.transfer_id:
                raise ProtocolError("its producer answered with another transfer's offer")
            if promise.tamper is not None:
                offer = msgspec.structs.replace(offer, tamper=promise.tamper)
            self._open(request, offer)
        except Exception as e:
            if not isinstance(e, ProtocolError | LayoutError | msgspec.DecodeError | RecursionError):
                logger.exception("defect while reading the offer of request %s", answer.request_id)
            # What came is not for us, so nobody will want it: its blocks need not be kept for a lease.
            self._closes.append(Close(answer.request_id))
            self._compute(request, str(e))

    def _use(self, request: Any, transfer_id: TransferId) -> None:
        """Raise if another request has or had this offer."""
        user = self.used.setdefault(transfer_id, RequestId(request.request_id))
        if user != request.request_id:
            raise ProtocolError(f"request {user} had this offer before, and an offer serves one request")
        while len(self.used) > MAX_USED:
            self.used.popitem(last=False)

    def _open(self, request: Any, offer: Offer) -> None:
        self._check_offer(request, offer)
        if not self._config.testing and offer.tamper is not None:
            offer = msgspec.structs.replace(offer, tamper=None)
        self._use(request, offer.transfer_id)
        request_id = RequestId(request.request_id)
        self.claimable[request_id] = Claimable(offer)
        ahead = _may_run_at_once(self._groups, offer.num_tokens, request.num_prompt_tokens)
        self._opens.append(Open(request_id, offer, trace_of(request), ahead))

    def _check_offer(self, request: Any, offer: Offer) -> None:
        """Raise unless the offer is for this very prompt and describes every block that is needed."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ProtocolError("its prompt has embeddings, which no offer covers")
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

        Claims only a live, unused offer. None asks vLLM to come again: the offer is not made yet, or, under
        `load_mode: sync`, its bytes are not here yet.
        """
        claimable = self.claimable.get(request.request_id)
        if claimable is None or claimable.loading or claimable.lost:
            # No offer covers the prompt's last token: there is nothing to wait for if the rest is here.
            awaited = request.request_id in self.expected and local_tokens < request.num_prompt_tokens - 1
            return (None if awaited else 0), False
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
        if self.expected.pop(request_id, None) is not None:
            self._closes.append(Close(request_id))  # it runs without
        claimable = self.claimable.get(request_id)
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
            loads = group_loads(self._groups, claimable.offer, blocks, local_tokens if in_room else None)
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

    def take_orders(self) -> Orders:
        """Orders since the last call."""
        orders = Orders(
            expects=tuple(self._expects),
            opens=tuple(self._opens),
            loads=tuple(self._loads),
            places=tuple(self._places),
            closes=tuple(self._closes),
        )
        self._expects, self._opens, self._loads, self._places, self._closes = [], [], [], [], []
        return orders

    # -- news from the workers -------------------------------------------------------------------

    def heard(self, news: StateFerryWorkerMetadata) -> None:
        """Remember how hand-offs ended, which offers were made and which are worth nothing any more."""
        for answer in news.answered:
            self._offer_came(answer)
        for request_id in news.lost:
            if request_id in self.claimable:
                self.claimable[request_id].lost = True
        for request_id in news.waiting:
            if request_id in self.claimable:
                self.claimable[request_id].waiting += 1
        for request_id in news.apart:
            if request_id in self.claimable:
                self.claimable[request_id].apart += 1
        for report in news.reports:
            claimable = self.claimable.get(report.request_id)
            if claimable is not None:
                claimable.reports += (report,)

    def freed(self, request_ids: set[str]) -> None:
        """No ferry holds these requests' blocks any more."""
        ended = self._loading & request_ids
        self._loading -= ended
        self._loading_alone -= len(ended.difference(self.claimable))

    # -- it finishes -----------------------------------------------------------------------------

    def finish(self, request_id: RequestId) -> dict[str, Any] | None:
        """A request is over: what its response says of its hand-off; None: it had none."""
        if self.expected.pop(request_id, None) is not None:
            self._closes.append(Close(request_id))
        claimable = self.claimable.pop(request_id, None)
        if claimable is None:
            return None
        self._loading_alone += request_id in self._loading
        self._closes.append(Close(request_id))
        return received(claimable.reports, self._groups, claimable.ahead)


def _may_run_at_once(groups: Sequence[Group], offered_tokens: int, prompt_tokens: int) -> bool:
    """Whether vLLM can run a request in the step that gives it blocks for what is offered.

    vLLM 0.32 counts one new block of a recurrent group for such a step. It takes two, for the state that is
    loaded and for the one that is written, where they lie in different blocks; and where fewer are left than
    it takes, it raises, which ends the engine. It counts rightly where the load comes first.
    """
    return not any(
        group.kind is GroupKind.STATE
        and (offered_tokens - 1) // group.block_tokens != (prompt_tokens - 1) // group.block_tokens
        for group in groups
    )
