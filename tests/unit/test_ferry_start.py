"""Whatever goes wrong before the ferry runs, `start` says so: an engine must not wait for ever."""

import pytest

from stateferry.testing.peers import EngineRank
from stateferry.transport.base import MemoryRegion, TransportOptions
from stateferry.transport.memory import MemoryTransport


class _HalfALibrary(MemoryTransport):
    def register(self, regions: tuple[MemoryRegion, ...]) -> bytes:
        raise ImportError("half a library")


@pytest.mark.timeout(10)
def test_an_error_of_a_library_ends_the_start() -> None:
    with (
        pytest.raises(ImportError, match="half a library"),
        EngineRank("p", transport=_HalfALibrary(TransportOptions())),
    ):
        pass
