"""Every transport passes the public conformance suite, over real processes where it is made for them."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from stateferry.testing.conformance import CHECKS
from stateferry.testing.mori_rig import MoriRig
from stateferry.testing.transport_rigs import MemoryRig, ProcessRig, Rig
from stateferry.transport.faults import FaultsTransport
from stateferry.transport.memory import MemoryTransport
from stateferry.transport.mori_options import MoriBackend

MORI: dict[str, dict[str, Any]] = {
    "mori over rdma": {},
    "mori over rdma, without wait_all, at once": {"wait_all": False, "looks": 0},
    "mori over xgmi": {"backend": MoriBackend.XGMI},
}
"""Over a double of the library: it runs on AMD machines only."""

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(
    scope="module",
    params=[
        *("memory", "cma", "faults", "faults over memory", "mooncake", *MORI),
        pytest.param("nixl", marks=needs_nixl),
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
    if request.param in MORI:
        with MoriRig(**MORI[request.param]) as over_the_double:
            yield over_the_double
            assert over_the_double.world.defects == []
        return
    with MemoryRig(made, request.param) if made is not None else ProcessRig(request.param) as rig:
        yield rig


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(rig: Rig, check: str) -> None:
    CHECKS[check](rig)
