"""Cross-memory attach: reads another process's memory on the same Linux host (process_vm_readv).

Needs nothing from the peer's threads, so a busy peer costs nothing. Bytes move inside `poll`, at
most `SLICE_BYTES` a call, with the GIL released.

The kernel knows only process numbers, so each registration holds a random cookie and its address.
`connect` reads it, and every call that reads data reads it again *after* the data: bytes count only
if the process, its memory and its registration were still the same when they were read.
"""

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from stateferry.errors import ProtocolError, TransportClosed, TransportUnavailable
from stateferry.layout.spec import Pieces
from stateferry.transport import linux
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
from stateferry.transport.pieces import RegionTable, Spans, batch_ends, cut, resolve_pieces
from stateferry.transport.registrations import check_first, cpu_spans, decode_registration
from stateferry.transport.settling import SettlingTransfer

SLICE_BYTES = 8 << 20
"""Most bytes that one `poll` moves: half a millisecond of copying, in which nobody else runs on that
processor. vLLM's thread waited for 2 ms behind slices of 32 MiB."""
CALLS_PER_POLL = 8
"""Most system calls that one `poll` makes: bounds it for many small pieces."""
COOKIE_BYTES = 32

_Address = Annotated[int, msgspec.Meta(gt=0)]
_Cookie = Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]


class _Registration(msgspec.Struct, frozen=True, tag="cma/1", forbid_unknown_fields=True):
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_time: int | None
    """Clock ticks since boot; with the pid names one life of one process."""
    uid: int
    pid_namespace: str
    boot_id: str
    hostname: str
    regions: tuple[tuple[_Address, _Address], ...]
    """(address, size in bytes) in the order in which they were registered."""
    cookie_address: _Address
    cookie: _Cookie


class CmaTransport(Transport):
    """See the module. `view` and `read` are replaced in tests."""

    name = "cma"
    capabilities = Capabilities(
        memory_kinds=frozenset({MemoryKind.CPU}), cancel=True, self_progressing=False, same_host_only=True
    )

    def __init__(
        self,
        options: TransportOptions | None = None,
        *,
        view: linux.ProcView | None = None,
        read: linux.ReadCall | None = None,
    ) -> None:
        self.view = view or linux.ProcView()
        self.read = read or linux.load_process_vm_readv()
        self.local = RegionTable("local", [])
        self.closed = False
        # The reader compares these bytes: kept alive, at one address, as long as this object.
        self._cookie = ctypes.create_string_buffer(COOKIE_BYTES)
        self._registered = False

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        check_first(self.name, closed=self.closed, registered=self._registered)
        spans = cpu_spans(self.name, regions, "cma moves cpu memory only")
        self.local = RegionTable("local", spans)
        self._registered = True
        self._cookie.raw = secrets.token_bytes(COOKIE_BYTES)
        if self.view.ptrace_scope() == 1:
            linux.allow_readers()
        return msgspec.msgpack.encode(
            _Registration(
                pid=os.getpid(),
                start_time=self.view.start_time(os.getpid()),
                uid=os.geteuid(),
                pid_namespace=self.view.pid_namespace(),
                boot_id=self.view.boot_id(),
                hostname=linux.hostname(),
                regions=tuple(spans),
                cookie_address=ctypes.addressof(self._cookie),
                cookie=self._cookie.raw,
            )
        )

    def connect(self, registration: bytes, timeout_s: float) -> Peer:
        """As the base says; never blocks."""
        if self.closed:
            raise TransportClosed("cma: connect after close")
        blob = decode_registration(self.name, registration, _Registration)
        try:
            remote = RegionTable("remote", blob.regions)
        except ValueError as e:
            raise ProtocolError(f"cma registration: {e}") from e
        peer = _CmaPeer(self, blob, remote)
        refusal = self._refusal(blob) or peer.probe()
        if refusal:
            raise TransportUnavailable(f"cma: {refusal}")
        return peer

    def close(self) -> None:
        self.closed = True
        # A wiped cookie makes every later read of ours by a peer fail.
        ctypes.memset(self._cookie, 0, COOKIE_BYTES)

    def _refusal(self, blob: _Registration) -> str:
        """What /proc shows against reading that process; empty: nothing."""
        elsewhere = linux.elsewhere(blob.boot_id, blob.hostname, blob.pid_namespace, self.view)
        if elsewhere:
            return elsewhere
        started = self.view.start_time(blob.pid)
        if started is not None and blob.start_time is not None and started != blob.start_time:
            return f"no such process: {blob.pid} is another process now (the peer's engine ended)"
        return ""


class _CmaPeer(Peer):
    def __init__(self, transport: CmaTransport, blob: _Registration, remote: RegionTable) -> None:
        self.transport = transport
        self.pid = blob.pid
        self.remote = remote
        self.cookie = blob.cookie
        self.cookie_address = blob.cookie_address
        self.closed = False
        self.gone = False
        self._uid = blob.uid

    def probe(self) -> str:
        """Read the cookie once. Empty: this is the process that registered; else why not."""
        found = ctypes.create_string_buffer(COOKIE_BYTES)
        local = np.array([(ctypes.addressof(found), COOKIE_BYTES)], dtype=linux.IOVEC)
        remote = np.array([(self.cookie_address, COOKIE_BYTES)], dtype=linux.IOVEC)
        got = self.transport.read(self.pid, local.ctypes.data, remote.ctypes.data, 1)
        if got == -errno.EPERM:
            return linux.explain_permission(self.pid, self._uid, self.transport.view)
        if got == -errno.ESRCH:
            return f"no such process: {self.pid} (the peer's engine ended)"
        if got == -errno.ENOSYS:
            return "this kernel is built without CONFIG_CROSS_MEMORY_ATTACH; use transport nixl"
        if got in (COOKIE_BYTES, -errno.EFAULT) and found.raw != self.cookie:
            return (
                f"process {self.pid} does not hold the registration's cookie: the peer closed its "
                f"transport, or this is another process"
            )
        return "" if got == COOKIE_BYTES else f"reading process {self.pid}: {linux.explain(max(-got, 0))}"

    @property
    def usable(self) -> bool:
        """False once a read found another process, no process, or no registration."""
        return not self.gone

    def post_read(self, pieces: Pieces) -> Transfer:
        if self.closed or self.transport.closed:
            raise TransportClosed("cma: post_read after close")
        return _CmaTransfer(self, resolve_pieces(pieces, self.transport.local, self.remote))

    def close(self) -> None:
        self.closed = True


class _CmaTransfer(SettlingTransfer):
    """Batches of at most 1,023 pieces and the cookie; one system call each. Bytes land only while `poll`
    runs."""

    def __init__(self, peer: _CmaPeer, spans: Spans) -> None:
        super().__init__(int(spans.sizes.sum()), f"cma: reading process {peer.pid}")
        self._peer = peer
        self._next = 0
        spans = cut(spans, SLICE_BYTES)
        self._ends = batch_ends(spans.sizes, SLICE_BYTES, linux.MAX_IOVECS - 1)
        self._found = ctypes.create_string_buffer(COOKIE_BYTES)
        found = (ctypes.addressof(self._found), COOKIE_BYTES)
        cookie = (peer.cookie_address, COOKIE_BYTES)
        self._local = linux.build_iovecs(spans.local, spans.sizes, self._ends, found)
        self._remote = linux.build_iovecs(spans.remote, spans.sizes, self._ends, cookie)

    def cancel(self) -> None:
        if self._state is TransferState.PENDING:
            self._fail("cancelled")

    def poll(self) -> TransferState:
        moved = 0
        for _ in range(CALLS_PER_POLL):
            if self._state is not TransferState.PENDING:
                break
            # Batch b's entries start after the pieces and the b cookies before it.
            first = (self._ends[self._next - 1] if self._next else 0) + self._next
            last = self._ends[self._next] + self._next + 1
            size = int(self._local["size"][first : last - 1].sum())
            if moved and moved + size > SLICE_BYTES:
                break
            self._read_batch(first, last, size)
            moved += size
        return self._state

    def _read_batch(self, first: int, last: int, size: int) -> None:
        if self._peer.closed or self._peer.transport.closed:
            self._fail("closed here while the read was pending")
            return
        ctypes.memset(self._found, 0, COOKIE_BYTES)
        wanted = size + COOKIE_BYTES
        got = self._call(first, last)
        if 0 <= got < wanted:
            # The kernel stops at a page it cannot read without saying why: the second try tells.
            first = self._skip(first, last, got)
            wanted -= got
            got = self._call(first, last)
            if 0 <= got < wanted:
                first = self._skip(first, last, got)
                self._fail(
                    f"stopped twice at {self._where(first)}, {self._bytes_done} of {self._total} bytes"
                )
                return
        if got == wanted and self._found.raw == self._peer.cookie:
            self._bytes_done += size
            self._next += 1
            if self._next == len(self._ends):
                self._state = TransferState.DONE
            return
        self._peer.gone = True
        if got < 0:
            self._fail(f"stopped at {self._where(first)}: {linux.explain(-got)}")
        else:
            self._fail("the peer closed its transport, or its process is another one now")

    def _call(self, first: int, last: int) -> int:
        skip = first * linux.IOVEC.itemsize
        local, remote = self._local.ctypes.data + skip, self._remote.ctypes.data + skip
        return self._peer.transport.read(self._peer.pid, local, remote, last - first)

    def _skip(self, first: int, last: int, size: int) -> int:
        """Leave out `size` bytes from entry `first` on. Returns the entry where they end."""
        ends = np.cumsum(self._local["size"][first:last])
        entry = first + int(np.searchsorted(ends, size, side="right"))
        into = np.uint64(size - (int(ends[entry - first - 1]) if entry > first else 0))
        for iovecs in (self._local, self._remote):
            iovecs["base"][entry] += into
            iovecs["size"][entry] -= into
        return entry

    def _where(self, entry: int) -> str:
        return self._peer.remote.locate(int(self._remote["base"][entry]))
