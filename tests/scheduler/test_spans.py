"""Spans of hand-offs under the trace of their request, made by real schedulers, in an exporter in memory."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from harness import HYBRID, Engine, Pair
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from stateferry.ids import RequestId, TransferId
from stateferry.session import Cause, Outcome, Report
from stateferry.telemetry import SPANS
from stateferry.vllm import spans as vllm_spans
from stateferry.vllm.spans import Spans, SpanTimes, spans_of

pytestmark = pytest.mark.scheduler

TRACE_ID, CALLER = "1" * 32, "2" * 16
HEADERS = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
WHOLE = "stateferry.handoff"


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


class Traced:
    """An exporter in the place of the one that vLLM sets up in an engine core."""

    def __init__(self, engine: Engine) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        engine.half.spans = Spans(provider.get_tracer("test"))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """All that were made, in the order in which they ended."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of one name."""
        return [span for span in self.spans if span.name == name]


def start_hand_off(pair: Pair, headers: Any = HEADERS, **more: Any) -> str:
    params = pair.prefill(prompt_of(14), trace_headers=headers)
    request = pair.consumer.add(prompt_of(14), params=params, max_tokens=2, trace_headers=headers, **more)
    return request.request_id


def hand_off(pair: Pair, headers: Any = HEADERS, **more: Any) -> str:
    request_id = start_hand_off(pair, headers, **more)
    pair.run()
    return request_id


def check_trace(spans: tuple[ReadableSpan, ...]) -> None:
    """All spans are of the request's trace, parts lie within their whole, and every time is a time."""
    wholes = {span.context.span_id: span for span in spans if span.parent.span_id == int(CALLER, 16)}
    assert wholes
    for span in spans:
        assert span.name in SPANS
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.start_time <= span.end_time
        if span.context.span_id not in wholes:
            whole = wholes[span.parent.span_id]
            slack = 2_000  # dates are seconds as floats, good to less than a microsecond
            assert whole.start_time - slack <= span.start_time
            assert span.end_time <= whole.end_time + slack


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_trace_has_the_spans_of_both_engines_and_of_every_rank(ranks: int) -> None:
    with Pair(HYBRID, ranks=ranks) as pair:
        producer, consumer = Traced(pair.producer), Traced(pair.consumer)
        request_id = hand_off(pair)
        pair.hand_off(prompt_of(9, 2))  # not traced; its steps carry the last news
        pair.check_idle()
        offers = producer.named("stateferry.offer")
        assert len(offers) == len(producer.spans) == ranks
        assert {span.attributes["stateferry.rank"] for span in offers} == set(range(ranks))
        assert {span.attributes["stateferry.end"] for span in offers} == {"released"}
        assert all(request_id in str(span.attributes["stateferry.claimant"]) for span in offers)
        parts = ("handshake", "wait", "plan", "post", "wire", "release")
        for name in (WHOLE, *(f"stateferry.{part}" for part in parts)):
            assert len(consumer.named(name)) == ranks, name
        assert len(consumer.spans) == (1 + len(parts)) * ranks
        check_trace(producer.spans)
        check_trace(consumer.spans)
        for whole in consumer.named(WHOLE):
            assert whole.attributes["stateferry.request_id"] == request_id
            assert whole.attributes["stateferry.outcome"] == "received"
            assert whole.attributes["stateferry.bytes"] > 0
            assert whole.status.status_code is StatusCode.UNSET
        transfers = {span.attributes["stateferry.transfer_id"] for span in (*offers, *consumer.named(WHOLE))}
        assert len(transfers) == 1


def test_spans_of_another_trace_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def astray(request: Any) -> Any:
        return (("traceparent", f"00-{'3' * 32}-{CALLER}-01"),) if request.trace_headers else ()

    for part in ("offering", "taking"):
        monkeypatch.setattr(f"stateferry.vllm.{part}.trace_of", astray)
    with pytest.raises(AssertionError):
        test_one_trace_has_the_spans_of_both_engines_and_of_every_rank(1)


def test_parts_outside_their_whole_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(report: Report) -> list[SpanTimes]:
        return [SpanTimes(s.name, s.start_s, s.end_s + (s.name != WHOLE)) for s in spans_of(report)]

    monkeypatch.setattr(vllm_spans, "spans_of", late)
    with pytest.raises(AssertionError):
        test_one_trace_has_the_spans_of_both_engines_and_of_every_rank(1)


def test_a_hand_off_that_fails_says_so_in_its_trace(leap: Callable[[float], None]) -> None:
    with Pair(HYBRID, transfer_timeout_s=30, lease_s=600, read_retries=0) as pair:
        consumer = Traced(pair.consumer)
        pair.consumer.tap.held = True
        start_hand_off(pair)
        pair.run_until(lambda: pair.consumer.tap.posted > 0, "the read")
        leap(31)
        pair.run()
        pair.check_idle()
        (whole,) = consumer.named(WHOLE)
        assert whole.status.status_code is StatusCode.ERROR
        assert whole.attributes["stateferry.cause"] == "deadline"
        assert "within transfer_timeout_s" in str(whole.attributes["stateferry.reason"])
        assert not consumer.named("stateferry.release")
        check_trace(consumer.spans)


def test_an_offer_that_nobody_takes_is_traced_to_the_end_of_its_lease() -> None:
    with Pair(HYBRID, lease_s=0.3) as pair:
        producer = Traced(pair.producer)
        pair.prefill(prompt_of(14), trace_headers=HEADERS)
        pair.run()
        (offer,) = producer.named("stateferry.offer")
        assert offer.attributes["stateferry.end"] == "expired"
        assert offer.status.status_code is StatusCode.ERROR
        assert 0.3 <= (offer.end_time - offer.start_time) / 1e9 < 30


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"traceparent": "nonsense"},
        {"tracestate": "a=b"},
        {"traceparent": f"00-{TRACE_ID}-{CALLER}-00"},
    ],
    ids=["none", "empty", "malformed", "only state", "not sampled"],
)
def test_a_request_without_a_trace_leaves_no_span_and_is_served(headers: Any) -> None:
    with Pair(HYBRID) as pair:
        engines = Traced(pair.producer), Traced(pair.consumer)
        request_id = hand_off(pair, headers)
        pair.check_idle()
        assert pair.consumer.finished[request_id].params["stateferry"]["received"]["outcome"] == "received"
        assert [span.name for engine in engines for span in engine.spans] == []


def test_without_tracing_nothing_is_even_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(Spans, "_make", export)
    with Pair(HYBRID) as pair:
        pair.hand_off(prompt_of(14))
        pair.check_idle()


def test_an_exporter_that_breaks_harms_no_request() -> None:
    class Broken:
        def start_span(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("disk full")

    with Pair(HYBRID) as pair:
        pair.consumer.half.spans = Spans(Broken())
        request_id = hand_off(pair)
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert received["outcome"] == "received"
        assert pair.log.errors == ["could not make the spans of a hand-off: RuntimeError('disk full')"]


def report(**changes: Any) -> Report:
    base: dict[str, Any] = {
        "request_id": RequestId("r"),
        "transfer_id": TransferId("t"),
        "outcome": Outcome.RECEIVED,
        "queued_s": 4.0,
        "handshake_s": 1.0,
        "waited_s": 2.0,
        "plan_s": 0.5,
        "post_s": 0.25,
        "wire_s": 8.0,
        "total_s": 11.0,
        "ended_unix_s": 100.0,
    }
    return Report(**(base | changes))


def times(**changes: Any) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for span in spans_of(report(**changes)):
        found.setdefault(span.name.removeprefix("stateferry."), []).append((span.start_s, span.end_s))
    return found


def test_stages_follow_one_another() -> None:
    assert times() == {
        "handoff": [(85.0, 100.0)],
        "handshake": [(85.0, 86.0)],
        "wait": [(89.0, 91.0)],
        "plan": [(91.0, 91.5)],
        "post": [(91.5, 91.75)],
        "wire": [(91.5, 99.5)],
        "release": [(99.5, 100.0)],
    }


def test_each_retry_lasts_to_the_next_or_to_the_last_byte() -> None:
    assert times(retried_s=(4.0, 7.0))["retry"] == [(93.0, 96.0), (96.0, 99.5)]
    assert "retry" not in times()


def test_a_hand_off_that_was_never_given_blocks_has_no_stages() -> None:
    found = times(
        outcome=Outcome.ABANDONED,
        cause=Cause.PEER,
        total_s=0.0,
        waited_s=0.0,
        plan_s=0.0,
        post_s=0.0,
        wire_s=0.0,
        handshake_s=0.0,
    )
    assert found == {"handoff": [(96.0, 100.0)]}
