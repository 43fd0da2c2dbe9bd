"""A server that speaks as much of OpenAI's protocol as clients of agent sessions need, and takes notes."""

import http.server
import json
import threading
from typing import Any

from stateferry.bench.agentx.compare import Asked
from stateferry.testing.local_server import LocalServer


class NoteTaker(LocalServer):
    """Answers every request with as many words, or token ids, as it asks for. Use as a context manager."""

    def __init__(self) -> None:
        self._notes: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._happened = 0
        taker = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send({"object": "list", "data": [{"id": "made-up", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                note = taker._begin(self.headers.get("X-Correlation-ID", ""), body)
                for event in _events(body, note["output_tokens"], self.path):
                    self._chunk(f"data: {json.dumps(event)}\n\n".encode())
                taker._end(note)  # before the client can know
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")

            def _chunk(self, content: bytes) -> None:
                if not getattr(self, "_begun", False):
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                self._begun = bool(content)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

            def _send(self, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        super().__init__(Handler)

    def conversations(self) -> dict[str, list[Asked]]:
        """What was asked, by conversation, each in the order in which it came."""
        return {name: [Asked(**note) for note in notes] for name, notes in self._notes.items()}

    def _begin(self, conversation: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            note = {
                "prompt": _prompt(body),
                "output_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or 1,
                "came": self._happened,
                "ended": 1 << 60,
            }
            self._happened += 1
            self._notes.setdefault(conversation, []).append(note)
        return note

    def _end(self, note: dict[str, Any]) -> None:
        with self._lock:
            note["ended"] = self._happened
            self._happened += 1


def _prompt(body: dict[str, Any]) -> list[Any]:
    """Token ids, or the words of all messages: the tokenizer makes one token of each."""
    if "prompt" in body:
        return list(body["prompt"])
    return [word for message in body["messages"] for word in _text(message["content"]).split()]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def _events(body: dict[str, Any], tokens: int, path: str) -> list[dict[str, Any]]:
    if path.endswith("/chat/completions"):
        words: list[dict[str, Any]] = [{"delta": {"content": "word "}, "index": 0} for _ in range(tokens)]
    else:
        words = [{"text": "", "token_ids": [7], "index": 0} for _ in range(tokens)]
    usage = {"prompt_tokens": len(_prompt(body)), "completion_tokens": tokens}
    usage["total_tokens"] = sum(usage.values())
    head = {"id": "noted", "object": "chat.completion.chunk", "model": body.get("model", ""), "created": 0}
    return [head | {"choices": [word]} for word in words] + [head | {"choices": [], "usage": usage}]
