"""Every transport passes the public conformance suite, over real processes where it is made for them."""

import importlib.util
from collections.abc import Iterator

import pytest

from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_rigs import MemoryRig, ProcessRig, Rig
from stateferry.transport.faults import FaultsTransport
from stateferry.transport.memory import MemoryTransport

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        "cma",
        "faults",
        "faults over memory",
        pytest.param("nixl", marks=needs_nixl),
        "mooncake",
    ],
    ids=lambda name: name,
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """`faults` without faults is as good as what it wraps: here `cma`, and `memory`."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)  # or a library of the system is missing
    in_process = {
        "memory": MemoryTransport,
        "faults over memory": lambda: FaultsTransport(inner=MemoryTransport()),
    }
    made = in_process.get(request.param)
    with MemoryRig(made, request.param) if made is not None else ProcessRig(request.param) as rig:
        yield rig


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(rig: Rig, check: str) -> None:
    CHECKS[check](rig)
