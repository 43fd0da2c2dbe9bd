"""A child process that answers HTTP: starting, waiting until it is healthy, explaining why not."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from stateferry.errors import EngineError
from stateferry.stack import logs
from stateferry.stack.ports import HOST, HeldPort
from stateferry.stack.process import Child, end_all

START_TIMEOUT_S = 600.0
"""What servers get to start: ten times what two engines take on a quiet machine with two cores."""
POLL_S = 0.1
PROGRESS_S = 0.5
ATTEMPTS = 3
GIVEN_UP_S = 15.0
"""How long a server may live on after its log says that it failed. vLLM's sometimes never ends."""
GIVEN_UP = ("EngineCore failed to start", "Engine core initialization failed")
PORT_TAKEN = ("address already in use", "errno 98")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a starting server is doing, for people to look at."""

    name: str
    seconds: float
    """Since it was started."""
    ready: bool
    line: str
    """The last line of its log."""


ProgressCallback = Callable[[Progress], None]


class Server(ABC):
    """A child process with an HTTP port on this machine."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.ready = False
        self._attempt = 0
        self._launch()

    @abstractmethod
    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        """Command line and environment for a port."""

    def _launch(self) -> None:
        self._attempt += 1
        self._failed_since: float | None = None
        self._port = HeldPort()
        self.port = self._port.number
        self.url = f"http://{HOST}:{self.port}"
        self._started = time.monotonic()
        try:
            command, env = self._command(self.port)
            self.child = Child(command, env, self.log_path)
        except BaseException:
            self.release_ports()
            raise

    @property
    def pid(self) -> int:
        """The server's own process; everything that it started is in its session."""
        return self.child.pid

    @property
    def running(self) -> bool:
        """Whether the server's own process is alive."""
        return self.child.exit_code is None

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return self.child.log_tail(lines)

    def release_ports(self) -> None:
        """Stop holding what the server has bound by now, or will never bind."""
        self._port.close()

    def wait_ready(
        self, timeout_s: float = START_TIMEOUT_S, progress: ProgressCallback | None = None
    ) -> None:
        """Wait until `/health` answers. See `wait_all_ready`."""
        wait_all_ready([self], timeout_s, progress)

    def check_alive(self) -> None:
        """Raise EngineError, with the end of the log and a hint, if the process has ended."""
        code = self.child.exit_code
        if code is None:
            return
        self.release_ports()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise EngineError(
            f"{self.name} ended with {how} {'after it was' if self.ready else 'before it was'} ready.\n"
            f"{logs.explain(self.log_path)}"
        )

    def check_not_given_up(self) -> None:
        """Raise EngineError if its log has said for GIVEN_UP_S that it failed, though it still runs."""
        now = time.monotonic()
        if self._failed_since is None:
            text = self.log_tail(10_000)
            self._failed_since = now if any(words in text for words in GIVEN_UP) else None
        elif now - self._failed_since > GIVEN_UP_S:
            raise EngineError(f"{self.name} failed to start, and hangs.\n{logs.explain(self.log_path)}")

    def _relaunch_if_port_taken(self) -> Child | None:
        """The child that found the port taken, gone with everything under it, if another one was started."""
        taken = any(words in self.log_tail(60).lower() for words in PORT_TAKEN)
        if self.running or self._attempt >= ATTEMPTS or not taken:
            return None
        before = self.child
        end_all([before])
        self.release_ports()
        self.log_path.rename(self.log_path.with_suffix(f".{self._attempt}.log"))
        self._launch()
        return before


def wait_all_ready(
    servers: Sequence[Server],
    timeout_s: float,
    progress: ProgressCallback | None = None,
    relaunched: Callable[[Server, Child], None] | None = None,
) -> None:
    """Wait until every server answers `/health`.

    `progress` is called for each about twice a second and once when it is ready. A server whose port
    was taken by others is started again on another one; `relaunched` is told, and which child is gone.

    Raises EngineError when one ends or `timeout_s` passes; nothing is stopped here.
    """
    deadline = time.monotonic() + timeout_s
    looked: dict[Server, float] = {}
    waiting = [server for server in servers if not server.ready]
    with httpx.Client(timeout=2.0, trust_env=False) as client:
        while waiting:
            for server in list(waiting):
                if not server.running:
                    if (before := server._relaunch_if_port_taken()) is not None:
                        if relaunched is not None:
                            relaunched(server, before)
                        continue
                    server.check_alive()
                server.ready = _healthy(client, server.url)
                now = time.monotonic()
                if server.ready:
                    waiting.remove(server)
                    server.release_ports()
                if server.ready or now - looked.get(server, 0.0) > PROGRESS_S:
                    looked[server] = now
                    if not server.ready:
                        server.check_not_given_up()
                    if progress is not None:
                        last_line = server.log_tail(1).strip()
                        progress(Progress(server.name, now - server._started, server.ready, last_line))
            if waiting and time.monotonic() > deadline:
                late = waiting[0]
                raise EngineError(
                    f"{late.name} was not ready after {timeout_s:.0f} s. A loaded machine may need more: "
                    f"raise the time-out.\n{logs.explain(late.log_path)}"
                )
            if waiting:
                time.sleep(POLL_S)


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
