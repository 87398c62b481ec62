"""Pages of listed origins call from a browser: what it asks first, what it lets the page send, and what it shows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gateway.fronts import CORS_EXPOSED_HEADERS
from tests.kit.fronts import Client, StreamingEngine, code_of, envoy_too
from tests.kit.stub_engine import StubEngine
from tests.kit.turn_pod import MODEL, running_turn_pod

PAGE, OTHER_PAGE = "https://chat.example.com", "https://chat.example.com.evil.net"
SENT = ["authorization", "content-type", "idempotency-key", "if-match", "x-api-key", "x-context-keep", "x-session-id"]
SENT += ["x-stainless-lang", "x-usage-format"]
CALLS = [("POST", "/v1/chat/completions"), ("POST", "/v1/context"), ("GET", "/v1/context"), ("GET", "/v1/models")]
CALLS += [("PATCH", "/v1/context/ctx_a"), ("DELETE", "/v1/context/ctx_a"), ("POST", "/v1/context/ctx_a/fork")]
NO_KEY = {"authorization": ""}


class OpenEngine(StubEngine):
    """Lets every origin read, as vLLM does unless told otherwise."""

    async def _send(self, writer, status: int, body: bytes, header: bytes = b"") -> bool:
        writer.write(b"HTTP/1.1 %d X\r\naccess-control-allow-origin: *\r\n%b" % (status, header))
        writer.write(b"access-control-allow-credentials: true\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        return True


def listed(headers, name: str) -> set[str]:
    return {found.strip().lower() for value in headers.getall(name, ()) for found in value.split(",") if found.strip()}


def origins(headers) -> list[str]:
    """Return every origin that an answer names: a browser takes two, equal ones too, for none."""
    assert "access-control-allow-credentials" not in headers
    return headers.getall("access-control-allow-origin", [])


async def asked_first(front: Client, method: str, path: str, *, page: str = PAGE):
    """Ask as a browser asks before a call that a form could not make: without a key."""
    wanted = {"access-control-request-method": method, "access-control-request-headers": ",".join(SENT)}
    async with front.request("OPTIONS", path, headers={**NO_KEY, "origin": page, **wanted}) as answer:
        return SimpleNamespace(status=answer.status, headers=answer.headers, body=await answer.read())


@pytest.fixture
async def browsed(open_front, engine, manager):
    async with open_front({"pod-a": engine}, manager_port=manager.port, cors_origins=[PAGE]) as front:
        yield front


@envoy_too
@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_a_browser_may_make_every_call_from_a_listed_page(browsed, engine, method, path):
    """Seen to fail with 404 without Envoy's route for it: its filter takes no policy from a route of Envoy's own."""
    answer = await asked_first(browsed, method, path)
    sendable = listed(answer.headers, "access-control-allow-headers")

    assert answer.status == 200, answer.body
    assert origins(answer.headers) == [PAGE]
    assert method in answer.headers["access-control-allow-methods"].split(", ")
    # The wildcard covers all but the key.
    assert "authorization" in sendable
    assert "*" in sendable or sendable >= set(SENT)
    assert 0 < int(answer.headers["access-control-max-age"]) <= 600
    assert answer.headers["x-request-id"]
    assert engine.turns == []


@pytest.mark.parametrize("page", [OTHER_PAGE, "https://chat.example.com:8443", "http://chat.example.com", "null"])
async def test_a_browser_is_not_told_that_other_pages_may_call(browsed, page):
    answer = await asked_first(browsed, "POST", "/v1/chat/completions", page=page)
    async with browsed.post("/v1/completions", {"prompt": "x"}, headers={"origin": page}) as called:
        status, seen = called.status, origins(called.headers)

    assert origins(answer.headers) == []
    assert answer.status == 405
    assert (status, seen) == (200, [])


async def test_without_the_setting_nothing_is_said_of_origins(front):
    answer = await asked_first(front, "POST", "/v1/chat/completions", page=PAGE)
    async with front.post("/v1/completions", {"prompt": "x"}, headers={"origin": PAGE}) as called:
        named = {name.lower() for name in (*called.headers, *answer.headers)}

    assert answer.status == 405
    assert not [name for name in named if name.startswith("access-control-")]


@envoy_too
async def test_what_a_pod_lets_read_is_ours_to_say(open_front):
    """Seen to fail with the pod's own wildcard left where it was: `*` for any page."""
    engine = OpenEngine()
    await engine.start()
    seen = {}
    async with open_front({"pod-a": engine}, cors_origins=[PAGE]) as front:
        for page in (PAGE, OTHER_PAGE):
            async with front.post("/v1/embeddings", {"input": "x"}, headers={"origin": page}) as answer:
                assert answer.status == 200
                seen[page] = origins(answer.headers)
    await engine.stop()

    assert seen == {PAGE: [PAGE], OTHER_PAGE: []}


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("POST", "/v1/chat/completions", NO_KEY, (401, "invalid_api_key")),
        ("GET", "/v1/context/ctx_gone", {}, (404, "context_not_found")),
        ("POST", "/v1/context", {}, (400, "invalid_request")),
        ("PATCH", "/v1/context", {}, (405, "method_not_allowed")),
    ],
)
async def test_a_page_may_read_what_went_wrong(browsed, method, path, headers, expected):
    sent = {"content-type": "application/json", "origin": PAGE, **headers}
    async with browsed.request(method, path, data=b"{", headers=sent) as answer:
        assert origins(answer.headers) == [PAGE]
        assert {"x-request-id", "retry-after"} <= listed(answer.headers, "access-control-expose-headers")
        assert await code_of(answer) == expected


@envoy_too
async def test_a_page_may_read_the_receipt_of_a_context(open_front, tmp_path, manager):
    async with (
        running_turn_pod(tmp_path, manager_port=manager.port) as pod,
        open_front({"pod-a": pod}, manager_port=manager.port, cors_origins=[PAGE]) as front,
    ):
        body = {"model": MODEL, "prompt": "Hello", "stream": True}
        async with front.post("/v1/context", body, headers={"origin": PAGE}) as answer:
            raw, headers = await answer.read(), answer.headers
        async with front.get("/v1/context", headers={"origin": PAGE}) as answer:
            page, seen = json.loads(await answer.read()), origins(answer.headers)

    for_proxies = {"x-accel-buffering"}
    receipt = {name.lower() for name in headers if name.lower().startswith(("x-", "server-timing"))} - for_proxies
    assert raw.endswith(b"data: [DONE]\n\n")
    assert origins(headers) == seen == [PAGE]
    assert {"x-session-id", "x-context-cache", "x-context-generation"} <= receipt
    assert receipt <= listed(headers, "access-control-expose-headers") == set(CORS_EXPOSED_HEADERS)
    assert page["data"][0]["session_id"] == headers["x-session-id"]


@envoy_too
async def test_a_stream_reaches_a_page_piece_by_piece(open_front):
    engine = StreamingEngine()
    await engine.start()
    async with (
        open_front({"pod-a": engine}, cors_origins=[PAGE]) as front,
        front.post("/v1/completions", {"prompt": "x", "stream": True}, headers={"origin": PAGE}) as answer,
    ):
        first = await answer.content.readexactly(len(engine.FIRST))
        engine.go_on.set()
        rest = await answer.content.read()
    await engine.stop()

    assert origins(answer.headers) == [PAGE]
    assert first + rest == engine.FIRST + engine.REST
