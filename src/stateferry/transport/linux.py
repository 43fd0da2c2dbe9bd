"""The Linux side of cross-memory attach: the calls, and what /proc says when they are refused.

No other file uses ctypes on libc or reads /proc for a transport.
"""

import ctypes
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stateferry.errors import TransportUnavailable
from stateferry.transport.pieces import AddressArray

IOVEC = np.dtype([("base", np.uint64), ("size", np.uint64)])
"""`struct iovec` on 64-bit Linux."""

MAX_IOVECS = 1024
"""UIO_MAXIOV: more in one call is EINVAL."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

ReadCall = Callable[[int, int, int, int], int]
"""(pid, address of local iovecs, address of remote iovecs, their count) -> bytes read, or -errno."""


def load_process_vm_readv() -> ReadCall:
    """libc's process_vm_readv. The GIL is released during the call.

    Raises TransportUnavailable where there is none (not Linux).
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError) as e:
        raise TransportUnavailable(f"cma: this system has no process_vm_readv ({e}); use nixl") from e
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]

    def read(pid: int, local: int, remote: int, count: int) -> int:
        got = int(function(pid, local, count, remote, count, 0))
        return got if got >= 0 else -ctypes.get_errno()

    return read


def allow_readers() -> bool:
    """Let every process of this user read our memory where Yama allows only ancestors to.

    Only matters, and only succeeds, under `ptrace_scope` 1: it takes back, for this process, the
    restriction that Yama adds. The kernel's other checks (same user) stay.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError, TypeError):
        return False
    return bool(prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) == 0)


class ProcView:
    """What /proc tells about this host and its processes. `root` is another folder in tests."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self.root = root

    def boot_id(self) -> str:
        """Differs between hosts, and between two boots of one host. Equal in all its containers."""
        return self._text("sys/kernel/random/boot_id") or ""

    def pid_namespace(self) -> str:
        """Names the PID namespace of this process; "" where it cannot be read."""
        try:
            return os.readlink(self.root / "self/ns/pid")
        except OSError:
            return ""

    def start_time(self, pid: int) -> int | None:
        """Clock ticks from boot to the start of a process: with the pid, names one life of it."""
        stat = self._text(f"{pid}/stat")
        if stat is None:
            return None
        try:
            # The command, in parentheses, may hold anything; the 22nd field is the 20th after it.
            return int(stat.rpartition(")")[2].split()[19])
        except (IndexError, ValueError):
            return None

    def ptrace_scope(self) -> int | None:
        """Yama's setting, 0 to 3; None where the kernel has no Yama."""
        text = self._text("sys/kernel/yama/ptrace_scope")
        return int(text) if text is not None and text.isdigit() else None

    def _text(self, name: str) -> str | None:
        try:
            # A process's name is cut after 15 bytes, be it in the middle of a character.
            return (self.root / name).read_text(errors="replace").strip()
        except OSError:
            return None


def build_iovecs(
    bases: AddressArray, sizes: AddressArray, ends: list[int], cookie: tuple[int, int]
) -> npt.NDArray[np.void]:
    """The iovecs of all calls in one array: each call's pieces, then `cookie` (address, size)."""
    iovecs = np.empty(len(sizes), dtype=IOVEC)
    iovecs["base"] = bases
    iovecs["size"] = sizes
    return np.insert(iovecs, ends, np.array(cookie, dtype=IOVEC))


def hostname() -> str:
    """This host's name, for messages only."""
    return socket.gethostname()


def elsewhere(boot_id: str, host: str, pid_namespace: str, view: ProcView) -> str:
    """Why a process that said so of itself cannot be named from here; empty: it can."""
    ours = view.boot_id()
    if boot_id != ours:
        return (
            f"the peer runs on another host ({host}, boot id {boot_id}; this is {hostname()}, boot id "
            f"{ours}); use transport nixl"
        )
    namespace = view.pid_namespace()
    if pid_namespace != namespace:
        return (
            f"the peer runs in another PID namespace ({pid_namespace}; this process is in {namespace}); "
            "share it (docker: --pid=container:NAME, Kubernetes: shareProcessNamespace) or use transport nixl"
        )
    return ""


def explain(code: int) -> str:
    """An errno of process_vm_readv in words that fit a transfer under way."""
    reason = {
        errno.EFAULT: "the peer's memory there is no longer mapped",
        errno.ESRCH: "the peer's process is gone",
        errno.EPERM: "permission to read the peer's memory was taken away",
    }.get(code, os.strerror(code))
    return f"{errno.errorcode.get(code, code)}: {reason}"


def explain_permission(pid: int, peer_uid: int, view: ProcView) -> str:
    """Why EPERM, from what /proc shows, and the cure."""
    uid = os.geteuid()
    if uid not in (0, peer_uid):
        return (
            f"process {pid} runs as uid {peer_uid}, this one as uid {uid}; run both engines as the same "
            f"user, give this one CAP_SYS_PTRACE, or use transport nixl"
        )
    scope = view.ptrace_scope()
    if scope:
        cure = (
            "its prctl(PR_SET_PTRACER) did not help"
            if scope == 1
            else "only CAP_SYS_PTRACE may read"
            if scope == 2
            else "nobody may read until the next boot"
        )
        return (
            f"/proc/sys/kernel/yama/ptrace_scope is {scope} ({cure}); set it to 0 with "
            f"`sysctl kernel.yama.ptrace_scope=0`, give this engine CAP_SYS_PTRACE, or use transport nixl"
        )
    return (
        f"the kernel forbids reading process {pid} although the user is the same and ptrace_scope does "
        f"not forbid it: the process is not dumpable, it holds capabilities that this one lacks, or a "
        f"container's seccomp profile blocks process_vm_readv (docker: --cap-add SYS_PTRACE); or use "
        f"transport nixl"
    )
