"""An HTTP server on loopback for as long as a block lasts: the frame of the doubles that clients talk to."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


class LocalServer:
    """Serves from a thread of its own, each request in another. Use as a context manager."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        """Bind a port that the system picks; nothing is answered before the block begins."""
        self._server = ThreadingHTTPServer((HOST, 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
