"""An environment variable: how vLLM's engine core and workers wait for each other's messages.

As shipped they look again without a pause for a second after each message. `vllm.waits` says what a pause is
for and makes it; whoever starts engines asks for it.
"""

from collections.abc import Mapping

from stateferry.errors import ConfigError

PAUSE_US = "STATEFERRY_VLLM_PAUSE_US"
"""Microseconds to sleep between looks. Unset or 0: vLLM is left as it is. Not a key of the connector's
configuration, because it is for every process of an engine from its start, and for engines without us."""
CPU_PAUSE_US = 50
"""For engines on CPU. It becomes about 100, as timers are; a step of such an engine takes milliseconds."""
MOST_US = 10_000
"""A step of an engine has several of these waits."""


def pause_us(environment: Mapping[str, str]) -> int:
    """What the environment asks for; 0: nothing. Raises ConfigError."""
    text = environment.get(PAUSE_US, "").strip() or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= MOST_US):
        raise ConfigError(
            f"{PAUSE_US}: expected a whole number of microseconds from 0 to {MOST_US}, found {text[:64]!r}"
        )
    return int(text)
