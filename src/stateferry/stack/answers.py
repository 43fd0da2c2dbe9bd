"""What servers answered: completions, the two legs of a hand-off, and errors."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from stateferry.errors import EngineError

KvParams = dict[str, Any]


class AnswerError(EngineError):
    """An engine or router answered with an error, or not at all.

    `status` is the HTTP status; 0 where there was no answer, or none of vLLM's. 200: the engine gave the
    request up.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities by token id: the chosen token's, and the most likely ones, for each position."""

    chosen: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prompt_tokens: int
    kv_transfer_params: KvParams | None
    """What the engine's connector returned; only in answers that were not streamed."""
    logprobs: Logprobs | None
    total_s: float
    first_token_s: float | None
    """From sending to the first piece of a streamed answer."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """Both legs of one request."""

    prefill: Completion
    decode: Completion
    total_s: float
    first_token_s: float | None
    """From sending the first leg to the first piece of the second, if that one was streamed."""

    @property
    def received(self) -> Mapping[str, Any]:
        """What the decode engine says it received: bytes by kind, tokens, milliseconds, outcome.

        Empty if it says nothing (a streamed answer, another connector, a local answer).
        """
        ours = (self.decode.kv_transfer_params or {}).get("stateferry") or {}
        received: Mapping[str, Any] = ours.get("received") or {}
        return received


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


def join_events(pieces: Iterator[dict[str, Any]], start: float, url: str) -> Completion:
    """Read a stream to its end."""
    first: float | None = None
    parts = []
    for event in pieces:
        if first is None and event.get("choices"):
            first = time.monotonic() - start
        parts.append(event)
    return completion(parts, time.monotonic() - start, first, url)


def completion(
    parts: Sequence[dict[str, Any]], total_s: float, first_token_s: float | None, url: str
) -> Completion:
    """One answer from its pieces: a single object, or the events of a stream."""
    for part in parts:
        if "error" in part:
            raise AnswerError(f"{url} gave the request up: {part['error']}", 200)
    if not any("choices" in part for part in parts):
        raise AnswerError(f"{url} does not answer like a vLLM server: it made no choices")
    choices = [choice for part in parts for choice in part.get("choices") or ()]
    usage: Mapping[str, Any] = next((part["usage"] for part in reversed(parts) if part.get("usage")), {})
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if reasons and reasons[-1] == "error":
        raise AnswerError(f"{url} gave the request up (finish reason: error)", 200)
    return Completion(
        text="".join(choice.get("text") or "" for choice in choices),
        token_ids=tuple(token for choice in choices for token in choice.get("token_ids") or ()),
        finish_reason=reasons[-1] if reasons else None,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        kv_transfer_params=next(
            (p["kv_transfer_params"] for p in parts if p.get("kv_transfer_params")), None
        ),
        logprobs=_logprobs([choice["logprobs"] for choice in choices if choice.get("logprobs")]),
        total_s=total_s,
        first_token_s=first_token_s,
    )


def _logprobs(parts: Sequence[Mapping[str, Any]]) -> Logprobs | None:
    if not parts:
        return None
    chosen = tuple(float(value) for part in parts for value in part["token_logprobs"])
    top = tuple(
        {int(token.removeprefix("token_id:")): float(value) for token, value in entry.items()}
        for part in parts
        for entry in part.get("top_logprobs") or ()
        if entry is not None
    )
    return Logprobs(chosen, top)
