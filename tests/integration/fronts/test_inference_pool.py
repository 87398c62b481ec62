"""The gateway as the endpoint picker of an InferencePool: Gateway API's protocol 1.0.0."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from contextcache.clock import SystemClock
from contextcache.identity import DESTINATION_HEADER, IDENTITY_HEADER
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.fronts import Front, code_of, until_answered
from tests.kit.gateway_parts import SECRET
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.identities import verify_identity
from tests.kit.inference_pool import as_inference_pool

STREAM = {"model": "stub-model", "prompt": "x", "stream": True}


def address_of(engine) -> str:
    return f"127.0.0.1:{engine.port}"


@pytest.fixture
def open_pool(tmp_path, manager):
    """Return what opens such a gateway over pods: `async with open_pool({"pod-a": engine}) as pool`."""

    @asynccontextmanager
    async def opened(pods, *, subset=(), shows_answers=False, num_ready=None, **settings):
        found = settings_for(tmp_path, pods, manager_port=manager.port, ext_proc_listen="127.0.0.1:0", **settings)
        ready = len(pods) if num_ready is None else num_ready
        ports = [engine.port for engine in pods.values()]
        addresses = [address_of(engine) for engine in pods.values()]
        async with running_gateway(found, num_ready=ready) as gateway:
            envoy_of = envoy_settings(pods=ports, gateways=[(gateway.port, gateway.ext_proc_port)])

            def changed(bootstrap):
                return as_inference_pool(bootstrap, pods=addresses, subset=subset, shows_answers=shows_answers)

            async with running_envoy(envoy_of, change=changed) as envoy:
                yield Front(envoy.port, gateway, envoy=envoy)

    return opened


async def test_requests_of_every_kind_pass_in_full_duplex(open_pool, engine, manager):
    await manager.add("ctx_1")
    plain = b'{"prompt":  "x"}'
    long = b'{"prompt": "' + b"x" * 500_000 + b'"}'
    async with open_pool({"pod-a": engine}) as pool:
        for path, body, headers in (
            ("/v1/completions", plain, {}),
            ("/v1/completions", long, {}),
            ("/v1/completions", b"", {}),
            ("/v1/completions", {"prompt": "x", "cache_salt": "y"}, {}),
            ("/v1/context", plain, {}),
            ("/v1/completions", {"prompt": "x", "session_id": "ctx_1"}, {}),
            ("/v1/chat/completions", long, {"X-Session-ID": "ctx_1"}),
            ("/v1/audio/transcriptions", long, {"content-type": "multipart/form-data; boundary=x"}),
        ):
            async with pool.post(path, body, headers=headers) as answer:
                assert (answer.status, (await answer.json())["method"]) == (200, "POST"), (path, headers)
        async with pool.get("/v1/responses/r1") as answer:
            assert (answer.status, (await answer.json())["method"]) == (200, "GET")
    now_ms = SystemClock().now_ms()
    signed = {
        position: verify_identity(found.header(IDENTITY_HEADER)[0], SECRET, now_ms=now_ms).session_id
        for position, found in enumerate(engine.turns)
        if found.header(IDENTITY_HEADER)
    }

    salted = b'{"prompt": "x", "cache_salt": "y","cache_salt":null}'
    turn = b'{"prompt": "x", "session_id": "ctx_1"}'

    assert [found.body for found in engine.turns] == [plain, long, b"", salted, plain, turn, long, long, b""]
    assert signed == {4: None, 5: "ctx_1", 6: "ctx_1"}
    assert [found.header(DESTINATION_HEADER) for found in engine.turns] == [[address_of(engine)]] * 9


async def test_a_body_of_20_mib_passes_in_full_duplex_and_33_mib_are_refused(open_pool, engine, manager):
    await manager.add("ctx_1")
    body = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    async with open_pool({"pod-a": engine}) as pool:
        for headers in ({}, {"X-Session-ID": "ctx_1"}):
            async with pool.post("/v1/completions", body, headers=headers) as answer:
                assert (answer.status, (await answer.json())["size"]) == (200, len(body))
            assert engine.turns[-1].body == body
        async with pool.post("/v1/completions", body + b" " * (13 << 20)) as answer:
            assert await code_of(answer) == (413, "body_too_large")

    assert len(engine.turns) == 2


@pytest.mark.parametrize("shows_answers", [False, True])
async def test_a_stream_passes_chunk_by_chunk_in_full_duplex(open_pool, engine, shows_answers):
    opened = open_pool({"pod-a": engine}, shows_answers=shows_answers)
    async with opened as pool, pool.post("/v1/completions", STREAM) as answer:
        engine.release("one")
        first = await answer.content.readany()
        engine.release("two")
        second = await answer.content.readany()
        engine.finish()
        rest = await answer.content.read()

    assert (first, second, rest) == (b'data: {"text": "one"}\n\n', b'data: {"text": "two"}\n\n', b"")


async def test_answers_that_stream_through_the_plugin_arrive_whole(open_pool, engine, manager):
    """Seen failing while `process` left once the request was routed: pods that answer at once lost their body."""
    await manager.add("ctx_1")
    long = b'{"prompt": "' + b"x" * 500_000 + b'"}'
    async with open_pool({"pod-a": engine}, shows_answers=True) as pool:
        for _ in range(20):
            for body, headers in (
                (b'{"prompt": "x"}', {}),
                (b'{"prompt": "x", "session_id": "ctx_1"}', {}),
                (b'{"prompt": "x"}', {"X-Session-ID": "ctx_1"}),
                (long, {"X-Session-ID": "ctx_1"}),
            ):
                async with pool.post("/v1/completions", body, headers=headers) as answer:
                    assert (answer.status, (await answer.json())["size"]) == (200, len(body))
            async with pool.get("/v1/responses/r1") as answer:
                assert (answer.status, (await answer.json())["method"]) == (200, "GET")


async def test_refusals_are_ours_in_full_duplex(open_pool, engine):
    async with open_pool({"pod-a": engine}) as pool:
        for path, body, headers, expected in (
            ("/v1/completions", {"session_id": "ctx_none"}, {}, (404, "context_not_found")),
            ("/v1/completions", b'{"session_id": }', {}, (400, "invalid_request")),
            ("/v1/context", {}, {"authorization": "Bearer nobodys"}, (401, "invalid_api_key")),
            ("/v1//context", {}, {}, (404, "not_found")),
        ):
            async with pool.post(path, body, headers=headers) as answer:
                assert await code_of(answer) == expected
        engine.load = {"vllm:num_requests_waiting": 300}
        await until_answered(lambda: pool.post("/v1/completions", {"prompt": "x"}), 429)
        async with pool.post("/v1/completions", {"prompt": "x"}) as answer:
            assert await code_of(answer) == (429, "endpoints_saturated")
        engine.healthy = False
        await pool.gateway.until_ready(0)
        async with pool.post("/v1/completions", {"prompt": "x"}) as answer:
            assert await code_of(answer) == (503, "no_ready_endpoint")


async def test_only_pods_of_the_subset_are_named(open_pool, engine, other, manager):
    await manager.add("ctx_1", holder="pod-a")
    pods = {"pod-a": engine, "pod-b": other}
    async with open_pool(pods, subset=[address_of(other), "10.0.0.1:80"]) as pool:
        for body in ({"prompt": "x"}, {"prompt": "x", "session_id": "ctx_1"}):
            for _ in range(3):
                async with pool.post("/v1/completions", body) as answer:
                    assert answer.status == 200
        async with pool.post("/v1/context", {"prompt": "x"}) as answer:
            assert answer.status == 200
    async with open_pool(pods, subset=["10.0.0.1:80"]) as pool, pool.post("/v1/completions", {"prompt": "x"}) as answer:
        assert await code_of(answer) == (503, "no_ready_endpoint")

    assert (len(engine.turns), len(other.turns)) == (0, 7)
