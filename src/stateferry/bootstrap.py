"""Where routers ask before they send both legs at once: `GET /query` says where a prefill engine listens.

    {"0": {"engine_id": "NAME@IP:PORT", "worker_addr": {"0": {"0": "tcp://IP:PORT"}}}}

By data-parallel rank of the engines behind one HTTP port, then by tensor-parallel and by pipeline rank. The
in-tree Mooncake connector answers like this; its routers read `engine_id`, and put it into the decode leg as
`remote_engine_id`. They ask once and keep the answer, so there is none before all of it is known.
"""

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Mapping, Sequence

import h11

from stateferry.errors import ConfigError
from stateferry.ids import EngineId
from stateferry.wire import RankAddress, authority, engine_place

logger = logging.getLogger(__name__)

PATH = b"/query"
MAX_CONNECTIONS = 64
"""More at a time are closed unread; routers ask again."""
MAX_HEAD_BYTES = 8192
ASK_S = 5.0
"""From accepting a connection to the last byte of its answer: whoever is slower is hung up on."""
AGAIN_S = 1.0
"""Pause where the system has no file left for a connection."""
STOP_S = 5.0


def query_answer(engines: Mapping[int, tuple[EngineId, Sequence[RankAddress]]]) -> bytes:
    """What `/query` says of these engines. Key: data-parallel rank. Value: name, and addresses by
    tensor-parallel rank."""
    return json.dumps(
        {
            rank: {
                "engine_id": engine_place(name, addresses[0]),
                "worker_addr": {
                    place: {0: f"tcp://{authority(address.host, address.port)}"}
                    for place, address in enumerate(addresses)
                },
            }
            for rank, (name, addresses) in engines.items()
        }
    ).encode()


class BootstrapService:
    """An HTTP server of one page, in a thread of its own. Nothing that it is sent ends more than itself.

    `start`, `tell` and `stop` from any thread; none of them waits for a client.
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind; whoever asks before `start` waits. Port 0: the system picks. Raises ConfigError."""
        ipv6 = ":" in host
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        # `::` is for everybody, as it is for control sockets.
        dualstack = ipv6 and socket.has_dualstack_ipv6()
        try:
            self._listener = socket.create_server((host, port), family=family, dualstack_ipv6=dualstack)
        except OSError as e:
            raise ConfigError(
                f"cannot answer routers on {host}:{port}: {e}. Set 'bootstrap_port' in "
                "kv_connector_extra_config to a free port, or to 0 to answer none"
            ) from e
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._answer: bytes | None = None
        self._open: set[asyncio.Task[None]] = set()
        """A task for each connection."""
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="stateferry-bootstrap", daemon=True)

    def tell(self, answer: bytes) -> None:
        """What is answered from now on, JSON; until then it is status 503, after which routers ask again."""
        self._answer = answer

    def start(self) -> None:
        """Begin to answer."""
        self._loop = self._runner.get_loop()
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and the port. Waits `STOP_S` at most. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(STOP_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._serve())
        except Exception:
            logger.exception("/query is answered no more; the engine goes on")

    async def _serve(self) -> None:
        self._listen()
        await self._ended.wait()
        self._loop.remove_reader(self._listener)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _listen(self) -> None:
        if not self._ended.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Somebody connects. What is accepted has a task, and what has a task is closed when that ends."""
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            logger.warning("no router can be answered for %g s: %s", AGAIN_S, e)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(AGAIN_S, self._listen)
            return
        if len(self._open) >= MAX_CONNECTIONS:
            client.close()
            return
        client.setblocking(False)
        task = self._loop.create_task(self._converse(client))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        task.add_done_callback(lambda _: client.close())

    async def _converse(self, client: socket.socket) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                await self._answer_one(client)
        except (OSError, TimeoutError):
            pass  # it left, or is too slow
        except Exception:
            logger.exception("a router was not answered")

    async def _answer_one(self, client: socket.socket) -> None:
        """One question, one answer, the end."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await self._loop.sock_recv(client, MAX_HEAD_BYTES))
        except h11.RemoteProtocolError as e:
            status, content = e.error_status_hint, _words(str(e))
        else:
            if not isinstance(event, h11.Request):
                return  # it left
            status, content = self._answer_to(event)
            if event.method == b"HEAD":
                content = b""
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
        response = h11.Response(status_code=status, headers=[*headers, ("Connection", "close")])
        parts = (response, h11.Data(content), h11.EndOfMessage())
        await self._loop.sock_sendall(client, b"".join(http.send(part) or b"" for part in parts))
        client.shutdown(socket.SHUT_WR)
        while await self._loop.sock_recv(client, MAX_HEAD_BYTES):
            pass  # until it has closed, too: what is unread would make the system throw the answer away

    def _answer_to(self, asked: h11.Request) -> tuple[int, bytes]:
        if asked.target.partition(b"?")[0] != PATH:
            return 404, _words("there is nothing here but /query")
        if asked.method != b"GET":
            return 405, _words("/query is asked with GET")
        if self._answer is None:
            return 503, _words("this engine does not know yet where its ranks listen; ask again")
        return 200, self._answer


def _words(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
