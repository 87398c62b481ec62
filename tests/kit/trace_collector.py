"""An OpenTelemetry collector in miniature: takes spans by OTLP over gRPC and keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from typing_extensions import override

from tests.kit.until import until

DEADLINE_S = 60


@dataclass(frozen=True)
class TakenSpan:
    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    attributes: dict[str, Any]
    failed: bool


@dataclass
class TraceCollector(pb_grpc.TraceServiceServicer):
    """`spans` grows; `refuses` makes it a collector that takes nothing."""

    spans: list[TakenSpan] = field(default_factory=list)
    refuses: bool = False
    num_calls: int = 0
    endpoint: str = ""

    @override
    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.num_calls += 1
        if self.refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.spans += [_taken(service, span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[TakenSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> TakenSpan:
        (span,) = self.named(name)
        return span

    def parent(self, span: TakenSpan) -> TakenSpan:
        (parent,) = [other for other in self.spans if other.span_id == span.parent_id]
        return parent

    def ancestry(self, span: TakenSpan) -> list[tuple[str, str]]:
        """Return (service, name) from the span itself up to the one that has no parent here."""
        line = [(span.service, span.name)]
        while any(other.span_id == span.parent_id for other in self.spans):
            span = self.parent(span)
            line.append((span.service, span.name))
        return line

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until enough has come; batches are sent each second."""
        await until(condition, what="the spans that are asked for")


def _taken(service: str, span: Any) -> TakenSpan:
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    return TakenSpan(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        values,
        failed=span.status.code == 2,
    )


@asynccontextmanager
async def running_collector() -> AsyncIterator[TraceCollector]:
    """Serve until the block ends."""
    collector = TraceCollector()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
