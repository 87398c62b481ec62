"""Spans without a collector: what is continued, what is off, what a bound costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.context import get_current
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span, get_current_span

from contextcache.errors import ContextNotFound, StoreUnavailable
from contextcache.wire import span_export
from contextcache.wire.span_export import BoundedSpans
from contextcache.wire.tracing import (
    NO_TRACER,
    Tracer,
    child_span,
    fail,
    kept_traceparent,
    open_tracer,
    trace_headers,
    trace_metadata,
    within,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEPT, NOT_KEPT = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


class Kept(SpanExporter):
    """Takes everything, or nothing, or hangs."""

    def __init__(self, *, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.spans: list[ReadableSpan] = []
        self.result = result
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go_on.wait()
        self.spans += spans
        return self.result


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Kept:
    exporter = Kept()
    monkeypatch.setattr(span_export, "OTLPSpanExporter", lambda **_options: exporter)
    return exporter


def opened(*, sample_ratio: float = 1.0, on_lost=lambda _num: None) -> Tracer:
    return open_tracer("http://collector:4317", part="test", sample_ratio=sample_ratio, on_lost=on_lost)


def traceparent_of(span: Span) -> str:
    told = span.get_span_context()
    return f"00-{told.trace_id:032x}-{told.span_id:016x}-{told.trace_flags:02x}"


def named(exporter: Kept, name: str) -> ReadableSpan:
    (span,) = [span for span in exporter.spans if span.name == name]
    return span


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        KEPT.upper(),
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}",
        f"{KEPT}, {KEPT}",
        f"01-{TRACE}-{PARENT}-01-" + "x" * 600,
    ],
)
def test_what_is_no_traceparent_is_not_continued(exporter: Kept, text: str) -> None:
    tracer = opened()
    with tracer.span("begun", parent=text), tracer.continued("not begun", parent=text):
        pass
    tracer.close()

    assert [(span.name, span.parent) for span in exporter.spans] == [("begun", None)]


def test_a_traceparent_of_a_later_version_is_read_as_far_as_we_know_it(exporter: Kept) -> None:
    tracer = opened()
    with tracer.continued("later", parent=f"01-{TRACE}-{PARENT}-01-more"):
        pass
    tracer.close()

    assert f"{named(exporter, 'later').parent.span_id:016x}" == PARENT


def test_a_span_continues_its_caller_s_trace_and_is_told_to_the_next_part(exporter: Kept) -> None:
    tracer = opened()
    with tracer.span("outer", parent=KEPT) as outer, child_span("inner"):
        headers = trace_headers()
        metadata = trace_metadata()
    tracer.close()

    made = named(exporter, "outer")
    assert (f"{made.context.trace_id:032x}", f"{made.parent.span_id:016x}") == (TRACE, PARENT)
    inner = named(exporter, "inner")
    assert inner.parent.span_id == made.context.span_id
    assert headers == {"traceparent": f"00-{TRACE}-{inner.context.span_id:016x}-01"}
    assert metadata == (("traceparent", headers["traceparent"]),)
    assert traceparent_of(outer) == f"00-{TRACE}-{made.context.span_id:016x}-01"


def test_the_caller_s_word_on_keeping_a_trace_decides_over_the_ratio(exporter: Kept) -> None:
    never, always = opened(sample_ratio=0), opened(sample_ratio=1)
    with never.span("kept", parent=KEPT), never.span("begun"):
        pass
    with never.span("begun here"):
        sampled = int(trace_headers()["traceparent"][-2:], 16) & 1
        assert not sampled, "told, so that the next part begins none of its own"
        assert trace_metadata() == ()
    with (
        always.span("not kept", parent=NOT_KEPT),
        always.continued("nor this", parent=NOT_KEPT),
        child_span("nor this"),
    ):
        assert kept_traceparent() == ""
    never.close()
    always.close()

    assert [span.name for span in exporter.spans] == ["kept"]


def test_a_refusal_is_no_failure_and_no_message_is_told(exporter: Kept) -> None:
    tracer = opened()
    for error in (ContextNotFound("secret words"), StoreUnavailable("secret words"), RuntimeError("secret words")):
        with pytest.raises(type(error)), tracer.span(type(error).__name__):
            raise error
    tracer.close()

    told = {span.name: (span.attributes["error.type"], span.status.is_ok) for span in exporter.spans}
    assert told == {
        "ContextNotFound": ("context_not_found", True),
        "StoreUnavailable": ("store_unavailable", False),
        "RuntimeError": ("RuntimeError", False),
    }
    assert all("secret" not in span.to_json() for span in exporter.spans)


async def test_each_task_has_a_span_of_its_own(exporter: Kept) -> None:
    tracer = opened()

    async def request(name: str, others: asyncio.Barrier) -> str:
        with tracer.span(name) as span:
            await others.wait()
            with child_span(f"below {name}") as below:
                return traceparent_of(below)[:35] if get_current_span() is below and span is not below else ""

    barrier = asyncio.Barrier(2)
    told = await asyncio.gather(request("a", barrier), request("b", barrier))
    tracer.close()

    for name, trace in zip("ab", told, strict=True):
        assert trace == f"00-{named(exporter, name).context.trace_id:032x}"
        assert named(exporter, f"below {name}").parent.span_id == named(exporter, name).context.span_id


def test_a_span_can_be_made_the_current_one_elsewhere_without_ending_it(exporter: Kept) -> None:
    tracer = opened()
    with tracer.span("turn"):
        turn = get_current()
        with child_span("generate"), within(turn), child_span("commit"):
            pass
    tracer.close()

    assert named(exporter, "commit").parent.span_id == named(exporter, "turn").context.span_id
    assert trace_headers() == {}


def test_nothing_is_begun_where_nobody_traces(exporter: Kept) -> None:
    tracer = opened()
    with tracer.continued("load", parent=""), child_span("below"):
        assert trace_headers() == {}
    tracer.close()
    with NO_TRACER.span("x", parent=KEPT) as span, child_span("y"):
        span.set_attribute("key", 1)
        fail(span, "error")
        assert trace_metadata() == ()

    assert exporter.spans == []


def test_a_span_of_another_library_in_the_process_has_no_children_of_ours(exporter: Kept) -> None:
    """vLLM may trace for itself: without a tracer of ours nothing of ours goes where its spans go."""
    provider = TracerProvider(shutdown_on_exit=False)
    theirs = provider.get_tracer("vllm")
    with theirs.start_as_current_span("theirs") as outer, child_span("ours") as ours:
        assert not ours.is_recording()
        tracer = opened()
        with tracer.span("a request"):
            pass
        assert get_current_span() is outer
    tracer.close()

    assert [(span.name, span.parent) for span in exporter.spans] == [("a request", None)]


def test_without_an_endpoint_nothing_that_makes_or_sends_spans_is_imported() -> None:
    program = (
        # Not the manager: redis-py imports the SDK by itself where it finds it.
        "import sys, gateway.__main__, kv_sidecar.__main__, vllm_plugin.turn.middleware\n"
        "from contextcache.wire.tracing import NO_TRACER, open_tracer\n"
        "assert open_tracer('', part='x', sample_ratio=1, on_lost=print) is NO_TRACER\n"
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_endpoint_without_opentelemetry_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "contextcache.wire.span_export", None)

    with pytest.raises(ValueError, match="extra `tracing`"):
        opened()


def test_spans_beyond_the_queue_are_counted_and_those_within_it_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "_QUEUE_SPANS", 3)
    lost: list[int] = []
    exporter = Kept()
    exporter.may_go_on.clear()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BoundedSpans(exporter, on_lost=lost.append))
    for number in range(5):
        provider.get_tracer("x").start_span(str(number)).end()
    exporter.may_go_on.set()
    provider.shutdown()

    assert lost == [1, 1]
    assert [span.name for span in exporter.spans] == ["0", "1", "2"]


def test_a_batch_nobody_takes_is_counted_as_lost(exporter: Kept) -> None:
    lost: list[int] = []
    exporter.result = SpanExportResult.FAILURE
    tracer = opened(on_lost=lost.append)
    with tracer.span("a"), child_span("b"):
        pass
    tracer.close()

    assert sum(lost) == 2


def test_a_collector_that_hangs_does_not_keep_a_process_from_ending(
    exporter: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "_CLOSE_TIMEOUT_S", 0.01)
    exporter.may_go_on.clear()
    tracer = opened()
    with tracer.span("a"):
        pass

    tracer.close()

    assert exporter.spans == [], "close came back while the exporter still hung"
    tracer.close()
    exporter.may_go_on.set()
