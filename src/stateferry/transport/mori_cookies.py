"""The page that peers read to know whether this life of the engine still holds, and where theirs arrive.

One page a transport, registered once: our cookie, then landings for peers' cookies. It is the first memory
that is registered, so that it has the same number in every engine: an XGMI back end that takes one peer's
memory for another's of the same number is then found out by the wrong cookie before anything is read.
"""

import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from stateferry.transport.base import MemoryKind, MemoryRegion
from stateferry.transport.mori_request import Request

COOKIE_BYTES = 32
LANDINGS = 1023
PAGE_BYTES = COOKIE_BYTES * (1 + LANDINGS)


class Page(ABC):
    """Memory of `PAGE_BYTES` bytes."""

    region: MemoryRegion

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Bytes as they are now."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Overwrite bytes, before this returns."""


class CpuPage(Page):
    """In this process's memory."""

    def __init__(self) -> None:
        self._bytes = np.zeros(PAGE_BYTES, dtype=np.uint8)
        self.region = MemoryRegion(self._bytes.ctypes.data, PAGE_BYTES)

    def read(self, offset: int, size: int) -> bytes:
        return self._bytes[offset : offset + size].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)


class DevicePage(Page):
    """On a GPU: XGMI moves nothing else. On a stream of its own, which waits for no forward."""

    def __init__(self, device_index: int) -> None:
        import torch

        self._torch: Any = torch
        self._stream: Any = torch.cuda.Stream(device_index)
        with torch.cuda.stream(self._stream):
            self._bytes: Any = torch.zeros(PAGE_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")
        self._stream.synchronize()
        self.region = MemoryRegion(self._bytes.data_ptr(), PAGE_BYTES, MemoryKind.CUDA, device_index)

    def read(self, offset: int, size: int) -> bytes:
        with self._torch.cuda.stream(self._stream):
            return bytes(self._bytes[offset : offset + size].cpu().numpy())

    def write(self, offset: int, data: bytes) -> None:
        with self._torch.cuda.stream(self._stream):
            self._bytes[offset : offset + len(data)] = self._torch.frombuffer(
                bytearray(data), dtype=self._torch.uint8
            ).to(self._bytes.device)
        self._stream.synchronize()


class Landing:
    """Room for one peer's cookie. It is used again only when no request writes to it any more."""

    def __init__(self, page: Page, offset: int) -> None:
        self.offset = offset
        self.requests: list[Request] = []
        self._page = page

    def clear(self) -> None:
        """Forget what came before."""
        self.requests.clear()
        self._page.write(self.offset, bytes(COOKIE_BYTES))

    def content(self) -> bytes:
        """What has arrived."""
        return self._page.read(self.offset, COOKIE_BYTES)

    @property
    def over(self) -> bool:
        """Whether nothing can land here any more."""
        return all(request.over for request in self.requests)


class Cookies:
    """Our cookie and the landings of one transport."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.ours = secrets.token_bytes(COOKIE_BYTES)
        page.write(0, self.ours)
        self._free = deque(Landing(page, COOKIE_BYTES * (1 + i)) for i in range(LANDINGS))
        self._given: list[Landing] = []

    def take(self) -> Landing | None:
        """One that nothing writes to; None: all are in use, come again."""
        for landing in [landing for landing in self._given if landing.over]:
            self._given.remove(landing)
            self._free.append(landing)
        if not self._free:
            return None
        landing = self._free.popleft()
        landing.clear()
        return landing

    def give(self, landing: Landing) -> None:
        """Nobody looks at it any more."""
        self._given.append(landing)

    def wipe(self) -> None:
        """This life has ended: every later read of a peer fails."""
        self.page.write(0, bytes(COOKIE_BYTES))


def page_for(regions: Sequence[MemoryRegion], on_device: bool) -> Page:
    """Where the cookie of a transport with these regions lies. `on_device`: with the regions, if on a GPU."""
    devices = [region.device_index for region in regions if region.kind is MemoryKind.CUDA]
    return DevicePage(devices[0]) if on_device and devices else CpuPage()
