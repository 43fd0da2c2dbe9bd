"""Notices an engine whose partner does not come: a decode engine without offers, offers that nobody takes.

Both are wiring: a router that sends one leg only, or to the wrong engine. Each request is right and each
line in the log is harmless, so it is said in one line, and never per request: of offers that nobody takes
once in an engine's life, of missing offers once until there are some again.
"""

import logging
import math
from collections.abc import Mapping, Sequence

from stateferry.layout.spec import Group
from stateferry.session import Clock
from stateferry.telemetry import Key

logger = logging.getLogger(__name__)

ENOUGH = 20
"""After so many requests, or offers, nothing will come by itself any more."""
LONG_S = 60.0
"""Offers that do not come for less than this may just not be wanted: some routers send only long prompts to
a prefill engine. Before the first one, nothing is known of that, and `ENOUGH` is enough."""
TAKEN = (
    ("stateferry_grants", "released"),
    ("stateferry_renewals", "producer"),
    ("stateferry_lease_losses", "producer"),
)
"""Counts that only a decode engine's message brings about."""
EXPIRED: Key = ("stateferry_grants", "expired")


class PartnerWatch:
    """Lives in the scheduler half. vLLM calls everything here on the engine core's thread."""

    def __init__(
        self,
        groups: Sequence[Group],
        tp_size: int,
        lease_s: float,
        clock: Clock,
        *,
        produces: bool,
        consumes: bool,
    ) -> None:
        self._block_tokens = min((group.block_tokens for group in groups if group.transfers), default=0)
        self._tp_size = tp_size
        self._lease_s = lease_s
        self._clock = clock
        # An engine of both roles may be meant to compute whole requests.
        self._wants_offers = consumes and not produces
        self._said = False
        """That there are no offers, and none came since."""
        self._last_offer_s = -math.inf
        self._waits_for_takers = produces
        self._without_offer = 0
        """Requests since then that were worth one."""
        self._expired = 0

    def offer_came(self) -> None:
        """A request brought an offer, good or bad: the router knows what to do."""
        self._last_offer_s = self._clock.now_s()
        self._without_offer = 0
        self._said = False

    def answered(self, prompt_tokens: int) -> None:
        """A request that brought no offer was answered. Prompts of a block or less, as of probes, do not
        count."""
        if not self._wants_offers or self._said or prompt_tokens <= self._block_tokens:
            return
        self._without_offer += 1
        ago_s = self._clock.now_s() - self._last_offer_s
        if self._without_offer >= ENOUGH and ago_s >= LONG_S:
            self._said = True
            logger.warning(
                "%d requests have finished on this decode engine and none brought an offer (the last one "
                "%s): it computed their prompts itself. Is the router sending kv_transfer_params? It must "
                "send the prefill leg first, to an engine with StateFerryConnector that produces, and then "
                "what that one answers to this engine. `stateferry doctor` compares the two engines",
                self._without_offer,
                f"came {ago_s:.0f} s ago" if math.isfinite(ago_s) else "never came",
            )

    def heard(self, counts: Mapping[Key, int]) -> None:
        """What producer ranks counted since the last time."""
        if not self._waits_for_takers or not counts:
            return
        if any(counts.get(key) for key in TAKEN):
            self._waits_for_takers = False
            return
        self._expired += counts.get(EXPIRED, 0)
        if self._expired >= ENOUGH * self._tp_size:
            self._waits_for_takers = False
            logger.warning(
                "all %d offers that this prefill engine made expired unclaimed, each after %g s: no decode "
                "engine has asked for any. Is the router carrying kv_transfer_params from here to the decode "
                "engine, and can that one reach this engine's address? `stateferry doctor` compares the two",
                self._expired // self._tp_size,
                self._lease_s,
            )
