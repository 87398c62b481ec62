"""The control calls over the whole front, without a socket."""

import asyncio
import json

import httpx
import pytest

from gateway.http import openapi
from gateway.http.answers import context_read
from gateway.http.app import HttpFront
from gateway.pods.endpoints import Health
from gateway.pods.state import EngineLoad
from gateway.tenants.keys import KeyFile
from gateway.tenants.limits import FrontLimits
from tests.kit.gateway_parts import KEY, manifest_of, write_keys

AUTH = {"authorization": f"Bearer {KEY}"}


class NoCarrier:
    """Nothing in this file is to be carried."""

    async def carry(self, forward, body, exchange):
        raise AssertionError(f"carried to {forward.endpoint.name}")


@pytest.fixture
def front(parts):
    return HttpFront(parts.with_parts(limits=FrontLimits(max_body_bytes=1000)), carrier=NoCarrier())


@pytest.fixture
async def client(front):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://gateway") as client:
        yield client


def error_of(answer):
    body = answer.json()

    assert set(body) == {"type", "error", "detail"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["detail"] == body["error"]["message"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return answer.status_code, body["error"]["code"]


async def test_get_one(client, parts):
    await parts.directory.add("ctx_1")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    answer = await client.get("/v1/context/ctx_1", headers=AUTH)

    assert answer.status_code == 200
    assert answer.json() == context_read(*await parts.gateway.contexts.read("demo", "ctx_1"))
    assert answer.headers["x-request-id"].startswith("req_")


async def test_list_pages(client, parts):
    for number in range(3):
        await parts.directory.add(f"ctx_{number}")
        parts.clock.advance(s=1)
    answer = await client.get("/v1/context", params={"limit": 1, "after": "ctx_2", "model": "stub-model"}, headers=AUTH)

    assert [found["session_id"] for found in answer.json()["data"]] == ["ctx_1"]
    assert answer.json()["has_more"] is True


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "1.5", ""])
async def test_a_limit_out_of_range_is_invalid(client, limit):
    answer = await client.get("/v1/context", params={"limit": limit}, headers=AUTH)

    assert error_of(answer) == (400, "invalid_request")
    assert answer.json()["error"]["param"] == "limit"


async def test_delete_twice(client, parts):
    await parts.directory.add("ctx_1")
    first = await client.delete("/v1/context/ctx_1", headers=AUTH)
    second = await client.delete("/v1/context/ctx_1", headers=AUTH)

    assert (first.status_code, first.json()) == (200, {"session_id": "ctx_1", "status": "success"})
    assert error_of(second) == (404, "context_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/context"),
        ("GET", "/v1/context/x"),
        ("DELETE", "/v1/context/x"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
async def test_without_a_key_nothing_is_told(client, method, path, headers):
    answer = await client.request(method, path, headers=headers)

    assert error_of(answer) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_a_fault_of_our_own_is_typed_too(client):
    answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=AUTH)

    assert error_of(answer) == (500, "internal_error")
    assert "pod-" not in answer.text


async def test_a_fault_of_our_own_in_a_control_call_is_typed_too(client, parts):
    """As every other call answers, not Starlette's "Internal Server Error" as text."""
    parts.directory.get_with_turns = None

    assert error_of(await client.get("/v1/context/ctx_1", headers=AUTH)) == (500, "internal_error")


async def test_a_plain_request_id_is_kept_and_a_strange_one_is_not(client):
    for asked, kept in (("abc-1.2:3", True), ("a b", False), ("x" * 129, False)):
        answer = await client.get("/healthz", headers={"x-request-id": asked})

        assert (answer.headers["x-request-id"] == asked) is kept


async def test_health_and_readiness_need_no_key_and_name_nothing(client, parts):
    """Seen failing before: every pod by its name, its load, its models, and which of our parts is missing."""
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    ready = await client.get("/readyz")
    parts.directory.down = True
    missing = await client.get("/readyz")

    assert (ready.status_code, ready.json()) == (200, {"ready": True})
    assert (missing.status_code, missing.json()) == (503, {"ready": False})


async def test_the_metrics_port_says_what_is_missing_and_how_each_pod_is(parts, front):
    load = EngineLoad(running=2, waiting=1, kv_usage=0.12345)
    models = frozenset({"stub-model"})
    parts.probe.health["pod-a"] = Health(healthy=True, models=models, load=load, clock_skew_s=-90.0)
    await parts.endpoints.probe_all()
    parts.endpoints.note_sidecar("pod-a", fingerprint="f", tiers={"host": 0.5, "disk": 0.1})
    parts.endpoints.note_beginnings("pod-a", {"x": 1}, 1)
    parts.endpoints.note_placed("pod-a", "y", at_ms=1, is_new=True)
    ready = await front.ready_state.describe()

    assert (ready["ready"], ready["missing"]) == (True, [])
    assert ready["endpoints"]["pod-a"] == {
        "ready": True,
        "draining": False,
        "models": ["stub-model"],
        "in_flight": 0,
        "clock_skew_s": -90.0,
        "running": 2,
        "waiting": 1,
        "kv_usage": 0.123,
        "tiers": ["disk", "host"],
        "beginnings": 2,
        "placed": 1,
    }

    parts.directory.down = True
    for name in ("pod-a", "pod-b"):
        parts.endpoints.mark_unreachable(name)
    front.ready_state.draining = True
    missing = (await front.ready_state.describe())["missing"]

    assert missing == ["context manager", "ready endpoint", "time: the gateway is draining"]


async def test_metrics_time_answers_by_kind_and_status(client, parts):
    await client.get("/v1/context", headers=AUTH)
    await client.get("/v1/context/x", headers=AUTH)
    await client.get("/nowhere", headers=AUTH)
    await client.get("/healthz")
    page = (await client.get("/metrics")).text
    timed = [line for line in page.splitlines() if line.startswith("contextcache_gateway_request_duration_seconds_cou")]

    assert sorted(timed) == [
        'contextcache_gateway_request_duration_seconds_count{code="200",route="control"} 1.0',
        'contextcache_gateway_request_duration_seconds_count{code="404",route="control"} 1.0',
        'contextcache_gateway_request_duration_seconds_count{code="404",route="refused"} 1.0',
    ]


async def test_the_openapi_document_has_every_call(client):
    document = (await client.get("/openapi.json")).json()
    calls = {(method, path) for path, operations in document["paths"].items() for method in operations}

    assert calls == {
        *((method, "/v1/context") for method in ("get", "post")),
        *((method, "/v1/context/{session_id}") for method in ("get", "patch", "delete")),
        *(("post", f"/v1/context/{{session_id}}/{change}") for change in ("compact", "fork", "rewind")),
        *(("post", path) for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")),
        *(("get", path) for path in ("/v1/usage", "/v1/deployment", "/v1/models/{model}")),
        ("post", "/v1/responses/compact"),
        ("post", "/v1/conversations"),
        *((method, "/v1/conversations/{conversation_id}") for method in ("get", "post", "delete")),
        *((method, "/v1/conversations/{conversation_id}/items") for method in ("get", "post")),
        *((method, "/v1/conversations/{conversation_id}/items/{item_id}") for method in ("get", "delete")),
        *((method, "/v1/responses/{response_id}") for method in ("get", "delete")),
        ("get", "/v1/responses/{response_id}/input_items"),
        *(("get", path) for path in ("/healthz", "/readyz", "/metrics")),
    }
    assert "HTTPValidationError" not in json.dumps(document)


@pytest.mark.looptime
async def test_readyz_waits_for_a_manager_that_hangs_no_longer_than_its_askers_do(parts, front, looptime):
    """Seen failing without the bound: it waited for ever, as long as the manager's client would."""
    await parts.endpoints.probe_all()
    parts.directory.is_serving = asyncio.Event().wait
    found = await front.ready_state.describe()

    assert (found["ready"], found["missing"]) == (False, ["context manager"])
    assert looptime == 1


async def test_a_key_of_any_letters_is_the_same_key_for_control_calls_and_carried_ones(parts, tmp_path):
    """Seen failing before: the control calls read it as Latin-1, the others as UTF-8."""
    key = "schlüssel-🔑"
    write_keys(tmp_path / "more.json", {key: "demo"})
    raw = [("authorization", f"Bearer {key}".encode())]
    keys = KeyFile(tmp_path / "more.json", metrics=parts.metrics)
    front = HttpFront(parts.with_parts(keys=keys), carrier=NoCarrier())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://gateway") as client:
        answers = [await client.get("/v1/context", headers=raw), await client.post("/v1/context", headers=raw)]
        twice = await client.get("/v1/context", headers=[("authorization", "Bearer x"), *raw])

    # 400: past the key, the body is no JSON.
    assert [answer.status_code for answer in (*answers, twice)] == [200, 400, 401]


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "told"),
    [
        ("PATCH", "/v1/context/mine", {"tll": 90}, "tll", "unknown field `tll`: did you mean `ttl`?"),
        ("PATCH", "/v1/context/mine", {"meta_data": {}}, "meta_data", "did you mean `metadata`?"),
        ("PATCH", "/v1/context/mine", {"color": 1}, "color", "allowed: kv_hints, metadata, ttl, ttl_policy"),
        ("POST", "/v1/context/mine/fork", {"sesion_id": "a"}, "sesion_id", "did you mean `session_id`?"),
        ("POST", "/v1/context/mine/rewind", {"genration": 1}, "genration", "did you mean `generation`?"),
        ("GET", "/v1/context?limt=5", None, "limt", "unknown query parameter `limt`: did you mean `limit`?"),
        ("GET", "/v1/context?page=2", None, "page", "allowed: after, kind, limit, model"),
        ("GET", "/v1/usage?tenent=other", None, "tenent", "did you mean `tenant`?"),
        ("GET", "/v1/usage?form=2026-11-01", None, "form", "did you mean `from`?"),
        ("GET", "/v1/context/mine?x=1", None, "x", "allowed: none"),
        ("DELETE", "/v1/context/mine?force=1", None, "force", "allowed: none"),
    ],
)
async def test_what_a_control_call_does_not_know_is_named_with_what_it_may_mean(
    parts, client, method, path, body, param, told
):
    """Seen to fail: of queries, 200 as if they had not been there."""
    await parts.directory.add("mine")
    answer = await client.request(method, path, json=body, headers=AUTH)

    assert error_of(answer) == (400, "invalid_request")
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]
    assert (await parts.directory.get_session_metadata("demo", "mine")).ttl_s == 600


async def test_a_model_is_described_as_openai_does(client, parts):
    """Seen to fail: 404 `not_found`."""
    parts.probe.health["pod-b"] = Health(healthy=True, models=frozenset({"org/model:tag"}))
    await parts.endpoints.probe_all()
    for model in ("stub-model", "org/model:tag"):
        answer = await client.get(f"/v1/models/{model}", headers=AUTH)
        assert (answer.status_code, answer.json()["id"], answer.json()["object"]) == (200, model, "model")
        assert answer.json()["created"] == parts.clock.now_ms() // 1000
    escaped = await client.get("/v1/models/org%2Fmodel:tag", headers=AUTH)
    assert (escaped.status_code, escaped.json()["id"]) == (200, "org/model:tag")

    missing = await client.get("/v1/models/nobody", headers=AUTH)
    assert error_of(missing) == (404, "model_not_found")
    assert (missing.json()["error"]["message"], missing.json()["error"]["param"]) == (
        "the model `nobody` does not exist",
        "model",
    )
    assert error_of(await client.get("/v1/models/stub-model")) == (401, "invalid_api_key")


@pytest.mark.parametrize(("said", "ttl_s"), [(90, 90), (90.0, 90), ("90s", 90), ("604800s", 604_800)])
async def test_a_life_may_be_written_as_a_number_or_as_text(client, parts, said, ttl_s):
    """Seen to fail: 400 for `90s`."""
    await parts.directory.add("mine")
    changed = await client.patch("/v1/context/mine", json={"ttl": said}, headers=AUTH)
    forked = await client.post("/v1/context/mine/fork", json={"ttl": said}, headers=AUTH)

    assert (changed.json()["ttl"], forked.json()["ttl"]) == (ttl_s, ttl_s)


@pytest.mark.parametrize(
    "said", ["90", "90 s", " 90s", "90S", "1m", "1.5s", "-90s", "090s", "s", "90ss", "\u0669\u0660s", "90s\n", "", True]
)
async def test_any_other_text_is_no_life(client, parts, said):
    await parts.directory.add("mine")
    answer = await client.patch("/v1/context/mine", json={"ttl": said}, headers=AUTH)

    assert (*error_of(answer), answer.json()["error"]["param"]) == (400, "invalid_request", "ttl")


@pytest.mark.parametrize("said", ["59s", "604801s", "999999999999999s"])
async def test_a_life_as_text_keeps_to_the_same_bounds(client, parts, said):
    await parts.directory.add("mine")

    assert error_of(await client.patch("/v1/context/mine", json={"ttl": said}, headers=AUTH)) == (
        400,
        "ttl_out_of_range",
    )


def test_a_missing_api_document_stops_the_start(parts, monkeypatch):
    def missing():
        raise FileNotFoundError("openapi.yaml")

    monkeypatch.setattr(openapi, "document", missing)

    with pytest.raises(FileNotFoundError):
        HttpFront(parts.gateway, carrier=None)
