"""Envoy's listener of probes and metrics: what the outside sees of its admin interface, and that it sees no more."""

from __future__ import annotations

import asyncio
import signal

import pytest
import pytest_asyncio

from tests.kit.attended_envoy import DEADLINE_S, attended_envoy
from tests.kit.ports import free_port
from tests.kit.until import until

CONNECTIONS_MAX = 256
"""Connections at one time to the listener of probes: `layered_runtime` in the template."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attended(tmp_path_factory):
    ports = [free_port() for _ in range(3)]
    async with attended_envoy(tmp_path_factory.mktemp("envoy"), ports, max_connections=4, drain_delay_s=600) as found:
        yield found


def port_of(attended) -> int:
    return int(attended.metrics_url.rpartition(":")[2])


async def test_metrics_and_readiness_are_shown(attended):
    async with attended.post(b"{}") as answer:
        await answer.read()
    found = {
        path: await asked(attended, f"GET {path} HTTP/1.1") for path in ("/stats/prometheus", "/ready", "/healthz")
    }

    assert {path: answer[:12] for path, answer in found.items()} == dict.fromkeys(found, b"HTTP/1.1 200")
    assert b'envoy_http_downstream_rq_completed{envoy_http_conn_manager_prefix="front"}' in found["/stats/prometheus"]


MORE_PATHS = (
    "/",
    "/certs",
    "/stats",
    "/stats/prometheus?usedonly",
    "/stats/prometheus/",
    "/ready/",
    "/ready?",
    "//ready",
    "/healthcheck/fail",
    "/drain_listeners",
)


@pytest.mark.parametrize(
    "path",
    [
        "/quitquitquit",
        "/config_dump",
        "/stats/prometheus/../../config_dump",
        "http://127.0.0.1/config_dump",
        *(pytest.param(path, marks=pytest.mark.thorough) for path in MORE_PATHS),
    ],
)
async def test_nothing_else_of_the_admin_interface_is_behind_it(attended, path):
    for method in ("GET", "POST"):
        assert (await asked(attended, f"{method} {path} HTTP/1.1"))[:12] == b"HTTP/1.1 404", method


async def test_only_a_get_is_answered(attended):
    for path in ("/stats/prometheus", "/ready", "/healthz"):
        assert (await asked(attended, f"POST {path} HTTP/1.1"))[:12] == b"HTTP/1.1 404"


MORE_NONSENSE = (b"\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000 + b"\r\n\r\n")


@pytest.mark.parametrize(
    "request_",
    [b"\xff\xfe\r\n\r\n", *(pytest.param(nonsense, marks=pytest.mark.thorough) for nonsense in MORE_NONSENSE)],
)
async def test_nonsense_ends_with_its_connection(attended, request_):
    answer = await asked_raw(attended, request_)

    assert answer[:10] in (b"", b"HTTP/1.1 4")
    assert (await asked(attended, "GET /healthz HTTP/1.1"))[:12] == b"HTTP/1.1 200"


async def test_clients_that_hold_all_connections_keep_no_probe_out(attended):
    front = int(attended.url.rpartition(":")[2])
    held = [await asyncio.open_connection("127.0.0.1", front) for _ in range(8)]
    probed = await asked(attended, "GET /ready HTTP/1.1")
    for _, writer in held:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in held), return_exceptions=True)

    assert probed[:12] == b"HTTP/1.1 200"


@pytest.mark.thorough
async def test_who_says_nothing_is_let_go(attended):
    """Envoy's own clock: it takes the seconds of the bound."""
    silent = await asyncio.open_connection("127.0.0.1", port_of(attended))
    half = await asyncio.open_connection("127.0.0.1", port_of(attended))
    half[1].write(b"GET /ready HTTP/1.1\r\n")
    async with asyncio.timeout(DEADLINE_S):
        ends = await asyncio.gather(silent[0].read(), half[0].read())
    for _, writer in (silent, half):
        writer.close()

    assert ends[0] == b""
    assert ends[1][:12] in (b"", b"HTTP/1.1 408")


async def test_connections_are_bounded(attended):
    held = [await asyncio.open_connection("127.0.0.1", port_of(attended)) for _ in range(CONNECTIONS_MAX)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(attended))
    try:
        async with asyncio.timeout(DEADLINE_S):
            refused = (await asyncio.gather(reader.read(), return_exceptions=True))[0]
    finally:
        for _, held_writer in [*held, (reader, writer)]:
            held_writer.close()
        await asyncio.gather(*(found.wait_closed() for _, found in held), return_exceptions=True)

    assert refused == b"" or isinstance(refused, ConnectionError)
    await until(
        lambda: asked(attended, "GET /healthz HTTP/1.1"),
        is_so=lambda answer: answer[:12] == b"HTTP/1.1 200",
        what="there is room again",
    )


@pytest.mark.thorough
async def test_it_says_not_ready_from_the_signal_on_and_shows_metrics_to_the_end(tmp_path):
    async with attended_envoy(tmp_path, [free_port() for _ in range(3)], drain_delay_s=600) as attended:
        attended.attendant.send_signal(signal.SIGTERM)
        await until(attended.is_draining, what="Envoy drains")
        paths = ("/ready", "/healthz", "/stats/prometheus")
        found = [(await asked(attended, f"GET {path} HTTP/1.1"))[:12] for path in paths]
        attended.attendant.send_signal(signal.SIGTERM)

        assert found == [b"HTTP/1.1 503", b"HTTP/1.1 200", b"HTTP/1.1 200"]
        assert await attended.ended() == 0


async def asked(attended, head: str) -> bytes:
    return await asked_raw(attended, f"{head}\r\nhost: x\r\nconnection: close\r\n\r\n".encode())


async def asked_raw(attended, request: bytes) -> bytes:
    """Return all that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(attended))
    try:
        writer.write(request)
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
