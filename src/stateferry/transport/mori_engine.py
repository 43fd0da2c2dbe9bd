"""MoRI's engine and its sessions: the only file that calls MoRI, with `mori_request` and `mori_wait`.

`stateferry.testing.mori_contract` lists every name that is used; a test keeps the list true, and
`make mori-contract` compares it with the published packages.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from stateferry.errors import TransportError, TransportUnavailable
from stateferry.transport.base import MemoryKind, MemoryRegion
from stateferry.transport.mori_options import MoriBackend, MoriOptions
from stateferry.transport.mori_request import Keeper, Order, Request

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # MoRI waits for room in its send queue inside the call (its own: 5 s), which would hold up every other
    # hand-off. We post again ourselves.
    "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000",
}
"""Set in this process before MoRI is loaded, where the user has not."""

SEVERAL_QUEUES = (
    "MORI_IO_QP_PER_TRANSFER",
    "MORI_IO_ENABLE_CHUNKING",
    "MORI_IO_NUM_NICS_PER_TRANSFER",
    "MORI_IO_RAIL_AFFINITY",
)
"""Variables that may make a session more than one queue pair, whatever the options say."""


class MoriSession:
    """One pair of registered regions, ours and a peer's."""

    def __init__(self, engine: "MoriEngine", session: Any) -> None:
        self._owner = engine
        self._session = session
        self._order = Order(engine.ordered)

    def read(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> Request:
        """Post one batch: from the remote region into the local one, offsets from the start of each.

        Never raises: the request that it returns may have failed already. The GIL is released meanwhile.
        """
        owner = self._owner
        request = Request(self._order, owner.clock, owner.quiet_after_s)
        request.session = self._session
        try:
            uid = self._session.allocate_transfer_uid()
            request.status = self._session.batch_read(list(local), list(remote), list(sizes), uid)
        except Exception as e:  # a C++ exception comes as one of many kinds
            # How much of it was posted is not known.
            request.failed(f"could not be posted: {e}")
        owner.keeper.keep(request)
        return request


class MoriEngine:
    """Owns MoRI's engine and its threads from construction to `close`. Used by one thread."""

    def __init__(
        self,
        name: str,
        host: str,
        options: MoriOptions,
        io: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: no other engine's, of whatever life. `host`: what peers dial. `io`: instead of `mori.io`.

        Raises TransportUnavailable when MoRI or its back end does not start.
        """
        self.name = name
        self.clock = clock
        self.quiet_after_s = options.quiet_after_s(os.environ)
        self.backend = options.backend
        self.ordered = options.backend is MoriBackend.RDMA and _one_queue(options)
        self.keeper = Keeper()
        self.io: Any = _load() if io is None else io
        self._engine: Any = None
        self._registered: list[Any] = []
        try:
            self._engine = self.io.IOEngine(name, self.io.IOEngineConfig(host, 0))
            self._engine.create_backend(self._type(), self._config(options))
        except Exception as e:  # RuntimeError, and what else C++ may throw
            self._engine = None
            raise TransportUnavailable(
                f"mori: the {options.backend.value} back end does not start on {host}: {e}. RDMA needs an "
                "active device (`ibv_devinfo`); between GPUs of one host set 'mori_backend' to 'xgmi'"
            ) from e

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Nothing else may be called then."""
        return self._engine is None

    @property
    def native(self) -> Any:
        """MoRI's own engine, for `mori_wait`."""
        return self._engine

    def register(self, region: MemoryRegion) -> Any:
        """Register memory by its address. Returns MoRI's descriptor. Raises TransportError."""
        on_gpu = region.kind is MemoryKind.CUDA
        places = self.io.MemoryLocationType
        place, device = (places.GPU, region.device_index) if on_gpu else (places.CPU, -1)
        try:
            desc = self._engine.register_memory(region.address, region.size_bytes, device, place)
        except Exception as e:
            raise TransportError(
                f"mori: {region.size_bytes} bytes of {region.kind.value} memory refused: {e}"
            ) from e
        self._registered.append(desc)
        return desc

    def description(self) -> bytes:
        """How peers reach this engine."""
        return bytes(self._engine.get_engine_desc().pack())

    def meet(self, packed: bytes) -> Any:
        """Make a peer's engine known. Returns its descriptor. Raises TransportError."""
        try:
            desc = self.io.EngineDesc.unpack(packed)
            self._engine.register_remote_engine(desc)
        except Exception as e:
            raise TransportError(f"its engine descriptor is refused: {e}") from e
        return desc

    def unpack_memory(self, packed: bytes) -> Any:
        """A peer's memory descriptor. Raises TransportError."""
        try:
            return self.io.MemoryDesc.unpack(packed)
        except Exception as e:
            raise TransportError(f"a memory descriptor of its is refused: {e}") from e

    def part(self, desc: Any) -> None:
        """Forget a peer's engine. Never raises: this is clean-up."""
        self._quietly(lambda: self._engine.deregister_remote_engine(desc), "a peer's engine")

    def session(self, local: Any, remote: Any) -> MoriSession:
        """Connect a region of ours to a peer's, by their descriptors.

        Blocks for MoRI's own hand-shake with the peer, holding the GIL; a peer that does not answer takes
        MoRI's own time-out (`MORI_IO_CP_TIMEOUT_MS`, 5 s). Raises TransportUnavailable.
        """
        try:
            session = self._engine.create_session(local, remote)
        except Exception as e:
            raise TransportUnavailable(f"no session: {e}") from e
        if session is None:
            raise TransportUnavailable(
                f"no session: MoRI's {self.backend.value} back end does not connect these two regions"
            )
        return MoriSession(self, session)

    def close(self) -> None:
        """Deregister all, destroy the back end and with it what may still write. Idempotent."""
        if self._engine is None:
            return
        for desc in self._registered:
            self._quietly(lambda desc=desc: self._engine.deregister_memory(desc), "memory")  # type: ignore[misc]
        self._quietly(lambda: self._engine.remove_backend(self._type()), "the back end")
        self._engine = None

    def _type(self) -> Any:
        types = self.io.BackendType
        return types.RDMA if self.backend is MoriBackend.RDMA else types.XGMI

    def _config(self, options: MoriOptions) -> Any:
        if options.backend is MoriBackend.XGMI:
            return self.io.XgmiBackendConfig(options.num_streams, options.num_events)
        # Without notifications: one that fails marks its request as failed before the data has landed.
        return self.io.RdmaBackendConfig(
            options.qp_per_transfer,
            options.post_batch_size,
            options.num_workers,
            self.io.PollCqMode.POLLING,
            False,
        )

    def _quietly(self, call: Callable[[], object], what: str) -> None:
        try:
            call()
        except Exception as e:
            logger.debug("mori: giving %s back failed: %s", what, e)


def _one_queue(options: MoriOptions) -> bool:
    """Whether a session's requests all go through one queue pair, in order."""
    return options.qp_per_transfer == 1 and not any(os.environ.get(name) for name in SEVERAL_QUEUES)


def _load() -> Any:
    """Import MoRI's Python package. Raises TransportUnavailable."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        return importlib.import_module("mori.io")
    except (ImportError, OSError) as e:  # OSError: a library of ROCm's is missing
        raise TransportUnavailable(
            f"transport 'mori' needs the amd-mori package and ROCm ({e}); pip install 'stateferry[rocm]'"
        ) from e
