"""An OpenTelemetry collector in this process: what engines export lands in a list. Needs vLLM's packages."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stateferry.testing.local_server import LocalServer


@dataclass(frozen=True)
class Span:
    """One span as it came over the wire."""

    trace_id: str
    name: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    process_id: str
    """Of the vLLM process that exported it."""


class Collector(LocalServer):
    """Listens from `with` on. Engines that start before it, or live on after it, lose their spans."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") is None:
                    collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        super().__init__(Handler)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What makes an engine export to us."""
        return ("--otlp-traces-endpoint", f"{self.url}/v1/traces")

    @property
    def environment(self) -> dict[str, str]:
        """What makes it do so over HTTP, and soon."""
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500"}

    def wait_for(self, trace_id: str, enough: Callable[[list[Span]], bool], timeout_s: float) -> list[Span]:
        """The spans of a trace, once there are enough, or when time is over."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self._news:
            self._news.wait_for(lambda: enough(found()), timeout_s)
            return found()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        new = []
        for resource in request.resource_spans:
            process = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                new += [
                    Span(
                        span.trace_id.hex(),
                        span.name,
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes},
                        process.get("vllm.process_id", ""),
                    )
                    for span in scope.spans
                ]
        with self._news:
            self._spans += new
            self._news.notify_all()
