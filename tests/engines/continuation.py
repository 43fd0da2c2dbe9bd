"""Continuation: one engine gives g0, g1, … after q; two engines are given q + [g0] and must give g1, …

The state after q comes from the same prefill kernels and every token after it from the same decode
kernels in both arms, so the comparison is exact: no tolerance.
"""

import random
from collections.abc import Sequence

from stateferry.stack import Client, Completion, Handoff

TOP = 20


def random_prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(f"{seed}/{tokens}")
    return [rng.randrange(16, 250) for _ in range(tokens)]


def same(whole: Completion, rest: Completion) -> bool:
    """Whether `rest` goes on exactly as `whole` did after its first token."""
    assert whole.logprobs is not None
    assert rest.logprobs is not None
    return (
        whole.token_ids[1:] == rest.token_ids
        and whole.logprobs.top[1:] == rest.logprobs.top
        and whole.logprobs.chosen[1:] == rest.logprobs.chosen
    )


def assert_exact(
    client: Client, prefill_url: str, decode_url: str, lengths: Sequence[int], tokens: int
) -> list[Handoff]:
    """Hand-offs of random prompts of these lengths equal one engine, and would not without their state."""
    handoffs = []
    for length in lengths:
        prompt = random_prompt(length, seed=length)
        whole = client.complete(prefill_url, prompt, tokens, logprobs=TOP)
        longer = [*prompt, whole.token_ids[0]]
        client.reset_prefix_cache(decode_url)
        good = client.handoff(prefill_url, decode_url, longer, tokens - 1, logprobs=TOP)
        assert good.received["outcome"] == "received", good.received
        assert good.received["tokens"] == length
        assert good.received["bytes"]["state"] > 0
        assert same(whole, good.decode), f"{length} tokens: {whole.token_ids} then {good.decode.token_ids}"
        client.reset_prefix_cache(decode_url)
        bad = client.handoff(
            prefill_url, decode_url, longer, tokens - 1, logprobs=TOP, tamper={"withhold": "state"}
        )
        assert not same(whole, bad.decode), f"{length} tokens: a withheld state went unnoticed"
        handoffs.append(good)
    return handoffs
