"""Which turn of which session is sent when. A closed loop: a lane holds one session tree until all of it is
over, then draws the next. Pure: the clock is the caller's.

Every lane begins inside its first session: the turns before a random point count as over, the last main turn
among them is sent once before the measurement, so that its prefix is cached as it would be. Pauses between
turns are the recorded ones, from the end of what a turn follows to its start, capped and then scaled.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stateferry.bench.agentx.turns import MAIN, Turn

BEGIN_AT = (0.25, 0.75)
"""Where in its first session a lane begins, as shares of the recorded time."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One session to replay."""

    number: int
    """Its place among the sessions."""
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Sent:
    """A turn whose time has come."""

    lane: int
    tree: Tree
    turn: Turn


@dataclass(slots=True)
class _Lane:
    tree: Tree
    over: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)


class Lanes:
    """All lanes of one replay. Seconds are those of the caller's clock, from any zero."""

    def __init__(
        self,
        trees: Sequence[Tree],
        lanes: int,
        seed: int,
        *,
        time_scale: float = 1.0,
        longest_pause_s: float = 10.0,
    ) -> None:
        """`longest_pause_s` caps recorded pauses; `time_scale` multiplies what is left of them."""
        rng = random.Random(seed)
        self._time_scale, self._longest_pause_s = time_scale, longest_pause_s
        trees = [tree for tree in trees if tree.turns]
        self._waiting = deque(rng.sample(trees, len(trees)))
        self._due: list[tuple[float, int, int]] = []
        """(when, lane, turn)"""
        self._in_flight = 0
        self._lanes: dict[int, _Lane] = {}
        self._warm_ups: list[Sent] = []
        for number in range(min(lanes, len(trees))):
            self._begin_inside(number, rng.uniform(*BEGIN_AT))

    def warm_ups(self) -> list[Sent]:
        """What to send, and wait for, before `begin`; not measured."""
        return self._warm_ups

    def begin(self, now_s: float) -> None:
        """Start the measurement: every lane's next turns are due now."""
        for number in list(self._lanes):
            self._follow(number, now_s, paused=False)
            self._next_tree(number, now_s)

    def take(self, now_s: float) -> list[Sent]:
        """Turns whose time has come; each counts as in flight until `ended`."""
        found = []
        while self._due and self._due[0][0] <= now_s:
            _, number, turn = heapq.heappop(self._due)
            tree = self._lanes[number].tree
            found.append(Sent(number, tree, tree.turns[turn]))
        self._in_flight += len(found)
        return found

    @property
    def next_s(self) -> float | None:
        """When `take` has something; None: only an end brings something."""
        return self._due[0][0] if self._due else None

    @property
    def done(self) -> bool:
        """Whether every session was replayed to its end."""
        return not self._lanes and not self._in_flight

    def ended(self, sent: Sent, now_s: float) -> None:
        """A turn was answered, well or badly: what follows it becomes due after its pause."""
        self._in_flight -= 1
        self._lanes[sent.lane].over.add(sent.turn.number)
        self._follow(sent.lane, now_s, paused=True)
        self._next_tree(sent.lane, now_s)

    # -- inside ----------------------------------------------------------------------------------

    def _begin_inside(self, number: int, share: float) -> None:
        lane = self._lanes[number] = _Lane(self._waiting.popleft())
        turns = lane.tree.turns
        begin_s = turns[0].start_s + share * (turns[-1].start_s - turns[0].start_s)
        before = [turn for turn in turns if turn.start_s < begin_s]
        lane.over = {turn.number for turn in before}
        lane.sent = set(lane.over)
        mains = [turn for turn in before if turn.agent == MAIN]
        self._warm_ups += [Sent(number, lane.tree, turn) for turn in mains[-1:]]

    def _follow(self, number: int, now_s: float, paused: bool) -> None:
        """Queue the turns of a lane that wait for nothing any more."""
        lane = self._lanes[number]
        for turn in lane.tree.turns:
            if turn.number not in lane.sent and lane.over.issuperset(turn.after):
                pause_s = min(turn.pause_s, self._longest_pause_s) * self._time_scale if paused else 0.0
                lane.sent.add(turn.number)
                heapq.heappush(self._due, (now_s + pause_s, number, turn.number))

    def _next_tree(self, number: int, now_s: float) -> None:
        """Give the lane its next session if this one is over; without one it ends."""
        while len(self._lanes[number].over) == len(self._lanes[number].tree.turns):
            if not self._waiting:
                del self._lanes[number]
                return
            self._lanes[number] = _Lane(self._waiting.popleft())
            self._follow(number, now_s, paused=False)
