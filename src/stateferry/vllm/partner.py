"""Notices an engine whose partner does not come: a decode engine without offers, offers that nobody takes.

Both are wiring: a router that sends one leg only, or to the wrong engine. Each request is right and each
line in the log is harmless, so it is said in one line, and never per request: when there were many in a row,
and once more when that is over.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stateferry.layout.spec import Group
from stateferry.session import Clock
from stateferry.telemetry import Key

logger = logging.getLogger(__name__)

ENOUGH = 20
"""After so many requests, or offers, nothing will come by itself any more."""
LONG_S = 60.0
"""A row that is shorter than this may just be chance: some routers send only long prompts to a prefill
engine, and a decode engine may be restarted. Where it never went right nothing is known of that, and `ENOUGH`
is enough."""
TAKEN = (
    ("stateferry_grants", "released"),
    ("stateferry_renewals", "producer"),
    ("stateferry_lease_losses", "producer"),
)
"""Counts that only a decode engine's message brings about."""
EXPIRED: Key = ("stateferry_grants", "expired")


@dataclass(slots=True)
class _Row:
    """What went wrong one after the other, since it went right last."""

    clock: Clock
    count: int = 0
    said: bool = False
    """That it is so."""
    right_s: float = -math.inf
    """When it went right last."""

    def right(self) -> bool:
        """It went right. True: the end of the row is to be said."""
        said, self.said = self.said, False
        self.count, self.right_s = 0, self.clock.now_s()
        return said

    def wrong(self, count: int, enough: int) -> bool:
        """It went wrong so often. True: that is to be said, now and not again."""
        self.count += count
        if self.said or self.count < enough or self.clock.now_s() < self.right_s + LONG_S:
            return False
        self.said = True
        return True

    @property
    def last(self) -> str:
        """When it went right last, for people."""
        if math.isinf(self.right_s):
            return "last: never"
        return f"last: {self.clock.now_s() - self.right_s:.0f} s ago"


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
        # An engine of both roles may be meant to compute whole requests.
        self._wants_offers = consumes and not produces
        self._wants_takers = produces
        self._without_offer = _Row(clock)
        self._not_taken = _Row(clock)

    def offer_came(self) -> None:
        """A request brought an offer, good or bad: the router knows what to do."""
        if self._without_offer.right():
            logger.warning("requests bring offers again")

    def answered(self, prompt_tokens: int) -> None:
        """A request that brought no offer was answered. Prompts of a block or less, as of probes, do not
        count."""
        if not self._wants_offers or prompt_tokens <= self._block_tokens:
            return
        if self._without_offer.wrong(1, ENOUGH):
            logger.warning(
                "%d requests have finished on this decode engine and none brought an offer (%s): it computed "
                "their prompts itself. Is the router sending kv_transfer_params? It must send the prefill "
                "leg first, to an engine with StateFerryConnector that produces, and then what that one "
                "answers to this engine. `stateferry doctor` compares the two engines",
                self._without_offer.count,
                self._without_offer.last,
            )

    def heard(self, counts: Mapping[Key, int]) -> None:
        """What producer ranks counted since the last time."""
        if not self._wants_takers or not counts:
            return
        if any(counts.get(key) for key in TAKEN):
            if self._not_taken.right():
                logger.warning("offers of this prefill engine are taken again")
            return
        if self._not_taken.wrong(counts.get(EXPIRED, 0), ENOUGH * self._tp_size):
            logger.warning(
                "the last %d offers that this prefill engine made expired unclaimed, each after %g s: no "
                "decode engine has asked for any (%s). Is the router carrying kv_transfer_params from here "
                "to the decode engine, does that one run, and can it reach this engine's address? "
                "`stateferry doctor` compares the two",
                self._not_taken.count // self._tp_size,
                self._lease_s,
                self._not_taken.last,
            )
