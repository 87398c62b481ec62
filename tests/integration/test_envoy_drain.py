"""An Envoy and its attendant: Envoy ends when its work is done. The local stack's are one process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.kit.attended_envoy import DEADLINE_S, ROOT, attended_envoy, environment
from tests.kit.envoy_process import envoy_settings
from tests.kit.ports import free_port
from tests.kit.until import until


@pytest.fixture
def free_ports():
    """Three ports that are nobody's: unlike the tests' other Envoys, these are told their ports."""
    return [free_port() for _ in range(3)]


def events(tmp_path) -> list[str]:
    lines = (tmp_path / "attendant.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines if line.startswith('{"time') or '"event"' in line]


async def test_a_drain_loses_no_request_before_the_load_balancer_has_noticed(tmp_path, free_ports):
    async with attended_envoy(tmp_path, free_ports, drain_delay_s=600) as attended:
        answers: list[tuple[int, str]] = []
        noticed = asyncio.Event()

        async def client() -> None:
            """Ask again and again, on connections that live, until the load balancer has noticed."""
            async with aiohttp.ClientSession() as session:
                while not noticed.is_set():
                    async with attended.post(b"{}", session=session) as answer:
                        await answer.read()
                        answers.append((answer.status, answer.headers.get("connection", "")))
                    if len(answers) == 200:
                        attended.attendant.send_signal(signal.SIGTERM)

        async def load_balancer() -> None:
            await until(attended.is_draining, what="Envoy drains")
            num_before = len(answers)
            await until(lambda: len(answers) >= num_before + 50, what="50 answers more")
            noticed.set()

        await asyncio.gather(load_balancer(), *(client() for _ in range(8)))
        attended.attendant.send_signal(signal.SIGTERM)

        assert await attended.ended() == 0
        assert {status for status, _ in answers} == {200}
        assert len(answers) >= 250
        assert answers[-1] == (200, "close")


async def test_a_drain_loses_no_token_it_closes_the_port_and_waits_for_the_last_answer(tmp_path, free_ports):
    async with attended_envoy(tmp_path, free_ports, drain_delay_s=1) as attended:
        streams = [await attended.post(b'{"stream": true}') for _ in range(5)]
        attended.attendant.send_signal(signal.SIGTERM)
        await until(attended.is_closed, what="nobody listens")
        still_runs = attended.attendant.returncode is None
        async with attended.http.get(f"{attended.metrics_url}/stats/prometheus") as answer:
            shown = answer.status
        for _ in range(5):
            attended.pod.release()
        for _ in range(5):
            attended.pod.finish()
        tokens = [await stream.read() for stream in streams]

        assert still_runs
        assert shown == 200
        assert await attended.ended() == 0
        assert b"".join(tokens).count(b"token") == 5
        assert attended.envoy.returncode is None, "Kubernetes ends it next"


async def test_a_drain_that_takes_too_long_ends_at_its_bound(tmp_path, free_ports):
    async with attended_envoy(tmp_path, free_ports, drain_delay_s=0, drain_timeout_s=0.5) as attended:
        stream = await attended.post(b'{"stream": true}')
        attended.attendant.send_signal(signal.SIGTERM)

        assert await attended.ended() == 0
        stream.close()


async def test_a_second_signal_ends_the_wait(tmp_path, free_ports):
    async with attended_envoy(tmp_path, free_ports, drain_delay_s=600, drain_timeout_s=600) as attended:
        stream = await attended.post(b'{"stream": true}')
        attended.attendant.send_signal(signal.SIGTERM)
        await until(attended.is_draining, what="Envoy drains")
        attended.attendant.send_signal(signal.SIGTERM)

        assert await attended.ended() == 0
        stream.close()


async def test_without_work_it_ends_at_once(tmp_path, free_ports):
    async with attended_envoy(tmp_path, free_ports, drain_delay_s=0, drain_timeout_s=600) as attended:
        attended.attendant.send_signal(signal.SIGTERM)

        assert await attended.ended() == 0


async def test_an_envoy_that_is_gone_already_is_not_waited_for(tmp_path, free_ports):
    async with attended_envoy(tmp_path, free_ports, drain_delay_s=600) as attended:
        attended.envoy.kill()
        await attended.envoy.wait()
        attended.attendant.send_signal(signal.SIGTERM)

        assert await attended.ended() == 0
        assert "envoy drain failed" in (tmp_path / "attendant.log").read_text()


async def test_an_attendant_without_a_good_key_file_says_so_and_ends(tmp_path):
    (tmp_path / "keys.json").write_text("{")
    settings = envoy_settings(pods=[1], gateways=[(1, 1)], api_keys_file=str(tmp_path / "keys.json"))
    env = {**os.environ, **environment(settings.model_copy(update={"config_dir": str(tmp_path)}))}
    for command in ("bootstrap", "attend"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.envoy", command),
            cwd=ROOT,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)

        assert process.returncode == 1
        assert b"keys.json" in said
        assert b"Traceback" not in said


@pytest.fixture
async def local_envoy(tmp_path):
    """The local stack's process, and a way to start it: what it says goes to `local.log`."""
    listen, admin = free_port(), free_port()
    settings = envoy_settings(
        pods=[1],
        gateways=[(1, 1)],
        listen_port=listen,
        admin_port=admin,
        config_dir=str(tmp_path / "envoy"),
        drain_delay_s=0,
        access_log="",
    )
    env = {**os.environ, **environment(settings)}
    with (tmp_path / "local.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.local.envoy"), cwd=ROOT, env=env, stdout=output, stderr=output
        )
    try:
        await until(lambda: _listens(listen), what="Envoy listens")
        yield process, listen
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await until(lambda: _is_closed(listen), what="its port is closed")


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return True


async def _is_closed(port: int) -> bool:
    return not await _listens(port)


def _envoy_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def test_the_local_stack_s_envoy_drains_and_ends_with_its_process(local_envoy):
    process, listen = local_envoy
    process.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    assert await _is_closed(listen)


async def test_an_envoy_that_dies_takes_the_local_stack_s_process_along(local_envoy, tmp_path):
    process, _ = local_envoy
    os.kill(_envoy_of(process.pid), signal.SIGKILL)

    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 1
    assert "envoy ended unexpectedly" in (tmp_path / "local.log").read_text()


async def test_a_process_of_the_local_stack_that_is_killed_takes_envoy_along(local_envoy):
    process, listen = local_envoy
    process.kill()
    await process.wait()

    await until(lambda: _is_closed(listen), what="its port is closed")
