"""What the ferry needs from the memory that it moves: look at it, and (in tests) fill it."""

from typing import Protocol

from stateferry.layout.spec import Pieces


class LocalMemory(Protocol):
    """This rank's registered regions. Implemented where tensors are known."""

    def read(self, region: int, offset: int, size: int) -> memoryview:
        """Bytes of a region, as they are now. May copy (device memory). Ferry thread."""
        ...

    def fill(self, pieces: Pieces, byte: int) -> None:
        """Overwrite the local side of all pieces with one byte value. Ferry thread, tests only."""
        ...
