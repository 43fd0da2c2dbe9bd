"""One Mooncake transfer engine over TCP: the only file that touches Mooncake's bindings.

Every piece is a native batch of its own. A batch of many pieces can only be waited for: the call that looks
at it spins on a core until it is over, and reports the first failed piece while others still write. A single
one is looked at without waiting, and is over only when nothing writes to its memory any more.

A segment is another engine's `address:port`. The first read from one fetches its description, without a
deadline of ours and under a lock that every other first read of this engine needs: see `opening`.
"""

import importlib
import os
import socket
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from stateferry.errors import TransportError, TransportUnavailable
from stateferry.transport.base import TransferState

ENVIRONMENT = {
    # Its notes on every start and batch otherwise go to stderr.
    "MC_LOG_LEVEL": "ERROR",
    # The first network device that it finds decides otherwise; only TCP was ever tried.
    "MC_FORCE_TCP": "1",
}
"""Set in this process before Mooncake is loaded, where the user has not."""

_NO_BATCH = (0, -1, (1 << 64) - 1)
"""What the bindings return for a batch when nothing was posted."""
_STATES = {1: TransferState.DONE, -1: TransferState.FAILED}


class MooncakeEngine:
    """Owns the native engine, its threads and its two listening ports from construction to `close`."""

    def __init__(self, host: str) -> None:
        """`host`: the address of this machine that others dial; a name is looked up here, once.

        Raises TransportUnavailable when Mooncake cannot be loaded or does not start.
        """
        # Any: the bindings are untyped, and imported only when somebody wants Mooncake.
        kind: Any = _load()
        address = _ipv4(host)
        self._engine: Any = kind()
        if self._engine.initialize(address, "P2PHANDSHAKE", "tcp", ""):
            self._engine = None
            raise TransportUnavailable(
                f"mooncake: its engine does not start on {address}; its own words are in stderr (set "
                f"MC_LOG_LEVEL=INFO for more)"
            )
        self.segment = f"{address}:{self._engine.get_rpc_port()}"
        """What a peer reads from."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Nothing else may be called then."""
        return self._engine is None

    def register(self, address: int, size_bytes: int) -> None:
        """Let peers read (and, if they are not ours, write) this memory. Raises TransportError."""
        code = self._engine.register_memory(address, size_bytes)
        if code:
            raise TransportError(
                f"mooncake: {size_bytes} bytes at {address:#x} were refused with code {code}; is that memory "
                f"registered already?"
            )

    def read(self, segment: str, local: int, remote: int, size_bytes: int) -> "MooncakeRead":
        """Start reading one piece. Never raises: what it returns may have failed already.

        Waits for the network only where this is the first read from that segment.
        """
        try:
            batch = self._engine.batch_transfer_async_read(segment, [local], [remote], [size_bytes])
        except (RuntimeError, MemoryError) as e:
            return MooncakeRead(self, None, str(e))
        if batch in _NO_BATCH:
            return MooncakeRead(self, None, f"{segment} cannot be opened or takes no more reads")
        return MooncakeRead(self, batch)

    def look(self, batch: int) -> TransferState:
        """Where a posted piece stands; once it is not PENDING, the batch is gone and must not be looked at
        again. Any thread."""
        return _STATES.get(self._engine.transfer_check_status(batch), TransferState.PENDING)

    def opening(self, segment: str, landing: npt.NDArray[np.uint8], remote: int) -> "Opening":
        """The first read from a segment, of as many bytes as `landing` holds, in a thread of its own. Until
        it is settled, this engine is of no use for anything else."""
        return Opening(self, segment, landing, remote)

    def close(self) -> None:
        """Stop its threads and free everything; nothing is written afterwards. Idempotent.

        Takes up to a second, during which no Python code runs in this process: the native destructor
        waits for its listener with the interpreter's lock held.
        """
        self._engine = None


class MooncakeRead:
    """One piece under way. Its local memory is Mooncake's until `settled`.

    Mooncake ends a piece, well or badly, only after the operation that wrote to its memory ended and, if it
    ended badly, after its connection was closed. A status it calls a time-out ends nothing: it stays PENDING
    here.
    """

    def __init__(self, engine: MooncakeEngine, batch: int | None, error: str = "") -> None:
        self._engine = engine
        self._batch = batch
        self.error = error
        self.state = TransferState.FAILED if batch is None else TransferState.PENDING

    @property
    def settled(self) -> bool:
        """Nothing is written any more."""
        return self.state is not TransferState.PENDING

    def poll(self) -> TransferState:
        """Look, without waiting. Never raises."""
        if self.state is TransferState.PENDING:
            if self._engine.closed:
                self.state, self.error = TransferState.FAILED, "the engine was closed"
            elif self._batch is not None:
                self.state = self._engine.look(self._batch)
                if self.state is TransferState.FAILED:
                    self.error = "the peer is gone, refuses, or its connection broke"
        return self.state


class Opening:
    """A first read, watched from another thread than the one that makes it.

    Mooncake waits a minute for a peer that accepts and says nothing, and cannot be told to stop: whoever
    closes the engine meanwhile leaves the thread to it. The native engine then ends with the thread.
    """

    def __init__(
        self, engine: MooncakeEngine, segment: str, landing: npt.NDArray[np.uint8], remote: int
    ) -> None:
        self._read: MooncakeRead | None = None

        def open_and_read() -> None:
            # The thread holds `landing`, too: it is written to whether or not somebody still waits.
            self._read = engine.read(segment, landing.ctypes.data, remote, landing.nbytes)

        threading.Thread(target=open_and_read, name="mooncake-opening", daemon=True).start()

    def poll(self) -> TransferState:
        """As a read's."""
        return TransferState.PENDING if self._read is None else self._read.poll()

    @property
    def settled(self) -> bool:
        """The thread has ended, and nothing is written any more."""
        return self._read is not None and self._read.settled

    @property
    def error(self) -> str:
        """Why it failed; empty otherwise."""
        return "" if self._read is None else self._read.error


def _ipv4(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise TransportUnavailable(
            f"mooncake: 'host' is {host!r}, which is no IPv4 address and no name of one ({e}); other "
            f"addresses were never tried: set 'host', or use transport nixl"
        ) from e


def _load() -> Any:
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as e:
        raise TransportUnavailable(
            f"transport 'mooncake' needs the mooncake package ({e}); pip install 'stateferry[mooncake]'"
        ) from e
    except ImportError as e:
        raise TransportUnavailable(
            f"transport 'mooncake': its library does not load ({e}). It needs libraries of the system: on "
            f"Debian and Ubuntu, apt install libibverbs1 libnuma1 libcurl4"
        ) from e
