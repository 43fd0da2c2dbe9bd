"""Whatever goes wrong before the ferry runs, `start` says so: an engine must not wait for ever."""

import pytest

from stateferry.testing.peers import EngineRank
from stateferry.transport.base import MemoryRegion, TransportOptions
from stateferry.transport.memory import MemoryTransport


class _NativePanic(BaseException):
    """As extensions written in Rust raise it: no Exception."""


class _HalfALibrary(MemoryTransport):
    error: type[BaseException] = ImportError

    def register(self, regions: tuple[MemoryRegion, ...]) -> bytes:
        raise self.error("half a library")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("error", [ImportError, SystemExit, _NativePanic])
def test_an_error_of_a_library_ends_the_start(error: type[BaseException]) -> None:
    library = _HalfALibrary(TransportOptions())
    library.error = error
    with pytest.raises(error, match="half a library"), EngineRank("p", transport=library):
        pass
