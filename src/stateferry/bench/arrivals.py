"""Requests that arrive while running answers are timed, sent by a process of their own.

Writing and reading prompts of thousands of token ids holds an event loop for milliseconds. On the loop that
notes when tokens come, that would be measured as if it were the engine's doing. Prompts go by their seeds.
"""

import asyncio
import json
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from stateferry.bench.engine_gaps import EngineGaps
from stateferry.bench.streams import Pair, Streamed, Streams
from stateferry.errors import EngineError
from stateferry.stack import AnswerError, Client

T = TypeVar("T")
Offered = tuple[Mapping[str, Any] | None, str]
"""What a prefill leg returned, or None and what went wrong."""
TOO_MANY_TOKENS = 1 << 30
"""No engine takes a request that asks for so many."""
LONGEST_S = 120.0
"""Wait for bytes of any one answer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent."""

    where: str | Pair
    """A pair: both legs."""
    seed: int
    tokens: int
    """Of its prompt."""
    answer_tokens: int
    params: Mapping[str, Any] | None = None
    """What its prefill leg returned."""


class Arrivals:
    """The process. Use as a context manager; one call at a time, each from an event loop.

    Nothing here raises because of a server; EngineError: the process died, and has said why.
    """

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

    async def prepare(self, seeds: Sequence[int], tokens: int) -> None:
        """Make prompts, so that `send` need not."""
        await self._call(_prepared, seeds, tokens)

    async def prefill(self, url: str, seeds: Sequence[int], tokens: int) -> list[Offered]:
        """The prefill legs of such prompts, one after another."""
        return await self._call(_prefilled, url, seeds, tokens)

    async def send(self, arrivals: Sequence[Arrival], interval_s: float) -> list[Streamed]:
        """Send them, one each `interval_s`, and wait for all answers."""
        return await self._call(_sent, arrivals, interval_s)

    async def refuse(self, url: str, seeds: Sequence[int], tokens: int, interval_s: float) -> list[str]:
        """Send such prompts in requests that an API server reads and refuses; what else it did, if it did."""
        return await self._call(_refused, url, seeds, tokens, interval_s)

    async def gaps(self, url: str) -> EngineGaps:
        """An engine's own histogram of gaps; empty where it tells none."""
        return await self._call(_gaps, url)

    async def _call(self, work: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()
        loop.add_reader(self._pipe.fileno(), _set, answered)
        try:
            self._pipe.send((work, arguments))
            await answered
            found: T = self._pipe.recv()
            return found
        except (EOFError, OSError) as e:
            raise EngineError("the process that sends a bench's requests died: see its output above") from e
        finally:
            loop.remove_reader(self._pipe.fileno())


def _set(answered: "asyncio.Future[None]") -> None:
    if not answered.done():
        answered.set_result(None)


@lru_cache(maxsize=256)
def prompt_of(seed: int, tokens: int) -> tuple[int, ...]:
    """Random token ids that every bundled model has."""
    rng = random.Random(seed)
    return tuple(rng.randrange(16, 250) for _ in range(tokens))


# -- in the process ------------------------------------------------------------------------------


def _serve(pipe: "Connection[Any, Any]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    with suppress(EOFError):
        while True:
            work, arguments = pipe.recv()
            pipe.send(work(*arguments))


def _prepared(seeds: Sequence[int], tokens: int) -> None:
    for seed in seeds:
        prompt_of(seed, tokens)


def _prefilled(url: str, seeds: Sequence[int], tokens: int) -> list[Offered]:
    async def ask() -> list[Offered]:
        async with Streams(LONGEST_S) as streams:
            return [await streams.prefill(url, prompt_of(seed, tokens)) for seed in seeds]

    return asyncio.run(ask())


def _sent(arrivals: Sequence[Arrival], interval_s: float) -> list[Streamed]:
    async def ask() -> list[Streamed]:
        async with Streams(LONGEST_S, ids=False) as streams:

            async def one(arrival: Arrival, at_s: float) -> Streamed:
                prompt = prompt_of(arrival.seed, arrival.tokens)
                await asyncio.sleep(at_s - monotonic())
                return await streams.ask(arrival.where, prompt, arrival.answer_tokens, params=arrival.params)

            return await _each(arrivals, interval_s, one)

    return asyncio.run(ask())


def _refused(url: str, seeds: Sequence[int], tokens: int, interval_s: float) -> list[str]:
    async def ask() -> list[str]:
        async with httpx.AsyncClient(timeout=LONGEST_S, trust_env=False, verify=False) as client:

            async def one(body: bytes, at_s: float) -> str:
                await asyncio.sleep(at_s - monotonic())
                headers = {"Content-Type": "application/json"}
                try:
                    answer = await client.post(f"{url}/v1/completions", content=body, headers=headers)
                except (httpx.HTTPError, httpx.InvalidURL) as e:
                    return f"{url}: {str(e) or type(e).__name__}"
                told = answer.text[:300]
                return "" if answer.status_code == 400 else f"{url}: not refused: {answer.status_code} {told}"

            bodies = [_too_long(prompt_of(seed, tokens)) for seed in seeds]
            return [text for text in await _each(bodies, interval_s, one) if text]

    return asyncio.run(ask())


def _too_long(prompt: Sequence[int]) -> bytes:
    body = {"model": "model", "prompt": list(prompt), "max_tokens": TOO_MANY_TOKENS, "temperature": 0.0}
    return json.dumps(body).encode()


async def _each(things: Sequence[Any], interval_s: float, one: Callable[[Any, float], Any]) -> list[Any]:
    """`one` of each, told when its time is."""
    start_s = monotonic()
    return list(await asyncio.gather(*(one(t, start_s + n * interval_s) for n, t in enumerate(things))))


def _gaps(url: str) -> EngineGaps:
    try:
        return EngineGaps.of(_client().metrics(url))
    except AnswerError:
        return EngineGaps()


@cache
def _client() -> Client:
    """Made once: it takes longer than an answer."""
    return Client(LONGEST_S)
