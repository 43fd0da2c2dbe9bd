"""What an idle NIXL agent costs, by the pause of its progress thread. See docs/decisions/0003.

    python tools/nixl_idle_cost.py [PAUSE_US ...]

Counts processor time, not wall time, so that a busy machine does not blur it.
"""

import os
import sys
import threading
import time


def cost(pause_us: int, seconds: float = 2.0) -> float:
    """Share of a core that one agent with a UCX back end takes while nothing happens."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    from nixl import _bindings

    config = _bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = pause_us
    agent = _bindings.nixlAgent(f"idle-{pause_us}", config)
    agent.createBackend("UCX", {})
    before = time.process_time()
    threading.Event().wait(seconds)
    share = (time.process_time() - before) / seconds
    del agent
    return share


if __name__ == "__main__":
    for pause in [int(argument) for argument in sys.argv[1:]] or [0, 1000, 10000]:
        print(f"pause {pause:6d} us: {cost(pause):6.1%} of a core")
