"""Requests that hang count for their tenant, whatever they ask for, and cost no other tenant an answer."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway.http.app import HttpFront
from tests.kit.gateway_parts import KEY, OTHER_KEY, GatewayParts

ROOM = 8
CALLS = [
    ("PATCH", "/v1/context/ctx_1"),
    ("POST", "/v1/context/ctx_1/fork"),
    ("POST", "/v1/context/ctx_1/rewind"),
    ("POST", "/v1/context"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
]


async def ask(front, method, path, key, *pieces):
    """Return the status of a call whose body comes in these pieces, and never ends."""
    left = list(pieces)

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    statuses = []
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    await front(scope, receive, send)
    return statuses[0]


@pytest.fixture
async def parts(parts):
    found = GatewayParts(parts.gateway.parts.keys, limits={"total_requests_max": ROOM})
    await found.endpoints.probe_all()
    await found.directory.add("ctx_1")
    await found.directory.add("ctx_2", tenant="other")
    return found


@pytest.fixture
def front(parts):
    return HttpFront(parts.gateway, carrier=None)


@asynccontextmanager
async def hanging(front, method, path, count):
    """As many calls of one tenant as that, each with one byte of its body."""
    tasks = [asyncio.create_task(ask(front, method, path, KEY, b"{")) for _ in range(count)]
    for _ in range(10):
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_a_tenant_whose_calls_hang_is_429_and_the_other_is_answered(front, parts, method, path):
    """Seen failing before: with PATCH, fork and rewind all other requests were 503, the other tenant's too."""
    async with hanging(front, method, path, 3 * ROOM) as tasks:
        refused = [task.result() for task in tasks if task.done()]
        own = await ask(front, "GET", "/v1/context/ctx_1", KEY)
        read = await ask(front, "GET", "/v1/context/ctx_2", OTHER_KEY)
        deleted = await ask(front, "DELETE", "/v1/context/ctx_2", OTHER_KEY)

        assert refused == [429] * (2 * ROOM)
        assert (own, read, deleted) == (429, 200, 200)
    assert parts.tenants.is_empty()


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_calls_that_wait_for_the_manager_count_too(front, parts, method):
    async def never(*args):
        await asyncio.Event().wait()

    parts.directory.get_with_turns = parts.directory.unregister_session_cache = never
    async with hanging(front, method, "/v1/context/ctx_1", 2 * ROOM) as tasks:
        assert [task.result() for task in tasks if task.done()] == [429] * ROOM
        assert await ask(front, "GET", "/v1/context", OTHER_KEY) == 200


@pytest.mark.looptime
@pytest.mark.parametrize(("method", "path"), CALLS[:3])
async def test_the_small_body_of_a_control_call_has_a_short_time(front, method, path, looptime):
    """Seen failing before: 60 s."""
    assert await ask(front, method, path, KEY, b"{") == 408
    assert looptime == 5
