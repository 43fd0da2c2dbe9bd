"""A proxy that follows the protocol of llm-d's routing sidecar (connector `nixlv2`), small enough to read.

    python examples/llmd_sidecar.py --decode http://127.0.0.1:8200 --port 8000

It stands beside one decode engine. Who routes (in llm-d the endpoint picker, behind the gateway) has chosen a
prefill engine and names it in a header; without one the decode engine answers alone:

    curl http://127.0.0.1:8000/v1/completions -H 'x-prefiller-host-port: 127.0.0.1:8100' \
        -H 'Content-Type: application/json' -d '{"model": "model", "prompt": "where is Leo"}'

For looking and trying: llm-d's own has TLS, a list of allowed prefill engines, encoders and spans besides.
Needs aiohttp, which vLLM brings.
"""

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

PREFILLER = "x-prefiller-host-port"
REQUEST_ID = "x-request-id"
FIRST_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PASSING = frozenset({502, 503, 504})
"""What a prefill engine may answer that is worth another try."""
PAUSE_S = 0.1
OF_ONE_HOP = frozenset(
    {"connection", "content-length", "content-encoding", "host", "keep-alive", "te", "transfer-encoding"}
)


class Sidecar:
    """Beside one decode engine. A client that leaves ends what is asked for it, on either leg."""

    def __init__(self, decode_url: str, prefill_max_retries: int = 0) -> None:
        self._decode_url = decode_url.rstrip("/")
        self._retries = prefill_max_retries
        self._engines: aiohttp.ClientSession

    def app(self) -> web.Application:
        """What answers HTTP. Served without `handler_cancellation`, it hears of no client that leaves."""
        app = web.Application(client_max_size=64 * 2**20)
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/health", self._health)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_route("*", "/{path:.*}", self._decode_alone)
        return app

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        patient = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with aiohttp.ClientSession(timeout=patient) as self._engines:
            yield

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        named = request.headers.get(PREFILLER, "").split(",")[0].strip()
        if not named:
            return await self._decode_alone(request)
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        headers = _passed_on(request.headers)
        headers.setdefault(REQUEST_ID, str(uuid.uuid4()))
        prefill_url = f"http://{named.removeprefix('http://')}{request.path}"
        status, kind, content = await self._prefill(prefill_url, first_leg(body, request.path), headers)
        if not 200 <= status < 300:
            return web.Response(status=status, body=content, headers={"Content-Type": kind})
        params = json.loads(content).get("kv_transfer_params")
        second = json.dumps(body | {"kv_transfer_params": params}).encode()
        return await self._decode(request, headers, second)

    async def _prefill(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """Status, content type and content of the last try."""
        tries = 0
        while True:
            try:
                async with self._engines.post(url, json=body, headers=headers) as answer:
                    found = answer.status, answer.content_type, await answer.read()
            except aiohttp.ClientError as e:
                found = 502, "application/json", _words(f"the prefill engine does not answer: {e}")
            if found[0] not in PASSING or tries >= self._retries:
                return found
            tries += 1
            await asyncio.sleep(PAUSE_S)

    async def _decode_alone(self, request: web.Request) -> web.StreamResponse:
        return await self._decode(request, _passed_on(request.headers), await request.read())

    async def _decode(
        self, request: web.Request, headers: Mapping[str, str], content: bytes
    ) -> web.StreamResponse:
        """Pass the decode engine's answer on as it comes."""
        try:
            async with self._engines.request(
                request.method, self._decode_url + request.path_qs, headers=headers, data=content or None
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as e:
            return _error(503, f"the decode engine does not answer: {e}")


def first_leg(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What the prefill engine is asked: the same prompt, one token, not streamed, its memory kept."""
    left_out = {"stream_options", "min_tokens"}
    leg = {key: value for key, value in body.items() if key not in left_out}
    leg |= {"stream": False, "max_tokens": 1, "kv_transfer_params": FIRST_LEG}
    if path.endswith("/chat/completions"):
        leg["max_completion_tokens"] = 1
    return leg


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for name in OF_ONE_HOP | {PREFILLER}:
        kept.popall(name, None)
    return kept


def _words(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=_words(message), content_type="application/json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Follow the protocol of llm-d's routing sidecar.")
    parser.add_argument("--decode", required=True, help="the decode engine's address")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--prefill-max-retries", type=int, default=0, help="after 502, 503 or 504")
    options = parser.parse_args()
    app = Sidecar(options.decode, options.prefill_max_retries).app()
    web.run_app(app, host=options.host, port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
