"""`stateferry doctor` asks two engines by URL: both real halves of the connector, behind a plain HTTP server
in place of vLLM's."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest.mock import patch

import pytest
from harness import ATTENTION, HYBRID, Engine, Pair

from command import Result, Run, command_here
from stateferry.cli import doctor as module
from stateferry.doctor import ask_engine
from stateferry.errors import LayoutMismatch
from stateferry.layout.fingerprint import compare

pytestmark = pytest.mark.scheduler

MODEL_NAME = "some/model"


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The engine's URL. A completion is computed by the thread that serves it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": MODEL_NAME}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == MODEL_NAME
            params = body.get("kv_transfer_params")
            prompt = list(body["prompt"].encode())
            request_id = engine.add(prompt, params=params, max_tokens=body["max_tokens"]).request_id
            while engine.finished[request_id].reason is None:
                engine.step()
            self.answer({"choices": [], "kv_transfer_params": engine.finished[request_id].params})

        def answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with patch.object(module, "examine_machine", list), command_here(capsys) as run:
        yield run


def doctor(run: Run, prefill: str, decode: str) -> Result:
    return run("doctor", "--prefill-url", prefill, "--decode-url", decode, "--json")


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_that_fit(run: Run, ranks: int) -> None:
    with Pair(HYBRID, ranks=ranks) as pair:
        with served(pair.producer) as prefill, served(pair.consumer) as decode:
            result = doctor(run, prefill, decode)
        assert result.code == 0, result.err
        value = result.value["engines"]
        assert value["can_exchange"] is True
        for side, engine in (("prefill", pair.producer), ("decode", pair.consumer)):
            assert value[side]["engine_id"] == engine.config.kv_transfer_config.engine_id
            assert value[side]["kv_role"] == engine.config.kv_transfer_config.kv_role
            handshakes = [half.get_handshake_metadata() for half in engine.worker_halves]
            assert [(r["port"], r["epoch"]) for r in value[side]["ranks"]] == [
                (h.address.port, h.address.epoch) for h in handshakes
            ]
        pair.run()
        pair.check_idle()


def test_two_engines_of_one_role_are_told_so(run: Run) -> None:
    with Pair(HYBRID) as pair, served(pair.producer) as url:
        result = doctor(run, url, url)
        assert result.code == 1
        (problem,) = result.value["problems"]
        assert problem.startswith("both engines have kv_role 'kv_producer'")
        assert result.value["engines"]["can_exchange"] is False
    with Pair(HYBRID, role="kv_both") as pair, served(pair.producer) as url:
        assert doctor(run, url, url).code == 0


def test_what_doctor_says_will_move_is_what_moves(run: Run) -> None:
    prompt = list(range(128))
    with Pair(HYBRID) as pair:
        with served(pair.producer) as prefill, served(pair.consumer) as decode:
            lengths = doctor(run, prefill, decode).value["engines"]["lengths"]
        (expected,) = (length for length in lengths if length["prompt_tokens"] == len(prompt))
        request_id = pair.hand_off(prompt)
        params = pair.consumer.finished[request_id].params
        assert params is not None
        assert params["stateferry"]["received"]["bytes"] == {
            "state": expected["state_bytes"],
            "attention": expected["attention_bytes"],
        }
        pair.check_idle()


def test_engines_that_do_not_fit_are_refused_as_their_hand_shake_does(run: Run) -> None:
    prompt = list(range(9))
    with Pair(ATTENTION, consumer={"model_name": "another"}) as pair:
        with served(pair.producer) as prefill, served(pair.consumer) as decode:
            result = doctor(run, prefill, decode)
            ours, theirs = (ask_engine(url).layouts[0] for url in (decode, prefill))
        with pytest.raises(LayoutMismatch) as refusal:
            compare(ours, theirs)
        assert result.code == 1
        assert result.value["problems"] == [str(refusal.value)]
        request_id = pair.hand_off(prompt)
        params = pair.consumer.finished[request_id].params
        assert params is not None
        assert str(refusal.value) in params["stateferry"]["received"]["reason"]


def test_an_engine_that_does_not_describe_itself(run: Run) -> None:
    with Pair(HYBRID) as pair:
        pair.consumer.connector._description._params = None
        with served(pair.producer) as prefill, served(pair.consumer) as decode:
            result = doctor(run, prefill, decode)
        assert result.code == 1
        (problem,) = result.value["problems"]
        assert problem.startswith(f"{decode}: ")
        assert "too old to describe itself" in problem
