"""Made-up engines for `tools/router_table.py --made-up`: what routers do, without vLLM, in seconds.

They answer as vLLM does with StateFerry, as far as a router can tell: the prefill leg's answer carries an
offer, and a decode leg is handed off if it brings that very offer, unused, for that very prompt, or the name
that its prefill leg has or will have. Where that leg's engine listens is told by the service that real ones
have. What engines make of `n` and of several prompts is not theirs to say: those questions are left to them.
"""

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from stateferry.bootstrap import BootstrapService, query_answer
from stateferry.ids import EngineId, Epoch
from stateferry.moriio import Address, Registration
from stateferry.moriio.registration import CONSUMER, PRODUCER
from stateferry.stack.ports import HOST, HeldPort
from stateferry.wire import RankAddress, parse_promise

LEFT_TO_REAL_ENGINES = ("n = 2", "two prompts in one call")
PIECE_S = 0.002
OFFER_S = 2.0
"""How long a decode leg that came with a name waits for an offer."""
LOOK_S = 0.01
START_S = 20.0


def solve(story: str) -> str:
    """What the bundled model answers: the place of the thing of the person that is asked for."""
    first, last = story.split()[-2:]
    thing = re.search(rf"\b{first} {last} has the (\w+)", story)
    place = re.search(rf"\bthe {thing[1]} is in (\w+)", story) if thing else None
    return place[1] if place else "nowhere"


@dataclass(frozen=True)
class SpanSeen:
    """As much of a span as the conversation looks at."""

    name: str


class Seen:
    """Which traces both engines were told of; stands in for a collector of spans."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def told(self, traceparent: str, name: str) -> None:
        """A request came with this header."""
        self._names.setdefault(traceparent.split("-")[1], set()).add(name)

    def wait_for(self, trace_id: str, enough: Callable[[Any], bool], timeout_s: float) -> list[SpanSeen]:
        """Nothing comes later: requests of that trace are over."""
        return [SpanSeen(name) for name in self._names.get(trace_id, ())]


class MadeUpEngine:
    """Half of a pair, in a thread of its own. `child` is itself: it can be frozen and killed."""

    def __init__(self, role: str, seen: Seen, offers: dict[str, str], ping_port: int | None) -> None:
        self.name = role
        self._seen, self._offers, self._ping_port = seen, offers, ping_port
        self._finished = self._received = self._tokens = self._running = 0
        with HeldPort() as held:
            self.port = held.number
        self.url = f"http://{HOST}:{self.port}"
        with HeldPort() as held:
            self.bootstrap_port = held.number
        self.child = self
        self.start()

    def start(self) -> None:
        """Listen, and tell a router that is found by telling."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._open())
        self._bootstrap: BootstrapService | None = None
        if self.name == "prefill":
            self._bootstrap = BootstrapService(HOST, self.bootstrap_port)
            self._bootstrap.start()
            self._bootstrap.tell(
                query_answer({0: (EngineId("made-up"), [RankAddress(HOST, self.port, Epoch(1))])})
            )
        self._registration: Registration | None = None
        if self._ping_port is not None:
            said = {
                "type": PRODUCER if self.name == "prefill" else CONSUMER,
                "http_address": f"{HOST}:{self.port}",
                "zmq_address": str(Address(HOST, self.port, self.port)),
                "dp_size": 1,
                "tp_size": 1,
                "transfer_mode": "READ",
            }
            self._registration = Registration(HOST, self._ping_port, msgspec.msgpack.encode(said))
            self._registration.start()

    def freeze(self) -> None:
        """Answer nobody until `thaw`."""
        self._loop.call_soon_threadsafe(self._awake.clear)

    def thaw(self) -> None:
        """Go on."""
        self._loop.call_soon_threadsafe(self._awake.set)

    def kill(self) -> None:
        """Close every connection and listen no more."""
        if self._registration is not None:
            self._registration.stop()
        if self._bootstrap is not None:
            self._bootstrap.stop()
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _open(self) -> None:
        self._awake = asyncio.Event()
        self._awake.set()
        app = web.Application()
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._ok)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port).start()

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = {
            "vllm:request_success_total": self._finished,
            "vllm:num_requests_running": self._running,
            "vllm:generation_tokens_total": self._tokens,
            'stateferry_handoffs_total{outcome="received"}': self._received,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in lines.items()))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._awake.wait()
        self._running += 1
        try:
            return await self._answer(request, body)
        finally:
            self._running -= 1

    async def _answer(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        text = solve(prompt) if isinstance(prompt, str) else "nowhere"
        params, told = await self._take(body.get("kv_transfer_params") or {}, json.dumps(prompt), request)
        count = (chat and body.get("max_completion_tokens")) or body["max_tokens"]
        words = [f" {text}", *[" ."] * (count - 1)]
        usage = {
            "prompt_tokens": len(prompt.split() if isinstance(prompt, str) else prompt),
            "completion_tokens": count,
            "total_tokens": count,
        }
        if body.get("stream"):
            return await self._stream(request, body, chat, words, usage)
        self._tokens += count
        self._finished += 1
        whole = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": whole}} if chat else {"text": whole}
        if body.get("logprobs"):
            ones = [-0.1] * count
            choice["logprobs"] = {
                "tokens": words,
                "token_logprobs": ones,
                "top_logprobs": [{word: -0.1} for word in words],
                "text_offset": list(range(count)),
            }
        answer = {"id": "a", "object": "text_completion", "created": 1, "model": "model"}
        return web.json_response(
            answer | {"choices": [choice], "usage": usage, "kv_transfer_params": params if told else None}
        )

    async def _take(
        self, params: Mapping[str, Any], prompt: str, request: web.Request
    ) -> tuple[dict[str, Any], bool]:
        """Make an offer, or use one up; what the answer carries, and whether it carries anything."""
        traceparent = request.headers.get("traceparent")
        if params.get("do_remote_decode"):
            if traceparent:
                self._seen.told(traceparent, "stateferry.offer")
            offer = uuid.uuid4().hex
            self._offers[offer] = prompt
            if name := params.get("transfer_id"):
                self._offers[name] = prompt
            found = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": f"p/{offer}"}
            found |= {"remote_block_ids": [[1]], "remote_host": HOST, "remote_port": self.port}
            return found | {
                "transfer_id": params.get("transfer_id"),
                "stateferry": {"transfer_id": offer},
            }, True
        offer = str(params.get("remote_engine_id")).partition("/")[2]
        if parse_promise(params) is not None:
            offer = params["transfer_id"]
            for _ in range(int(OFFER_S / LOOK_S)):
                if offer in self._offers:
                    break
                await asyncio.sleep(LOOK_S)
        if params.get("do_remote_prefill") and self._offers.get(offer) == prompt:
            del self._offers[offer]
            self._received += 1
            if traceparent:
                self._seen.told(traceparent, "stateferry.handoff")
            return {"stateferry": {"received": {"outcome": "received"}}}, True
        return {}, False

    async def _stream(
        self, request: web.Request, body: Mapping[str, Any], chat: bool, words: list[str], usage: Any
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in words:
            self._tokens += 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": word}} if chat else {"text": word}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(PIECE_S)
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        self._finished += 1
        return response


class MadeUpPair:
    """As `router_servers.Pair`."""

    def __init__(self, stack: Any, ping_port: int | None = None) -> None:
        self.stack = stack
        self.seen = Seen()
        offers: dict[str, str] = {}
        self.prefill = MadeUpEngine("prefill", self.seen, offers, ping_port)
        self.decode = MadeUpEngine("decode", self.seen, offers, ping_port)
        self.bootstrap_port = self.prefill.bootstrap_port

    def kill_prefill(self) -> None:
        """As if its host had died."""
        self.prefill.kill()

    def revive_prefill(self) -> None:
        """The same engine at the same address."""
        self.prefill.start()

    def close(self) -> None:
        """End both."""
        for engine in (self.prefill, self.decode):
            engine.kill()
