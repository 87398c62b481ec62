"""One trace of a turn, from the gateway to the engine, in OpenTelemetry's own spans (ADR 0036).

A process begins a span with its `Tracer` for each request (`parent` comes from the caller), and with `child_span` below
it. A call to another process carries `trace_metadata()` or `trace_headers()`. Nothing is registered with OpenTelemetry
globally, because vLLM may have its own tracer in the same process. Without tracing only OpenTelemetry's API is
imported; span_export.py makes and sends spans.

Attributes never hold prompt text, token ids, keys or tenants. Session ids are allowed, as in log lines: an id alone
grants no access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from contextcache.errors import ContextCacheError
from contextcache.process.settings import TracingSettings

if TYPE_CHECKING:
    from contextcache.wire.span_export import Provider

TRACEPARENT = "traceparent"
"""Header and gRPC metadata key: W3C Trace Context."""

_W3C = TraceContextTextMapPropagator()
_TRACER = context.create_key("contextcache-tracer")
"""Context key of our tracer. Spans of another library, such as vLLM, get no children of ours."""
_NOTHING = nullcontext(trace.INVALID_SPAN)


class Tracer:
    """Begins a part's spans. One per part and process."""

    def __init__(self, provider: Provider | None) -> None:
        """Take the provider that sends ended spans to a collector; None: tracing is off, and no span begins."""
        self._provider = provider
        self._tracer = provider.get_tracer("context-cache") if provider else trace.NoOpTracer()

    def span(
        self, name: str, *, kind: SpanKind = SpanKind.INTERNAL, parent: str = "", attributes: Attributes = None
    ) -> AbstractContextManager[Span]:
        """Begin a span for a `with` block, in which it is the current one.

        `parent`: the caller's traceparent, which decides on sampling; empty or malformed: a new trace.
        """
        if self._provider is None:
            return _NOTHING
        return _running(self._tracer, name, kind, _caller(parent), attributes)

    def continued(
        self, name: str, *, kind: SpanKind = SpanKind.INTERNAL, parent: str, attributes: Attributes = None
    ) -> AbstractContextManager[Span]:
        """Begin a span below `parent` if its trace is sampled. No trace begins here."""
        if self._provider is None or not parent:
            return _NOTHING
        caller = _caller(parent)
        return _running(self._tracer, name, kind, caller, attributes) if _is_kept(caller) else _NOTHING

    def close(self) -> None:
        """Send the remaining spans, within a few seconds. Blocks. Idempotent."""
        if self._provider is not None:
            self._provider.close()


NO_TRACER = Tracer(None)
"""Tracer without spans."""


def open_tracer(endpoint: str, *, part: str, sample_ratio: float, on_lost: Callable[[int], object]) -> Tracer:
    """Return a tracer of `part` that sends to `endpoint`; NO_TRACER if that is empty.

    Starts a thread, and connects with the first spans. Any thread calls `on_lost` with the number of spans that did not
    reach the collector. Raises ValueError when OpenTelemetry's SDK is not installed.
    """
    if not endpoint:
        return NO_TRACER
    try:
        from contextcache.wire.span_export import Provider
    except ImportError as exc:
        raise ValueError(
            f"traces to {endpoint} need the extra `tracing`: pip install 'context-cache-server[tracing]'"
        ) from exc
    return Tracer(Provider(endpoint, part=part, sample_ratio=sample_ratio, on_lost=on_lost))


def tracer_of(settings: TracingSettings, *, part: str, on_lost: Callable[[int], object]) -> Tracer:
    """Return the tracer of a process's settings. Raises as `open_tracer`."""
    return open_tracer(settings.traces_endpoint, part=part, sample_ratio=settings.traces_sample_ratio, on_lost=on_lost)


def child_span(
    name: str, *, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes = None
) -> AbstractContextManager[Span]:
    """Begin a span below the current one; does nothing if that is not ours, or not sampled."""
    tracer = cast("trace.Tracer | None", context.get_value(_TRACER))
    if tracer is None or not trace.get_current_span().is_recording():
        return _NOTHING
    return _running(tracer, name, kind, context.get_current(), attributes)


@contextmanager
def within(there: context.Context) -> Iterator[None]:
    """Make `there` the current context for a `with` block, in any task. The block does not end its span."""
    before = context.get_current()
    context.attach(there)
    try:
        yield
    finally:
        # Without a token: a generator may be closed in another context than it began in.
        context.attach(before)


def fail(span: Span, error_type: str) -> None:
    """Mark a span as failed; `error_type` is an error code or a class name, never a message."""
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


def trace_headers() -> dict[str, str]:
    """Return the HTTP headers that make the server's span a child of the current one; empty without tracing."""
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    return headers


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return `trace_headers()` as gRPC metadata; empty also for a trace that is not sampled."""
    return tuple(trace_headers().items()) if _is_kept(None) else ()


def kept_traceparent() -> str:
    """Return the current span's traceparent if its trace is sampled, else empty."""
    return trace_headers()[TRACEPARENT] if _is_kept(None) else ""


def _caller(traceparent: str) -> context.Context:
    # Into an empty context: the current span must not become the parent of a caller's trace.
    return _W3C.extract({TRACEPARENT: traceparent}, context.Context())


def _is_kept(there: context.Context | None) -> bool:
    told = trace.get_current_span(there).get_span_context()
    return told.is_valid and told.trace_flags.sampled


@contextmanager
def _running(
    tracer: trace.Tracer, name: str, kind: SpanKind, parent: context.Context, attributes: Attributes
) -> Iterator[Span]:
    span = tracer.start_span(name, context=parent, kind=kind, attributes=attributes)
    try:
        with within(context.set_value(_TRACER, tracer, trace.set_span_in_context(span, parent))):
            yield span
    except ContextCacheError as exc:
        # Only faults of the server fail a span. Messages stay out, because they may quote a request.
        if exc.http_status >= 500:
            fail(span, exc.code)
        else:
            span.set_attribute("error.type", exc.code)
        raise
    except Exception as exc:
        fail(span, type(exc).__name__)
        raise
    finally:
        span.end()
