"""Ends the processes of a stack whose owner is gone. Run as a script; uses the standard library only.

Its standard input is a pipe whose other end only the owner holds. A line `+PID` names a process to
watch over, the leader of a session; `-PID` says that it ended. End of file says that the owner is
gone, however it died: then every session still named is ended. (`PR_SET_PDEATHSIG` would reach the
leader alone, not the engine core and workers under it, and fires when the starting thread ends.)
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 10.0
"""What a session gets to end by itself between SIGTERM and SIGKILL."""
ORPHAN_GRACE_S = 1.0
STUCK_S = 30.0
"""After this even SIGKILL is given up: the kernel is not letting go of the process."""
POLL_S = 0.05


def session_members(session_id: int) -> list[int]:
    """Pids of the living processes of one session, from /proc. Zombies do not count."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue  # it ended while we looked
        # The command stands in parentheses and may contain anything; fields follow the last one:
        # state, parent, process group, session.
        fields = stat[stat.rfind(b")") + 2 :].split()
        if int(fields[3]) == session_id and fields[0] not in (b"Z", b"X"):
            members.append(int(entry.name))
    return members


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process; nothing happens if it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def end_sessions(
    leaders: list[int], grace_s: float = GRACE_S, ended: Callable[[int], None] = lambda leader: None
) -> None:
    """SIGTERM to each leader, so that it ends its own children; what is left after `grace_s` is killed.

    What a leader leaves behind when it ends gets ORPHAN_GRACE_S. Returns when no process of these
    sessions is left (zombies aside: their parents reap them). `ended` is called with each leader, once,
    when nothing of its session is left, or the kernel does not let go of it.
    """
    now = time.monotonic()
    deadlines = dict.fromkeys(leaders, now + grace_s)
    for leader in leaders:
        send(leader, signal.SIGTERM)
    while deadlines:
        now = time.monotonic()
        for leader, deadline in list(deadlines.items()):
            members = session_members(leader)
            if not members or now > deadline + STUCK_S:
                del deadlines[leader]
                ended(leader)
            elif now > deadline:  # looked for and killed again until none is left: it may fork meanwhile
                for member in members:
                    send(member, signal.SIGKILL)
            elif leader not in members:
                deadlines[leader] = min(deadline, now + ORPHAN_GRACE_S)
        if deadlines:
            time.sleep(POLL_S)


def main() -> None:
    """Keep the list of sessions until the owner is gone, then end them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders: dict[int, None] = {}
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            leaders[pid] = None
        else:
            leaders.pop(pid, None)
    end_sessions(list(leaders))


if __name__ == "__main__":
    main()
