"""The keeper: Envoy ends when its work is done, and never outlives whoever keeps it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from deploy.envoy.bootstrap import bootstrap
from deploy.local.processes import ProcessName, is_alive, name_of
from tests.helpers.envoy_process import envoy_settings
from tests.helpers.stub_engine import StubEngine
from tests.helpers.stub_processor import StubProcessor
from tests.helpers.valkey import free_port

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90
_POLL_S = 0.02


@dataclass
class Kept:
    """A keeper, its Envoy, and what is behind that."""

    keeper: asyncio.subprocess.Process
    pod: StubEngine
    http: aiohttp.ClientSession
    url: str
    admin_url: str

    envoy: ProcessName | None = None

    def find_envoy(self) -> None:
        (pid,) = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()
        self.envoy = name_of(int(pid))

    async def envoy_is_gone(self) -> bool:
        return not is_alive(self.envoy)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.keeper.wait(), DEADLINE_S)

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await asyncio.sleep(_POLL_S)

    async def is_ready(self) -> bool:
        try:
            async with self.http.get(f"{self.admin_url}/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def is_draining(self) -> bool:
        return not await self.is_ready()

    async def is_closed(self) -> bool:
        """Return whether nobody listens any more."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except ConnectionRefusedError:
            return True
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        return False

    def post(self, body: bytes, *, session: aiohttp.ClientSession | None = None):
        return (session or self.http).post(f"{self.url}/v1/completions", data=body)


@asynccontextmanager
async def kept_envoy(tmp_path, free_ports, **more):
    listen, admin = free_ports
    async with AsyncExitStack() as stack:
        pod, plugin = StubEngine(), StubProcessor()
        for part in (pod, plugin):
            await part.start()
            stack.push_async_callback(part.stop)
        settings = envoy_settings(
            pods=[pod.port],
            gateways=[(pod.port, plugin.port)],
            listen_port=listen,
            admin_port=admin,
            access_log=str(tmp_path / "access.jsonl"),
            **more,
        )
        config = tmp_path / "envoy.yaml"
        config.write_text(yaml.safe_dump(bootstrap(settings)))
        command = [sys.executable, "-m", "deploy.envoy", "run", "--config", str(config)]
        with (tmp_path / "keeper.log").open("wb") as output:
            keeper = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=output, stderr=output)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), auto_decompress=False)
        )
        kept = Kept(keeper, pod, http, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}")
        try:
            await kept.until(kept.is_ready)
            kept.find_envoy()
            yield kept
        finally:
            if keeper.returncode is None:
                keeper.kill()
                await keeper.wait()
            if kept.envoy is not None and is_alive(kept.envoy):
                os.kill(kept.envoy.pid, signal.SIGKILL)


@pytest.fixture
def free_ports():
    """Two ports that are nobody's: unlike the tests' other Envoys, a kept one is told its ports."""
    return [free_port() for _ in range(2)]


async def _is(found: bool) -> bool:
    return found


def events(tmp_path) -> list[str]:
    lines = (tmp_path / "keeper.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines if line.startswith("{")]


async def test_a_drain_loses_no_request_and_no_token(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=10) as kept:
        streams = [await kept.post(b'{"stream": true}') for _ in range(5)]
        answers: list[tuple[int, str]] = []
        noticed = asyncio.Event()

        async def client() -> None:
            """Ask again and again, on connections that live, until the load balancer has noticed."""
            async with aiohttp.ClientSession() as session:
                while not noticed.is_set():
                    async with kept.post(b"{}", session=session) as answer:
                        await answer.read()
                        answers.append((answer.status, answer.headers.get("connection", "")))
                    if len(answers) == 200:
                        kept.keeper.send_signal(signal.SIGTERM)

        async def load_balancer() -> None:
            await kept.until(kept.is_draining)
            num_before = len(answers)
            await kept.until(lambda: _is(len(answers) >= num_before + 50))
            noticed.set()

        await asyncio.gather(load_balancer(), *(client() for _ in range(8)))
        await kept.until(kept.is_closed)
        for _ in range(5):
            kept.pod.release()
        for _ in range(5):
            kept.pod.finish()
        tokens = [await stream.read() for stream in streams]

        assert await kept.ended() == 0
        assert {status for status, _ in answers} == {200}
        assert len(answers) >= 250
        assert answers[-1] == (200, "close")
        assert b"".join(tokens).count(b"token") == 5
        assert events(tmp_path) == ["envoy drains"]


async def test_a_drain_says_so_first_closes_the_port_then_and_waits_for_the_last_answer(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=10) as kept:
        stream = await kept.post(b'{"stream": true}')
        kept.keeper.send_signal(signal.SIGTERM)
        await kept.until(kept.is_draining)
        async with kept.post(b"{}") as answer:
            await answer.read()
        await kept.until(kept.is_closed)
        still_runs = kept.keeper.returncode is None
        kept.pod.release("last")
        kept.pod.finish()
        text = await stream.read()

        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert still_runs
        assert b"last" in text
        assert await kept.ended() == 0


async def test_a_drain_that_takes_too_long_ends_at_its_bound(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=0, drain_timeout_s=0.5) as kept:
        stream = await kept.post(b'{"stream": true}')
        kept.keeper.send_signal(signal.SIGTERM)

        assert await kept.ended() == 0
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.read()


async def test_a_second_signal_ends_the_wait(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=20, drain_timeout_s=600) as kept:
        stream = await kept.post(b'{"stream": true}')
        kept.keeper.send_signal(signal.SIGTERM)
        await kept.until(kept.is_draining)
        kept.keeper.send_signal(signal.SIGTERM)

        assert await kept.ended() == 0
        stream.close()


async def test_without_work_it_ends_at_once(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=0, drain_timeout_s=600) as kept:
        kept.keeper.send_signal(signal.SIGTERM)

        assert await kept.ended() == 0


async def test_an_envoy_that_dies_takes_the_keeper_along(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports) as kept:
        os.kill(kept.envoy.pid, signal.SIGKILL)

        assert await kept.ended() == 1
        assert events(tmp_path) == ["envoy ended by itself"]


async def test_a_keeper_that_is_killed_takes_envoy_along(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports) as kept:
        kept.keeper.kill()
        await kept.ended()
        await kept.until(kept.envoy_is_gone)

        assert await kept.is_closed()


async def test_a_config_that_envoy_refuses_ends_the_keeper(tmp_path):
    config = tmp_path / "envoy.yaml"
    metadata = {"concurrency": 1, "drain_delay_s": 0, "drain_timeout_s": 0}
    config.write_text(yaml.safe_dump({"node": {"metadata": metadata}, "unknown_field": 1}))
    keeper = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.envoy", "run", "--config", str(config), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await asyncio.wait_for(keeper.communicate(), DEADLINE_S)

    assert keeper.returncode == 1
    assert b"unknown_field" in complaint


async def test_a_config_that_is_not_ours_ends_the_keeper_with_its_name(tmp_path):
    config = tmp_path / "envoy.yaml"
    config.write_text("admin: {}")
    keeper = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.envoy", "run", "--config", str(config), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await asyncio.wait_for(keeper.communicate(), DEADLINE_S)

    assert keeper.returncode == 2
    assert str(config).encode() in complaint
    assert b"Traceback" not in complaint
