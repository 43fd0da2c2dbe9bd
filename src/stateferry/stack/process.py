"""One child process: in a session of its own, its output in a file, ended with all its children."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stateferry.stack import guard, logs


class Child:
    """A process that was started here. Its pid is also its session and its process group."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        """Start it. Output is appended to `log_path`, after the command itself."""
        self.command = tuple(command)
        self.log_path = log_path
        with log_path.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self.command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if a signal ended it."""
        return self._process.poll()

    def log_tail(self, lines: int = 30) -> str:
        """The last lines it wrote."""
        return logs.tail(self.log_path, lines)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process itself."""
        if self.exit_code is None:
            guard.send(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the process and everything under it, as if its host had died."""
        for pid in guard.session_members(self.pid):
            guard.send(pid, signal.SIGKILL)
        guard.end_sessions([self.pid], grace_s=0)
        self.wait()

    def wait(self) -> int:
        """Wait until the process itself has ended, and return its exit code."""
        return self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP to the process and everything under it, as if its host hung. `thaw` undoes it."""
        for pid in guard.session_members(self.pid):
            guard.send(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to the process and everything under it."""
        for pid in guard.session_members(self.pid):
            guard.send(pid, signal.SIGCONT)


def end_all(
    children: Sequence[Child],
    grace_s: float = guard.GRACE_S,
    ended: Callable[[int], None] = lambda pid: None,
) -> None:
    """End the children and everything under them, all at the same time. Returns when none is left.

    `ended` is called with each child's pid, once, when it is gone with everything under it.
    """
    for child in children:
        child.thaw()
    guard.end_sessions([child.pid for child in children], grace_s, ended)
    for child in children:
        child.wait()


class Guardian:
    """A helper process that ends our children if we die without ending them, even by SIGKILL."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """The helper's own pid."""
        return self._process.pid

    def add(self, child: Child) -> None:
        """Watch over a child."""
        self._tell(f"+{child.pid}\n")

    def remove(self, child: Child) -> None:
        """The child is gone with everything under it."""
        self._tell(f"-{child.pid}\n")

    def close(self) -> None:
        """End the helper; it first ends what is still watched. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.write(line)
            self._process.stdin.flush()
