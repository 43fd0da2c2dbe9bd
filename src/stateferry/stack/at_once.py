"""Both legs of a hand-off at once, as a router sends them that does not wait for the first answer.

The decode engine reads, hashes and queues the request while the prefill engine still computes, and hears of
the offer by itself.
"""

import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stateferry.stack.answers import AnswerError, Handoff, KvParams
from stateferry.stack.client import PREFILL_PARAMS, Client, Prompt

DESCRIBE: Mapping[str, Any] = {"stateferry": {"describe": True}}


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A prefill and a decode engine, and how the second finds the first."""

    prefill_url: str
    decode_url: str
    place: str
    """`remote_engine_id` of every decode leg: a name, `@`, and the first control address of the prefill
    engine."""

    @classmethod
    def between(cls, client: Client, prefill_url: str, decode_url: str) -> "AtOnce":
        """Ask the prefill engine where it listens. Raises AnswerError."""
        told = client.complete(prefill_url, [1], 1, kv_transfer_params=DESCRIBE).kv_transfer_params or {}
        ranks = (told.get("stateferry") or {}).get("ranks")
        if not ranks:
            raise AnswerError(f"{prefill_url} does not say where it listens: it runs no StateFerryConnector")
        host, port, _ = ranks[0]
        return cls(prefill_url, decode_url, f"prefill@{host}:{port}")

    def legs(self) -> tuple[KvParams, KvParams]:
        """`kv_transfer_params` of the two legs of one request, under a name that nobody can guess."""
        name = secrets.token_hex(16)
        decode = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.place,
            "transfer_id": name,
        }
        return {**PREFILL_PARAMS, "transfer_id": name}, decode


def handoff_at_once(
    client: Client,
    pair: AtOnce,
    prompt: Prompt,
    max_tokens: int = 16,
    *,
    tamper: Mapping[str, Any] | None = None,
    logprobs: int | None = None,
    stream: bool = False,
    **sampling: Any,  # whatever vLLM's completion API takes, for both legs
) -> Handoff:
    """As `Client.handoff`, without waiting between the legs. Raises AnswerError."""
    asked, params = pair.legs()
    if tamper is not None:
        params["stateferry"] = {"tamper": dict(tamper)}
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(client.complete, pair.prefill_url, prompt, 1, kv_transfer_params=asked, **sampling)
        decode = client.complete(
            pair.decode_url,
            prompt,
            max_tokens,
            kv_transfer_params=params,
            logprobs=logprobs,
            stream=stream,
            **sampling,
        )
        return Handoff(leg.result(), decode, time.monotonic() - start, decode.first_token_s)
