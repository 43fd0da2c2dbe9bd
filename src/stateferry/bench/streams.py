"""Streamed completions of token ids with the moment of every token, many at a time.

Nothing here raises because of a server: benches count errors.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from stateferry.stack import PREFILL_PARAMS, AtOnce

Pair = tuple[str, str]
"""URLs of a prefill and a decode engine."""


@dataclass(slots=True)
class Streamed:
    """One answer. Moments are those of `time.monotonic`, in seconds."""

    sent_s: float
    """Before the first leg."""
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    """When each token came."""
    prefill_s: float | None = None
    """How long the prefill leg took; None without one."""
    error: str = ""

    @property
    def first_token_s(self) -> float | None:
        """From sending, the prefill leg included, to the first token; None if there was none."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    @property
    def gaps_s(self) -> list[float]:
        """From each token to the next."""
        return [after - before for before, after in pairwise(self.token_s)]


class Streams:
    """A client for one event loop. Use as a context manager."""

    def __init__(
        self,
        timeout_s: float = 120.0,
        model: str = "model",
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        ids: bool = True,
    ) -> None:
        """`timeout_s` bounds every wait for bytes; `transport`: for tests.

        `ids`: ask for the ids of tokens, so that each is counted. vLLM then sends those of the prompt, too;
        without, every piece of an answer counts as one token.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(timeout=timeout_s, limits=limits, trust_env=False, transport=transport)
        self._model, self._ids = model, ids

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def ask(
        self,
        where: str | Pair | AtOnce,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        on_token: Callable[[Streamed], None] | None = None,
    ) -> Streamed:
        """A greedy answer of exactly `max_tokens`. From a pair: both legs, as a router does them, one after
        the other or at once.

        `params` is what an earlier prefill leg returned (see `prefill`).
        """
        answer = Streamed(monotonic(), len(prompt))
        try:
            if isinstance(where, AtOnce):
                asked, params = where.legs()
                decode = self._stream(where.decode_url, prompt, max_tokens, params, headers, answer, on_token)
                await _both(self._timed_prefill(where.prefill_url, prompt, headers, asked, answer), decode)
                return answer
            if not isinstance(where, str):
                prefill, where = where
                params = await self._timed_prefill(prefill, prompt, headers, PREFILL_PARAMS, answer)
            await self._stream(where, prompt, max_tokens, params, headers, answer, on_token)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, _AnswerError) as e:
            answer.error = f"{where}: {str(e) or type(e).__name__}"[:500]
        return answer

    async def prefill(self, url: str, prompt: Sequence[int]) -> tuple[Mapping[str, Any] | None, str]:
        """The prefill leg alone: what the decode leg must be given, or None and what went wrong."""
        try:
            return await self._prefill(url, prompt, None, PREFILL_PARAMS), ""
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, _AnswerError) as e:
            return None, f"{url}: {str(e) or type(e).__name__}"[:500]

    async def _timed_prefill(
        self,
        url: str,
        prompt: Sequence[int],
        headers: Mapping[str, str] | None,
        asked: Mapping[str, Any],
        answer: Streamed,
    ) -> Mapping[str, Any]:
        params = await self._prefill(url, prompt, headers, asked)
        answer.prefill_s = monotonic() - answer.sent_s
        return params

    async def _prefill(
        self, url: str, prompt: Sequence[int], headers: Mapping[str, str] | None, asked: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        body = self._body(prompt, 1) | {"kv_transfer_params": dict(asked)}
        response = await self._http.post(f"{url}/v1/completions", **_sent(body, headers))
        if response.status_code != 200:
            raise _AnswerError(f"HTTP {response.status_code}: {response.text[:300]}")
        params: Mapping[str, Any] | None = msgspec.json.decode(response.content).get("kv_transfer_params")
        if not params:
            raise _AnswerError("returned no kv_transfer_params")
        return params

    async def _stream(
        self,
        url: str,
        prompt: Sequence[int],
        max_tokens: int,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        answer: Streamed,
        on_token: Callable[[Streamed], None] | None,
    ) -> None:
        body = self._body(prompt, max_tokens) | {"stream": True}
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        target = f"{url}/v1/completions"
        async with self._http.stream("POST", target, **_sent(body, headers)) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _AnswerError(f"HTTP {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = msgspec.json.decode(line[len("data: ") :])
                if "error" in event:
                    raise _AnswerError(f"gave the request up: {event['error']}")
                for choice in event.get("choices") or ():
                    new = len(choice.get("token_ids") or ()) if self._ids else 1
                    answer.token_s += [monotonic()] * new
                    if new and on_token is not None:
                        on_token(answer)
                    if choice.get("finish_reason") == "error":
                        raise _AnswerError("gave the request up (finish reason: error)")

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "return_token_ids": self._ids,
        }


def _sent(body: Mapping[str, Any], headers: Mapping[str, str] | None) -> dict[str, Any]:
    """Arguments of a request. Encoded here, in a tenth of the time that the client would take: on the loop
    that stamps tokens, 2 ms for a prompt of 32,000 would be measured as the engine's."""
    return {
        "content": msgspec.json.encode(body),
        "headers": {"Content-Type": "application/json", **(headers or {})},
    }


async def _both(*legs: Coroutine[Any, Any, object]) -> None:
    """Both at once; the first that fails ends the other."""
    tasks = [asyncio.ensure_future(leg) for leg in legs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _AnswerError(Exception):
    """A server answered with something else than tokens."""


async def stopped(tasks: Sequence["asyncio.Task[Streamed]"]) -> None:
    """Leave: close the connections of answers that still come, which vLLM takes as cancelled."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
