"""The network between two hosts that `tools/two_hosts.py` makes: late, lossy, in order; and its verdict."""

import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.programs import loaded

ROOT = Path(__file__).parents[2]
PACKETS = [f"packet {number}".encode() for number in range(2000)]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "two_hosts.py")


def test_packets_arrive_late_and_in_order(tool: ModuleType) -> None:
    wire = tool.Wire(delay_s=0.005, loss=0.0, seed=1)
    for number, packet in enumerate(PACKETS[:10]):
        wire.put(number * 0.001, packet)
    assert list(wire.due(0.0049)) == []
    assert wire.wait_s(0.004) == pytest.approx(0.001)
    assert list(wire.due(0.0070001)) == PACKETS[:3]
    assert list(wire.due(1.0)) == PACKETS[3:10]
    assert wire.wait_s(1.0) == 1.0
    assert (wire.carried, wire.lost) == (10, 0)
    assert wire.carried_bytes == sum(map(len, PACKETS[:10]))


def test_as_many_packets_are_lost_as_was_asked_for_and_by_seed_the_same(tool: ModuleType) -> None:
    def lost(seed: int) -> list[bytes]:
        wire = tool.Wire(delay_s=0.0, loss=0.1, seed=seed)
        for packet in PACKETS:
            wire.put(0.0, packet)
        arrived = list(wire.due(0.0))
        assert wire.lost + len(arrived) == len(PACKETS)
        assert 120 < wire.lost < 280
        return arrived

    assert lost(1) == lost(1) != lost(2)


def test_the_cable_carries_both_ways_until_it_is_stopped(tool: ModuleType) -> None:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    cable = tool.Cable(
        tuple(inner.fileno() for _, inner in pairs), tuple(tool.Wire(0.0, 0.0, n) for n in range(2))
    )
    cable.start()
    try:
        for here, there in ((0, 1), (1, 0)):
            pairs[here][0].send(b"hello")
            pairs[there][0].settimeout(20.0)
            assert pairs[there][0].recv(100) == b"hello"
    finally:
        cable.stop()
        for outer, inner in pairs:
            outer.close()
            inner.close()


GOOD: dict[str, Any] = {"tokens": 20, "right": True, "outcome": "received", "bytes": {"state": 500}}


def test_a_good_run_passes(tool: ModuleType) -> None:
    assert tool.verdict([GOOD, GOOD], carried=1000) == []


@pytest.mark.parametrize(
    ("answers", "carried", "says"),
    [
        ([], 1000, "no prompt"),
        ([GOOD | {"right": False}], 1000, "wrong answer"),
        ([GOOD | {"outcome": "failed", "reason": "no way there"}], 1000, "no way there"),
        ([GOOD, GOOD], 999, "only 999 came over the network"),
    ],
)
def test_a_bad_run_does_not(tool: ModuleType, answers: list[Any], carried: int, says: str) -> None:
    (problem,) = tool.verdict(answers, carried)
    assert says in problem
