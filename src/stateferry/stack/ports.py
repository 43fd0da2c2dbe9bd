"""Ports from the system, held until the process that was given one has bound it."""

import socket
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


class HeldPort:
    """A free TCP port that no other process is given while this object is open.

    The socket is bound but does not listen. With both reuse options set, a server that sets either
    one (vLLM: both, vllm-router: SO_REUSEADDR) may bind and listen beside it.
    """

    def __init__(self, host: str = HOST) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let the system give the number to others again. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
