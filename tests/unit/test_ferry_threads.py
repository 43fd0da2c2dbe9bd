"""Control sockets are one thread's alone, and requests that arrive together share one hand-shake."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from stateferry.ferry.link import Link
from stateferry.testing.peers import EngineRank

TABLES = ((1, 2, 3), (4,))
LOCAL = ((5, 6, 7), (8,))
REQUESTS = 20
CALLS = ("send", "send_multipart", "recv", "recv_multipart", "close")


def threads_of_sockets(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Which threads use which socket from now on. Sockets are kept, so that no id comes twice."""
    seen: dict[int, set[int]] = {}
    kept: list[Any] = []

    def recording(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            kept.append(self)
            seen.setdefault(id(self), set()).add(threading.get_ident())
            return right(self, *arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(zmq.Socket, name, recording(getattr(zmq.Socket, name)))
    return seen


def hand_off_many() -> None:
    with EngineRank("p") as producer, EngineRank("d") as consumer:
        offers = {f"r{i}": producer.grant(40, TABLES, f"p{i}") for i in range(REQUESTS)}
        for request_id, offer in offers.items():
            consumer.open(request_id, offer)
            consumer.load(request_id, offer, LOCAL)
        assert not consumer.wait_idle().failed
        assert len(producer.wait_idle().sent) == REQUESTS


def test_no_control_socket_is_shared_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_of_sockets(monkeypatch)
    hand_off_many()
    assert len(seen) >= 2, "neither side's sockets were seen: a test of nothing"
    assert [threads for threads in seen.values() if len(threads) > 1] == []


def test_a_socket_of_two_threads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_of_sockets(monkeypatch)
    right = Link.send

    def elsewhere(self: Link, message: Any) -> bool:
        sender = threading.Thread(target=right, args=(self, message))
        sender.start()
        sender.join()
        return True

    monkeypatch.setattr(Link, "send", elsewhere)
    hand_off_many()
    assert any(len(threads) > 1 for threads in seen.values())


def test_requests_that_arrive_together_share_one_hand_shake(monkeypatch: pytest.MonkeyPatch) -> None:
    greetings: list[int] = []
    right = Link.greet
    monkeypatch.setattr(Link, "greet", lambda self, *more: (greetings.append(1), right(self, *more)))
    hand_off_many()
    assert greetings == [1]
