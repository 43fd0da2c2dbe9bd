"""The client that notes when every token came, against a server that answers what it is told."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from stateferry.bench.arrivals import Arrivals
from stateferry.bench.engine_gaps import EngineGaps
from stateferry.bench.interference import ALONE, ARRIVING, PREFILL, WINDOWS, Repeat, gaps_by_window, summary
from stateferry.bench.streams import Pair, Streamed, Streams
from stateferry.errors import EngineError
from stateferry.stack import PREFILL_PARAMS, AtOnce, Metrics

PARAMS = {"do_remote_prefill": True, "remote_host": "h"}
Handler = Callable[[httpx.Request], httpx.Response]


def stream(*counts: int, end: str = "length") -> httpx.Response:
    """Events of so many tokens each."""
    events = [{"choices": [{"token_ids": [7] * n, "finish_reason": None}]} for n in counts]
    events.append({"choices": [{"token_ids": [], "finish_reason": end}]})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return httpx.Response(200, text=f"{text}data: [DONE]\n\n")


def ask(handler: Handler, where: str | Pair | AtOnce, tokens: int = 3, **more: Any) -> Streamed:
    async def run() -> Streamed:
        async with Streams(transport=httpx.MockTransport(handler)) as streams:
            return await streams.ask(where, [1, 2, 3], tokens, **more)

    return asyncio.run(run())


def body(request: httpx.Request) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(request.content)
    return found


def test_every_token_has_a_moment_also_when_several_come_at_once() -> None:
    seen: list[int] = []
    got = ask(lambda _: stream(1, 2), "http://d", on_token=lambda a: seen.append(len(a.token_s)))
    assert (len(got.token_s), len(got.gaps_s), got.error, got.prompt_tokens) == (3, 2, "", 3)
    assert seen == [1, 3]
    assert got.first_token_s is not None
    assert got.first_token_s >= 0
    assert got.gaps_s == sorted(got.gaps_s, key=lambda gap: gap >= 0)


def test_a_pair_is_asked_as_a_router_does_and_lengths_are_exact() -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, body(request), request.headers.get("X-Correlation-ID")))
        if request.url.host == "p":
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": PARAMS})
        return stream(1, 1, 1)

    got = ask(handler, ("http://p", "http://d"), headers={"X-Correlation-ID": "tree-1"})
    (first, prefill, name), (second, decode, other_name) = asked
    assert (first, second, name, other_name) == ("p", "d", "tree-1", "tree-1")
    assert (prefill["max_tokens"], prefill["kv_transfer_params"]) == (1, dict(PREFILL_PARAMS))
    assert (decode["max_tokens"], decode["min_tokens"], decode["ignore_eos"]) == (3, 3, True)
    assert (decode["kv_transfer_params"], decode["prompt"], decode["stream"]) == (PARAMS, [1, 2, 3], True)
    assert got.prefill_s is not None
    assert got.first_token_s is not None
    assert got.first_token_s >= got.prefill_s


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (lambda _: httpx.Response(503, text="full"), "HTTP 503: full"),
        (lambda _: stream(1, end="error"), "gave the request up"),
        (lambda _: httpx.Response(200, text='data: {"error": "lost"}\n\n'), "gave the request up: lost"),
        (lambda _: httpx.Response(200, text="data: {damaged\n\n"), "http://d"),
    ],
)
def test_whatever_a_server_does_is_an_error_of_that_request_only(handler: Handler, words: str) -> None:
    assert words in ask(handler, "http://d").error


def test_an_error_without_a_text_is_named_by_its_kind() -> None:
    """Symptom: `http://127.0.0.1:34659: `, and nobody knew what had happened."""

    def closed(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("", request=request)

    assert ask(closed, "http://d").error == "http://d: ReadError"


def test_a_prefill_leg_without_an_offer_is_an_error() -> None:
    got = ask(lambda _: httpx.Response(200, json={"choices": []}), ("http://p", "http://d"))
    assert "no kv_transfer_params" in got.error
    assert got.first_token_s is None


def test_a_gap_belongs_to_the_window_in_which_it_ended() -> None:
    """A stall from before a window counts where it was noticed; what ends between windows counts nowhere."""
    windows = {ALONE: (0.0, 10.0), PREFILL: (10.0, 20.0), ARRIVING: (20.0, 30.0)}
    found = gaps_by_window([[1.0, 2.0, 11.0, 12.0, 25.0, 31.0], [29.0, 30.0]], windows)
    nothing = {name: [] for name in WINDOWS}
    assert found == nothing | {ALONE: [1.0], PREFILL: [9.0, 1.0], ARRIVING: [13.0, 1.0]}


def test_who_does_not_ask_for_ids_counts_pieces() -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(body(request))
        event = json.dumps({"choices": [{"text": "a", "finish_reason": None}]})
        return httpx.Response(200, text=f"data: {event}\n\n" * 3)

    async def run() -> Streamed:
        async with Streams(transport=httpx.MockTransport(handler), ids=False) as streams:
            return await streams.ask("http://d", [1, 2, 3], 3)

    assert len(asyncio.run(run()).token_s) == 3
    assert asked[0]["return_token_ids"] is False


def answer(sent_s: float, *token_s: float, error: str = "") -> Streamed:
    return Streamed(sent_s, 5, list(token_s), error=error)


def repeat(gap_s: float) -> Repeat:
    """A token each second alone, one each `gap_s` seconds later on."""
    tokens = [float(s) for s in range(11)] + [10 + gap_s * n for n in range(1, 6)]
    arrivals = [answer(10.0, 10.5), answer(11.0, error="HTTP 500")]
    windows = {ALONE: (0.0, 10.0), ARRIVING: (10.0, tokens[-1])}
    return Repeat(windows, [answer(0.0, *tokens)], arrivals)


def test_a_ratio_is_taken_in_each_repeat_and_errors_are_counted() -> None:
    found = summary([repeat(1.0), repeat(2.0), repeat(3.0)])
    ratio = found["figures"]["arriving_over_alone_p50"]
    assert (ratio["least"], ratio["median"], ratio["most"]) == (1.0, 2.0, 3.0)
    assert found["figures"]["first_token_p50_s"]["median"] == 0.5
    assert (found["errors"], found["error_texts"]) == (3, ["HTTP 500"])
    assert found["time_line"]["arrivals_s"] == [[10.0, 10.5]]
    assert len(found["distributions"]["arriving"]) == 51


def test_the_engines_own_gaps_stand_beside_the_clients() -> None:
    """The client notices a gap of four seconds; the engine's clock says that no step took longer than one."""
    one, four = repeat(1.0), repeat(4.0)
    page = 'vllm:inter_token_latency_seconds_bucket{{le="{}"}} {}\n'
    text = page.format("1.0", 98) + page.format("2.0", 99) + page.format("+Inf", 100)
    before = EngineGaps.of(Metrics(text + "vllm:inter_token_latency_seconds_sum 100"))
    later = page.format("1.0", 198) + page.format("2.0", 199) + page.format("+Inf", 200)
    steady = EngineGaps.of(Metrics(later + "vllm:inter_token_latency_seconds_sum 150")).since(before)
    assert (steady.bounds_s, steady.counts, steady.sum_s) == ((1.0, 2.0, float("inf")), (100, 0, 0), 50.0)
    assert steady.figures() == {"p50": 1.0, "mean": 0.5, "p99": 1.0}
    assert before.figures()["p99"] == 2.0
    one.engine = four.engine = {ALONE: steady, ARRIVING: steady}
    found = summary([four])["figures"]
    assert found["arriving_over_alone_p99"]["median"] == 4.0
    assert found["arriving_over_alone_engine_p99"]["median"] == 1.0
    assert summary([one, four])["engine_gaps"] == {
        "bounds_s": [1.0, 2.0],
        "counts": {ALONE: [200, 0, 0], ARRIVING: [200, 0, 0]},
    }


def test_nothing_measured_is_nothing_and_not_a_good_result() -> None:
    nothing = Repeat({ALONE: (0.0, 1.0), ARRIVING: (1.0, 2.0)}, [answer(0.0, error="gone")], [])
    found = summary([nothing])
    assert found["figures"] == {}
    assert found["errors"] == 1


AT_ONCE = AtOnce("http://p", "http://d", "prefill@1.2.3.4:5")


def test_both_legs_at_once_have_one_name_and_the_first_token_counts_from_sending() -> None:
    asked: dict[str, Mapping[str, Any]] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        asked[request.url.host] = body(request)
        if request.url.host == "p":
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": PARAMS})
        return stream(1, 1, 1)

    got = ask(handler, AT_ONCE)
    assert (len(got.token_s), got.error) == (3, "")
    assert got.prefill_s is not None
    prefill, decode = asked["p"]["kv_transfer_params"], asked["d"]["kv_transfer_params"]
    assert prefill["do_remote_decode"]
    assert decode["do_remote_prefill"]
    assert prefill["transfer_id"] == decode["transfer_id"] != ""
    assert decode["remote_engine_id"] == "prefill@1.2.3.4:5"
    assert asked["p"]["max_tokens"] == 1


@pytest.mark.parametrize("failing", ["p", "d"])
def test_of_both_legs_at_once_either_may_fail_and_both_are_over(failing: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == failing:
            return httpx.Response(503, text="busy")
        if request.url.host == "p":
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": PARAMS})
        return stream(1, 1, 1)

    assert "HTTP 503" in ask(handler, AT_ONCE).error


@pytest.mark.parametrize("missed", ["before", "after"])
def test_a_look_that_an_engine_did_not_answer_tells_nothing_of_its_window(missed: str) -> None:
    """Symptom: without the first look all gaps since the engine's start were the window's; without the second
    one the bench ended."""
    there = EngineGaps((0.001, math.inf), (900, 1), 0.9)
    looks = (EngineGaps(), there) if missed == "before" else (there, EngineGaps())
    assert looks[1].since(looks[0]).figures() == {}
    assert there.since(EngineGaps((0.001, math.inf), (899, 1), 0.899)).counts == (1, 0)


def test_the_process_that_sends_dying_is_an_error_with_words() -> None:
    """Symptom: a BrokenPipeError came out of the bench."""

    async def ask() -> None:
        with Arrivals() as arrivals:
            arrivals._process.kill()
            arrivals._process.join()
            await arrivals.gaps("http://127.0.0.1:1")

    with pytest.raises(EngineError, match="sends a bench's requests died"):
        asyncio.run(ask())
