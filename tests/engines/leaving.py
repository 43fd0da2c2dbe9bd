"""A client that closes its connection when the test says so."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


@contextmanager
def asked(
    url: str, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None, stream: bool = False
) -> Iterator[socket.socket]:
    """Send one completion request, and hang up with the block, whatever has been answered by then."""
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": stream,
        "kv_transfer_params": params,
    }
    payload = json.dumps(body).encode()
    where = urlsplit(url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), timeout=100.0) as connection:
        connection.sendall(head.encode() + payload)
        yield connection
