"""How vLLM's engine core and workers wait for each other's messages, and a calmer way for small machines.

For a second after each message they look again without a pause, calling `sched_yield` in between. With few
cores that takes processor time from whoever works; worse, processes that yield to each other confuse the
scheduler of Linux 6.18, which then leaves other threads waiting for seconds, or for minutes (decision 7). A
short sleep in the place of the yield ends both.
"""

import logging
import os
import time

from stateferry.pause import PAUSE_US, pause_us
from stateferry.vllm.compat import message_queue

logger = logging.getLogger(__name__)

YIELD = "sched_yield"
"""What vLLM's queue of messages between processes calls between looks."""


def sleep_between_looks() -> None:
    """Do in this process what the environment asks for. Any number of times, from vLLM's plugin hook and from
    our connector.

    Raises ConfigError for a value that cannot be read: better no engine than one that stalls now and then.
    """
    pause_s = pause_us(os.environ) / 1e6
    if not pause_s:
        return
    if not hasattr(message_queue, YIELD):
        logger.warning("%s is set, but this vLLM waits in another way; nothing is changed", PAUSE_US)
        return

    def sleep() -> None:
        time.sleep(pause_s)

    setattr(message_queue, YIELD, sleep)
