"""Asking engines and routers over HTTP: completions, and the two legs of a hand-off."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from stateferry.stack.answers import (
    AnswerError,
    Completion,
    Handoff,
    KvParams,
    completion,
    events,
    join_events,
)
from stateferry.stack.metrics import Metrics

Prompt = str | Sequence[int]

PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to the prefill engine."""

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""What reading an answer raises that is not vLLM's."""


class Client:
    """Talks to any number of servers. Thread-safe."""

    def __init__(self, timeout_s: float = 300.0, model: str = "model") -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.Client(timeout=timeout_s, limits=limits, trust_env=False)
        self._model = model

    def complete(
        self,
        url: str,
        prompt: Prompt,
        max_tokens: int = 16,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        stream: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **sampling: Any,  # whatever vLLM's completion API takes
    ) -> Completion:
        """Ask for one completion, greedy unless `sampling` says otherwise.

        `timeout_s` bounds every wait for bytes; past it the connection is closed, which vLLM takes
        as a cancelled request. Raises AnswerError.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
            **sampling,
        }
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(kv_transfer_params)
        if logprobs is not None:
            # Ids, not texts: several tokens may have the same text.
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        timeout: Any = self._http.timeout if timeout_s is None else timeout_s
        start = time.monotonic()
        try:
            with self._http.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    text = response.read().decode(errors="replace")
                    raise AnswerError(
                        f"{url} answered HTTP {response.status_code}: {text[:2000]}", response.status_code
                    )
                if stream:
                    return join_events(events(response), start, url)
                answer = json.loads(response.read())
                return completion([answer], time.monotonic() - start, None, url)
        except httpx.TimeoutException as e:
            raise AnswerError(f"{url} did not answer within its time ({str(e) or type(e).__name__})") from e
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise AnswerError(f"{url} did not answer: {str(e) or type(e).__name__}") from e
        except UNREADABLE as e:
            raise _unlike_vllm(url, e) from e

    def handoff(
        self,
        prefill_url: str,
        decode_url: str,
        prompt: Prompt,
        max_tokens: int = 16,
        *,
        between: Callable[[KvParams], KvParams] | None = None,
        decode_prompt: Prompt | None = None,
        tamper: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        stream: bool = False,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Handoff:
        """Do what a router does: prefill with one token, then decode with the dictionary that came back.

        `between` may change that dictionary (or do something to the engines); `tamper` is put into its
        `stateferry` part and makes engines started with `testing` damage this hand-off;
        `decode_prompt` is sent to the decode engine in place of `prompt`.
        """
        start = time.monotonic()
        prefill = self.complete(
            prefill_url,
            prompt,
            1,
            kv_transfer_params=PREFILL_PARAMS,
            timeout_s=timeout_s,
            **sampling,
        )
        params = prefill.kv_transfer_params
        if params is None:
            raise AnswerError(
                f"{prefill_url} returned no kv_transfer_params: is a KV connector configured there, "
                f"with a role that produces?"
            )
        if tamper is not None:
            params = {**params, "stateferry": {**(params.get("stateferry") or {}), "tamper": dict(tamper)}}
        if between is not None:
            params = between(params)
        middle = time.monotonic()
        decode = self.complete(
            decode_url,
            prompt if decode_prompt is None else decode_prompt,
            max_tokens,
            kv_transfer_params=params,
            logprobs=logprobs,
            stream=stream,
            timeout_s=timeout_s,
            **sampling,
        )
        first = None if decode.first_token_s is None else middle - start + decode.first_token_s
        return Handoff(prefill, decode, time.monotonic() - start, first)

    def metrics(self, url: str) -> Metrics:
        """Read `/metrics`."""
        return Metrics(self._get(f"{url}/metrics").text)

    def cache_usage(self, url: str) -> float:
        """The fraction of KV-cache blocks in use, by vLLM's own metric. 0.0: every block is free."""
        return self.metrics(url).total("vllm:kv_cache_usage_perc")

    def reset_prefix_cache(self, url: str, timeout_s: float = 20.0) -> None:
        """Forget cached prefixes. vLLM refuses while blocks are held, so this tries until `timeout_s`.

        Needs an engine with development mode on. Raises AnswerError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            response = self._post(f"{url}/reset_prefix_cache")
            try:
                if response.json().get("success", True):
                    return
            except UNREADABLE as e:
                raise _unlike_vllm(url, e) from e
            if time.monotonic() > deadline:
                raise AnswerError(
                    f"{url} still holds KV blocks after {timeout_s:.0f} s; cache not reset", 200
                )
            time.sleep(0.02)

    def models(self, url: str) -> list[str]:
        """The names that a server answers to. Raises AnswerError."""
        response = self._get(f"{url}/v1/models")
        try:
            return [str(entry["id"]) for entry in response.json()["data"]]
        except UNREADABLE as e:
            raise _unlike_vllm(url, e) from e

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _get(self, url: str) -> httpx.Response:
        return self._checked("GET", url)

    def _post(self, url: str) -> httpx.Response:
        return self._checked("POST", url)

    def _checked(self, method: str, url: str) -> httpx.Response:
        try:
            response = self._http.request(method, url)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise AnswerError(f"{url} did not answer: {str(e) or type(e).__name__}") from e
        if response.status_code != 200:
            raise AnswerError(f"{url} answered HTTP {response.status_code}", response.status_code)
        return response


def _unlike_vllm(url: str, error: Exception) -> AnswerError:
    """It answered, and said nothing: status 0, as if it had not."""
    return AnswerError(f"{url} does not answer like a vLLM server: {error!r}")
