"""A read that neither ends nor can be stopped: its blocks belong to nobody, whoever asks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from harness import HYBRID, Pair
from simulated_model import answer
from vllm.v1.request import RequestStatus

from stateferry.vllm.stats import StateFerryStats

pytestmark = pytest.mark.scheduler

GAUGE = "stateferry_quarantined_transfers"


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


class Gauge:
    """Every value that the scheduler half told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[float] = []
        right = StateFerryStats.set

        def tell(stats: StateFerryStats, name: str, value: float, label: str = "") -> None:
            if name == GAUGE:
                self.values.append(value)
            right(stats, name, value, label)

        monkeypatch.setattr(StateFerryStats, "set", tell)


@pytest.mark.parametrize("leaves", [False, True], ids=["client waits", "client leaves"])
def test_blocks_in_quarantine_are_neither_freed_nor_forgotten(
    leaves: bool, monkeypatch: pytest.MonkeyPatch, leap: Callable[[float], None]
) -> None:
    gauge = Gauge(monkeypatch)
    with Pair(HYBRID, transfer_timeout_s=10, lease_s=30) as pair:
        tap = pair.consumer.tap
        tap.held = tap.deaf = True
        params: dict[str, Any] = pair.prefill(prompt_of(14))
        request_id = pair.consumer.add(prompt_of(14), params=params, max_tokens=4).request_id
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        leap(11)
        pair.run_until(lambda: 1 in gauge.values, "the quarantine to be told")
        # The producer is done with it long before its lease is over.
        pair.run_until(lambda: not pair.producer.busy, "the producer to be idle")
        held = pair.consumer.all_free - pair.consumer.free_blocks
        assert held == 4 + 3
        if leaves:
            pair.consumer.abort(request_id)
        plain = pair.consumer.add(prompt_of(9, 1), max_tokens=30).request_id
        pair.run_until(lambda: pair.consumer.finished[plain].reason is not None, "a plain request")
        assert pair.consumer.finished[plain].tokens == answer(prompt_of(9, 1), 30)
        assert pair.consumer.all_free - pair.consumer.free_blocks >= held
        if not leaves:
            assert pair.consumer.status(request_id) is RequestStatus.WAITING_FOR_REMOTE_KVS
        tap.held = False
        pair.run()
        if not leaves:
            assert pair.consumer.finished[request_id].tokens == answer(prompt_of(14), 4)
        assert pair.consumer.ferry.quarantined_count == 0
        pair.check_idle()
        assert gauge.values[0] == 1
