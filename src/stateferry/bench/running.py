"""Answers that run all the time, and windows of time in which they are watched."""

import asyncio
from collections.abc import Coroutine, Sequence
from time import monotonic
from typing import Any, TypeVar

from stateferry.bench.arrivals import Arrivals
from stateferry.bench.engine_gaps import EngineGaps
from stateferry.bench.streams import Streamed
from stateferry.errors import EngineError

T = TypeVar("T")
GIVEN_UP_S = 120.0
"""Longest wait for any one thing."""


class Running:
    """The answers that run all the time."""

    def __init__(self) -> None:
        self._answers: dict[int, Streamed] = {}
        self._tasks: Sequence[asyncio.Task[Streamed]] = ()
        self._news = asyncio.Event()

    def watch(self, tasks: Sequence["asyncio.Task[Streamed]"]) -> None:
        """These are the answers."""
        self._tasks = tasks
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())

    def token_came(self, answer: Streamed) -> None:
        """One of them has a new token."""
        self._answers[id(answer)] = answer
        self._news.set()

    def all_answers(self) -> list[Streamed]:
        """Those that have tokens, and those that ended without."""
        ended = [task.result() for task in self._tasks if task.done() and not task.cancelled()]
        return [*self._answers.values(), *(a for a in ended if id(a) not in self._answers)]

    async def each_had_one_more(self) -> None:
        """Wait until every answer that has not ended has a token more than now. Raises EngineError."""
        before = {key: len(answer.token_s) for key, answer in self._answers.items()}

        def waiting() -> bool:
            grown = sum(len(a.token_s) > before.get(key, 0) for key, a in self._answers.items())
            return grown < sum(not task.done() for task in self._tasks)

        try:
            async with asyncio.timeout(GIVEN_UP_S):
                while waiting():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as e:
            raise EngineError(f"a running answer had no token for {GIVEN_UP_S:g} s: cannot measure") from e


class Windows:
    """Times of windows, and the engine's own gaps in them."""

    def __init__(self, running: Running, arrivals: Arrivals, engine_url: str) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self.engine: dict[str, EngineGaps] = {}
        self._running, self._arrivals, self._url = running, arrivals, engine_url

    async def during(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Do it in a window of this name. Its end is late enough for a gap that began in it.

        The engine writes its metrics page on the loop that sends tokens, so it is asked outside of windows.
        """
        before = await self._arrivals.gaps(self._url)
        await self._running.each_had_one_more()
        begin_s = monotonic()
        result = await work
        await self._running.each_had_one_more()
        self.seconds[name] = begin_s, monotonic()
        self.engine[name] = (await self._arrivals.gaps(self._url)).since(before)
        return result
