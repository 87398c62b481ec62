"""Makes spans and sends them by OTLP over gRPC. The only importer of OpenTelemetry's SDK.

Rules: a collector that is slow, absent or dead costs a counter and nothing else. Ended spans wait in a queue of
`_QUEUE_SPANS`, are sent in batches by one thread, each batch within `_EXPORT_TIMEOUT_S`, and what does not fit is
dropped.
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
"""About 8 MB; a turn makes some fifteen."""
_BATCH_SPANS = 512
_BATCH_INTERVAL_MS = 1000
_EXPORT_TIMEOUT_S = 5
_CLOSE_TIMEOUT_S = 3.0


class Provider(TracerProvider):
    """One per part and process."""

    def __init__(self, endpoint: str, *, part: str, sample_ratio: float, on_lost: Callable[[int], object]) -> None:
        """`endpoint`: http://host:4317 or https://…; `part` as the collector shall name the service."""
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
        """Send what is left, within `_CLOSE_TIMEOUT_S`."""
        if self._closing is None:
            # In a thread, because what it waits for has no deadline of its own in every version.
            self._closing = threading.Thread(target=self.shutdown, name="trace-shutdown", daemon=True)
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
