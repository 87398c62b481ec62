"""The tracer that makes real spans and sends them by OTLP over gRPC. The only importer of OpenTelemetry.

Rules: a collector that is slow, absent or dead costs a counter and nothing else. Ended spans wait in a queue of
`_QUEUE_SPANS`, are sent in batches by one thread, each batch within `_EXPORT_TIMEOUT_S`, and what does not fit is
dropped. Nothing is registered globally: vLLM may have a tracer of its own in the same process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from typing_extensions import override

from contextcache.errors import ContextCacheError
from contextcache.tracing import CURRENT, Attributes, Kind, Span, Tracer, is_traceparent

_QUEUE_SPANS = 4096
"""About 8 MB; a turn makes some fifteen."""
_BATCH_SPANS = 512
_BATCH_INTERVAL_MS = 1000
_EXPORT_TIMEOUT_S = 5
_CLOSE_TIMEOUT_S = 3.0
_KINDS = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT, "internal": trace.SpanKind.INTERNAL}


class OtlpTracer(Tracer):
    """One per part and process."""

    def __init__(self, endpoint: str, *, part: str, sample_ratio: float, on_lost: Callable[[int], object]) -> None:
        """`endpoint`: http://host:4317 or https://…; `part` as the collector shall name the service."""
        insecure = endpoint.startswith("http://")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S)
        self._processor = BoundedSpans(exporter, on_lost=on_lost)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {
                    "service.namespace": "context-cache",
                    "service.name": f"context-cache-{part}",
                    "service.instance.id": socket.gethostname(),
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("context-cache")
        self._closing: threading.Thread | None = None

    @override
    def span(
        self, name: str, *, kind: Kind = "internal", parent: str = "", attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        context = _remote(parent) if is_traceparent(parent) else Context()
        return _running(self._tracer, name, kind, context, attributes or {})

    @override
    def close(self) -> None:
        if self._closing is None:
            # In a thread, because what it waits for has no deadline of its own in every version.
            self._closing = threading.Thread(target=self._provider.shutdown, name="trace-shutdown", daemon=True)
            self._closing.start()
        self._closing.join(_CLOSE_TIMEOUT_S)


class BoundedSpans(BatchSpanProcessor):
    """A batch processor that counts what is lost: spans beyond the queue, and batches nobody took."""

    def __init__(self, exporter: SpanExporter, *, on_lost: Callable[[int], object]) -> None:
        self._on_lost = on_lost
        self._lock_waiting = threading.Lock()
        self._num_waiting = 0
        super().__init__(
            _CountedExporter(exporter, self._taken, on_lost),
            # Room for the batch being sent: the queue itself never has to drop.
            max_queue_size=_QUEUE_SPANS + _BATCH_SPANS,
            schedule_delay_millis=_BATCH_INTERVAL_MS,
            max_export_batch_size=_BATCH_SPANS,
        )

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock_waiting:
            fits = self._num_waiting < _QUEUE_SPANS
            self._num_waiting += fits
        if fits:
            super().on_end(span)
        else:
            self._on_lost(1)

    def _taken(self, num_spans: int) -> None:
        with self._lock_waiting:
            self._num_waiting -= num_spans


class _CountedExporter(SpanExporter):
    def __init__(
        self, exporter: SpanExporter, on_taken: Callable[[int], None], on_lost: Callable[[int], object]
    ) -> None:
        self._exporter = exporter
        self._on_taken = on_taken
        self._on_lost = on_lost

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._on_taken(len(spans))
            if result is not SpanExportResult.SUCCESS:
                self._on_lost(len(spans))
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()

    @override
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _OtlpSpan(Span):
    """One span, and the tracer that makes its children."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self._traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    @override
    def traceparent(self) -> str:
        return self._traceparent

    @override
    def set(self, key: str, value: str | float) -> None:
        self._span.set_attribute(key, value)

    @override
    def rename(self, name: str) -> None:
        self._span.update_name(name)

    @override
    def fail(self, error_type: str) -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR)

    @override
    def child(self, name: str, kind: Kind, attributes: Attributes) -> AbstractContextManager[Span]:
        if not self._span.get_span_context().trace_flags.sampled:
            # Nothing below a trace that is not kept is kept either: the name of this span is all anybody needs.
            return nullcontext(self)
        context = trace.set_span_in_context(self._span, Context())
        return _running(self._tracer, name, kind, context, attributes)


@contextmanager
def _running(tracer: trace.Tracer, name: str, kind: Kind, context: Context, attributes: Attributes) -> Iterator[Span]:
    made = tracer.start_span(name, context=context, kind=_KINDS[kind], attributes=attributes)
    span = _OtlpSpan(tracer, made)
    before = CURRENT.get()
    CURRENT.set(span)
    try:
        yield span
    except ContextCacheError as exc:
        # A refusal is an answer; a fault is one of ours. Messages stay out: they may quote what somebody sent.
        if exc.http_status >= 500:
            span.fail(exc.code)
        else:
            span.set("error.type", exc.code)
        raise
    except Exception as exc:
        span.fail(type(exc).__name__)
        raise
    finally:
        # Not by its token: a generator may be closed in another context than it was begun in.
        CURRENT.set(before)
        made.end()


def _remote(traceparent: str) -> Context:
    context = trace.SpanContext(
        trace_id=int(traceparent[3:35], 16),
        span_id=int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(traceparent[53:55], 16)),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())
