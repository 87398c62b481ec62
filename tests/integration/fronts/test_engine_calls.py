"""Of all that vLLM's server can be asked, inference reaches a pod and the rest is not found, on both fronts."""

from __future__ import annotations

import pytest

from gateway.paths import ENGINE_CALLS
from tests.kit.engine_calls import known_calls
from tests.kit.fronts import FRONTS, code_of, running_front
from tests.kit.gateway_server import settings_for

OURS = {"/openapi.json", "/metrics"}
"""Answered by the gateway itself."""


@pytest.fixture(params=FRONTS)
async def front(request, engine, tmp_path):
    settings = settings_for(tmp_path, {"pod-a": engine}, engine_paths=["GET /version"])
    async with running_front(request.param, settings, num_ready=1) as front:
        yield front


async def test_inference_passes_and_the_rest_is_not_found(front, engine):
    passed = set()
    for method, path in known_calls():
        plain = path.replace("{", "").replace("}", "")
        if plain in OURS:
            continue
        data = b"{}" if method in {"POST", "PUT", "PATCH"} else None
        async with front.request(method, plain, data=data, headers={"content-type": "application/json"}) as answer:
            if answer.status == 200:
                passed.add(f"{method} {path}")
            elif method != "HEAD":
                assert await code_of(answer) == (404, "not_found"), (method, path)

    assert passed == ENGINE_CALLS | {"GET /version"}
    assert {found.method for found in engine.turns} == {"GET", "POST"}


async def test_what_no_client_should_ask_arrives_at_no_pod(front, engine):
    for method, path in (
        ("POST", "/v1/load_lora_adapter"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("OPTIONS", "/v1/completions"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/completions"),
        ("POST", "/v1/tokenize"),
        ("GET", "/health"),
    ):
        async with front.request(method, path, headers={"content-type": "application/json"}) as answer:
            is_known = path in {"/v1/completions", "/v1/models"}
            assert answer.status == (405 if is_known else 404), (method, path)
            assert bool(answer.headers.get("allow")) == is_known

    assert engine.turns == []
