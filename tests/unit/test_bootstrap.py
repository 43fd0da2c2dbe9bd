"""The page that routers ask before they send both legs at once: what it says, to whom, and what it bears."""

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from stateferry import bootstrap
from stateferry.bootstrap import MAX_CONNECTIONS, MAX_HEAD_BYTES, BootstrapService, query_answer
from stateferry.errors import ConfigError
from stateferry.ids import EngineId, Epoch
from stateferry.wire import RankAddress, parse_promise

HOST = "127.0.0.1"
RANKS = [RankAddress(HOST, 5600, Epoch(7)), RankAddress(HOST, 5601, Epoch(8))]
ANSWER = query_answer({0: (EngineId("e"), RANKS)})


@pytest.fixture
def service() -> Iterator[BootstrapService]:
    """Started, and with nothing to tell yet."""
    made = BootstrapService(HOST, 0)
    made.start()
    yield made
    made.stop()


def url(service: BootstrapService, path: str = "/query") -> str:
    return f"http://{HOST}:{service.port}{path}"


def ask(service: BootstrapService, path: str = "/query", method: str = "GET") -> httpx.Response:
    return httpx.request(method, url(service, path), timeout=30.0, trust_env=False)


def said_to(service: BootstrapService, sent: bytes) -> bytes:
    """All that comes back for these bytes, until the service hangs up."""
    with socket.create_connection((HOST, service.port), timeout=30.0) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_router_reads_what_a_decode_leg_can_use(service: BootstrapService) -> None:
    """The form is that of the in-tree Mooncake connector; the name is one that `parse_promise` takes."""
    service.tell(query_answer({0: (EngineId("e_dp0"), RANKS), 1: (EngineId("e_dp1"), RANKS[1:])}))
    answer = ask(service)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert told["0"]["worker_addr"] == {
        "0": {"0": "tcp://127.0.0.1:5600"},
        "1": {"0": "tcp://127.0.0.1:5601"},
    }
    assert set(told) == {"0", "1"}
    for rank, port in (("0", 5600), ("1", 5601)):
        # As vllm-router, llm-d's sidecar and vLLM's example proxy write it.
        leg = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "xfer-8d7f5a0e-4d0f-4a5c-9d6a-0d7b2f6f3a11",
            "remote_bootstrap_addr": f"http://{HOST}:{service.port}",
            "remote_engine_id": told[rank]["engine_id"],
        }
        promise = parse_promise(leg)
        assert promise is not None
        assert (promise.address.host, promise.address.port) == (HOST, port)


def test_an_ipv6_address_is_one_that_a_decode_leg_can_use() -> None:
    told = json.loads(query_answer({0: (EngineId("e"), [RankAddress("fe80::1%eth0", 5600, Epoch(7))])}))
    assert told["0"]["worker_addr"]["0"]["0"] == "tcp://[fe80::1%eth0]:5600"
    promise = parse_promise({"transfer_id": "x", "remote_engine_id": told["0"]["engine_id"]})
    assert promise is not None
    assert promise.address.host == "fe80::1%eth0"


def test_who_asks_before_the_ranks_are_known_is_told_to_ask_again(service: BootstrapService) -> None:
    """vllm-router asks again after a status like this, and keeps an empty answer for ever."""
    early = ask(service)
    assert early.status_code == 503
    assert "ask again" in early.json()["error"]
    service.tell(ANSWER)
    assert ask(service).content == ANSWER


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/query?x=1", 200),
        ("GET", "/", 404),
        ("GET", "/metrics", 404),
        ("POST", "/register", 404),
        ("POST", "/query", 405),
        ("HEAD", "/query", 405),
        ("HEAD", "/", 404),
    ],
)
def test_there_is_one_page(service: BootstrapService, method: str, path: str, status: int) -> None:
    service.tell(ANSWER)
    answer = ask(service, path, method)
    assert answer.status_code == status
    assert (answer.content == ANSWER) == (status == 200)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"GET /query\r\n\r\n",
        b"GET /query HTTP/1.1\r\n\r\n",  # no Host
        b"GET /query HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /" + b"q" * 2 * MAX_HEAD_BYTES,
        b"GET /query HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * 100_000,
        b"POST /query HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_garbage_gets_an_error_or_nothing_and_the_next_one_an_answer(
    service: BootstrapService, sent: bytes
) -> None:
    service.tell(ANSWER)
    said = said_to(service, sent)
    assert said[:10] in (b"", b"HTTP/1.1 4", b"HTTP/1.1 5")
    assert ANSWER not in said
    assert ask(service).content == ANSWER


def test_who_says_nothing_is_hung_up_on(service: BootstrapService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ASK_S", 0.05)
    for sent in (b"", b"GET /query HTTP/1.1\r\n", b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection((HOST, service.port), timeout=30.0) as client:
            client.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):
                    pass  # a service that waited for more would let this time out


def fill(service: BootstrapService) -> list[socket.socket]:
    """As many clients as there may be, none of which says anything."""
    return [socket.create_connection((HOST, service.port), timeout=30.0) for _ in range(MAX_CONNECTIONS)]


def test_only_so_many_are_heard_at_a_time_and_the_others_afterwards(service: BootstrapService) -> None:
    service.tell(ANSWER)
    silent = fill(service)
    try:
        with pytest.raises(httpx.TransportError):
            ask(service)
    finally:
        for client in silent:
            client.close()
    answers = (ask_again(service) for _ in range(1000))
    assert next(answer for answer in answers if answer) == ANSWER


def ask_again(service: BootstrapService) -> bytes:
    try:
        return ask(service).content
    except httpx.TransportError:
        return b""


def test_without_a_bound_everybody_would_be_heard(
    service: BootstrapService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant."""
    service.tell(ANSWER)
    monkeypatch.setattr(bootstrap, "MAX_CONNECTIONS", 10 * MAX_CONNECTIONS)
    silent = fill(service)
    assert ask(service).content == ANSWER
    for client in silent:
        client.close()


def test_an_engine_that_binds_everything_answers_both_kinds_of_address() -> None:
    made = BootstrapService("::", 0)
    made.tell(ANSWER)
    made.start()
    try:
        for host in (HOST, "[::1]"):
            answer = httpx.get(f"http://{host}:{made.port}/query", timeout=30.0, trust_env=False)
            assert answer.content == ANSWER
    finally:
        made.stop()


def test_a_port_that_is_taken_is_named_and_so_is_its_setting() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use.*'bootstrap_port'"):
            BootstrapService(HOST, port)
    with pytest.raises(ConfigError, match=r"cannot answer routers on 203\.0\.113\.7"):
        BootstrapService("203.0.113.7", 0)


def test_an_engine_that_comes_back_answers_at_the_same_port(service: BootstrapService) -> None:
    """Its last connections linger; and nobody answers between the two lives."""
    service.tell(ANSWER)
    assert ask(service).content == ANSWER
    waits = socket.create_connection((HOST, service.port), timeout=30.0)
    service.stop()
    with pytest.raises(httpx.ConnectError):
        ask(service)
    again = BootstrapService(HOST, service.port)
    again.start()
    try:
        assert ask(again).status_code == 503
        other = query_answer({0: (EngineId("f"), RANKS)})
        again.tell(other)
        assert ask(again).content == other
    finally:
        again.stop()
        waits.close()


def test_stopping_leaves_no_thread_and_may_be_said_twice(service: BootstrapService) -> None:
    waits = socket.create_connection((HOST, service.port), timeout=30.0)
    service.stop()
    service.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "stateferry-bootstrap"]
    with contextlib.suppress(ConnectionResetError):
        assert waits.recv(1) == b""
    waits.close()
    never_started = BootstrapService(HOST, 0)
    never_started.stop()
    with pytest.raises(httpx.ConnectError):
        ask(never_started)


class OutOfFiles:
    """A listener on a machine that has no file left, for a while."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.refused = 0

    def accept(self) -> Any:
        if self.refused == 2:
            return self._listener.accept()
        self.refused += 1
        raise OSError(errno.EMFILE, "Too many open files")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_machine_without_a_file_left_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in a loop without a pause, which is what a listener that stays readable makes of it."""
    monkeypatch.setattr(bootstrap, "AGAIN_S", 0.05)
    made = BootstrapService(HOST, 0)
    listener = OutOfFiles(made._listener)
    monkeypatch.setattr(made, "_listener", listener)
    made.tell(ANSWER)
    made.start()
    try:
        assert ask(made).content == ANSWER
    finally:
        made.stop()
    assert listener.refused == 2
    assert caplog.text.count("no router can be answered for 0.05 s") == 2


def test_a_defect_in_an_answer_ends_that_answer_alone(
    service: BootstrapService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service.tell(ANSWER)
    with monkeypatch.context() as patch:
        patch.setattr(service, "_answer_to", lambda asked: 1 // 0)
        with pytest.raises(httpx.TransportError):
            ask(service)
    assert "ZeroDivisionError" in caplog.text
    assert ask(service).content == ANSWER
