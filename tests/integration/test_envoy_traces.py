"""Envoy's spans: one trace from the client's header, or one of Envoy's own, to the plugin and to the pod."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from tests.kit.envoy_names import PLUGIN, PODS
from tests.kit.envoy_process import DEADLINE_S, envoy_settings, running_envoy
from tests.kit.stub_engine import StubEngine
from tests.kit.stub_processor import StubProcessor
from tests.kit.trace_collector import TraceCollector

pytestmark = pytest.mark.thorough

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-2] + "00"
TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-(0[01])")


class Traced:
    """Envoy between a client and stubs, and where its spans go."""

    def __init__(self, url, collector, pod, plugin, http):
        self.collector = collector
        self._url, self._pod, self._plugin, self._http = url, pod, plugin, http

    async def post(self, traceparent: str | None = None) -> tuple[str, str, str]:
        """Send a turn; return trace id, parent and flags as the pod is told."""
        headers = {"x-session-id": "ctx_1", **({"traceparent": traceparent} if traceparent else {})}
        async with self._http.post(f"{self._url}/v1/completions", data=b"{}", headers=headers) as answer:
            assert answer.status == 200
        (told,) = self._pod.turns[-1].header("traceparent")
        return TRACEPARENT.fullmatch(told).groups()

    @property
    def told_to_plugin(self) -> str:
        """Return the trace id that the plugin's stream came with."""
        return TRACEPARENT.fullmatch(self._plugin.calls[-1]["traceparent"])[1]


@asynccontextmanager
async def running_traced(*, ratio: float, refuses: bool = False):
    async with AsyncExitStack() as stack:
        collector, server = TraceCollector(refuses=refuses), grpc.aio.server()
        pb_grpc.add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        pod, plugin = StubEngine(), StubProcessor()
        for part in (pod, plugin):
            await part.start()
            stack.push_async_callback(part.stop)
        plugin.pick = f"127.0.0.1:{pod.port}"
        settings = envoy_settings(
            pods=[pod.port],
            gateways=[(pod.port, plugin.port)],
            plugin_timeout_s=60,
            traces_endpoint=f"http://127.0.0.1:{port}",
            traces_sample_ratio=ratio,
        )
        envoy = await stack.enter_async_context(running_envoy(settings))
        await envoy.until_healthy(PODS, 1)
        await envoy.until_healthy(PLUGIN, 1)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)))
        yield Traced(envoy.url, collector, pod, plugin, http)


async def test_a_trace_of_the_client_s_goes_on_to_the_plugin_and_the_pod_whatever_the_ratio():
    async with running_traced(ratio=0) as traced:
        trace_id, parent, flags = await traced.post(CALLER)
        told_to_plugin = traced.told_to_plugin
        await traced.collector.until(lambda: any(span.span_id == parent for span in traced.collector.spans))
        (span,) = [found for found in traced.collector.spans if found.span_id == parent]

        assert (trace_id, flags) == (CALLER[3:35], "01")
        assert told_to_plugin == trace_id
        assert (span.service, span.trace_id, span.parent_id) == ("envoy", trace_id, CALLER[36:52])


async def test_without_one_envoy_begins_a_trace_that_plugin_and_pod_share():
    async with running_traced(ratio=1) as traced:
        trace_id, parent, flags = await traced.post()
        told_to_plugin = traced.told_to_plugin
        await traced.collector.until(lambda: any(span.span_id == parent for span in traced.collector.spans))

        assert flags == "01"
        assert told_to_plugin == trace_id


@pytest.mark.parametrize(("ratio", "traceparent"), [(0, None), (1, UNSAMPLED)])
async def test_a_trace_that_is_not_kept_is_told_so_and_sends_no_span(ratio, traceparent):
    async with running_traced(ratio=ratio) as traced:
        trace_id, _, flags = await traced.post(traceparent)
        kept, _, _ = await traced.post(CALLER.replace("0af7", "ffff"))
        await traced.collector.until(lambda: any(span.trace_id == kept for span in traced.collector.spans))

        assert flags == "00"
        assert not [span for span in traced.collector.spans if span.trace_id == trace_id]


async def test_a_collector_that_takes_nothing_costs_no_request():
    async with running_traced(ratio=1, refuses=True) as traced:
        for _ in range(20):
            await traced.post()
        await traced.collector.until(lambda: traced.collector.num_calls > 0)

        assert await traced.post()
