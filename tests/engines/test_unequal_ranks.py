"""One rank on one side, two on the other: the same bytes, cut differently."""

import math
from pathlib import Path

import pytest

from stateferry.models import RECALL_GDN, recall_prompt
from stateferry.stack import Client, Completion, EngineSpec, Role, Stack

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(900)]
LENGTHS = (20, 100, 700)
TOKENS = 3


def spread(whole: Completion, other: Completion) -> float:
    """Largest difference of a log-probability among the tokens that both list, over all positions."""
    assert whole.logprobs is not None
    assert other.logprobs is not None
    differences = [
        abs(ours[token] - theirs[token])
        for ours, theirs in zip(whole.logprobs.top, other.logprobs.top, strict=True)
        for token in ours.keys() & theirs.keys()
    ]
    return max(differences, default=math.inf)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(1, 2), (2, 1)])
def test_unequal_ranks(stack: Stack, client: Client, prefill_size: int, decode_size: int) -> None:
    model: Path = RECALL_GDN
    extra = {"testing": True}
    sizes = {Role.PREFILL: prefill_size, Role.DECODE: decode_size}
    specs = [
        EngineSpec(model=model, role=role, extra_config=extra, tp_size=size, max_model_len=2048)
        for role, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    engines = [stack.start(spec) for spec in specs]
    try:
        for engine in engines:
            engine.wait_ready(600.0)
        urls = {engine.spec.role: engine.url for engine in engines}
        prefill, decode = urls[Role.PREFILL], urls[Role.DECODE]
        bound = 0.0
        moved, withheld = [], []
        for length in LENGTHS:
            prompt = recall_prompt(length, length).token_ids
            whole = client.complete(decode, prompt, TOKENS, logprobs=20)
            elsewhere = client.complete(prefill, prompt, TOKENS, logprobs=20)
            longer = [*prompt, whole.token_ids[0]]
            rest = client.complete(decode, longer, TOKENS - 1, logprobs=20)
            for url in (prefill, decode):
                client.reset_prefix_cache(url)
            # How much the two sizes, and the two kernels, differ without any hand-off.
            bound = max(bound, spread(whole, elsewhere))
            good = client.handoff(prefill, decode, longer, TOKENS - 1, logprobs=20)
            assert good.received["outcome"] == "received", good.received
            moved.append(spread(rest, good.decode))
            client.reset_prefix_cache(decode)
            bad = client.handoff(
                prefill, decode, longer, TOKENS - 1, logprobs=20, tamper={"withhold": "state"}
            )
            withheld.append(spread(rest, bad.decode))
            assert good.decode.token_ids == rest.token_ids
        print(f"bound {bound:.4f} moved {moved} withheld {withheld}")
        assert max(moved) <= max(4 * bound, 0.05)
        assert min(withheld) > 4 * max(max(moved), 0.05)
    finally:
        stack.stop(*engines)
