"""A proxy that follows the protocol of llm-d's routing sidecar, small enough to read.

    python examples/llmd_sidecar.py --decode http://127.0.0.1:8200 --port 8000

It stands beside one decode engine. Who routes (in llm-d the endpoint picker, behind the gateway) has chosen a
prefill engine and names it in a header; without one the decode engine answers alone:

    curl http://127.0.0.1:8000/v1/completions -H 'x-prefiller-host-port: 127.0.0.1:8100' \
        -H 'Content-Type: application/json' -d '{"model": "model", "prompt": "where is Leo"}'

Its connector `nixlv2` asks the decode engine when the prefill engine has answered, and carries that answer
over. Its connector `mooncake` asks both at once, under a name that it makes up; where the prefill engine
listens it has asked before (`stateferry serve prefill … --kv-port 5600 --bootstrap-port 8998`):

    python examples/llmd_sidecar.py --decode http://127.0.0.1:8200 --port 8000 --kv-connector mooncake

For looking and trying: llm-d's own has TLS, a list of allowed prefill engines, encoders and spans besides.
Needs aiohttp, which vLLM brings.
"""

import argparse
import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

PREFILLER = "x-prefiller-host-port"
REQUEST_ID = "x-request-id"
RANK = "x-data-parallel-rank"
NIXL, MOONCAKE = "nixlv2", "mooncake"
BOOTSTRAP_PORT = 8998
BOOTSTRAP_S = 5.0
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

    def __init__(
        self,
        decode_url: str,
        prefill_max_retries: int = 0,
        connector: str = NIXL,
        bootstrap_port: int = BOOTSTRAP_PORT,
    ) -> None:
        self._decode_url = decode_url.rstrip("/")
        self._retries = prefill_max_retries
        self._connector = connector
        self._bootstrap_port = bootstrap_port
        self._places: dict[str, dict[str, str]] = {}
        """What prefill engines answered to `/query`: data-parallel rank -> `remote_engine_id`."""
        self._first_legs: set[asyncio.Task[Any]] = set()
        """Of requests that were sent to both engines at once; nobody waits for them."""
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
            for leg in self._first_legs:
                leg.cancel()
            await asyncio.gather(*self._first_legs, return_exceptions=True)

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
        prefill = f"http://{named.removeprefix('http://')}"
        if self._connector == MOONCAKE:
            return await self._both_at_once(request, body, headers, prefill)
        first, prefill_url = first_leg(body, request.path, FIRST_LEG), prefill + request.path
        status, kind, content = await self._prefill(prefill_url, first, headers, self._retries)
        if not 200 <= status < 300:
            return web.Response(status=status, body=content, headers={"Content-Type": kind})
        params = json.loads(content).get("kv_transfer_params")
        second = json.dumps(body | {"kv_transfer_params": params}).encode()
        return await self._decode(request, headers, second)

    async def _both_at_once(
        self, request: web.Request, body: dict[str, Any], headers: CIMultiDict[str], prefill: str
    ) -> web.StreamResponse:
        """Neither leg waits for the other. A first leg that fails is not the client's: the decode engine
        hears of it from the prefill engine, or of nothing, and computes the prompt."""
        bootstrap = f"http://{_host_of(prefill)}:{self._bootstrap_port}"
        try:
            rank, engine_id = random.choice(list((await self._places_of(prefill, bootstrap)).items()))
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, LookupError) as e:
            return _error(502, f"{bootstrap}/query does not say where the prefill engine listens: {e!r}")
        name = f"xfer-{uuid.uuid4()}"  # to know it is to be allowed to fetch: nobody may guess it
        asked = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": name}
        fetch = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": name,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": engine_id,
        }
        first, named = first_leg(body, request.path, asked), headers.copy()
        named[RANK] = rank
        leg = asyncio.create_task(self._prefill(prefill + request.path, first, named, 0))
        self._first_legs.add(leg)
        leg.add_done_callback(self._first_legs.discard)
        return await self._decode(request, headers, json.dumps(body | {"kv_transfer_params": fetch}).encode())

    async def _places_of(self, prefill: str, bootstrap: str) -> dict[str, str]:
        """Ask at the first request for a prefill engine, and keep what it says."""
        if prefill not in self._places:
            patience = aiohttp.ClientTimeout(total=BOOTSTRAP_S)
            async with self._engines.get(f"{bootstrap}/query", timeout=patience) as answer:
                answer.raise_for_status()
                told = await answer.json()
            if not isinstance(told, dict) or not told:
                raise ValueError(f"it names no engine: {told!r}")
            self._places[prefill] = {rank: entry["engine_id"] for rank, entry in told.items()}
        return self._places[prefill]

    async def _prefill(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str], retries: int
    ) -> tuple[int, str, bytes]:
        """Status, content type and content of the last try."""
        tries = 0
        while True:
            try:
                async with self._engines.post(url, json=body, headers=headers) as answer:
                    found = answer.status, answer.content_type, await answer.read()
            except aiohttp.ClientError as e:
                found = 502, "application/json", _words(f"the prefill engine does not answer: {e}")
            if found[0] not in PASSING or tries >= retries:
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


def first_leg(body: Mapping[str, Any], path: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the prefill engine is asked: the same prompt, one token, not streamed, its memory kept."""
    left_out = {"stream_options", "min_tokens"}
    leg = {key: value for key, value in body.items() if key not in left_out}
    leg |= {"stream": False, "max_tokens": 1, "kv_transfer_params": dict(params)}
    if path.endswith("/chat/completions"):
        leg["max_completion_tokens"] = 1
    return leg


def _host_of(url: str) -> str:
    """As it is written in a URL: an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


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
    parser.add_argument("--kv-connector", choices=(NIXL, MOONCAKE), default=NIXL)
    parser.add_argument("--mooncake-bootstrap-port", type=int, default=BOOTSTRAP_PORT)
    options = parser.parse_args()
    app = Sidecar(
        options.decode, options.prefill_max_retries, options.kv_connector, options.mooncake_bootstrap_port
    ).app()
    web.run_app(app, host=options.host, port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
