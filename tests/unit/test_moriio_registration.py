"""Registration: what a router hears, again and again, whatever becomes of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from stateferry.moriio import Address, Moriio, Registration, message

MORIIO = Moriio(Address("10.0.0.7", 6301, 61005), 20005, Address("10.0.0.1", 36367, 0), ())
SOON_S = 0.01
PATIENCE_MS = 20_000


@contextmanager
def router(port: int | None = None) -> Iterator["zmq.Socket[bytes]"]:
    """Its context ends with it, and with the context its port is free again."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        yield socket


def port_of(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def test_what_a_router_hears() -> None:
    said = msgspec.msgpack.decode(message(MORIIO, produces=True, data_parallel_size=2, tp_size=4))
    assert said == {
        "type": "P",
        "http_address": "10.0.0.7:20005",
        "zmq_address": "host:10.0.0.7,handshake:6301,notify:61005",
        "dp_size": 2,
        "tp_size": 4,
        "transfer_mode": "READ",
    }
    other = msgspec.msgpack.decode(message(MORIIO, produces=False, data_parallel_size=1, tp_size=1))
    assert other["type"] == "D"


def test_a_router_hears_it_again_and_again() -> None:
    with router() as socket:
        registration = Registration("127.0.0.1", port_of(socket), b"here", SOON_S)
        registration.start()
        try:
            for _ in range(3):
                assert socket.recv_multipart()[1:] == [b"here"]
        finally:
            registration.stop()
        registration.stop()


def test_a_router_that_comes_later_or_comes_back_is_told_of_now() -> None:
    with router() as socket:
        port = port_of(socket)
    registration = Registration("127.0.0.1", port, b"here", SOON_S)
    registration.start()
    try:
        for _ in range(2):
            with router(port) as socket:
                assert socket.recv_multipart()[1:] == [b"here"]
    finally:
        registration.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host!", "::1"])
def test_nobody_there_ends_nothing_and_stopping_is_quick(host: str) -> None:
    """W22: registration that failed ended the engine that it was for."""
    before = threading.active_count()
    registration = Registration(host, 9, b"here", SOON_S)
    registration.start()
    registration.stop()
    assert threading.active_count() == before
