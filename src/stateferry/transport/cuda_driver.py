"""The calls of NVIDIA's driver that let one process read another's device memory (CUDA IPC).

Only the driver's library is used, so no version of the runtime has to match torch's. The calling
thread must have the device's context current (`torch.cuda.device`).
"""

import ctypes
from dataclasses import dataclass
from functools import cache

from stateferry.errors import TransportError, TransportUnavailable

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The driver's allocation that an address lies in. Allocators cut large ones into pieces."""

    address: int
    size_bytes: int


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransportUnavailable(f"cudaipc: NVIDIA's driver is not there: {e}") from e


def _check(result: int, doing: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise TransportError(f"cudaipc: {doing}: {reason} (CUDA error {result})")


def allocation_of(address: int) -> Allocation:
    """Where the driver's allocation around `address` starts and how large it is. Raises TransportError."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _check(
        _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)),
        f"looking up the allocation of address {address:#x}",
    )
    return Allocation(base.value, size.value)


def export(allocation: Allocation) -> bytes:
    """A handle with which another process of this host can map the allocation. Raises TransportError."""
    handle = _IpcHandle()
    _check(
        _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(allocation.address)),
        "exporting device memory (memory from torch's expandable segments, or from vLLM's sleep mode, "
        "cannot be exported: start without them, or use transport nixl)",
    )
    return bytes(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES))


def map_handle(handle: bytes) -> int:
    """Map another process's allocation; returns its address here. Raises TransportError."""
    address = ctypes.c_uint64()
    found = _IpcHandle.from_buffer_copy(handle)
    _check(
        _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), found, ctypes.c_uint(_LAZY_PEER_ACCESS)),
        "mapping the peer's device memory (the devices need peer access; else use transport nixl)",
    )
    return address.value


def unmap(address: int) -> None:
    """Undo `map_handle`; the driver frees the memory with its last user. Raises TransportError."""
    _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "unmapping the peer's device memory")


def copy_to_host(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy from device memory to pinned host memory. Does not block. Raises TransportError."""
    _check(
        _driver().cuMemcpyDtoHAsync_v2(
            ctypes.c_void_p(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size_bytes),
            ctypes.c_void_p(stream),
        ),
        "copying to the host",
    )
