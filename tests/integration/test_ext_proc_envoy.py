"""The external processor behind a real Envoy in full duplex mode. `test_envoy_bootstrap.py` tests our own bootstrap."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from contextcache.clock import SystemClock
from contextcache.identity import IDENTITY_HEADER, IN_FLIGHT_HEADER, UNROUTED_HEADER
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.gateway_parts import KEY, SECRET
from tests.kit.gateway_server import DEADLINE_S, RunningManager, running_gateway, settings_for
from tests.kit.identities import verify_identity
from tests.kit.until import until

HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
ROUTED_TURNS = '{code="routed",route="turn"}'


@dataclass
class Pod:
    """Reads whole bodies, chunked ones too."""

    name: str
    port: int = 0
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def serving(pod: Pod):
    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path in {"/health", "/metrics/"}:
            return web.Response(headers={IN_FLIGHT_HEADER: ""})
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "stub-model"}]})
        pod.received.append(({name.lower(): value for name, value in request.headers.items()}, body))
        return web.json_response({"pod": pod.name})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pod.port = runner.addresses[0][1]
        yield pod
    finally:
        await runner.cleanup()


@pytest.fixture
async def pods():
    async with serving(Pod("pod-a")) as first, serving(Pod("pod-b")) as second:
        yield {pod.name: pod for pod in (first, second)}


@pytest.fixture
async def manager():
    manager = RunningManager()
    await manager.start()
    await manager.add("ctx_1", holder="pod-b")
    yield manager
    await manager.stop()


@contextlib.asynccontextmanager
async def fronted(tmp_path, pods, manager, change, **more):
    """A gateway with an Envoy in front; yields what posts a body to a path through it."""
    settings = settings_for(tmp_path, pods, manager_port=manager.port, ext_proc_listen="127.0.0.1:0", **more)
    async with running_gateway(settings, num_ready=2) as gateway:
        envoys = envoy_settings(
            pods=[pod.port for pod in pods.values()], gateways=[(gateway.port, gateway.ext_proc_port)]
        )
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with running_envoy(envoys, change=change) as envoy, aiohttp.ClientSession(timeout=timeout) as http:
            await envoy.until_healthy("pods", len(pods))

            async def post(path: str, sent, headers=()) -> tuple[int, dict]:
                data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
                async with http.post(envoy.url + path, data=data, headers={**HEADERS, **dict(headers)}) as answer:
                    return answer.status, await answer.json()

            yield post, gateway


def in_full_duplex(made: dict) -> dict:
    """Return a bootstrap of ours as an InferencePool gateway would have it: pieces, and nothing passes without us."""
    made = json.loads(json.dumps(made).replace('"failure_mode_allow": true', '"failure_mode_allow": false'))
    manager = _connection_manager(made)
    manager["http_filters"] = [
        found
        for found in manager["http_filters"]
        if "processing_mode" in found["typed_config"] or found["name"].endswith("router")
    ]
    mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
    mode.update(request_body_mode="FULL_DUPLEX_STREAMED", request_trailer_mode="SEND")
    return made


def _connection_manager(made: dict) -> dict:
    return made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


async def test_in_full_duplex_a_turn_goes_to_its_holder_whole_and_signed(tmp_path, pods, manager):
    in_body = {"session_id": "ctx_1", "prompt": "x" * 300_000}
    in_header = {"prompt": "y" * 300_000}
    async with fronted(tmp_path, pods, manager, in_full_duplex) as (post, gateway):
        by_body = await post("/v1/completions", in_body)
        by_header = await post("/v1/completions", in_header, {"x-session-id": "ctx_1"})
        # Counted when our last write has returned, which may be after the client has its answer.
        routed = await until(
            lambda: gateway.metric("contextcache_gateway_request_duration_seconds_count", ROUTED_TURNS),
            is_so=lambda number: number >= 2,
            what="two turns are counted",
        )

    assert by_body == by_header == (200, {"pod": "pod-b"})
    assert [json.loads(body) for _, body in pods["pod-b"].received] == [in_body, in_header]
    for headers, _ in pods["pod-b"].received:
        identity = verify_identity(headers[IDENTITY_HEADER], SECRET, now_ms=SystemClock().now_ms())
        assert (identity.tenant, identity.session_id) == ("demo", "ctx_1")
        assert not {UNROUTED_HEADER, "authorization"} & headers.keys()
    assert routed == 2


async def test_in_full_duplex_bodies_change_are_bounded_and_are_refused(tmp_path, pods, manager):
    stolen = {"prompt": "x" * 300_000, "cache_salt": "stolen"}
    async with fronted(tmp_path, pods, manager, in_full_duplex, max_body_bytes=1 << 19) as (post, _):
        changed = await post("/v1/completions", stolen)
        too_large = await post("/v1/completions", b"x" * 700_000)
        unknown = await post("/v1/completions", {"session_id": "ctx_none", "prompt": "x"})
    [(_, body)] = pods["pod-a"].received + pods["pod-b"].received

    assert changed[0] == 200
    assert json.loads(body) == {"prompt": stolen["prompt"], "cache_salt": None}
    assert (too_large[0], too_large[1]["error"]["code"]) == (413, "body_too_large")
    assert (unknown[0], unknown[1]["error"]["code"]) == (404, "context_not_found")
