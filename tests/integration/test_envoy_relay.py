"""The keeper's relay: what the outside sees of Envoy's admin interface, and that it sees no more."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager, suppress

import pytest
from yarl import URL

from deploy.envoy.relay import MAX_CONNECTIONS, Relay, listening
from tests.kit.kept_envoy import DEADLINE_S, ROOT, kept_envoy
from tests.kit.ports import free_port
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until

_POLL_S = 0.02


class Admin(StubEngine):
    """Ends a connection after its answer, as the relay asks of Envoy's admin interface."""

    async def _one_request(self, reader, writer) -> bool:
        await super()._one_request(reader, writer)
        return False


@pytest.fixture
def free_ports():
    """Three ports that are nobody's: unlike the tests' other Envoys, a kept one is told its ports."""
    return [free_port() for _ in range(3)]


async def relayed(kept, path: str, *, method: str = "GET") -> tuple[int, str]:
    async with kept.http.request(method, URL(kept.metrics_url + path, encoded=True)) as answer:
        return answer.status, await answer.text()


async def test_the_relay_shows_metrics_and_readiness(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports) as kept:
        async with kept.post(b"{}") as answer:
            await answer.read()
        status, metrics = await relayed(kept, "/stats/prometheus")
        ready, _ = await relayed(kept, "/ready")
        healthy, _ = await relayed(kept, "/healthz")

        assert (status, ready, healthy) == (200, 200, 200)
        assert 'envoy_http_downstream_rq_completed{envoy_http_conn_manager_prefix="front"} 1' in metrics


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/quitquitquit",
        "/config_dump",
        "/certs",
        "/stats",
        "/stats/prometheus?usedonly",
        "/stats/prometheus/../../config_dump",
        "/ready/",
        "//ready",
        "/healthcheck/fail",
        "http://127.0.0.1/config_dump",
    ],
)
async def test_nothing_else_of_the_admin_interface_is_behind_the_relay(relay_before_admin, path):
    port, admin = relay_before_admin

    assert (await asked(port, f"GET {path} HTTP/1.1"))[:12] == b"HTTP/1.1 404"
    assert (await asked(port, f"POST {path} HTTP/1.1"))[:12] == b"HTTP/1.1 404"
    assert admin.received == []


async def test_the_relay_asks_and_tells_nothing_that_is_in_a_request(relay_before_admin):
    port, admin = relay_before_admin
    posted = await asked(port, "POST /ready HTTP/1.1")
    await asked(port, "GET /ready HTTP/1.1\r\nx-secret: 1\r\ncookie: 2")

    assert posted[:12] == b"HTTP/1.1 405"
    assert [(found.method, found.target) for found in admin.received] == [("GET", "/ready")]
    assert {name for name, _ in admin.received[0].headers} == {"host", "connection"}


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000 + b"\r\n\r\n"])
async def test_the_relay_outlives_nonsense(relay_before_admin, request_):
    port, _ = relay_before_admin
    answer = await asked_raw(port, request_)

    assert answer[:12] in (b"", b"HTTP/1.1 404")
    assert (await asked(port, "GET /healthz HTTP/1.1"))[:12] == b"HTTP/1.1 200"


async def test_who_holds_connections_and_says_nothing_keeps_no_probe_out(relay_before_admin):
    port, _ = relay_before_admin
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
    probed = await asked(port, "GET /healthz HTTP/1.1")
    async with asyncio.timeout(DEADLINE_S):
        gave_way = await asyncio.gather(held[0][0].read(), return_exceptions=True)
    for _, writer in held:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in held), return_exceptions=True)

    assert probed[:12] == b"HTTP/1.1 200"
    assert not gave_way[0] or isinstance(gave_way[0], ConnectionError)


async def test_a_client_that_does_not_read_is_let_go(tmp_path):
    async def endless(reader, writer):
        with suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as admin:
        (tmp_path / "admin").write_text(f"127.0.0.1:{admin.sockets[0].getsockname()[1]}")
        with serving_relay(tmp_path / "admin", drains=lambda: False, deadline_s=0.2) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(b"GET /stats/prometheus HTTP/1.1\r\n\r\n")
            with pytest.raises(ConnectionError):
                # An end that was not waited for: what the client had not read would have come first.
                await until_broken(writer)
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def until_broken(writer):
    """Write until the other end is gone."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(_POLL_S)


async def test_the_relay_of_a_draining_envoy_is_not_ready_whatever_admin_says(tmp_path, relay_before_admin):
    with serving_relay(tmp_path / "admin", drains=lambda: True) as port:
        assert (await asked(port, "GET /ready HTTP/1.1"))[:12] == b"HTTP/1.1 503"
        assert (await asked(port, "GET /healthz HTTP/1.1"))[:12] == b"HTTP/1.1 200"


async def test_a_request_that_never_ends_is_let_go(tmp_path):
    with serving_relay(tmp_path / "admin", drains=lambda: False, deadline_s=0.1) as port:
        assert await asked_raw(port, b"GET /ready HTTP/1.1\r\n") == b""


async def test_without_an_answer_of_admin_the_relay_says_so(tmp_path):
    with serving_relay(tmp_path / "no-admin-yet", drains=lambda: False) as port:
        for path in ("/ready", "/healthz", "/stats/prometheus"):
            assert (await asked(port, f"GET {path} HTTP/1.1"))[:12] == b"HTTP/1.1 503"


async def test_the_relay_says_not_ready_from_the_signal_on_and_shows_metrics_to_the_end(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=600) as kept:
        kept.keeper.send_signal(signal.SIGTERM)
        await until(kept.is_draining, what="Envoy drains")
        found = [(await relayed(kept, path))[0] for path in ("/ready", "/healthz", "/stats/prometheus")]
        kept.keeper.send_signal(signal.SIGTERM)

        assert found == [503, 200, 200]
        assert await kept.ended() == 0


async def test_a_relay_whose_port_is_taken_ends_the_keeper_before_there_is_an_envoy(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports) as kept:
        config = tmp_path / "second.yaml"
        text = (tmp_path / "envoy.yaml").read_text()
        config.write_text(text.replace(f"port_value: {free_ports[0]}", "port_value: 0"))
        keeper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "deploy.envoy",
            "run",
            "--config",
            str(config),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        _, complaint = await asyncio.wait_for(keeper.communicate(), DEADLINE_S)

        assert keeper.returncode == 2
        assert b"Address already in use" in complaint
        assert b"Traceback" not in complaint
        assert kept.keeper.returncode is None


@contextmanager
def serving_relay(admin_file, *, drains, **more):
    """Run a relay on a free port."""
    with listening("127.0.0.1:0") as listener, Relay(listener, admin_file, drains=drains, **more).serving():
        yield listener.getsockname()[1]


@pytest.fixture
async def relay_before_admin(tmp_path):
    """A relay before a server that shows what admin would be asked."""
    admin = Admin()
    await admin.start()
    admin_file = tmp_path / "admin"
    admin_file.write_text(f"127.0.0.1:{admin.port}")
    with serving_relay(admin_file, drains=lambda: False) as port:
        yield port, admin
    await admin.stop()


async def asked(port: int, head: str) -> bytes:
    return await asked_raw(port, f"{head}\r\nhost: x\r\n\r\n".encode())


async def asked_raw(port: int, request: bytes) -> bytes:
    """Return all that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
