"""The gateway behind an Envoy that a controller configures, as Envoy Gateway does from the chart's routes and policies.

What that Envoy has (envoyproxy/gateway 1.9, internal/xds/translator/extproc.go): the plugin in full duplex, closed when
it fails; answers skipped; the pod by the header that the plugin sets; 32 KiB of buffer a listener; nothing stripped at
the edge, unless a ClientTrafficPolicy says so; requests on contexts straight to the HTTP front.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from contextcache.clock import SystemClock
from contextcache.identity import DESTINATION_HEADER, IDENTITY_HEADER, UNROUTED_HEADER
from tests.kit import http2
from tests.kit.envoy_names import PLUGIN
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.fronts import Front
from tests.kit.gateway_parts import KEY, SECRET
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.identities import verify_identity
from tests.kit.inference_pool import as_inference_pool
from tests.kit.stub_engine import StubEngine

FORGED = {IDENTITY_HEADER: "v1.forged.mac", UNROUTED_HEADER: "1", DESTINATION_HEADER: "127.0.0.1:1"}


def as_envoy_gateway(made: dict, pods: list[str]) -> dict:
    """Return our bootstrap with the listener, filters and routes of such an Envoy."""
    front = next(cluster for cluster in made["static_resources"]["clusters"] if cluster["name"] == "gateway_http")
    made = as_inference_pool(made, pods=pods)
    listener = made["static_resources"]["listeners"][0]
    listener["per_connection_buffer_limit_bytes"] = 32 << 10
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    plugin = manager["http_filters"][0]["typed_config"]
    plugin["processing_mode"]["response_header_mode"] = "SKIP"
    plugin["allow_mode_override"] = True
    post = [{"name": ":method", "string_match": {"exact": "POST"}}]
    to_pool, to_front = {"cluster": "pool", "timeout": "60s"}, {"cluster": "gateway_http", "timeout": "30s"}
    without_plugin = {
        "envoy.filters.http.ext_proc": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "disabled": True,
        }
    }
    manager["route_config"]["virtual_hosts"][0]["routes"] = [
        {"match": {"path": "/v1/context", "headers": post}, "route": to_pool},
        {
            "match": {"path_separated_prefix": "/v1/context"},
            "route": to_front,
            "typed_per_filter_config": without_plugin,
        },
        {"match": {"path_separated_prefix": "/v1"}, "route": to_pool},
    ]
    made["static_resources"]["clusters"].append(front)
    return made


@pytest.fixture
async def other():
    """A pod that nobody chose."""
    async with _started(StubEngine()) as pod:
        yield pod


@asynccontextmanager
async def _started(pod):
    await pod.start()
    yield pod
    await pod.stop()


@pytest.fixture
async def front(engine, other, manager, tmp_path):
    """The plugin knows one pod, Envoy two: a request that the plugin did not send is seen."""
    await manager.add("ctx_1", holder="pod-a")
    found = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port, ext_proc_listen="127.0.0.1:0")
    async with running_gateway(found, num_ready=1) as gateway:
        settings = envoy_settings(pods=[engine.port], gateways=[(gateway.port, gateway.ext_proc_port)])
        pods = [f"127.0.0.1:{pod.port}" for pod in (engine, other)]
        async with running_envoy(settings, change=lambda made: as_envoy_gateway(made, pods)) as envoy:
            await envoy.until_healthy(PLUGIN, 1)
            await envoy.until_healthy("gateway_http", 1)
            yield Front(envoy.port, gateway, envoy=envoy)


async def test_the_plugin_chooses_the_pod_and_a_client_s_header_does_not(front, engine, other):
    forged = {**FORGED, DESTINATION_HEADER: f"127.0.0.1:{other.port}"}
    for path, body, headers in (
        ("/v1/completions", {}, {"x-session-id": "ctx_1"}),
        ("/v1/completions", {"session_id": "ctx_1"}, {}),
        ("/v1/completions", {"prompt": "x"}, {}),
        ("/v1/context", {}, {}),
        ("/v1/embeddings", {}, {}),
    ):
        async with front.post(path, body, headers={**headers, **forged}) as answer:
            assert answer.status == 200
    async with front.get("/v1/responses/r1", headers=forged) as answer:
        assert answer.status == 200
    identities = [found.header(IDENTITY_HEADER) for found in engine.turns]
    now_ms = SystemClock().now_ms()

    assert other.turns == []
    assert len(engine.turns) == 6
    assert [len(found) for found in identities] == [1, 1, 0, 1, 0, 0]
    assert all(verify_identity(found[0], SECRET, now_ms=now_ms) for found in identities if found)
    assert [found.header(UNROUTED_HEADER) for found in engine.turns] == [[]] * 6
    # The plugin's own word.
    assert [found.header(DESTINATION_HEADER) for found in engine.turns] == [[f"127.0.0.1:{engine.port}"]] * 6


async def test_a_request_of_trailers_without_a_body_is_seen_by_the_plugin_and_they_say_nothing(front, engine, other):
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **FORGED}
    for path in ("/v1/completions", "/v1/embeddings"):
        await http2.post(front.port, path, headers, trailers={"x-session-id": "ctx_1", **FORGED})
    names = {name for found in engine.turns for name, _ in found.headers}

    assert (len(engine.turns), other.turns) == (2, [])
    assert not names & {IDENTITY_HEADER, UNROUTED_HEADER, "x-session-id"}


async def test_a_body_above_the_listener_s_buffer_passes(front, engine):
    body = b'{"session_id": "ctx_1", "prompt": "' + b"x" * (4 << 20) + b'"}'
    async with front.post("/v1/completions", body) as answer:
        assert answer.status == 200

    assert engine.turns[-1].body == body


async def test_calls_on_contexts_go_to_the_http_front(front, engine, other):
    async with front.get("/v1/context/ctx_1") as answer:
        assert (answer.status, (await answer.json())["session_id"]) == (200, "ctx_1")
    async with front.delete("/v1/context/ctx_1") as answer:
        assert answer.status == 200
    async with front.post("/v1/Context", {}) as answer:
        assert answer.status == 404

    assert engine.turns == other.turns == []


async def test_without_a_plugin_no_request_reaches_a_pod(front, engine, other):
    await front.end_gateway()
    for path, headers in (("/v1/completions", {}), ("/v1/completions", {"x-session-id": "ctx_1"}), ("/v1/context", {})):
        async with front.post(path, {}, headers={**headers, DESTINATION_HEADER: f"127.0.0.1:{other.port}"}) as answer:
            assert answer.status >= 500

    assert engine.turns == other.turns == []
