"""A real Envoy with our bootstrap: which way requests take, what they lose, and what Envoy answers by itself."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from contextcache.errors import PathNotFound, error_body
from gateway.envoy.render import SHOWN_BYTES_MAX
from tests.kit.envoy_names import PLUGIN, PODS
from tests.kit.envoy_process import RunningEnvoy, envoy_settings, running_envoy
from tests.kit.fronts import Client
from tests.kit.ports import free_port
from tests.kit.stub_engine import StubEngine
from tests.kit.stub_processor import StubProcessor
from tests.kit.until import DEADLINE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 32 << 20
EVIL = "127.0.0.1:6553"
STEERING = {
    "X-Gateway-Destination-Endpoint": EVIL,
    "x-gateway-destination-endpoint-subset": EVIL,
    "x-envoy-original-dst-host": EVIL,
    "x-context-identity": EVIL,
    "x-context-tenant": EVIL,
    "x-context-unrouted": EVIL,
    "x-envoy-max-retries": EVIL,
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-upstream-alt-stat-name": EVIL,
}
SHORT_WAIT = {"plugin_timeout_s": 0.1}
"""For plugins that answer nothing at all."""
FORGETTING = {"connection": "x-context-unrouted, x-context-identity"}
"""Asks a proxy to drop these headers, ours included."""


@dataclass
class Bench:
    """Envoy before two stub pods, a stub plugin and a stub HTTP front."""

    envoy: RunningEnvoy
    pods: list[StubEngine]
    plugin: StubProcessor
    front: StubEngine
    http: aiohttp.ClientSession

    def request(self, method: str, path: str, *, data=None, headers=None):
        """Send a request whose path the client does not touch."""
        return self.http.request(method, URL(self.envoy.url + path, encoded=True), data=data, headers=headers)

    async def status_of(self, method: str, path: str, *, data=None, headers=None) -> int:
        async with self.request(method, path, data=data, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def code_of(self, method: str, path: str, *, data=None, headers=None) -> tuple[int, str]:
        """Return status and code of an error, whose shape is checked."""
        async with self.request(method, path, data=data, headers=headers) as answer:
            body = await answer.json()
            assert body["detail"] == body["error"]["message"]
            assert ("retry-after" in answer.headers) == (answer.status == 503)
            assert answer.headers["x-request-id"]
            return answer.status, body["error"]["code"]

    async def plugin_dies(self) -> None:
        await self.plugin.stop()

    async def raw(self, request: bytes) -> bytes:
        """Send bytes as they are and return the answer."""
        return await Client(self.envoy.port, self.http).raw(request)

    def forget(self) -> None:
        """Have the stubs as they were in the beginning; all of them live."""
        for engine in (*self.pods, self.front):
            engine.received.clear()
            engine.disconnects = 0
            engine.noticed_disconnect.clear()
        for seen in (self.plugin.heads, self.plugin.calls, self.plugin.body_sizes):
            seen.clear()
        self.plugin.pick = f"127.0.0.1:{self.pods[1].port}"
        self.plugin.refusal, self.plugin.skip_body = None, False

    def asked_of_front(self) -> list[str]:
        return [
            found.target
            for found in self.front.turns
            if found.target != "/readyz" or found.header("user-agent") != ["Envoy/HC"]
        ]

    def arrived(self) -> list[str]:
        """Return the targets of requests that reached a pod, sorted: which pod, nobody may have chosen."""
        return sorted(found.target for pod in self.pods for found in pod.turns)


@asynccontextmanager
async def bench_of(**more):
    """`more` are settings, unchecked, so that limits may be small."""
    async with AsyncExitStack() as stack:
        engines = [StubEngine() for _ in range(3)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        *pods, front = engines
        plugin = StubProcessor()
        await plugin.start()
        stack.push_async_callback(plugin.stop)
        settings = envoy_settings(pods=[pod.port for pod in pods], gateways=[(front.port, plugin.port)])
        envoy = await stack.enter_async_context(running_envoy(settings.model_copy(update=more)))
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, auto_decompress=False))
        bench = Bench(envoy, pods, plugin, front, http)
        bench.forget()
        yield bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bench():
    async with bench_of() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_dead_bench():
    async with bench_of() as found:
        await found.plugin_dies()
        yield found


@pytest.fixture
def bench(shared_bench):
    """One Envoy for all tests that leave its stubs alive."""
    shared_bench.forget()
    return shared_bench


@pytest.fixture
def dead_bench(shared_dead_bench):
    """The same, with a plugin that is dead."""
    shared_dead_bench.forget()
    return shared_dead_bench


@pytest.fixture(params=["alive", "dead"])
def either_bench(request):
    """By the state of the plugin."""
    return request.getfixturevalue("bench" if request.param == "alive" else "dead_bench")


@pytest_asyncio.fixture(loop_scope="module")
async def own_bench():
    """For tests that end or harm what is behind Envoy, or read its whole log."""
    async with bench_of() as found:
        yield found


async def test_the_pod_that_the_plugin_names_gets_the_request_and_the_answer_comes_back_untouched(bench):
    async with bench.request("POST", "/v1/completions?a=%2F", data=b"{}", headers={"x-request-id": "mine"}) as answer:
        echo = await answer.json()

    assert echo == {"method": "POST", "target": "/v1/completions?a=%2F", "size": 2}
    assert answer.headers["x-request-id"] == "mine"
    assert not [name for name in answer.headers if name.lower().startswith(("x-envoy", "server"))]
    (received,) = bench.pods[1].turns
    assert received.header("x-gateway-destination-endpoint") == [bench.plugin.pick]
    assert received.header("x-request-id") == ["mine"]
    assert received.header("x-context-unrouted") == []


async def test_no_header_of_a_client_steers_past_a_plugin_that_answers(bench):
    await no_header_steers(bench, routed=True)


async def test_no_header_of_a_client_steers_past_a_plugin_that_is_dead(dead_bench):
    await no_header_steers(dead_bench, routed=False)


async def test_no_header_of_a_client_steers_past_a_plugin_that_is_silent():
    async with bench_of(**SHORT_WAIT) as bench:
        bench.plugin.hang = True
        await no_header_steers(bench, routed=False)


async def no_header_steers(bench, *, routed: bool) -> None:
    bench.plugin.pick = ""
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/responses/r1"), ("POST", "/tokenize")):
        for headers in (STEERING, FORGETTING, STEERING | FORGETTING):
            data = b"{}" if method == "POST" else None
            assert await bench.status_of(method, path, data=data, headers=headers) == 200
    received = [found for pod in bench.pods for found in pod.turns]

    assert len(received) == 9
    for found in received:
        assert [name for name, value in found.headers if EVIL in value] == []
        assert [name for name, _ in found.headers if name.startswith(("x-envoy", "x-gateway"))] == []
        assert found.header("x-context-unrouted") == ([] if routed else ["1"])


async def test_neither_the_plugin_nor_the_http_front_sees_a_client_s_steering_headers(bench):
    await bench.status_of("POST", "/v1/context", data=b"{}", headers=STEERING)
    await bench.status_of("GET", "/v1/context/ctx_1", headers=STEERING)
    (to_front,) = [found for found in bench.front.received if found.target == "/v1/context/ctx_1"]

    assert [name for name, value in bench.plugin.heads[0].items() if EVIL in value] == []
    assert bench.plugin.heads[0]["x-context-unrouted"] == "1"
    assert [name for name, value in to_front.headers if EVIL in value] == []


async def test_a_pod_that_envoy_does_not_know_is_not_reached_even_for_the_plugin(bench):
    for pick in (EVIL, "not an address", "127.0.0.1", bench.envoy.admin_url.removeprefix("http://")):
        bench.plugin.pick = pick
        assert await bench.status_of("POST", "/v1/completions", data=b"{}") == 200

    assert bench.arrived() == ["/v1/completions"] * 4


async def test_control_calls_go_to_the_http_front_whatever_the_plugin_does(dead_bench):
    bench = dead_bench
    calls = [("GET", "/v1/context?limit=2"), ("DELETE", "/v1/context/ctx_1"), ("PATCH", "/v1/context/ctx_1")]
    calls += [("GET", path) for path in ("/readyz", "/openapi.json", "/v1/context/...")]
    for method, path in calls:
        assert await bench.status_of(method, path) == 200

    assert bench.asked_of_front() == [path for _, path in calls]
    assert bench.arrived() == []


SPELLINGS = [
    "//v1/context",
    "/v1//context",
    "/v1/context//",
    "/v1/%63ontext",
    "/v1/context%2f",
]
SPELLINGS += ["/v1/./context", "/v1/x/../context", "/v1/context//;", "/v1\\context", "/v1/co%6Etext", "/v1/models/%2e"]
SPELLINGS += ["/v1/completions%00", "/", "/metrics", "/metrics/", "/v1/%2e%2e/metrics"]
PLAIN_SPELLINGS = ["/v1/Context", "/V1/context", "/v1/context;/", "/v1/context/a/b", "/v1/completions/", "/v1/contexts"]
PLAIN_SPELLINGS += ["/v1", "/admin", "/stats", "/v1/context/ctx_1/forks"]


async def test_what_is_not_spelled_plainly_is_not_found(either_bench):
    bench = either_bench
    for path in SPELLINGS:
        async with bench.request("POST", path, data=b"{}") as answer:
            assert (path, answer.status, await answer.read()) == (path, 404, error_body(PathNotFound("no such path")))

    assert bench.arrived() == []
    assert bench.plugin.heads == []


async def test_a_plain_path_that_is_not_found_is_the_fronts_to_name(dead_bench):
    for path in PLAIN_SPELLINGS:
        await dead_bench.status_of("POST", path, data=b"{}")

    assert dead_bench.asked_of_front() == PLAIN_SPELLINGS
    assert dead_bench.arrived() == []


async def test_what_claims_a_context_is_refused_while_the_plugin_is_dead_and_the_rest_is_served(own_bench):
    await own_bench.plugin_dies()
    by_header = {"x-session-id": "ctx_1"}

    assert await own_bench.code_of("POST", "/v1/context", data=b"{}") == (503, "gateway_unavailable")
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert await own_bench.code_of("POST", path, data=b"{}", headers=by_header) == (503, "gateway_unavailable")
        assert await own_bench.status_of("POST", path, data=b"{}") == 200
    assert own_bench.arrived() == ["/v1/chat/completions", "/v1/completions"]


async def test_a_plugin_that_does_not_answer_is_the_same_as_a_dead_one():
    async with bench_of(**SHORT_WAIT) as bench:
        bench.plugin.hang = True

        assert await bench.code_of("POST", "/v1/context", data=b"{}") == (503, "gateway_unavailable")
        assert await bench.status_of("POST", "/v1/completions", data=b"{}") == 200


async def test_nothing_is_served_without_the_plugin_where_that_is_asked_for():
    async with bench_of(fail_open_stateless=False) as bench:
        await bench.plugin_dies()

        assert await bench.code_of("POST", "/v1/completions", data=b"{}") == (503, "gateway_unavailable")
        assert await bench.code_of("GET", "/v1/models") == (503, "gateway_unavailable")


@pytest.mark.thorough
async def test_a_plugin_that_is_back_is_asked_again_at_once(own_bench):
    await own_bench.plugin_dies()
    await own_bench.envoy.until_healthy(PLUGIN, 0)
    await own_bench.plugin.start()
    await own_bench.envoy.until_healthy(PLUGIN, 1)

    assert await own_bench.status_of("POST", "/v1/context", data=b"{}") == 200
    assert len(own_bench.plugin.heads) == 1


async def test_the_plugin_s_own_answers_are_not_touched(bench):
    for status in (400, 404, 413, 429, 503, 504):
        bench.plugin.refusal = (status, b'{"error": "its own"}')
        async with bench.request("POST", "/v1/completions", data=b"{}") as answer:
            assert (answer.status, await answer.read()) == (status, b'{"error": "its own"}')
            assert answer.headers["content-type"] == "application/json"


async def test_a_chosen_pod_that_refuses_the_connection_costs_no_request(own_bench):
    await own_bench.pods[1].stop()

    assert await own_bench.status_of("POST", "/v1/completions", data=b"{}") == 200
    assert len(own_bench.pods[0].turns) == 1


async def test_a_pod_that_takes_too_long_is_an_engine_error():
    async with bench_of(total_timeout_s=0.2) as bench:
        bench.pods[1].stall = True

        assert await bench.code_of("POST", "/v1/completions", data=b"{}") == (502, "engine_error")
        await asyncio.wait_for(bench.pods[1].noticed_disconnect.wait(), DEADLINE_S)


async def test_without_a_pod_or_a_front_the_answers_say_which(own_bench):
    for engine in (*own_bench.pods, own_bench.front):
        await engine.stop()

    assert await own_bench.code_of("POST", "/v1/completions", data=b"{}") == (503, "no_ready_endpoint")
    assert await own_bench.code_of("GET", "/v1/context/ctx_1") == (503, "gateway_unavailable")
    await own_bench.envoy.until_healthy(PODS, 0)
    assert await own_bench.code_of("POST", "/v1/completions", data=b"{}") == (503, "no_ready_endpoint")


async def test_a_pod_that_looks_ill_gets_nothing_that_nobody_chose_it_for(own_bench):
    own_bench.plugin.pick = ""
    own_bench.pods[0].healthy = False
    await own_bench.envoy.until_healthy(PODS, 1)
    for _ in range(10):
        await own_bench.status_of("POST", "/v1/completions", data=b"{}")

    assert [len(pod.turns) for pod in own_bench.pods] == [0, 10]


async def test_pods_that_look_ill_are_tried_all_the_same_when_there_is_no_other(own_bench):
    for pod in own_bench.pods:
        pod.healthy = False
    await own_bench.envoy.until_healthy(PODS, 0)
    chosen = await own_bench.status_of("POST", "/v1/completions", data=b"{}")
    own_bench.plugin.pick = ""
    fallen_back = await own_bench.status_of("POST", "/v1/completions", data=b"{}")

    assert (chosen, fallen_back) == (200, 200)


async def _in_pieces(size_bytes: int):
    for start in range(0, size_bytes, 1 << 20):
        yield bytes(min(1 << 20, size_bytes - start))


def _body(size_bytes: int, *, chunked: bool):
    return _in_pieces(size_bytes) if chunked else io.BytesIO(bytes(size_bytes))


@pytest.mark.parametrize("skip_body", [False, True])
async def test_a_body_up_to_the_limit_passes_whether_the_plugin_looks_at_it_or_not(bench, skip_body):
    """Large ones, and those of no size, pass through the gateway's HTTP front."""
    bench.plugin.skip_body = skip_body
    sizes = [SHOWN_BYTES_MAX - 1, 20 << 20, LIMIT_BYTES]
    for size_bytes in sizes:
        for chunked in (False, True):
            async with bench.request("POST", "/v1/completions", data=_body(size_bytes, chunked=chunked)) as answer:
                assert (await answer.json())["size"] == size_bytes

    assert bench.plugin.body_sizes == ([] if skip_body else [SHOWN_BYTES_MAX - 1])


async def test_an_upload_that_stops_is_ended_and_reaches_no_pod():
    async with bench_of(upload_timeout_s=0.2) as bench:
        answer = await bench.raw(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc")

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"did not arrive before the upload deadline" in answer
        assert (bench.plugin.body_sizes, bench.arrived()) == ([], [])


async def test_a_proxy_whose_memory_is_used_up_refuses_in_our_shape():
    metrics = f"127.0.0.1:{free_port()}"
    async with bench_of(max_heap_bytes=1 << 20, metrics_listen=metrics) as bench:
        await bench.envoy.until_stat("overload.envoy.overload_actions.stop_accepting_requests.active", 1)

        async with bench.request("GET", "/v1/models") as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await answer.json())["error"]["code"] == "no_ready_endpoint"
        # It must not be restarted for that.
        for path in ("/ready", "/healthz"):
            async with bench.http.get(f"http://{metrics}{path}") as probed:
                assert probed.status == 200


async def test_a_running_answer_does_not_notice_that_the_plugin_dies(own_bench):
    async with own_bench.request("POST", "/v1/completions", data=b'{"stream": true}') as answer:
        own_bench.pods[1].release()
        first = await answer.content.readany()
        await own_bench.plugin_dies()
        own_bench.pods[1].release()
        own_bench.pods[1].finish()
        rest = await answer.content.read()

    assert first == rest == b'data: {"text": "token"}\n\n'


@pytest.mark.parametrize(
    ("status", "request_bytes"),
    [
        (b"400", b"NONSENSE\r\n\r\n"),
        (b"400", b"POST /v1/models HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"400", b"GET /v1/models#/v1/context HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"),
        (b"431", b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 300 + b"\r\n"),
        (b"403", b"GET /v1/models HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"),
    ],
)
async def test_what_is_not_http_as_we_speak_it_is_refused_in_our_shape(bench, status, request_bytes):
    head, _, body = (await bench.raw(request_bytes)).partition(b"\r\n\r\n")

    assert head.split(b" ")[1] == status
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert bench.arrived() == []


async def test_a_path_in_a_whole_url_is_matched_like_any_other(bench):
    answer = await bench.raw(b"GET http://x/v1/context/ctx_1 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert bench.asked_of_front() == ["/v1/context/ctx_1"]


async def test_the_access_log_has_the_receipts_and_neither_prompt_nor_query_nor_key(own_bench):
    headers = {"authorization": "Bearer the-key", "x-request-id": "req-1", "content-type": "application/json"}
    body = json.dumps({"prompt": "the-prompt", "stream": True}).encode()
    async with own_bench.request("POST", "/v1/completions?q=the-query", data=body, headers=headers) as answer:
        own_bench.pods[1].finish()
        await answer.read()
    await own_bench.status_of("GET", "/v1/context/ctx_1?q=the-query", headers=headers)
    turn, control = await own_bench.envoy.access_log(num_lines=2)

    assert "the-" not in json.dumps([turn, control])
    assert (turn["method"], turn["path"], turn["route"], turn["status"]) == (
        "POST",
        "/v1/completions",
        "completion",
        200,
    )
    assert (turn["pod"], turn["request_id"], turn["context_mode"]) == (own_bench.plugin.pick, "req-1", "append")
    assert {"time", "duration_ms", "first_byte_ms", "sent_bytes", "plugin_head_us", "plugin_body_us"} <= turn.keys()
    assert (control["path"], control["route"]) == ("/v1/context/ctx_1", "control")
    assert "the-" not in own_bench.envoy.log()
