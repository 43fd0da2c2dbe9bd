"""A server that answers like an engine of vLLM with a connector, at once: benches run whole against it."""

import http.server
import json
import threading
from typing import Any

from stateferry.bench.arms import Arm
from stateferry.testing.local_server import LocalServer

RECEIVED = {
    "outcome": "received",
    "milliseconds": 4.0,
    "post_milliseconds": 1.0,
    "wire_milliseconds": 2.0,
    "bytes": {"attention": 100, "state": 40},
}


class FakeEngine(LocalServer):
    """Answers until `close`. `bodies` has every request; `fails` answers that many with an error."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.fails = 0
        self.frozen = False
        self.handoffs = 0
        self.sent = 0
        """Tokens of streams, each two milliseconds after the one before by the engine's own count."""
        self.most_tokens = 1 << 20
        self.refused = 0
        self._ended = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                page = f"stateferry_handoff_seconds_count {fake.handoffs}\n"
                page += f'stateferry_received_bytes_total{{kind="state"}} {40 * fake.handoffs}\n'
                for bound, count in ((0.001, 0), (0.01, fake.sent), ("+Inf", fake.sent)):
                    page += f'vllm:inter_token_latency_seconds_bucket{{le="{bound}"}} {count}\n'
                page += f"vllm:inter_token_latency_seconds_sum {0.002 * fake.sent}\n"
                self._send(page.encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.bodies.append(body)
                if fake.fails:
                    fake.fails -= 1
                    self._send(b"full", 500)
                    return
                if body["max_tokens"] > fake.most_tokens:
                    fake.refused += 1
                    self._send(b"max_tokens is too large", 400)
                    return
                params = body.get("kv_transfer_params") or {}
                fake.handoffs += bool(params.get("do_remote_prefill"))
                if body.get("stream"):
                    self._stream(body["max_tokens"])
                    return
                ours = {"received": RECEIVED} if params.get("do_remote_prefill") else {}
                answer = {
                    "choices": [{"text": "", "token_ids": [7] * min(body["max_tokens"], 100)}],
                    "kv_transfer_params": {"do_remote_prefill": True, "stateferry": ours},
                }
                self._send(json.dumps(answer).encode())

            def _stream(self, tokens: int) -> None:
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                event = f"data: {json.dumps({'choices': [{'token_ids': [7]}]})}\n\n".encode()
                try:
                    for _ in range(tokens):
                        self.wfile.write(event)
                        fake.sent += 1
                        if fake._ended.wait(0.002):
                            break
                except OSError:
                    return  # the client left
                self.close_connection = True

            def _send(self, content: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        super().__init__(Handler)
        self.child = self
        self.__enter__()

    def freeze(self) -> None:
        """As `Child.freeze`, only noted."""
        self.frozen = True

    def thaw(self) -> None:
        """As `Child.thaw`, only noted."""
        self.frozen = False

    def close(self) -> None:
        """End it, and all its answers."""
        self._ended.set()
        self.__exit__(None, None, None)


def fake_arm(name: str) -> tuple[Arm, FakeEngine, FakeEngine]:
    """A pair of such servers."""
    prefill, decode = FakeEngine(), FakeEngine()
    return Arm(name, (prefill, decode)), prefill, decode  # type: ignore[arg-type]
