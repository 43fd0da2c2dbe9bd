"""`examples/llmd_sidecar.py` against made-up engines: what each leg is sent, and what becomes of trouble.

The facts are those of llm-d's own sidecar (connector `nixlv2`), read in its source.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import ClientSession, ServerDisconnectedError, web
from aiohttp.test_utils import TestClient, TestServer, unused_port
from tests.programs import loaded

EXAMPLE = Path(__file__).parents[2] / "examples" / "llmd_sidecar.py"
OFFER = {"do_remote_prefill": True, "remote_engine_id": "p", "stateferry": {"ranks": [["h", 1, 2]]}}
BODY = {"model": "model", "prompt": "q", "max_tokens": 9, "min_tokens": 3}


@pytest.fixture(scope="module")
def sidecar() -> ModuleType:
    return loaded(EXAMPLE)


class MadeUp:
    """An engine that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.statuses: list[int] = []
        """Of the next answers; 200 when none is left."""
        self.held: asyncio.Event | None = None
        self.waits = asyncio.Event()
        self.left = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.path, body, headers))
        try:
            if self.held is not None:
                self.waits.set()
                await self.held.wait()
            if body.get("stream"):
                return await self._stream(request)
        except asyncio.CancelledError:
            self.left.set()
            raise
        status = self.statuses.pop(0) if self.statuses else 200
        answer = {"choices": [{"text": "Kyoto"}], "kv_transfer_params": OFFER, "usage": {"prompt_tokens": 1}}
        return web.json_response(answer, status=status, headers={"x-of-engine": "yes"})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(f"data: {number}\n\n".encode())
        await response.write_eof()
        return response


Scenario = Callable[[TestClient[Any, Any], MadeUp, MadeUp, dict[str, str]], Awaitable[None]]


def play(sidecar: ModuleType, scenario: Scenario, retries: int = 0) -> tuple[MadeUp, MadeUp]:
    """Run a scenario before two engines; give them for a look."""

    async def run() -> tuple[MadeUp, MadeUp]:
        prefill, decode = MadeUp(), MadeUp()
        async with TestServer(prefill.app()) as p, TestServer(decode.app()) as d:
            app = sidecar.Sidecar(str(d.make_url("/")), retries).app()
            async with TestClient(TestServer(app)) as client:
                await asyncio.wait_for(
                    scenario(client, prefill, decode, {"x-prefiller-host-port": f"{p.host}:{p.port}"}), 30.0
                )
        return prefill, decode

    return asyncio.run(run())


def test_the_prefill_engine_is_asked_for_one_token_and_the_decode_engine_with_its_answer(
    sidecar: ModuleType,
) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        more = {"traceparent": "00-a-b-01", "X-Request-Id": "mine"}
        answer = await client.post("/v1/completions", json=BODY, headers=named | more)
        assert answer.status == 200
        assert (await answer.json())["choices"][0]["text"] == "Kyoto"
        assert answer.headers["x-of-engine"] == "yes"

    prefill, decode = play(sidecar, scenario)
    ((path, first, headers),) = prefill.asked
    assert path == "/v1/completions"
    assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, "q")
    assert "min_tokens" not in first, "vLLM refuses more than max_tokens"
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first["kv_transfer_params"]["do_remote_prefill"] is False
    ((_, second, headers_two),) = decode.asked
    assert second == BODY | {"kv_transfer_params": OFFER}
    for of_leg in (headers, headers_two):
        assert of_leg["traceparent"] == "00-a-b-01"
        assert of_leg["x-request-id"] == "mine"
        assert "x-prefiller-host-port" not in of_leg


def test_a_stream_is_passed_on_and_its_options_are_for_the_decode_engine(sidecar: ModuleType) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 5}
        answer = await client.post("/v1/chat/completions", json=BODY | options, headers=named)
        assert await answer.text() == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert answer.headers["Content-Type"] == "text/event-stream"

    prefill, decode = play(sidecar, scenario)
    ((path, first, headers),) = prefill.asked
    assert path == "/v1/chat/completions"
    assert first["stream"] is False
    assert "stream_options" not in first
    assert (first["max_tokens"], first["max_completion_tokens"]) == (1, 1)
    ((_, second, headers_two),) = decode.asked
    assert second["stream_options"] == {"include_usage": True}
    assert second["max_completion_tokens"] == 5
    assert headers["x-request-id"] == headers_two["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [("POST", "/v1/completions", False), ("GET", "/v1/models", True), ("POST", "/tokenize", True)],
)
def test_what_names_no_prefill_engine_or_is_no_completion_goes_to_the_decode_engine_alone(
    sidecar: ModuleType, method: str, path: str, named: bool
) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, header: dict[str, str]) -> None:
        body = BODY if method == "POST" else None
        answer = await client.request(method, path, json=body, headers=header if named else {})
        assert answer.status == 200

    prefill, decode = play(sidecar, scenario)
    assert prefill.asked == []
    assert [(path, "kv_transfer_params" in body) for path, body, _ in decode.asked] == [(path, False)]


def test_the_first_of_several_prefill_engines_is_asked(sidecar: ModuleType) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        several = {name: f" http://{value}, 127.0.0.1:1" for name, value in named.items()}
        assert (await client.post("/v1/completions", json=BODY, headers=several)).status == 200

    prefill, _ = play(sidecar, scenario)
    assert len(prefill.asked) == 1


@pytest.mark.parametrize(
    ("statuses", "retries", "status", "tries"),
    [
        ([503], 0, 503, 1),
        ([503, 502], 2, 200, 3),
        ([504, 504, 504], 2, 504, 3),
        ([500], 2, 500, 1),
        ([400], 2, 400, 1),
    ],
)
def test_an_error_of_the_prefill_engine_is_the_clients_unless_another_try_helps(
    sidecar: ModuleType,
    statuses: list[int],
    retries: int,
    status: int,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sidecar, "PAUSE_S", 0.0)

    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        prefill.statuses = list(statuses)
        answer = await client.post("/v1/completions", json=BODY, headers=named)
        assert answer.status == status
        assert (await answer.json())["choices"], "the engine's own words"

    prefill, decode = play(sidecar, scenario, retries)
    assert len(prefill.asked) == tries
    assert len(decode.asked) == (1 if status == 200 else 0)


def test_a_prefill_engine_that_is_not_there_is_a_bad_gateway(sidecar: ModuleType) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        nobody = {"x-prefiller-host-port": f"127.0.0.1:{unused_port()}"}
        answer = await client.post("/v1/completions", json=BODY, headers=nobody)
        assert answer.status == 502
        assert "prefill engine" in (await answer.json())["error"]["message"]

    _, decode = play(sidecar, scenario)
    assert decode.asked == []


@pytest.mark.parametrize("body", ["{", "[]", "7"])
def test_a_body_that_is_no_object_asks_nobody(sidecar: ModuleType, body: str) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        assert (await client.post("/v1/completions", data=body, headers=named)).status == 400

    prefill, decode = play(sidecar, scenario)
    assert prefill.asked == decode.asked == []


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_client_that_leaves_is_a_client_that_left_for_either_engine(sidecar: ModuleType, leg: str) -> None:
    async def scenario(client: Any, prefill: Any, decode: Any, named: dict[str, str]) -> None:
        asked = prefill if leg == "prefill" else decode
        asked.held = asyncio.Event()
        async with ClientSession() as leaving:
            url = client.make_url("/v1/completions")
            task = asyncio.create_task(leaving.post(url, json=BODY, headers=named))
            await asked.waits.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait_for(asked.left.wait(), 20.0)

    _, decode = play(sidecar, scenario)
    assert len(decode.asked) == (0 if leg == "prefill" else 1)


def test_a_sidecar_that_tells_nobody_of_clients_that_leave_is_noticed(sidecar: ModuleType) -> None:
    """The mutant: served without `handler_cancellation`, it asks the decode engine for nobody."""

    async def run() -> int:
        prefill, decode = MadeUp(), MadeUp()
        prefill.held = asyncio.Event()
        async with TestServer(prefill.app()) as p, TestServer(decode.app()) as d:
            runner = web.AppRunner(sidecar.Sidecar(str(d.make_url("/"))).app())
            await runner.setup()
            port = unused_port()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            async with ClientSession() as leaving:
                named = {"x-prefiller-host-port": f"{p.host}:{p.port}"}
                url = f"http://127.0.0.1:{port}/v1/completions"
                task = asyncio.create_task(leaving.post(url, json=BODY, headers=named))
                await prefill.waits.wait()
                task.cancel()
                with pytest.raises((asyncio.CancelledError, ServerDisconnectedError)):
                    await task
            prefill.held.set()
            while not decode.asked:
                await asyncio.sleep(0.01)
            await runner.cleanup()
        return len(decode.asked)

    assert asyncio.run(asyncio.wait_for(run(), 30.0)) == 1


def test_it_is_served_so_that_it_hears_of_clients_that_leave(
    sidecar: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(sidecar.web, "run_app", lambda app, **options: served.update(options))
    monkeypatch.setattr("sys.argv", ["llmd_sidecar.py", "--decode", "http://127.0.0.1:1", "--port", "7"])
    sidecar.main()
    assert served["handler_cancellation"] is True
    assert served["port"] == 7
    assert json.dumps(sidecar.FIRST_LEG)
