"""Every error of the design, at every operation that names it in the OpenAPI document, through both fronts.

Not here: what depends on more than one request and the store (a slow upload, a fault of ours or the engine's, a busy
deployment, Envoy alone, an Idempotency-Key). `test_refusals.py`, `test_repeats.py` and others beside this have them.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from contextcache.clock import ManualClock, SystemClock
from contextcache.model import NewSession
from tests.kit.fake_vllm import FakeVllm
from tests.kit.fronts import code_of
from tests.kit.gateway_parts import OPERATOR_KEY
from tests.kit.gateway_server import RunningManager
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.unit.docs.test_openapi import codes_of, document, operations  # noqa: F401 - a fixture

pytestmark = pytest.mark.thorough

CONTEXTS_MAX, BODY_BYTES_MAX = 3, 1 << 16
LONG = "x" * 20_000
"""More than the toy's window."""
CREATE, ONE = "/v1/context", "/v1/context/{session_id}"
FORK, REWIND = f"{ONE}/fork", f"{ONE}/rewind"
TALKS, TALK = "/v1/conversations", "/v1/conversations/{conversation_id}"
ITEMS = f"{TALK}/items"
CHANGES = {CREATE: {"model": MODEL, "prompt": "Hi"}, ONE: {"ttl": 600}, FORK: {}, REWIND: {"generation": 1}}
COMPACT, COMPACT_RESPONSE = f"{ONE}/compact", "/v1/responses/compact"
CHANGES |= {COMPACT: {"prompt": "Short."}, COMPACT_RESPONSE: {"model": MODEL, "input": "Hi"}}
CHANGES |= {TALKS: {}, TALK: {"metadata": {}}, ITEMS: {"items": [{"role": "user", "content": "Hi"}]}}
TURNS = {
    "/v1/completions": {"model": MODEL, "prompt": " more"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
}
WRONG = {CREATE: {"prompt": 5}, ONE: {"colour": 1}, FORK: {"generation": "x"}, REWIND: {"generation": 0}}
WRONG |= {path: {"colour": 1} for path in (TALKS, TALK, ITEMS, COMPACT, COMPACT_RESPONSE)}
CODES = (
    "invalid_request", "model_mismatch", "ttl_out_of_range", "context_length_exceeded", "invalid_api_key",
    "context_not_found", "context_exists", "context_busy", "generation_mismatch", "generation_gone", "context_expired",
    "body_too_large", "context_quota_exceeded", "store_unavailable", "operator_only", "previous_response_not_found",
)  # fmt: skip
RACES = {(path, "context_exists") for path in TURNS} | {(CREATE, code) for code in ("context_busy", "context_expired")}
RACES |= {("/v1/responses/{response_id}", "context_busy"), (ITEMS, "context_quota_exceeded")}
RACES |= {
    (COMPACT_RESPONSE, code) for code in ("context_not_found", "context_busy", "context_expired", "model_mismatch")
}
"""Of two that create one context at once, and of creates that come again: test_changes.py and test_repeats.py. Of a
compaction's context: test_compaction.py."""


@pytest.fixture
async def world(open_front, tmp_path):
    """A context `ctx_mine`, of at most three."""
    clock = ManualClock(SystemClock().now_ms())
    manager = RunningManager(tenant_contexts_max=CONTEXTS_MAX, clock=clock)
    await manager.start()
    engine = FakeVllm()
    async with (
        running_turn_pod(tmp_path, manager_port=manager.port, engine=engine) as pod,
        open_front({"pod-a": pod}, manager_port=manager.port, max_body_bytes=BODY_BYTES_MAX) as front,
    ):
        await made(front, "ctx_mine")
        yield SimpleNamespace(front=front, manager=manager, clock=clock)
    await manager.stop()


async def made(front, name):
    async with front.post(CREATE, CHANGES[CREATE] | {"session_id": name, "ttl": 600}) as answer:
        assert answer.status == 200, await answer.read()


async def prepare(world, code):
    """Bring about what all operations are to meet."""
    match code:
        case "context_busy":
            new = NewSession("demo", "ctx_busy", MODEL, ttl_s=600)
            await world.manager.manager.reserve(new, lease_id="l", lease_ttl_ms=60_000)
        case "context_expired":
            world.clock.advance(s=700)
        case "context_quota_exceeded":
            for number in range(CONTEXTS_MAX - 1):
                await made(world.front, f"ctx_{number}")
        case "store_unavailable":
            await world.manager.stop()


def differing(path, code):
    """Return what a request says beside what it always says, and the context it names."""
    may_create = {"context_create": "if_missing"} if path in TURNS else {}
    said = CHANGES.get(path) or TURNS.get(path) or {}
    words = next((word for word in ("prompt", "messages", "input") if word in said), "")
    match code:
        case "invalid_request":
            return WRONG.get(path, {"context_mode": "guess"}), "ctx_mine"
        case "model_mismatch":
            return {"model": "another"}, "ctx_mine"
        case "ttl_out_of_range":
            return {"ttl": 1, **may_create}, "ctx_new" if path in TURNS else "ctx_mine"
        case "context_length_exceeded":
            return {words: [{"role": "user", "content": LONG}] if words == "messages" else LONG}, "ctx_mine"
        case "context_not_found":
            return {}, "ctx_nobody"
        case "context_exists":
            return {"session_id": "ctx_mine"}, "ctx_mine"
        case "context_busy":
            return {}, "ctx_busy"
        case "generation_gone":
            return {"generation": 9}, "ctx_mine"
        case "previous_response_not_found":
            return {"previous_response_id": "resp_9_ctx_mine"}, "ctx_mine"
        case "body_too_large":
            return {"metadata": {"a": "x" * BODY_BYTES_MAX}}, "ctx_mine"
        case "context_quota_exceeded":
            return may_create, "ctx_new" if path in TURNS else "ctx_mine"
    return {}, "ctx_mine"


def ids_of(name):
    return {
        "session_id": name,
        "conversation_id": name,
        "item_id": "msg_1",
        "response_id": f"resp_1_{name}",
        "model": "nobodys",
    }


async def asked(front, method, path, code):
    """Return status and code of the answer to what is asked so that it gets this error."""
    more, name = differing(path, code)
    headers = {"authorization": "Bearer nobody's"} if code == "invalid_api_key" else {}
    headers |= {"if-match": "9"} if code == "generation_mismatch" else {}
    data = None
    if method in {"POST", "PATCH"}:
        names_it = path in TURNS and "previous_response_id" not in more
        body = (CHANGES.get(path) or TURNS.get(path) or {}) | ({"session_id": name} if names_it else {}) | more
        data, headers = json.dumps(body).encode(), headers | {"content-type": "application/json"}
    queries = {"invalid_request": "?limit=0&from=yesterday", "operator_only": "?tenant=another"}
    query = queries.get(code, "") if method in {"GET", "DELETE"} else ""
    if path == "/v1/deployment" and code == "operator_only":
        query = ""
    if path == "/v1/deployment" and code == "invalid_request":
        headers["authorization"] = f"Bearer {OPERATOR_KEY}"
    async with front.request(method, path.format(**ids_of(name)) + query, data=data, headers=headers) as answer:
        return await code_of(answer)


@pytest.mark.parametrize("code", CODES)
async def test_every_operation_gives_each_error_that_it_names(world, document, code):  # noqa: F811 - a fixture
    await prepare(world, code)
    named = {
        (method, path): (int(status), code)
        for method, path, told in operations(document)
        for status, named in codes_of(told)
        if named == code and (path, code) not in RACES
    }

    found = {operation: await asked(world.front, *operation, code) for operation in named}
    assert found == named != {}
