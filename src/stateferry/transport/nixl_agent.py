"""One NIXL agent: the only file that touches NIXL's bindings. Maps its exceptions to ours.

The bindings are used instead of `nixl._api`, which fixes the progress thread's pause at 0: the thread
then never sleeps and burns a whole core per engine (docs/decisions/0003-nixl-post-times.md). With a
pause it sleeps in poll(2) and still wakes at once for an event.
"""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stateferry.errors import TransportError, TransportUnavailable
from stateferry.transport.base import MemoryKind, TransferState

Descriptors = npt.NDArray[np.uint64]
"""`uint64[pieces, 3]`: address, size in bytes, device index."""

PROGRESS_PAUSE_US = 1000
"""How long the progress thread sleeps when nothing happens; it looks around that often anyway."""

ENVIRONMENT = {
    # UCX writes its messages to stdout unless told otherwise.
    "UCX_LOG_FILE": "stderr",
    # How often UCX looks whether a peer is still there (its own: 20 s). One that died in the middle of a
    # read is found only this way.
    "UCX_KEEPALIVE_INTERVAL": "1s",
}
"""Set in this process before NIXL is loaded, where the user has not."""

_KIND_NAMES = {MemoryKind.CPU: "DRAM_SEG", MemoryKind.CUDA: "VRAM_SEG"}


class NixlAgent:
    """Owns the native agent and its threads from construction to `close`. Used by one thread."""

    def __init__(self, name: str, backends: Sequence[str], threads: int) -> None:
        """`threads`: extra UCX workers for one large batch; 0 is right unless measured.

        Raises TransportUnavailable when NIXL or a back end cannot be loaded.
        """
        # Any: the bindings are untyped, and imported only when somebody wants NIXL.
        self._nixl: Any = _load()
        self._errors = tuple(
            value
            for key, value in vars(self._nixl).items()
            if key.endswith("Error") and isinstance(value, type) and issubclass(value, Exception)
        )
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_PAUSE_US
        self.name = name
        self._agent: Any = None
        try:
            agent = self._nixl.nixlAgent(name, config)
            known = agent.getAvailPlugins()
            for backend in backends:
                if backend not in known:
                    raise TransportUnavailable(
                        f"nixl: no back end {backend!r} (nixl_backends); there are {', '.join(sorted(known))}"
                    )
                agent.createBackend(backend, {"num_threads": str(threads)} if threads else {})
        except self._errors as e:
            raise TransportUnavailable(f"nixl: back ends {', '.join(backends)} do not start: {e}") from e
        self._agent = agent

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Nothing else may be called then."""
        return self._agent is None

    def register(self, kind: MemoryKind, memory: Descriptors) -> object:
        """Register memory. Returns a token for `deregister`. Raises TransportError."""
        descriptors = self._nixl.nixlRegDList(self._segment(kind), memory)
        try:
            self._agent.registerMem(descriptors, [])
        except self._errors as e:
            raise TransportError(f"nixl: {len(memory)} regions of {kind.value} memory refused: {e}") from e
        return descriptors

    def deregister(self, token: object) -> None:
        """Undo `register`. Never raises: this is clean-up."""
        try:
            self._agent.deregisterMem(token, [])
        except self._errors as e:
            logging.getLogger(__name__).warning("nixl: deregistering failed: %s", e)

    def metadata(self) -> bytes:
        """What a peer's `add_peer` needs: how to reach us, and every region registered so far."""
        return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and start connecting. Returns its name. Raises TransportError."""
        try:
            name = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(name, [])
        except self._errors as e:
            raise TransportError(str(e)) from e
        return str(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect. Never raises: the peer may be gone."""
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors as e:
            logging.getLogger(__name__).debug("nixl: peer %s was gone: %s", name, e)

    def read(
        self,
        peer: str,
        local_kind: MemoryKind,
        local: Descriptors,
        remote_kind: MemoryKind,
        remote: Descriptors,
    ) -> "NixlRead":
        """Start one batch. Never raises: the read it returns may have failed already.

        Between processes of one host the copy is made inside this call; the GIL is released.
        """
        handle: int | None = None
        try:
            handle = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._nixl.nixlXferDList(self._segment(local_kind), local),
                self._nixl.nixlXferDList(self._segment(remote_kind), remote),
                peer,
                "",
                [],
            )
            status = self._agent.postXferReq(handle, "")
        except self._errors as e:
            return NixlRead(self, handle, Status(TransferState.FAILED, str(e)))
        return NixlRead(self, handle, self._translate(status))

    def status(self, handle: int) -> "Status":
        """How a started request stands. Never raises."""
        try:
            return self._translate(self._agent.getXferStatus(handle))
        except self._errors as e:
            return Status(TransferState.FAILED, str(e))

    def release(self, handle: int) -> bool:
        """Give a finished request back. False: NIXL still needs it, try again. Never raises."""
        try:
            self._agent.releaseXferReq(handle)
        except self._errors:
            return False
        return True

    def close(self) -> None:
        """Stop the native threads and free everything. Idempotent."""
        # The native destructor does it; this is the only reference.
        self._agent = None

    def _segment(self, kind: MemoryKind) -> object:
        return getattr(self._nixl, _KIND_NAMES[kind])

    def _translate(self, status: object) -> "Status":
        if status == self._nixl.NIXL_SUCCESS:
            return Status(TransferState.DONE)
        if status == self._nixl.NIXL_IN_PROG:
            return Status(TransferState.PENDING)
        return Status(TransferState.FAILED, str(status))


class Status(NamedTuple):
    """NIXL's status in our words."""

    state: TransferState
    error: str = ""


class NixlRead:
    """One native request. Its local memory is NIXL's until `settled`."""

    def __init__(self, agent: NixlAgent, handle: int | None, status: Status) -> None:
        self._agent = agent
        self._handle = handle
        self.state, self.error = status

    def poll(self) -> TransferState:
        """Look, without waiting. A finished request is released here. Never raises."""
        if self._agent.closed:
            self._handle = None
            if self.state is TransferState.PENDING:
                self.state, self.error = TransferState.FAILED, "the agent was closed"
        elif self._handle is not None:
            if self.state is TransferState.PENDING:
                self.state, self.error = self._agent.status(self._handle)
            if self.state is not TransferState.PENDING and self._agent.release(self._handle):
                self._handle = None
        return self.state

    @property
    def settled(self) -> bool:
        """Terminal, and NIXL has given the request back."""
        return self.state is not TransferState.PENDING and self._handle is None


def _load() -> Any:
    """Import NIXL's bindings without what its import does to this process's logging.

    It sends its log records to stdout, which may carry our JSON, and turns off the report of errors
    inside logging handlers for everybody.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    raise_exceptions = logging.raiseExceptions
    try:
        bindings = importlib.import_module("nixl")._bindings
    except ImportError as e:
        raise TransportUnavailable(
            f"transport 'nixl' needs the nixl package ({e}); "
            f"pip install 'stateferry[cpu]' or 'stateferry[cuda]'"
        ) from e
    finally:
        logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            logger.removeHandler(handler)
            logger.propagate = True
    return bindings
