"""What engines still hold when all should be over."""

from collections.abc import Mapping

from stateferry.stack.client import Client
from stateferry.stack.engine import Engine

METRICS = ("vllm:kv_cache_usage_perc", "stateferry_open_handoffs")
"""vLLM's own count of blocks in use, and the connector's maps."""


def held(client: Client, engines: Mapping[str, Engine]) -> str:
    """Empty when no engine holds anything; otherwise which one, and what. Asks each for one token."""
    for name, engine in engines.items():
        # An idle engine takes no steps, so its ferry's counts are old: make it take some.
        client.complete(engine.url, [1, 2, 3], 1)
        metrics = client.metrics(engine.url)
        for metric in METRICS:
            if metrics.total(metric):
                return f"{name} engine: {metric} is {metrics.total(metric)}"
    return ""
