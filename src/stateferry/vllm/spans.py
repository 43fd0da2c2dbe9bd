"""Spans of hand-offs, under the trace that came with the request.

Ferries only measure. Their timings come to the scheduler half with everything else that they report, and its
process, where vLLM has set a tracer up, makes the spans: one process of an engine exports, and a request
that carries no trace costs nothing. vLLM hands trace headers on only where `--otlp-traces-endpoint` is set.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stateferry.ids import shown
from stateferry.session import Cause, Kept, Outcome, Report, Trace

logger = logging.getLogger(__name__)

TRACER = "stateferry"
HANDOFF = "stateferry.handoff"
OFFER = "stateferry.offer"
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanTimes:
    """One span: dates in seconds since 1970."""

    name: str
    start_s: float
    end_s: float


def trace_of(request: Any) -> Trace:
    """The trace headers of a request; empty without any."""
    headers = request.trace_headers
    return tuple(headers.items()) if headers else ()


def spans_of(report: Report) -> list[SpanTimes]:
    """Where the time of a hand-off went: the whole first, then its parts as they came. Pure."""
    ended = report.ended_unix_s
    ordered = ended - report.total_s
    opened = ordered - report.queued_s
    spans = [SpanTimes(HANDOFF, opened, ended)]
    if report.handshake_s:
        spans.append(SpanTimes("stateferry.handshake", opened, opened + report.handshake_s))
    if not report.total_s:
        return spans
    planned = ordered + report.waited_s
    spans.append(SpanTimes("stateferry.wait", ordered, planned))
    if not report.wire_s:
        return spans
    posted = planned + report.plan_s
    done = posted + report.wire_s
    spans.append(SpanTimes("stateferry.plan", planned, posted))
    spans.append(SpanTimes("stateferry.post", posted, posted + report.post_s))
    spans.append(SpanTimes("stateferry.wire", posted, done))
    ends = (*report.retried_s[1:], done - ordered)
    for start_s, end_s in zip(report.retried_s, ends, strict=report.retries > 0):
        spans.append(SpanTimes("stateferry.retry", ordered + start_s, ordered + end_s))
    if report.outcome is Outcome.RECEIVED:
        spans.append(SpanTimes("stateferry.release", done, ended))
    return spans


class Spans:
    """Makes them. Engine core's thread; vLLM's exporter has one of its own."""

    def __init__(self, tracer: Any = None) -> None:
        """`tracer` is OpenTelemetry's; None: the one of this process, whenever it is set up."""
        self._tracer = tracer

    def handoff(self, report: Report) -> None:
        """A rank's hand-off ended."""
        if report.trace:
            self._make(report.trace, spans_of(report), dict(_of_handoff(report)), _error(report))

    def offer(self, kept: Kept) -> None:
        """A rank keeps the blocks of an offer no more."""
        if kept.trace:
            span = SpanTimes(OFFER, kept.ended_unix_s - kept.kept_s, kept.ended_unix_s)
            self._make(kept.trace, [span], dict(_of_offer(kept)), "" if kept.released else "the lease ended")

    def _make(self, trace: Trace, spans: list[SpanTimes], attributes: dict[str, Value], error: str) -> None:
        try:
            self._export(trace, spans, attributes, error)
        except Exception:  # whatever an exporter or a client's header does, serving goes on
            logger.exception("could not make the spans of a hand-off")

    def _export(self, trace: Trace, spans: list[SpanTimes], attributes: dict[str, Value], error: str) -> None:
        from opentelemetry import trace as otel
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(dict(trace))
        if not otel.get_current_span(context).get_span_context().is_valid:
            return  # the client's header is no trace
        tracer = self._tracer or otel.get_tracer(TRACER)
        whole, *parts = spans
        top = tracer.start_span(
            whole.name, context=context, start_time=_ns(whole.start_s), attributes=attributes
        )
        if error:
            top.set_status(otel.StatusCode.ERROR, error)
        inside = otel.set_span_in_context(top, context)
        for part in parts:
            tracer.start_span(part.name, context=inside, start_time=_ns(part.start_s)).end(_ns(part.end_s))
        top.end(_ns(whole.end_s))


def _of_handoff(report: Report) -> Iterator[tuple[str, Value]]:
    yield "stateferry.request_id", report.request_id
    yield "stateferry.transfer_id", shown(report.transfer_id)
    yield "stateferry.rank", report.tp_rank
    yield "stateferry.peer", report.peer
    yield "stateferry.outcome", report.outcome.value
    if report.cause is not Cause.NONE:
        yield "stateferry.cause", report.cause.value
        yield "stateferry.reason", report.reason
    yield "stateferry.tokens", report.tokens
    yield "stateferry.bytes", sum(report.bytes_by_group)
    yield "stateferry.pieces", report.pieces
    yield "stateferry.retries", report.retries


def _of_offer(kept: Kept) -> Iterator[tuple[str, Value]]:
    yield "stateferry.request_id", kept.request_id
    yield "stateferry.transfer_id", shown(kept.transfer_id)
    yield "stateferry.rank", kept.tp_rank
    yield "stateferry.claimant", kept.claimant
    yield "stateferry.end", "released" if kept.released else "expired"


def _error(report: Report) -> str:
    return report.reason if report.outcome is Outcome.FAILED else ""


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
