"""A proxy that speaks MoRIIO's READ protocol as documented, for tests. One request at a time.

Engines register with it; it asks a prefill engine, then a decode engine, under an id that names both. As
proxies of MoRIIO's users do, it builds the decode leg's dictionary itself from three fields of the first
answer, or carries all of it (`carries_whole`).
"""

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import msgspec
import zmq

from stateferry.moriio import parse_address, request_id
from stateferry.testing.local_server import HOST, LocalServer

PICKED = ("remote_engine_id", "remote_block_ids", "transfer_id")
POLL_MS = 50
LEG_TIMEOUT_S = 120.0


class Instance(NamedTuple):
    """An engine that registered."""

    http_address: str
    zmq_address: str
    dp_size: int
    tp_size: int


class Legs(NamedTuple):
    """What became of one request, for tests to look at."""

    request_id: str
    prefill_answer: Mapping[str, Any]
    decode_params: Mapping[str, Any]


class MoriioProxy(LocalServer):
    """Listens from `__enter__` to `__exit__`."""

    def __init__(
        self,
        ping_port: int,
        *,
        carries_whole: bool = False,
        between: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """`between` may change what the decode leg is sent."""
        self.carries_whole = carries_whole
        self.between = between
        self.legs: list[Legs] = []
        self._instances: dict[str, dict[str, Instance]] = {"P": {}, "D": {}}
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._ping_port = ping_port
        self._http = httpx.Client(timeout=LEG_TIMEOUT_S, trust_env=False)
        self._pings = threading.Thread(target=self._listen, name="moriio-proxy-pings", daemon=True)
        super().__init__(_handler(self))

    def __enter__(self) -> Self:
        self._pings.start()
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        super().__exit__(exc_type, exc, traceback)
        self._pings.join()
        self._http.close()

    def wait_registered(self, timeout_s: float) -> bool:
        """Whether engines of both kinds have registered within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: all(self._instances.values()), timeout_s)

    def complete(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Both legs of one request; the second one's answer, or the first one's if that failed."""
        with self._changed:
            (prefill, *_), (decode, *_) = (list(self._instances[kind].values()) for kind in "PD")
        name = request_id(
            parse_address(prefill.zmq_address), parse_address(decode.zmq_address), uuid.uuid4().hex
        )
        transfer_id = f"tx-{uuid.uuid4().hex}"
        first = {key: value for key, value in body.items() if key != "stream_options"}
        first |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        first["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "transfer_id": transfer_id,
            "remote_dp_size": decode.dp_size,
            "remote_tp_size": decode.tp_size,
        }
        answer = self._ask(prefill, path, first, name)
        if answer.status_code != 200:
            return answer
        given = answer.json()["kv_transfer_params"]
        params = dict(given) if self.carries_whole else {key: given[key] for key in PICKED}
        params |= {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_dp_size": prefill.dp_size,
            "remote_tp_size": prefill.tp_size,
        }
        if self.between is not None:
            params = self.between(params)
        self.legs.append(Legs(name, given, params))
        return self._ask(decode, path, {**body, "kv_transfer_params": params}, name)

    def _ask(self, instance: Instance, path: str, body: Mapping[str, Any], name: str) -> httpx.Response:
        url = f"http://{instance.http_address}{path}"
        return self._http.post(url, json=body, headers={"X-Request-Id": name})

    def _listen(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://{HOST}:{self._ping_port}")
            while not self._stopped.is_set():
                if socket.poll(POLL_MS):
                    self._register(msgspec.msgpack.decode(socket.recv_multipart()[-1]))

    def _register(self, said: Mapping[str, Any]) -> None:
        if said["transfer_mode"] != "READ":
            return
        instance = Instance(
            said["http_address"], said["zmq_address"], int(said["dp_size"]), int(said["tp_size"])
        )
        with self._changed:
            self._instances[said["type"]][instance.http_address] = instance
            self._changed.notify_all()


def _handler(proxy: MoriioProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Passes requests on."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """A request for completions of any kind."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = proxy.complete(self.path, body)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: tests look at `legs`."""

    return Handler
