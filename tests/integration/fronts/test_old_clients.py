"""What stands between: proxies that speak HTTP/1.0 as nginx does unless told otherwise, checks by HEAD, buffers."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.kit.fake_vllm import FakeVllm
from tests.kit.fronts import envoy_too, running_front
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import DEADLINE_S, settings_for
from tests.kit.turn_pod import MODEL, running_turn_pod

PUBLIC = ["/healthz", "/readyz", "/openapi.json", "/console", "/console/turns.js", "/", "/healthz/"]
SAID = {"role": "user", "content": "Hi"}
STREAMS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [SAID]},
    "/v1/messages": {"messages": [SAID], "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture
async def pod(tmp_path, manager):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=FakeVllm()) as pod:
        yield pod


@pytest.fixture
async def turn_front(front_kind, tmp_path, pod, manager):
    settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
    async with running_front(front_kind, settings, num_ready=1) as front:
        yield front


async def until_closed(front, request: bytes) -> tuple[bytes, bytes]:
    """Send bytes as they are; return head and body of the answer once the other end has closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return head.lower(), body
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("host", [b"", b"host: upstream\r\n"])
async def test_a_client_of_http_1_0_is_answered_whole_with_a_host_and_without(front, host):
    """Seen failing before at Envoy: 426."""
    head, body = await until_closed(front, b"GET /healthz HTTP/1.0\r\n%b\r\n" % host)
    refused, _ = await until_closed(front, b"GET /v1/context HTTP/1.0\r\n%b\r\n" % host)

    assert re.match(rb"http/1\.[01] 200 ", head)
    assert json.loads(body) == {"status": "ok"}
    assert re.match(rb"http/1\.[01] 401 ", refused)
    assert b"transfer-encoding" not in head + refused


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nginx_as_it_comes_passes_answers_on(turn_front, stream):
    """`proxy_pass` alone: HTTP/1.0 and `Connection: close`. Seen failing before: 426, and chunks from uvicorn."""
    asked = {"model": MODEL, "prompt": "Hi", "stream": stream, "session_id": "mine", "context_create": "if_missing"}
    body = json.dumps(asked).encode()
    head, answer = await until_closed(
        turn_front,
        b"POST /v1/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n\r\n%b" % (len(body), KEY.encode(), body),
    )

    assert re.match(rb"http/1\.[01] 200 ", head)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if stream:
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(answer)["session_id"] == "mine"


@envoy_too
@pytest.mark.parametrize("path", PUBLIC)
async def test_head_tells_what_get_would_wherever_no_key_is_asked_for(front, path):
    """Seen failing before: 405, and 404 for the root at Envoy."""
    told = {}
    for method in (b"GET", b"HEAD"):
        head, body = await until_closed(
            front, b"%b %b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n" % (method, path.encode())
        )
        names = [b"content-type", b"content-length", b"location", b"etag"]
        told[method] = [head.split(b" ")[1], *(re.findall(rb"\r\n%b: ([^\r]*)" % name, head) for name in names)]
        assert bool(body) == (method == b"GET" and told[method][2] not in ([], [b"0"]))

    assert told[b"HEAD"] == told[b"GET"]
    assert told[b"GET"][0] in {b"200", b"307"}


@envoy_too
async def test_head_reads_nothing_that_needs_a_key(front):
    async with front.request("HEAD", "/v1/context/ctx_1") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "GET, PATCH, DELETE")


@envoy_too
@pytest.mark.parametrize(
    ("path", "kind"),
    # The toy engine has no plain messages.
    [(path, kind) for path in STREAMS for kind in ("plain", "session") if (path, kind) != ("/v1/messages", "plain")],
)
async def test_a_stream_asks_proxies_not_to_hold_it_back(turn_front, path, kind):
    """Seen failing before: nginx collects events by the page."""
    named = {"session_id": "mine", "context_create": "if_missing"} if kind == "session" else {}
    async with turn_front.post(path, {"model": MODEL, "stream": True, **STREAMS[path], **named}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    async with turn_front.post(path, {"model": MODEL, **STREAMS[path], **named}) as whole:
        await whole.read()

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers.getall("cache-control") == ["no-cache"]
    assert answer.headers.getall("x-accel-buffering") == ["no"]
    assert "x-accel-buffering" not in whole.headers
