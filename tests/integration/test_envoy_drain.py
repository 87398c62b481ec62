"""The keeper: Envoy ends when its work is done, and never outlives whoever keeps it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import aiohttp
import pytest
import yaml

from tests.kit.kept_envoy import DEADLINE_S, ROOT, kept_envoy
from tests.kit.ports import free_port
from tests.kit.until import until


@pytest.fixture
def free_ports():
    """Three ports that are nobody's: unlike the tests' other Envoys, a kept one is told its ports."""
    return [free_port() for _ in range(3)]


def events(tmp_path) -> list[str]:
    lines = (tmp_path / "keeper.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines if line.startswith("{")]


async def test_a_drain_loses_no_request_before_the_load_balancer_has_noticed(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=600) as kept:
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
            await until(kept.is_draining, what="Envoy drains")
            num_before = len(answers)
            await until(lambda: len(answers) >= num_before + 50, what="50 answers more")
            noticed.set()

        await asyncio.gather(load_balancer(), *(client() for _ in range(8)))
        kept.keeper.send_signal(signal.SIGTERM)

        assert await kept.ended() == 0
        assert {status for status, _ in answers} == {200}
        assert len(answers) >= 250
        assert answers[-1] == (200, "close")


async def test_a_drain_loses_no_token_it_closes_the_port_and_waits_for_the_last_answer(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=1) as kept:
        streams = [await kept.post(b'{"stream": true}') for _ in range(5)]
        kept.keeper.send_signal(signal.SIGTERM)
        await until(kept.is_closed, what="nobody listens")
        still_runs = kept.keeper.returncode is None
        for _ in range(5):
            kept.pod.release()
        for _ in range(5):
            kept.pod.finish()
        tokens = [await stream.read() for stream in streams]

        assert still_runs
        assert await kept.ended() == 0
        assert b"".join(tokens).count(b"token") == 5
        assert events(tmp_path) == ["envoy drains"]


async def test_a_drain_that_takes_too_long_ends_at_its_bound(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=0, drain_timeout_s=0.5) as kept:
        stream = await kept.post(b'{"stream": true}')
        kept.keeper.send_signal(signal.SIGTERM)

        assert await kept.ended() == 0
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.read()


async def test_a_second_signal_ends_the_wait(tmp_path, free_ports):
    async with kept_envoy(tmp_path, free_ports, drain_delay_s=600, drain_timeout_s=600) as kept:
        stream = await kept.post(b'{"stream": true}')
        kept.keeper.send_signal(signal.SIGTERM)
        await until(kept.is_draining, what="Envoy drains")
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
        await until(kept.envoy_is_gone, what="Envoy is gone")

        await until(kept.is_closed, what="its port is closed")


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
