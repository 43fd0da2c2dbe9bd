"""An HTTP server on loopback for as long as a block lasts: the frame of the doubles that clients talk to."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

HOST = "127.0.0.1"


class LocalServer:
    """Serves from a thread of its own, each request in another. Use as a context manager."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str = HOST, port: int = 0) -> None:
        """Bind; nothing is answered before the block begins. Port 0: the system picks."""
        self._server = _Server((host, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{host}:{self.port}"

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


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
