"""Several servers side by side, all of them ended again whatever happens."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stateferry.errors import EngineError
from stateferry.stack.engine import Engine, EngineSpec
from stateferry.stack.guard import GRACE_S
from stateferry.stack.process import Child, Guardian, end_all
from stateferry.stack.router import Router
from stateferry.stack.server import START_TIMEOUT_S, ProgressCallback, Server, wait_all_ready

ServersCallback = Callable[[Sequence[str], bool], None]
"""Is told the names of a stack's servers on every change: of those that were started (False), and of those
that are being ended and still run (True; at first all of them, at last none)."""


class Stack:
    """Starts engines and routers; leaving its `with` block ends every process of them.

    They are also ended at interpreter exit, and by a helper process if this process is killed. Not
    thread-safe. Logs go to `log_folder`; without one, to a new temporary folder that is deleted at
    the end, unless an EngineError ends the block.
    """

    def __init__(
        self,
        log_folder: Path | None = None,
        grace_s: float = GRACE_S,
        watch: ServersCallback = lambda names, ending: None,
    ) -> None:
        """`grace_s`: what servers get to end by themselves before they are killed."""
        self._grace_s = grace_s
        self._tell = watch
        self._temporary = log_folder is None
        self.log_folder = Path(tempfile.mkdtemp(prefix="stateferry-")) if log_folder is None else log_folder
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._servers: list[Server] = []
        self._guardian = Guardian()
        atexit.register(self.close)

    @property
    def servers(self) -> tuple[Server, ...]:
        """Everything started and not yet stopped, in order."""
        return tuple(self._servers)

    def start(self, spec: EngineSpec) -> Engine:
        """Start an engine and return at once; `wait_ready` waits for it."""
        engine = Engine(spec, self._log_path(spec.label))
        self.add(engine)
        return engine

    def start_router(
        self, prefill: Sequence[Engine], decode: Sequence[Engine], args: Sequence[str] = ()
    ) -> Router:
        """Start a router in front of engines that are ready, and return at once."""
        router = Router(
            [engine.url for engine in prefill],
            [engine.url for engine in decode],
            self._log_path("router"),
            args,
        )
        self.add(router)
        return router

    def add(self, server: Server) -> None:
        """Own a server of another kind, just started: it is waited for and ended with the rest."""
        self._servers.append(server)
        self._watch(server)
        self._tell([server.name for server in self._servers], False)

    def wait_ready(
        self, timeout_s: float = START_TIMEOUT_S, progress: ProgressCallback | None = None
    ) -> None:
        """Wait until everything started here is healthy.

        Raises EngineError when one ends first or the time is over; the `with` block then ends all.
        """
        wait_all_ready(self._servers, timeout_s, progress, relaunched=self._watch_instead)

    def check_alive(self) -> None:
        """Raise EngineError, with the end of the log, if one of the servers has ended."""
        for server in self._servers:
            server.check_alive()

    def stop(self, *servers: Server) -> None:
        """End some of the servers, at the same time. An interrupt while they end kills what is left of them
        at once, and is raised when that is done."""
        left = {server.pid: server.name for server in servers}
        if left:
            self._tell(list(left.values()), True)

        def ended(pid: int) -> None:
            left.pop(pid, None)
            self._tell(list(left.values()), True)

        try:
            end_all([server.child for server in servers], self._grace_s, ended)
        except (KeyboardInterrupt, SystemExit):
            end_all([server.child for server in servers if server.pid in left], 0.0, ended)
            self._forget(servers)
            raise
        self._forget(servers)

    def _forget(self, servers: Sequence[Server]) -> None:
        """They have ended."""
        for server in servers:
            server.release_ports()
            self._guardian.remove(server.child)
            if server in self._servers:
                self._servers.remove(server)

    def close(self) -> None:
        """End everything. Idempotent. Interrupted half-way, the helper process does the rest."""
        atexit.unregister(self.close)
        try:
            self.stop(*self._servers)
        finally:
            self._guardian.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if not self._temporary:
            return
        if isinstance(exc, EngineError):
            exc.add_note(f"Logs are in {self.log_folder}")
        else:
            shutil.rmtree(self.log_folder, ignore_errors=True)

    def _watch(self, server: Server) -> None:
        self._guardian.add(server.child)

    def _watch_instead(self, server: Server, before: Child) -> None:
        """It was started again: the system may give the pid of `before` to somebody else."""
        self._guardian.remove(before)
        self._watch(server)

    def _log_path(self, name: str) -> Path:
        path = self.log_folder / f"{name}.log"
        number = 2
        while path.exists():
            path = self.log_folder / f"{name}-{number}.log"
            number += 1
        return path
