"""The client against a fake server that records what it is asked and answers what it is told."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stateferry.stack import PREFILL_PARAMS, AnswerError, AtOnce, Client, Metrics, handoff_at_once


def answer(**changes: Any) -> dict[str, Any]:
    """What vLLM answers to a completion request."""
    choice = {"text": " Paris .", "token_ids": [7, 8], "finish_reason": "length", "logprobs": None}
    whole = {"choices": [choice], "usage": {"prompt_tokens": 5}, "kv_transfer_params": None}
    return {**whole, **changes}


class Fake:
    """The server: `requests` has every body; `answers` is used up from the front."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.answers: list[tuple[int, str]] = []
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.requests.append((self.path, json.loads(body) if body else None))
                status, text = fake.answers.pop(0)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *args: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def will(self, value: Any, status: int = 200) -> None:
        """Say what to answer next."""
        self.answers.append((status, value if isinstance(value, str) else json.dumps(value)))


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake()
    thread = threading.Thread(target=fake.server.serve_forever)
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(timeout_s=30) as client:
        yield client


def test_a_completion_is_greedy_and_asks_for_token_ids(fake: Fake, client: Client) -> None:
    fake.will(answer())
    got = client.complete(fake.url, [1, 2, 3], 2, seed=4)
    path, body = fake.requests[0]
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (2, 0.0, 4)
    assert body["return_token_ids"] is True
    assert "kv_transfer_params" not in body
    assert (got.text, got.token_ids, got.finish_reason, got.prompt_tokens) == (
        " Paris .",
        (7, 8),
        "length",
        5,
    )
    assert got.first_token_s is None
    assert got.total_s > 0


def test_logprobs_are_by_token_id(fake: Fake, client: Client) -> None:
    logprobs = {
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -2.0}, {"token_id:8": -1.0}],
    }
    fake.will(answer(choices=[{"text": "", "token_ids": [7, 8], "logprobs": logprobs}]))
    got = client.complete(fake.url, "x", 2, logprobs=20)
    assert fake.requests[0][1]["logprobs"] == 20
    assert fake.requests[0][1]["return_tokens_as_token_ids"] is True
    assert got.logprobs is not None
    assert got.logprobs.chosen == (-0.5, -1.0)
    assert got.logprobs.top == ({7: -0.5, 9: -2.0}, {8: -1.0})


def test_a_stream_is_joined(fake: Fake, client: Client) -> None:
    events = [
        {"choices": [{"text": " Paris", "token_ids": [7], "finish_reason": None}]},
        {"choices": [{"text": " .", "token_ids": [8], "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 5}},
    ]
    fake.will("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
    got = client.complete(fake.url, "x", 2, stream=True)
    assert (got.text, got.token_ids, got.finish_reason, got.prompt_tokens) == (" Paris .", (7, 8), "stop", 5)
    assert got.first_token_s is not None
    assert got.first_token_s <= got.total_s


def test_a_hand_off_has_the_two_legs_of_a_router(fake: Fake, client: Client) -> None:
    params = {"do_remote_prefill": True, "remote_host": "h", "stateferry": {"epoch": 1}}
    received = {"bytes": {"attention": 1, "state": 2}, "outcome": "received"}
    fake.will(answer(kv_transfer_params=params))
    fake.will(answer(kv_transfer_params={"stateferry": {"received": received}}))
    got = client.handoff(fake.url, fake.url, "x", 9, tamper={"withhold": "state"}, logprobs=20)
    (_, first), (_, second) = fake.requests
    assert first["max_tokens"] == 1
    assert first["kv_transfer_params"] == dict(PREFILL_PARAMS)
    assert "logprobs" not in first
    assert second["max_tokens"] == 9
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "remote_host": "h",
        "stateferry": {"epoch": 1, "tamper": {"withhold": "state"}},
    }
    assert got.received == received


def test_what_lies_between_the_legs_can_be_changed(fake: Fake, client: Client) -> None:
    fake.will(answer(kv_transfer_params={"remote_host": "h"}))
    fake.will(answer())
    got = client.handoff(
        fake.url,
        fake.url,
        [1],
        2,
        between=lambda params: {**params, "remote_host": "i"},
        decode_prompt=[1, 2],
    )
    assert fake.requests[1][1]["kv_transfer_params"] == {"remote_host": "i"}
    assert fake.requests[1][1]["prompt"] == [1, 2]
    assert got.received == {}


def test_a_prefill_engine_without_a_connector_is_named(fake: Fake, client: Client) -> None:
    fake.will(answer())
    with pytest.raises(AnswerError, match="no kv_transfer_params"):
        client.handoff(fake.url, fake.url, "x")


def test_an_error_answer_carries_its_status(fake: Fake, client: Client) -> None:
    fake.will({"error": "no"}, status=400)
    with pytest.raises(AnswerError, match=r"HTTP 400: .*no") as caught:
        client.complete(fake.url, "x")
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [{"error": {"message": "no"}}, answer(choices=[{"finish_reason": "error"}])])
def test_a_request_that_the_engine_gave_up_is_an_error(fake: Fake, client: Client, body: object) -> None:
    fake.will(body)
    with pytest.raises(AnswerError, match="gave the request up") as caught:
        client.complete(fake.url, "x")
    assert caught.value.status == 200


def test_no_server_is_an_error_without_a_status(client: Client) -> None:
    with pytest.raises(AnswerError, match="did not answer") as caught:
        client.complete("http://127.0.0.1:9", "x")
    assert caught.value.status == 0


@pytest.mark.parametrize("text", ["<html>Log in</html>", "[]", "null", "{}", '{"choices": [1]}'])
def test_a_page_of_another_server_is_an_error_and_no_traceback(text: str, fake: Fake, client: Client) -> None:
    asks: list[Callable[[], object]] = [
        lambda: client.complete(fake.url, "x"),
        lambda: client.models(fake.url),
        lambda: client.reset_prefix_cache(fake.url),
    ]
    for ask in asks[: 2 if text.startswith("{") else None]:  # a reset is well with any object
        fake.will(text)
        with pytest.raises(AnswerError, match="does not answer like a vLLM server") as caught:
            ask()
        assert caught.value.status == 0, "nothing that an engine said of a request"


@pytest.mark.parametrize("text", ["data: <html>\n\n", "<html>", ""])
def test_a_stream_of_another_server_is_an_error_and_no_traceback(
    text: str, fake: Fake, client: Client
) -> None:
    """Symptom of the last two: an empty answer."""
    fake.will(text)
    with pytest.raises(AnswerError, match="does not answer like a vLLM server"):
        client.complete(fake.url, "x", stream=True)


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port"])
def test_a_url_that_is_none_is_an_error_and_no_traceback(url: str, client: Client) -> None:
    for ask in (lambda: client.complete(url, "x"), lambda: client.metrics(url)):
        with pytest.raises(AnswerError, match="did not answer: Invalid"):
            ask()


def test_resetting_the_prefix_cache_waits_for_held_blocks(fake: Fake, client: Client) -> None:
    fake.will({"success": False})
    fake.will({"success": True})
    client.reset_prefix_cache(fake.url)
    assert [path for path, _ in fake.requests] == ["/reset_prefix_cache"] * 2
    fake.will({"success": False})
    with pytest.raises(AnswerError, match="still holds KV blocks"):
        client.reset_prefix_cache(fake.url, timeout_s=0)


def test_metrics_are_read_by_name_and_label(fake: Fake, client: Client) -> None:
    page = (
        "# HELP vllm:kv_cache_usage_perc KV-cache usage.\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.25\n'
        'stateferry_bytes_total{kind="state",text="a \\"b\\", c"} 1e3\n'
        'stateferry_bytes_total{kind="attention",text=""} 20\n'
        "plain 7\n"
    )
    fake.will(page)
    assert client.cache_usage(fake.url) == 0.25
    metrics = Metrics(page)
    assert metrics.total("stateferry_bytes_total") == 1020
    assert metrics.total("stateferry_bytes_total", kind="state") == 1000
    assert metrics.total("plain") == 7
    assert metrics.total("missing") == 0
    assert metrics.find("stateferry_bytes_total", kind="state")[0].labels["text"] == 'a \\"b\\", c'


def test_both_legs_at_once_name_one_transfer_and_where_it_is_asked_for(fake: Fake) -> None:
    described = {"stateferry": {"ranks": [["10.0.0.7", 5600, 9], ["10.0.0.7", 5601, 9]]}}
    for params in (described, None, None):
        fake.will(answer(kv_transfer_params=params))
    with Client() as client:
        pair = AtOnce.between(client, fake.url, fake.url)
        both = handoff_at_once(client, pair, [1, 2], 5, tamper={"withhold": "state"})
    assert both.decode.token_ids == (7, 8)
    legs = {body["kv_transfer_params"]["do_remote_decode"]: body for _, body in fake.requests[1:]}
    prefill, decode = legs[True]["kv_transfer_params"], legs[False]["kv_transfer_params"]
    assert prefill["transfer_id"] == decode["transfer_id"]
    assert decode["remote_engine_id"] == "prefill@10.0.0.7:5600"
    assert decode["stateferry"] == {"tamper": {"withhold": "state"}}
    assert (legs[True]["max_tokens"], legs[False]["max_tokens"]) == (1, 5)


def test_an_engine_of_another_connector_is_named(fake: Fake) -> None:
    fake.will(answer())
    with Client() as client, pytest.raises(AnswerError, match="does not say where it listens"):
        AtOnce.between(client, fake.url, fake.url)
