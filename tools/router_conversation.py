"""The conversation that `tools/router_table.py` holds through each router: what is asked, and what is seen.

Each scenario returns a flat dictionary of what was seen. An answer is right if it begins with the word that
only an engine with both kinds of memory knows. Whether it was handed off is read from the decode engine's
counters.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import httpx

from router_servers import Front, Pair
from stateferry.models import RecallPrompt, recall_prompt
from stateferry.stack import Client, Metrics
from stateferry.testing.collector import Collector

Seen = dict[str, Any]
TOKENS = 300
LONG_ANSWER = 6000
ANSWER_TOKENS = 4
ASK_S = 90.0
LEAVES_S = 1.0
SETTLE_S = 60.0
ASKS = 90
"""How often, once a second, a router is asked until it has found a prefill engine that came back."""


class Conversation:
    """Through one router. Prompts are never asked twice: nothing is answered from a prefix cache."""

    def __init__(
        self, front: Front, pair: Pair, client: Client, collector: Collector, first_seed: int
    ) -> None:
        self._front = front
        self._pair = pair
        self._client = client
        self._collector = collector
        self._seed = first_seed
        self._pause = threading.Event()

    def scenarios(self) -> dict[str, Callable[[], Seen]]:
        """In the order of the table; all need both engines."""
        return {
            "completion": lambda: self._ask(self._completion()),
            "completion, streamed": lambda: self._ask(self._completion(stream=True)),
            "chat": lambda: self._ask(self._chat()),
            "chat, streamed": lambda: self._ask(self._chat(stream=True)),
            "usage": self.usage,
            "log-probabilities": self.logprobs,
            "n = 2": lambda: self._ask(self._completion(n=2, temperature=0.001)),
            "two prompts in one call": self.two_prompts,
            "trace": self.trace,
            "client leaves during the answer": self.leaves_answer,
            "client leaves before the answer": self.leaves_prompt,
        }

    # -- scenarios -------------------------------------------------------------------------------

    def usage(self) -> Seen:
        """Token counts of an answer, and of a stream that is asked for them."""
        prompt, path, body = self._completion()
        plain = self._post(path, body).json()["usage"]
        prompt_again, path, body = self._completion(stream=True, stream_options={"include_usage": True})
        streamed = [event["usage"] for event in self._events(path, body) if event.get("usage")]
        return {
            "asked": [prompt.num_tokens, ANSWER_TOKENS],
            "told": [plain["prompt_tokens"], plain["completion_tokens"]],
            "asked_streamed": [prompt_again.num_tokens, ANSWER_TOKENS],
            "told_streamed": [streamed[-1]["prompt_tokens"], streamed[-1]["completion_tokens"]]
            if streamed
            else [],
        }

    def logprobs(self) -> Seen:
        """How many log-probabilities come with an answer."""
        _, path, body = self._completion(logprobs=1)
        (choice,) = self._post(path, body).json()["choices"]
        return {
            "asked": ANSWER_TOKENS,
            "told": len((choice.get("logprobs") or {}).get("token_logprobs") or ()),
        }

    def two_prompts(self) -> Seen:
        """Which of two prompts of one call are handed off."""
        one, two = self._prompt(), self._prompt()
        _, path, body = self._completion()
        return self._ask(([one, two], path, body | {"prompt": [one.text, two.text]}))

    def trace(self) -> Seen:
        """Engines that have spans in the caller's trace."""
        trace_id = f"{self._seed:032x}"
        _, path, body = self._completion()
        self._post(path, body, {"traceparent": f"00-{trace_id}-{'c3' * 8}-01"})
        for engine in (self._pair.prefill, self._pair.decode):  # an idle engine tells with its next step
            self._client.complete(engine.url, [20, 21, 22], 2)
        wanted = {"stateferry.offer", "stateferry.handoff"}
        spans = self._collector.wait_for(trace_id, lambda seen: wanted <= {s.name for s in seen}, 15.0)
        names = {span.name for span in spans}
        return {"prefill": "stateferry.offer" in names, "decode": "stateferry.handoff" in names}

    def leaves_answer(self) -> Seen:
        """A client that hangs up at the first piece of a long answer. How much is decoded all the same?"""
        _, path, body = self._completion(stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)
        before = self._decode()
        events = self._events(path, body)
        first = next(events)
        events.close()
        idle = self._until(lambda: self._running(self._decode()) == 0)
        made = self._decode().total("vllm:generation_tokens_total") - before.total(
            "vllm:generation_tokens_total"
        )
        return {"began": bool(first), "stopped": idle and made < LONG_ANSWER}

    def leaves_prompt(self) -> Seen:
        """A client that hangs up while the prefill engine hangs. Is the decode engine asked all the same?

        vLLM does not count a request that ends because its client left: one that comes early is seen while it
        waits.
        """
        before = self._decode()
        self._pair.prefill.child.freeze()
        try:
            asked_early = self._comes_early()
        finally:
            self._pair.prefill.child.thaw()
        self._until(lambda: self._running(self._prefill()) == 0)
        seen = self._ask(self._completion())
        self._until(lambda: self._running(self._decode()) == 0)
        asked = _finished(self._decode()) - _finished(before)
        return {**seen, "handed_off": None, "decode_asked": asked_early or asked > 1}

    def _comes_early(self) -> bool:
        """Ask, and leave after `LEAVES_S`: has the decode engine anything to do meanwhile?"""
        _, path, body = self._completion()

        def ask_and_leave() -> None:
            with contextlib.suppress(httpx.TimeoutException):
                self._post(path, body, timeout_s=LEAVES_S)

        client = threading.Thread(target=ask_and_leave)
        client.start()
        early = False
        while client.is_alive():
            early = early or self._running(self._decode()) > 0
            self._pause.wait(0.02)
        client.join()
        return early

    def prefill_is_dead(self) -> Seen:
        """Asked while there is no prefill engine."""
        return self._ask(self._completion())

    def prefill_is_back(self) -> Seen:
        """Asked once a second until a request is handed off again."""
        for asks in range(1, ASKS + 1):
            seen = self._ask(self._completion())
            if seen["handed_off"]:
                return {**seen, "asks": asks}
            self._pause.wait(1.0)
        return {**seen, "asks": None}

    # -- asking ----------------------------------------------------------------------------------

    def _prompt(self) -> RecallPrompt:
        self._seed += 1
        return recall_prompt(self._seed, TOKENS + self._seed % 7)

    def _completion(self, **more: Any) -> tuple[RecallPrompt, str, dict[str, Any]]:
        prompt = self._prompt()
        body = {
            "model": "model",
            "prompt": prompt.text,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            **more,
        }
        return prompt, "/v1/completions", body

    def _chat(self, **more: Any) -> tuple[RecallPrompt, str, dict[str, Any]]:
        prompt, _, body = self._completion(**more)
        del body["prompt"]
        messages = [{"role": "user", "content": prompt.text}]
        return prompt, "/v1/chat/completions", body | {"messages": messages}

    def _ask(self, asked: tuple[RecallPrompt | list[RecallPrompt], str, dict[str, Any]]) -> Seen:
        """One request: its status, whether the answers are right, and what the decode engine counted."""
        prompts, path, body = asked
        wanted = [p.answer for p in (prompts if isinstance(prompts, list) else [prompts])]
        before = self._decode()
        try:
            if body.get("stream"):
                events, status = list(self._events(path, body)), 200
            else:
                answer = self._post(path, body)
                status = answer.status_code
                events = [answer.json()] if status == 200 else []
        except httpx.HTTPStatusError as e:
            events, status = [], e.response.status_code
        except httpx.HTTPError:
            events, status = [], 0
        texts = _texts(events)
        wanted = [wanted[index * len(wanted) // max(1, len(texts))] for index in range(len(texts))]
        right = bool(texts) and all(t.split()[:1] == [w] for t, w in zip(texts, wanted, strict=True))
        if texts:
            self._until(lambda: _finished(self._decode()) > _finished(before))
        told = any((event.get("kv_transfer_params") or {}).get("stateferry") for event in events)
        after = self._decode()
        return {
            "status": status,
            "answers": len(texts),
            "right": right,
            "handed_off": int(_received(after) - _received(before)),
            "failed": int(_not_received(after) - _not_received(before)),
            "told": told,
        }

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ASK_S,
    ) -> httpx.Response:
        with httpx.Client(timeout=timeout_s, trust_env=False) as http:
            return http.post(
                self._front.url + path, json=dict(body), headers={**self._front.headers, **(headers or {})}
            )

    def _events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """A stream's pieces. Whoever stops asking for them hangs up."""
        url, headers = self._front.url + path, dict(self._front.headers)
        with (
            httpx.Client(timeout=ASK_S, trust_env=False) as http,
            http.stream("POST", url, json=dict(body), headers=headers) as answer,
        ):
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    # -- looking ---------------------------------------------------------------------------------

    def _decode(self) -> Metrics:
        return self._client.metrics(self._pair.decode.url)

    def _prefill(self) -> Metrics:
        return self._client.metrics(self._pair.prefill.url)

    @staticmethod
    def _running(page: Metrics) -> float:
        return page.total("vllm:num_requests_running") + page.total("vllm:num_requests_waiting")

    def _until(self, holds: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + SETTLE_S
        while not holds():
            if time.monotonic() > deadline:
                return False
            self._pause.wait(0.1)
        return True


def _texts(events: list[dict[str, Any]]) -> list[str]:
    """The answers of a completion or chat, whole or in pieces, by index."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices") or ():
            said = choice.get("text")
            if said is None:
                said = (choice.get("message") or choice.get("delta") or {}).get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (said or "")
    return [text for _, text in sorted(texts.items())]


def _finished(page: Metrics) -> float:
    return page.total("vllm:request_success_total")


def _received(page: Metrics) -> float:
    return page.total("stateferry_handoffs_total", outcome="received")


def _not_received(page: Metrics) -> float:
    return page.total("stateferry_handoffs_total") - _received(page)
