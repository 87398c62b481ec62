"""Spans as our parts know them: one trace id for a turn, from the gateway to the engine. Imports nothing foreign.

What goes where: a part begins a span with its `Tracer` where a request comes in (`parent` is what the caller sent) and
with `child_span` anywhere below; a call to another part carries `trace_metadata()` or `trace_headers()`. Where tracing
is off nothing of this does anything, and OpenTelemetry is not even imported: that is otlp_tracer.py's.

Attributes never hold prompt text, token ids, keys or tenants. Session ids are allowed, as in log lines: an id alone
opens nothing (ADR 0016).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

from typing_extensions import override

from contextcache.settings import TracingSettings

TRACEPARENT = "traceparent"
"""Header and gRPC metadata key: W3C Trace Context."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

Kind: TypeAlias = Literal["server", "client", "internal"]
Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """One piece of work under way."""

    @property
    def traceparent(self) -> str:
        """Names this span to another part; empty where tracing is off."""
        ...

    def set(self, key: str, value: str | float) -> None:
        """Add an attribute."""
        ...

    def rename(self, name: str) -> None:
        """Give it a better name, once more is known."""
        ...

    def fail(self, error_type: str) -> None:
        """Mark it as failed; `error_type` is an error code or a class name, never a message."""
        ...

    def child(self, name: str, kind: Kind, attributes: Attributes) -> AbstractContextManager[Span]:
        """Begin a span below this one, for the length of a `with` block."""
        ...


class Tracer(Protocol):
    """Begins spans and sends the ended ones to a collector."""

    def span(
        self, name: str, *, kind: Kind = "internal", parent: str = "", attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        """Begin a span for the length of a `with` block, in which it is the current one.

        `parent`: the caller's traceparent, which decides whether it is kept; empty or malformed: a new trace.
        """
        ...

    def close(self) -> None:
        """Send what is left, within a few seconds. Blocks; harmless when repeated."""
        ...


class _NoSpan(Span, AbstractContextManager["Span"]):
    """Where tracing is off: its own context manager, so that a span costs one call."""

    __slots__ = ()

    @property
    @override
    def traceparent(self) -> str:
        return ""

    @override
    def set(self, key: str, value: str | float) -> None:
        return

    @override
    def rename(self, name: str) -> None:
        return

    @override
    def fail(self, error_type: str) -> None:
        return

    @override
    def child(self, name: str, kind: Kind, attributes: Attributes) -> AbstractContextManager[Span]:
        return self

    @override
    def __enter__(self) -> Span:
        return self

    @override
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


class _NoTracer(Tracer):
    """Where tracing is off."""

    @override
    def span(
        self, name: str, *, kind: Kind = "internal", parent: str = "", attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        return _NO_SPAN

    @override
    def close(self) -> None:
        return


_NO_SPAN = _NoSpan()
NO_TRACER: Tracer = _NoTracer()
"""Begins nothing."""

CURRENT: ContextVar[Span] = ContextVar("current_span", default=_NO_SPAN)
"""Set by tracers only."""


def open_tracer(endpoint: str, *, part: str, sample_ratio: float, on_lost: Callable[[int], object]) -> Tracer:
    """Return a tracer of `part` that sends to `endpoint`, or one that does nothing when that is empty.

    Begins a thread; connects with the first spans. `on_lost` is told how many spans did not reach the collector, by
    any thread. Raises ValueError when OpenTelemetry is not installed.
    """
    if not endpoint:
        return NO_TRACER
    try:
        from contextcache.otlp_tracer import OtlpTracer
    except ImportError as exc:
        raise ValueError(f"traces to {endpoint} need the extra `tracing` of context-cache") from exc
    return OtlpTracer(endpoint, part=part, sample_ratio=sample_ratio, on_lost=on_lost)


def tracer_of(settings: TracingSettings, *, part: str, on_lost: Callable[[int], object]) -> Tracer:
    """Return the tracer that a part's settings ask for. Raises as `open_tracer`."""
    return open_tracer(settings.traces_endpoint, part=part, sample_ratio=settings.traces_sample_ratio, on_lost=on_lost)


def current_span() -> Span:
    """Return the span that the caller works in; one that does nothing where there is none."""
    return CURRENT.get()


@contextmanager
def within(span: Span) -> Iterator[None]:
    """Make `span` the current one for a `with` block, in whichever task that runs; it is not ended by it."""
    before = CURRENT.get()
    CURRENT.set(span)
    try:
        yield
    finally:
        CURRENT.set(before)


def child_span(
    name: str, *, kind: Kind = "internal", attributes: Attributes | None = None
) -> AbstractContextManager[Span]:
    """Begin a span below the current one; does nothing where there is none."""
    return CURRENT.get().child(name, kind, attributes or {})


def continued_span(
    tracer: Tracer, name: str, *, parent: str, attributes: Attributes | None = None
) -> AbstractContextManager[Span]:
    """Begin a span below `parent`; does nothing where that is empty: no trace begins here."""
    return tracer.span(name, parent=parent, attributes=attributes) if parent else _NO_SPAN


def trace_headers() -> dict[str, str]:
    """Return the HTTP headers that make the next part's span a child of the current one; none where tracing is off."""
    traceparent = CURRENT.get().traceparent
    return {TRACEPARENT: traceparent} if traceparent else {}


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the same as gRPC metadata; none either for a trace that is not kept, which nobody needs to know."""
    traceparent = kept_traceparent()
    return ((TRACEPARENT, traceparent),) if traceparent else ()


def kept_traceparent() -> str:
    """Return the current span's name, if its trace is kept; else empty."""
    traceparent = CURRENT.get().traceparent
    return traceparent if traceparent and is_kept(traceparent) else ""


def is_traceparent(text: str) -> bool:
    """Return whether `text` is a traceparent that can be continued."""
    return len(text) <= 256 and _TRACEPARENT.fullmatch(text) is not None


def is_kept(traceparent: str) -> bool:
    """Return whether a well-formed traceparent says that its trace is recorded (the sampled flag)."""
    return bool(int(traceparent[53:55], 16) & 1)
