"""Spans, and their export by OTLP over gRPC. The only importer of OpenTelemetry's SDK.

A slow, absent or dead collector never slows a process down. One thread sends batches of ended spans, each within
`_EXPORT_TIMEOUT_S`. Spans beyond a queue of `_QUEUE_SPANS`, and batches that fail, are dropped and counted.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from typing_extensions import override

_QUEUE_SPANS = 4096
"""Spans that wait for export, about 8 MB. A turn makes fifteen."""
_BATCH_SPANS = 512
_BATCH_INTERVAL_MS = 1000
_EXPORT_TIMEOUT_S = 5
_CLOSE_TIMEOUT_S = 3.0


class Provider(TracerProvider):
    """Source of a process's spans."""

    def __init__(self, endpoint: str, *, part: str, sample_ratio: float, on_lost: Callable[[int], object]) -> None:
        """`endpoint`: http://host:4317 or https://…; `part`: suffix of the service's name."""
        resource = {
            "service.namespace": "context-cache",
            "service.name": f"context-cache-{part}",
            "service.instance.id": socket.gethostname(),
        }
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        super().__init__(sampler=sampler, resource=Resource.create(resource), shutdown_on_exit=False)
        insecure = endpoint.startswith("http://")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S)
        self.add_span_processor(BoundedSpans(exporter, on_lost=on_lost))
        self._closing: threading.Thread | None = None

    def close(self) -> None:
        """Send the remaining spans, within `_CLOSE_TIMEOUT_S`."""
        if self._closing is None:
            # In a thread, because the shutdown has no deadline of its own in some versions.
            self._closing = threading.Thread(target=self.shutdown, name="trace-shutdown", daemon=True)
            self._closing.start()
        self._closing.join(_CLOSE_TIMEOUT_S)


class BoundedSpans(BatchSpanProcessor):
    """A batch processor that counts lost spans: those beyond the queue, and those of failed batches."""

    def __init__(self, exporter: SpanExporter, *, on_lost: Callable[[int], object]) -> None:
        self._on_lost = on_lost
        self._places = threading.Semaphore(_QUEUE_SPANS)
        super().__init__(
            _CountedExporter(exporter, self._places, on_lost),
            # Room for the batch being sent, so that the queue itself never drops spans.
            max_queue_size=_QUEUE_SPANS + _BATCH_SPANS,
            schedule_delay_millis=_BATCH_INTERVAL_MS,
            max_export_batch_size=_BATCH_SPANS,
        )

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._places.acquire(blocking=False):
            super().on_end(span)
        else:
            self._on_lost(1)


class _CountedExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, places: threading.Semaphore, on_lost: Callable[[int], object]) -> None:
        self._exporter, self._places, self._on_lost = exporter, places, on_lost

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._places.release(len(spans))
            if result is not SpanExportResult.SUCCESS:
                self._on_lost(len(spans))
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()
