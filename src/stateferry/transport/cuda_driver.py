"""The calls of NVIDIA's driver that read another process's device memory: CUDA IPC, launches and events.

Only the driver's library is used, so no version of the runtime has to match torch's, and a launch costs a few
microseconds, not torch's and Triton's tens. But for `make_current` and `retain_context`, the calling thread
must have the device's context current. Numbers stand for the driver's handles.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from stateferry.errors import TransportError, TransportUnavailable

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_NO_TIMING = 2
_PORTABLE = 1
_NOT_READY = 600


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_int, _uint, _size, _address, _pointer = (
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (_uint,),
    "cuDevicePrimaryCtxRetain": (_pointer, _int),
    "cuCtxSetCurrent": (_pointer,),
    "cuMemGetAddressRange_v2": (_pointer, _pointer, _address),
    "cuIpcGetMemHandle": (_pointer, _address),
    "cuIpcOpenMemHandle_v2": (_pointer, _IpcHandle, _uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuMemAlloc_v2": (_pointer, _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyHtoD_v2": (_address, _pointer, _size),
    "cuMemHostAlloc": (_pointer, _size, _uint),
    "cuMemFreeHost": (_pointer,),
    "cuStreamCreate": (_pointer, _uint),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamDestroy_v2": (_pointer,),
    "cuEventCreate": (_pointer, _uint),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventSynchronize": (_pointer,),
    "cuEventDestroy_v2": (_pointer,),
    "cuLaunchKernel": (_pointer, *[_uint] * 7, _pointer, _pointer, _pointer),
}


@dataclass(frozen=True, slots=True)
class Allocation:
    """The driver's allocation that an address lies in. Allocators cut large ones into pieces."""

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function of one context, all of whose parameters are 64 bits wide."""

    function: int
    threads: int
    """In one block."""
    shared_bytes: int


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransportUnavailable(f"cudaipc: NVIDIA's driver is not there: {e}") from e
    for name, arguments in _PROTOTYPES.items():
        # Declared once: a call then takes plain numbers, which is what makes it cheap.
        getattr(library, name).argtypes = arguments
    return library


def _check(result: int, doing: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise TransportError(f"cudaipc: {doing}: {reason} (CUDA error {result})")


def retain_context(device_index: int) -> int:
    """The device's primary context, which torch uses, too; kept for the life of the process. Raises
    TransportError."""
    context = ctypes.c_void_p()
    _check(_driver().cuInit(0), "starting the driver")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device_index), "taking the context")
    return context.value or 0


def make_current(context: int) -> None:
    """For all that follows on this thread. Raises TransportError."""
    _check(_driver().cuCtxSetCurrent(context), "making the device's context current")


# -- memory ----------------------------------------------------------------------------------------------


def allocation_of(address: int) -> Allocation:
    """Where the driver's allocation around `address` starts and how large it is. Raises TransportError."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _check(
        _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address),
        f"looking up the allocation of address {address:#x}",
    )
    return Allocation(base.value, size.value)


def export(allocation: Allocation) -> bytes:
    """A handle with which another process of this host can map the allocation. Raises TransportError."""
    handle = _IpcHandle()
    _check(
        _driver().cuIpcGetMemHandle(ctypes.byref(handle), allocation.address),
        "exporting device memory (memory from torch's expandable segments, or from vLLM's sleep mode, "
        "cannot be exported: start without them, or use transport nixl)",
    )
    return bytes(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES))


def map_handle(handle: bytes) -> int:
    """Map another process's allocation; returns its address here. Raises TransportError."""
    address = ctypes.c_uint64()
    found = _IpcHandle.from_buffer_copy(handle)
    _check(
        _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), found, _LAZY_PEER_ACCESS),
        "mapping the peer's device memory (the devices need peer access; else use transport nixl)",
    )
    return address.value


def unmap(address: int) -> None:
    """Undo `map_handle`; the driver frees the memory with its last user. Raises TransportError."""
    _check(_driver().cuIpcCloseMemHandle(address), "unmapping the peer's device memory")


def allocate(size_bytes: int) -> int:
    """Device memory of our own. Raises TransportError."""
    address = ctypes.c_uint64()
    _check(_driver().cuMemAlloc_v2(ctypes.byref(address), size_bytes), "allocating device memory")
    return address.value


def free(address: int) -> None:
    """Undo `allocate`; waits for the device. Raises TransportError."""
    _check(_driver().cuMemFree_v2(address), "freeing device memory")


def write(address: int, content: bytes) -> None:
    """Write to device memory; returns when it is there. Raises TransportError."""
    _check(_driver().cuMemcpyHtoD_v2(address, content, len(content)), "writing to device memory")
    synchronize(0)  # the call may return when the bytes have left here


def allocate_host(size_bytes: int) -> int:
    """Host memory that kernels of every context can read and write. Raises TransportError."""
    address = ctypes.c_void_p()
    _check(_driver().cuMemHostAlloc(ctypes.byref(address), size_bytes, _PORTABLE), "allocating host memory")
    return address.value or 0


def free_host(address: int) -> None:
    """Undo `allocate_host`. Raises TransportError."""
    _check(_driver().cuMemFreeHost(address), "freeing host memory")


# -- streams, events, launches ---------------------------------------------------------------------------


def create_stream() -> int:
    """A stream of the lowest priority that waits for no other. Raises TransportError."""
    stream = ctypes.c_void_p()
    _check(_driver().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "making a stream")
    return stream.value or 0


def synchronize(stream: int) -> None:
    """Wait until all that was queued is done. Raises TransportError when it failed."""
    _check(_driver().cuStreamSynchronize(stream), "waiting for a stream")


def destroy_stream(stream: int) -> None:
    """Undo `create_stream`. Raises TransportError."""
    _check(_driver().cuStreamDestroy_v2(stream), "ending a stream")


def create_event() -> int:
    """An event that keeps no times. Raises TransportError."""
    event = ctypes.c_void_p()
    _check(_driver().cuEventCreate(ctypes.byref(event), _NO_TIMING), "making an event")
    return event.value or 0


def record(event: int, stream: int) -> None:
    """Queue the event behind what the stream has. Raises TransportError."""
    _check(_driver().cuEventRecord(event, stream), "recording an event")


def happened(event: int) -> bool:
    """Whether all before the event is done. Does not block. Raises TransportError when it failed."""
    result = int(_driver().cuEventQuery(event))
    if result == _NOT_READY:
        return False
    _check(result, "the device failed")
    return True


def wait(event: int) -> None:
    """Until `happened`. Raises TransportError when the device failed."""
    _check(_driver().cuEventSynchronize(event), "the device failed")


def destroy_event(event: int) -> None:
    """Undo `create_event`. Raises TransportError."""
    _check(_driver().cuEventDestroy_v2(event), "ending an event")


class Parameters:
    """A kernel's parameters, where the driver reads them during a launch: addresses, and then zeros for what
    the compiler adds (Triton's scratch pointers, which a kernel without scratch does not look at)."""

    ADDED = 4

    def __init__(self, addresses: Sequence[int]) -> None:
        count = len(addresses) + self.ADDED
        self._values = (ctypes.c_uint64 * count)(*addresses)
        first = ctypes.addressof(self._values)
        size = ctypes.sizeof(ctypes.c_uint64)
        self._pointers = (ctypes.c_void_p * count)(*(first + i * size for i in range(count)))
        self.address = ctypes.addressof(self._pointers)


def launch(kernel: Kernel, grid: tuple[int, int], parameters: Parameters, stream: int) -> None:
    """Queue a kernel. Does not block. Raises TransportError."""
    result = _driver().cuLaunchKernel(
        kernel.function,
        grid[0],
        grid[1],
        1,
        kernel.threads,
        1,
        1,
        kernel.shared_bytes,
        stream,
        parameters.address,
        None,
    )
    _check(result, "launching the copy")
