"""Reads another process's device memory on the same host: CUDA IPC, and one gathering kernel a batch.

The peer's memory is mapped once per life of it; a batch is one launch on a stream of our own, so a
piece costs nothing by itself (NIXL over UCX takes about 10 µs each on one host) and nothing of the
peer's runs. The driver keeps mapped memory alive after its owner died, so being readable proves
nothing: after the pieces the kernel reads a random cookie that the owner wipes when it closes, and the
owner's process must still live then. Whether the blocks were still ours is the lease's business.
"""

import os
import secrets
import select
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from stateferry.errors import ProtocolError, TransportClosed, TransportError, TransportUnavailable
from stateferry.layout.spec import Pieces
from stateferry.transport import cuda_driver, linux
from stateferry.transport.base import (
    Capabilities,
    MemoryKind,
    MemoryRegion,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
)
from stateferry.transport.pieces import RegionTable, Spans, resolve_pieces
from stateferry.transport.registrations import decode_registration
from stateferry.transport.settling import SettlingTransfer

COOKIE_BYTES = 32
COOKIE_ALLOCATION_BYTES = 2 << 20
"""What the driver hands out at least: a smaller allocation shares it with others, and exports them, too."""
_ADDRESSES, _REGIONS = np.empty(0, np.uint64), np.empty(0, np.int64)
NOTHING = Spans(_ADDRESSES, _ADDRESSES, _ADDRESSES, _REGIONS, _REGIONS)

_Size = Annotated[int, msgspec.Meta(gt=0)]
_Offset = Annotated[int, msgspec.Meta(ge=0)]
_Handle = Annotated[
    bytes, msgspec.Meta(min_length=cuda_driver.HANDLE_BYTES, max_length=cuda_driver.HANDLE_BYTES)
]
_Cookie = Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stretch of memory inside one exported allocation."""

    allocation: _Offset
    offset: _Offset
    size: _Size


class _Registration(msgspec.Struct, frozen=True, tag="cudaipc/1", forbid_unknown_fields=True):
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_time: int | None
    pid_namespace: str
    boot_id: str
    hostname: str
    allocations: tuple[tuple[_Handle, _Size], ...]
    regions: tuple[_Place, ...]
    cookie_place: _Place
    cookie: _Cookie


class CudaIpcTransport(Transport):
    """See the module."""

    name = "cudaipc"
    capabilities = Capabilities(memory_kinds=frozenset({MemoryKind.CUDA}), same_host_only=True)

    def __init__(self, options: TransportOptions | None = None) -> None:
        try:
            import torch

            from stateferry.transport.cuda_gather import Gatherer
        except ImportError as e:
            raise TransportUnavailable(f"cudaipc needs torch and triton: {e}") from e
        if not torch.cuda.is_available() or torch.version.hip:
            raise TransportUnavailable("cudaipc needs an NVIDIA device that torch can use")
        self._torch: Any = torch
        self.view = linux.ProcView()
        self.local = RegionTable("local", [])
        self.closed = False
        self.gatherer: Gatherer | None = None
        self._make_gatherer = Gatherer
        self._cookie = 0
        """Address of our cookie, in an allocation of its own; 0: not registered."""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        if self.closed:
            raise TransportClosed("cudaipc: register after close")
        if self._cookie:
            raise TransportError("cudaipc: register was called before; it works once")
        devices = {region.device_index for region in regions}
        if len(devices) > 1 or any(region.kind is not MemoryKind.CUDA for region in regions):
            raise TransportUnavailable("cudaipc: moves the memory of one CUDA device; use nixl for others")
        index = devices.pop() if devices else self._torch.cuda.current_device()
        spans = [(region.address, region.size_bytes) for region in regions]
        self.local = RegionTable("local", spans)
        cookie = secrets.token_bytes(COOKIE_BYTES)
        self.gatherer = self._make_gatherer(index)
        self._cookie = cuda_driver.allocate(COOKIE_ALLOCATION_BYTES)
        cuda_driver.write(self._cookie, cookie)
        exports = _Exports()
        places = [exports.place(address, size) for address, size in spans]
        cookie_place = exports.place(self._cookie, COOKIE_BYTES)
        return msgspec.msgpack.encode(
            _Registration(
                pid=os.getpid(),
                start_time=self.view.start_time(os.getpid()),
                pid_namespace=self.view.pid_namespace(),
                boot_id=self.view.boot_id(),
                hostname=linux.hostname(),
                allocations=tuple(exports.handles),
                regions=tuple(places),
                cookie_place=cookie_place,
                cookie=cookie,
            )
        )

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """As the base says. Mapping takes the driver some 10 ms."""
        if self.closed or self.gatherer is None:
            raise TransportClosed("cudaipc: connect after close, or before register")
        blob = decode_registration(self.name, registration, _Registration)
        for place in (*blob.regions, blob.cookie_place):
            if (
                place.allocation >= len(blob.allocations)
                or place.offset + place.size > blob.allocations[place.allocation][1]
            ):
                raise ProtocolError(f"cudaipc registration: {place} lies outside the exported allocations")
        process = _LiveProcess(blob, self.view)
        try:
            return _CudaIpcPeer(self, self.gatherer, blob, process)
        except BaseException:
            process.close()
            raise

    def close(self) -> None:
        if not self.closed and self.gatherer is not None:
            self.gatherer.enter()
            if self._cookie:
                # Every later read of ours by a peer fails then. The memory stays: who has it mapped must find
                # this in it, and not what others keep there next.
                cuda_driver.write(self._cookie, bytes(COOKIE_BYTES))
            self.gatherer.close()
        self.closed = True


class _Exports:
    """Handles of the allocations that regions lie in; each allocation once."""

    def __init__(self) -> None:
        self.handles: list[tuple[bytes, int]] = []
        self._numbers: dict[int, int] = {}

    def place(self, address: int, size: int) -> _Place:
        allocation = cuda_driver.allocation_of(address)
        if allocation.address not in self._numbers:
            self._numbers[allocation.address] = len(self.handles)
            self.handles.append((cuda_driver.export(allocation), allocation.size_bytes))
        return _Place(self._numbers[allocation.address], address - allocation.address, size)


class _LiveProcess:
    """Tells whether the process that registered still lives. Raises TransportUnavailable when it does not."""

    def __init__(self, blob: _Registration, view: linux.ProcView) -> None:
        elsewhere = linux.elsewhere(blob.boot_id, blob.hostname, blob.pid_namespace, view)
        if elsewhere:
            raise TransportUnavailable(f"cudaipc: {elsewhere}")
        try:
            self._descriptor = os.pidfd_open(blob.pid)
        except OSError as e:
            raise TransportUnavailable(f"cudaipc: no such process: {blob.pid} ({e.strerror})") from e
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        # In this order, so that a process number used again in between is noticed.
        if view.start_time(blob.pid) != blob.start_time or not self.alive:
            self.close()
            raise TransportUnavailable(f"cudaipc: process {blob.pid} ended, or is another one now")

    @property
    def alive(self) -> bool:
        return self._descriptor >= 0 and not self._poll.poll(0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _CudaIpcPeer(Peer):
    def __init__(
        self, transport: CudaIpcTransport, gatherer: Any, blob: _Registration, process: _LiveProcess
    ) -> None:
        self.transport = transport
        self.gatherer = gatherer
        self.process = process
        self.cookie = blob.cookie
        self.closed = False
        self.gone = False
        self._mapped: list[int] = []
        gatherer.enter()
        try:
            self._map(blob)
            self._probe()
        except BaseException:
            self._unmap()
            raise

    @property
    def usable(self) -> bool:
        """False once the peer's process ended or its cookie was wiped."""
        return not self.gone

    def post_read(self, pieces: Pieces) -> Transfer:
        if self.closed or self.transport.closed:
            raise TransportClosed("cudaipc: post_read after close")
        spans = resolve_pieces(pieces, self.transport.local, self.remote)
        return _CudaIpcTransfer(self, spans)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.process.close()
            self.gatherer.enter()
            self._unmap()

    def why_gone(self, seal: bytes) -> str:
        """Why what was just read does not count; empty: it does."""
        if not self.process.alive:
            return "the peer's process ended"
        return "" if seal == self.cookie else "the peer closed its transport"

    def _map(self, blob: _Registration) -> None:
        try:
            for handle, _ in blob.allocations:
                self._mapped.append(cuda_driver.map_handle(handle))
        except TransportError as e:
            raise TransportUnavailable(str(e)) from e
        spans = [(self._mapped[p.allocation] + p.offset, p.size) for p in blob.regions]
        try:
            self.remote = RegionTable("remote", spans)
        except ValueError as e:
            raise ProtocolError(f"cudaipc registration: {e}") from e
        self.cookie_address = self._mapped[blob.cookie_place.allocation] + blob.cookie_place.offset

    def _probe(self) -> None:
        """Read the cookie once: a registration of an earlier life must not be connected to."""
        launched = self.gatherer.launch(NOTHING, self.cookie_address, COOKIE_BYTES)
        launched.wait()
        why = self.why_gone(launched.seal())
        self.gatherer.retire(launched)
        if why:
            raise TransportUnavailable(f"cudaipc: {why}")

    def _unmap(self) -> None:
        # At once, so that a peer that starts again finds its device's memory free.
        while self._mapped:
            cuda_driver.unmap(self._mapped.pop())


class _CudaIpcTransfer(SettlingTransfer):
    """One launch. The device writes into our blocks until its event is done."""

    def __init__(self, peer: _CudaIpcPeer, spans: Spans) -> None:
        super().__init__(int(spans.sizes.sum()), "cudaipc")
        self._peer = peer
        self._launched: Any = None
        if self._total:
            try:
                self._launched = peer.gatherer.launch(spans, peer.cookie_address, COOKIE_BYTES)
            except TransportError as e:
                self._fail(f"could not launch: {e}")

    def poll(self) -> TransferState:
        if self._state is not TransferState.PENDING:
            return self._state
        try:
            if not self._launched.done():
                return self._state
        except TransportError as e:
            self._fail(str(e))
            return self._state
        why = self._peer.why_gone(self._launched.seal())
        self._peer.gatherer.retire(self._launched)
        if why:
            self._peer.gone = True
            self._fail(why)
        else:
            self._bytes_done = self._total
            self._state = TransferState.DONE
        self._launched = None
        return self._state
