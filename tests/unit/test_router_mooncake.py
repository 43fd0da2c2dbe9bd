"""vllm-router in its Mooncake mode: what it asks for at its start, and when it sends the decode leg.

`docs/routers.md` says that the real router sends one leg after the other. Here it is the real one, before
made-up engines and the real service that it asks. A test that fails here after an update of the router says
that the page is out of date.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from stateferry.bootstrap import BootstrapService, query_answer
from stateferry.ids import EngineId, Epoch
from stateferry.stack import AtOnce, Client, Router, Stack, handoff_at_once
from stateferry.testing.local_server import LocalServer
from stateferry.wire import RankAddress, engine_place, parse_promise, promised_to

PLACE = RankAddress("127.0.0.1", 5600, Epoch(1))
PATIENCE_S = 0.5
"""How long the prefill engine computes: far longer than it takes to send a leg that waits for nothing."""
MEETS_S = 30.0
"""The same where both legs were sent: it goes on as soon as they met."""
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "hello"}),
    "completion, streamed": ("/v1/completions", {"prompt": "hello", "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
}


class Starting(BootstrapService):
    """Of an engine that does not know where its ranks listen when it is asked for the first time."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", 0)
        self.statuses: list[int] = []
        self.early: bytes | None = None
        """What it would say with status 200 in place of its first answer."""

    def _answer_to(self, asked: Any) -> tuple[int, bytes]:
        status, content = super()._answer_to(asked)
        if not self.statuses and self.early is not None:
            status, content = 200, self.early
        self.statuses.append(status)
        self.tell(query_answer({0: (EngineId("prefill"), [PLACE])}))
        return status, content


class MadeUpPair:
    """Two engines that note what they are asked, and whether a decode leg came while its prefill computed."""

    def __init__(self) -> None:
        self.legs: list[tuple[str, dict[str, Any]]] = []
        self.computes_s = PATIENCE_S
        self.met: list[bool] = []
        """For each prefill leg."""
        self._lock = threading.Lock()
        self._decode_came: dict[str, threading.Event] = {}
        """By the name of the transfer."""
        self.prefill = LocalServer(self._engine("prefill"))
        self.decode = LocalServer(self._engine("decode"))
        self.bootstrap = Starting()

    def came(self, role: str, params: dict[str, Any]) -> None:
        """A leg is here. Returns when this engine has computed it."""
        with self._lock:
            self.legs.append((role, params))
            decode_came = self._decode_came.setdefault(params.get("transfer_id", ""), threading.Event())
        if role == "decode":
            decode_came.set()
        else:
            self.met.append(decode_came.wait(self.computes_s))

    def _engine(self, role: str) -> type[BaseHTTPRequestHandler]:
        pair = self

        class Engine(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                """Be quiet."""

            def do_GET(self) -> None:
                self._answer({"data": [{"id": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pair.came(role, body.get("kv_transfer_params") or {})
                text = f" from {role}"
                choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}}
                self._answer({"id": "x", "choices": [choice | {"finish_reason": "length"}]})

            def _answer(self, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Engine


@pytest.fixture
def pair() -> Iterator[MadeUpPair]:
    made = MadeUpPair()
    with made.prefill, made.decode:
        made.bootstrap.start()
        yield made
        made.bootstrap.stop()


@contextmanager
def started(pair: MadeUpPair, folder: Path) -> Iterator[Router]:
    with Stack(folder) as stack:
        prefill = ["--prefill", pair.prefill.url, str(pair.bootstrap.port)]
        router = Router([], [pair.decode.url], folder / "router.log", prefill, kv_connector="mooncake")
        stack.add(router)
        router.wait_ready(50.0)
        yield router


@pytest.fixture
def router(pair: MadeUpPair, tmp_path: Path) -> Iterator[Router]:
    with started(pair, tmp_path) as router:
        yield router


def test_the_mooncake_mode_sends_the_decode_leg_after_the_prefill_engines_answer(
    pair: MadeUpPair, router: Router
) -> None:
    with httpx.Client(timeout=30.0, trust_env=False) as http:
        for name, (path, body) in ASKED.items():
            answer = http.post(router.url + path, json={"model": "model", "max_tokens": 5, **body})
            assert "from decode" in answer.text, name
    assert pair.met == [False] * len(ASKED), "both legs at once: docs/routers.md says that it does not"
    assert [role for role, _ in pair.legs] == ["prefill", "decode"] * len(ASKED)
    # Their keys are those of a promise all the same, and the place was asked for until there was one.
    names = set()
    for (_, prefill), (_, decode) in zip(pair.legs[::2], pair.legs[1::2], strict=True):
        assert set(prefill) == {"do_remote_decode", "do_remote_prefill", "transfer_id"}
        assert prefill["transfer_id"] == decode["transfer_id"]
        promise = parse_promise(decode)
        assert promise is not None
        assert (promise.address.host, promise.address.port) == ("127.0.0.1", 5600)
        assert promise.transfer_id == promised_to(prefill)
        names.add(promise.transfer_id)
    assert len(names) == len(ASKED)
    assert pair.bootstrap.statuses == [503, 200]


def test_a_router_that_sends_both_at_once_is_noticed(pair: MadeUpPair) -> None:
    """The mutant: legs that wait for nothing meet while the prefill engine computes."""
    pair.computes_s = MEETS_S
    with Client(timeout_s=MEETS_S) as client:
        place = engine_place("prefill", PLACE)
        answer = handoff_at_once(client, AtOnce(pair.prefill.url, pair.decode.url, place), "hello")
    assert answer.decode.text == " from decode"
    assert pair.met == [True]


def test_an_answer_without_engines_would_be_kept_for_ever(pair: MadeUpPair, tmp_path: Path) -> None:
    """The mutant of the status 503: the in-tree connector's own service answers `{}` before its ranks are
    known. This router does not ask again, and its decode legs bring nothing."""
    pair.bootstrap.early = b"{}"
    with started(pair, tmp_path) as router, httpx.Client(timeout=30.0, trust_env=False) as http:
        path, body = ASKED["completion"]
        for _ in range(2):
            assert http.post(router.url + path, json={"model": "model", **body}).status_code == 200
    assert pair.bootstrap.statuses == [200]
    assert [params for role, params in pair.legs if role == "decode"] == [{}, {}]
