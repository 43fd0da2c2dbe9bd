"""A worker half tells its ferry when device work can no longer write into a load's blocks."""

import warnings
from types import SimpleNamespace

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from stateferry.vllm.metadata import StateFerryMetadata
    from stateferry.vllm.worker import WorkerHalf

from stateferry.config import Config
from stateferry.errors import TransportError
from stateferry.ferry import Fence
from stateferry.ids import EngineId, RequestId
from stateferry.session import Load, Orders
from stateferry.transport import MemoryKind

LOADS = Orders(loads=(Load(RequestId("r"), 0, ()),))


class Device:
    """As much of `torch.cuda.Event` as a fence needs."""

    works = True
    done = False

    def record(self) -> None:
        if not Device.works:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def query(self) -> bool:
        return Device.done


def submitted(monkeypatch: pytest.MonkeyPatch) -> tuple[Orders, Fence]:
    monkeypatch.setattr(torch.cuda, "Event", Device)
    half = WorkerHalf(Config(), EngineId("d"), SimpleNamespace(), SimpleNamespace())
    half._device = MemoryKind.CUDA
    found: list[tuple[Orders, Fence]] = []
    half._ferry = SimpleNamespace(submit=lambda *order: found.append(order))  # type: ignore[assignment]
    half.take_orders(StateFerryMetadata(1, LOADS))
    ((orders, fence),) = found
    return orders, fence


def test_loads_wait_for_what_the_device_was_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "done", False)
    _, fence = submitted(monkeypatch)
    assert not fence()
    monkeypatch.setattr(Device, "done", True)
    assert fence()


def test_loads_of_a_device_that_failed_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the orders of that step were lost, and vLLM waited for them."""
    monkeypatch.setattr(Device, "works", False)
    orders, fence = submitted(monkeypatch)
    assert orders == LOADS
    with pytest.raises(TransportError, match="the device failed: CUDA error"):
        fence()
