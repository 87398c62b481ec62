"""Behind a real Envoy: one trace a turn, whether Envoy makes spans of its own or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from contextcache.wire.tracing import open_tracer
from tests.kit.envoy_names import PLUGIN
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.fronts import Client
from tests.kit.gateway_server import RunningManager, running_gateway, settings_for
from tests.kit.trace_collector import running_collector
from tests.kit.turn_pod import MODEL, running_turn_pod

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUEST = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("traceparent", "envoy_traces"),
    [
        pytest.param("", True, id="begun by envoy"),
        pytest.param(TRACEPARENT, True, id="continued by envoy", marks=pytest.mark.thorough),
        pytest.param("", False, id="begun past envoy", marks=pytest.mark.thorough),
        pytest.param(TRACEPARENT, False, id="continued past envoy"),
    ],
)
async def test_gateway_and_pod_are_in_one_trace(
    tmp_path: Path, manager: RunningManager, traceparent: str, envoy_traces: bool
) -> None:
    async with running_collector() as collector:
        tracer = open_tracer(collector.endpoint, part="turn", sample_ratio=1, on_lost=lambda _num: None)
        settings = {"manager_port": manager.port, "traces_endpoint": collector.endpoint, "traces_sample_ratio": 1}
        async with (
            running_turn_pod(tmp_path, manager_port=manager.port, tracer=tracer) as pod,
            running_gateway(
                settings_for(tmp_path, {"pod-a": pod}, ext_proc_listen="127.0.0.1:0", **settings), num_ready=1
            ) as gateway,
            running_envoy(
                envoy_settings(
                    pods=[pod.port],
                    gateways=[(gateway.port, gateway.ext_proc_port)],
                    traces_endpoint=collector.endpoint if envoy_traces else "",
                    traces_sample_ratio=1,
                )
            ) as envoy,
            Client.opened(envoy.port) as client,
        ):
            await envoy.until_healthy(PLUGIN, 1)
            headers = {"traceparent": traceparent} if traceparent else {}
            async with client.post("/v1/context", REQUEST, headers=headers) as answer:
                assert answer.status == 200, await answer.read()
            await collector.until(lambda: collector.named("gateway create") and collector.named("turn /v1/context"))
            if envoy_traces:
                await collector.until(lambda: any(span.service == "envoy" for span in collector.spans))

    gateway_span, turn_span = collector.one("gateway create"), collector.one("turn /v1/context")
    assert gateway_span.trace_id == turn_span.trace_id
    if traceparent:
        assert gateway_span.trace_id == TRACE
    if not envoy_traces:
        assert turn_span.parent_id == gateway_span.span_id
        assert gateway_span.parent_id == (PARENT if traceparent else "")
    else:
        assert {span.trace_id for span in collector.spans if span.service == "envoy"} <= {gateway_span.trace_id}


async def test_envoy_shows_the_metrics_that_alerts_ask_for(tmp_path: Path) -> None:
    async with (
        running_envoy(envoy_settings(pods=[1], gateways=[(1, 1)])) as envoy,
        Client.opened(envoy.port) as client,
    ):
        async with client.get("/v1/models") as answer:
            await answer.read()
        _, page = await envoy.admin("/stats/prometheus")

    assert f'envoy_cluster_membership_healthy{{envoy_cluster_name="{PLUGIN}"}}' in page
    assert 'envoy_http_downstream_rq_xx{envoy_response_code_class="5",' in page
