"""What the gate asks of two engines, and how it asks the real ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from stateferry.errors import ConfigError, EngineError
from stateferry.gate.prompts import Tokens
from stateferry.stack import PREFILL_PARAMS, AnswerError, Client, Completion, Metrics

TOP = 20
"""Log-probabilities compared per token."""

KvParams = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the gate has to know of the engines. The same flags on both."""

    block_tokens: int
    """Tokens in a block of attention KV."""
    caching: bool
    """Whether prefixes are cached."""
    chunk_tokens: int
    """The most prompt tokens that one step computes."""
    longest: int
    """The most tokens that a request may have."""


class Engines(Protocol):
    """A prefill and a decode engine. Every answer is greedy, goes on past an end token, and comes with
    log-probabilities where it is compared. Raises AnswerError."""

    @property
    def facts(self) -> Facts:
        """See there."""

    def alone(self, prompt: Tokens, max_tokens: int) -> Completion:
        """The prefill engine's own answer, without any hand-off."""

    def hold_on_decode(self, prompt: Tokens) -> None:
        """Let the decode engine compute a prompt by itself, so that its cache holds it."""

    def offer(self, prompt: Tokens) -> KvParams:
        """First leg: what the router would carry to the decode engine."""

    def decode(
        self, prompt: Tokens, params: KvParams, max_tokens: int, damage: Mapping[str, Any] | None = None
    ) -> Completion:
        """Second leg."""

    def forget(self, *, prefill: bool = False, decode: bool = False) -> None:
        """Empty prefix caches."""

    def prefill_hit_tokens(self) -> int:
        """Prompt tokens that the prefill engine found in its cache since it started."""


def received(completion: Completion) -> Mapping[str, Any]:
    """What the decode engine says of the hand-off; empty if it says nothing."""
    ours = (completion.kv_transfer_params or {}).get("stateferry") or {}
    found: Mapping[str, Any] = ours.get("received") or {}
    return found


class RealEngines:
    """Two engines by their URLs."""

    def __init__(self, client: Client, prefill_url: str, decode_url: str, facts: Facts) -> None:
        self._client = client
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._facts = facts

    @property
    def facts(self) -> Facts:
        """See Engines."""
        return self._facts

    def alone(self, prompt: Tokens, max_tokens: int) -> Completion:
        """See Engines."""
        return self._client.complete(self._prefill_url, prompt, max_tokens, logprobs=TOP, ignore_eos=True)

    def hold_on_decode(self, prompt: Tokens) -> None:
        """See Engines."""
        self._client.complete(self._decode_url, prompt, 1, ignore_eos=True)

    def offer(self, prompt: Tokens) -> KvParams:
        """See Engines."""
        answer = self._client.complete(self._prefill_url, prompt, 1, kv_transfer_params=PREFILL_PARAMS)
        if answer.kv_transfer_params is None:
            raise ConfigError(
                f"{self._prefill_url} returned no kv_transfer_params: start it with StateFerryConnector "
                "and a role that produces"
            )
        return answer.kv_transfer_params

    def decode(
        self, prompt: Tokens, params: KvParams, max_tokens: int, damage: Mapping[str, Any] | None = None
    ) -> Completion:
        """See Engines."""
        if damage is not None:
            params = {**params, "stateferry": {**(params.get("stateferry") or {}), "tamper": dict(damage)}}
        return self._client.complete(
            self._decode_url, prompt, max_tokens, kv_transfer_params=params, logprobs=TOP, ignore_eos=True
        )

    def forget(self, *, prefill: bool = False, decode: bool = False) -> None:
        """See Engines."""
        for url, wanted in ((self._prefill_url, prefill), (self._decode_url, decode)):
            if wanted:
                self._client.reset_prefix_cache(url)

    def prefill_hit_tokens(self) -> int:
        """See Engines."""
        return int(self._client.metrics(self._prefill_url).total("vllm:prefix_cache_hits_total"))


def served(url: str) -> tuple[str, int]:
    """The name of the model that a server answers to, and its longest request in tokens."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=False)
        model = answer.raise_for_status().json()["data"][0]
        return str(model["id"]), int(model["max_model_len"])
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, IndexError, TypeError, ValueError) as e:
        raise EngineError(f"{url} does not answer like a vLLM server: {str(e) or type(e).__name__}") from e


def facts_of(metrics: Metrics, chunk_tokens: int, longest: int) -> Facts:
    """Read an engine's cache settings from its metrics page."""
    found = metrics.find("vllm:cache_config_info")
    try:
        labels = found[0].labels
        block_tokens, caching = int(labels["block_size"]), labels["enable_prefix_caching"] == "True"
    except (IndexError, KeyError, ValueError) as e:
        raise EngineError("the engine's metrics have no readable vllm:cache_config_info") from e
    return Facts(block_tokens, caching, chunk_tokens, longest)


def check_ready(engines: Engines, source_prompt: Tokens) -> None:
    """Raise ConfigError where engines cannot be judged: a gate that damages nothing must not pass."""
    try:
        engines.forget(prefill=True, decode=True)
    except AnswerError as e:
        raise ConfigError(
            f"prefix caches cannot be reset ({e}): start both engines with VLLM_SERVER_DEV_MODE=1"
        ) from e
    params = engines.offer(source_prompt)
    answer = engines.decode(source_prompt, params, 1, {"an unknown damage": True})
    outcome = received(answer).get("outcome", "nothing reported")
    if outcome != "failed":
        raise ConfigError(
            f"the decode engine ignores damage (hand-off {outcome}): start it with "
            '"kv_connector_extra_config": {"testing": true}, which is `stateferry serve … --set testing=true`'
        )
