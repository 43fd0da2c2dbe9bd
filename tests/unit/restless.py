"""Which threads of a process do not rest: asked of the kernel, whatever the speed of the machine."""

import threading
from collections import Counter
from pathlib import Path

LOOKS = 40
PAUSE_S = 0.01


def restless_threads() -> list[int]:
    """Threads of this process, besides the caller, that wanted a processor at most looks of half a second."""
    seen: Counter[int] = Counter()
    pause = threading.Event()
    for _ in range(LOOKS):
        pause.wait(PAUSE_S)
        seen.update(thread for thread in _others() if _runs(thread))
    return [thread for thread, count in seen.items() if count > LOOKS / 2]


def _others() -> list[int]:
    own = threading.get_native_id()
    return [int(task.name) for task in Path("/proc/self/task").iterdir() if int(task.name) != own]


def _runs(thread: int) -> bool:
    try:
        stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    except OSError:  # it has ended
        return False
    # The name, in brackets, may hold anything; the state follows it (proc_pid_stat(5)).
    return stat.rpartition(")")[2].split()[0] == "R"
