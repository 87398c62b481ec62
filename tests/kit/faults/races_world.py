"""Valkey, two managers, two real turn processes, and two gateways: processes that tests stop and kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp

from context_manager.client import ContextManagerClient
from contextcache.errors import StoreUnavailable
from contextcache.identity import Identity, sign_identity
from tests.kit.faults.races_model import Attempt, Told
from tests.kit.gateway_parts import KEY, SECRET, write_keys
from tests.kit.ports import free_port
from tests.kit.turn_pod import MODEL
from tests.kit.until import until, wait_until
from tests.kit.valkey import ValkeyServer

ROOT = Path(__file__).parents[3]
START_DEADLINE_S = 90
LEASE_TTL_S = 2.0
RPC_DEADLINE_S = 3.0
"""More than a busy machine stands still for."""
TENANT = "demo"
CERTAINLY_ABSENT = frozenset({400, 401, 404, 409, 410, 413, 429, 503})


class RunningProcess:
    """One `python -m …` on ports of its own, which survive it."""

    def __init__(self, name: str, module: str, directory: Path, env: dict[str, str], ready: Callable[[], bool]) -> None:
        self.name = name
        self.crash_file = directory / f"{name}.crash"
        self._command = [sys.executable, "-m", module]
        self._env = {**os.environ, **env, "CONTEXT_CACHE_CRASH_FILE": str(self.crash_file), "PYTHONPATH": str(ROOT)}
        self._ready = ready
        self.log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._env, cwd=ROOT, stdout=log, stderr=log)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return self._ready()

    def await_ready(self) -> None:
        wait_until(self.is_ready, what=f"{self.name} is ready (log: {self.log})", deadline_s=START_DEADLINE_S)

    def kill(self) -> None:
        """SIGKILL; a stopped process dies of it too."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def is_stopped(self) -> bool:
        """Whether it stands still, by SIGSTOP."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def arm(self, line: str) -> None:
        """Have it die (or stop) at its next passing of a crash point."""
        new = self.crash_file.with_suffix(".new")
        new.write_text(line)
        new.rename(self.crash_file)


class World:
    """All of them; `start` returns when they serve."""

    def __init__(self, directory: Path, *, with_gateways: bool, pace_s: float = 0.02) -> None:
        self.valkey = ValkeyServer(directory)
        secret, keys = directory / "secret", directory / "keys.json"
        secret.write_bytes(SECRET)
        write_keys(keys, {KEY: TENANT})
        self.manager_ports = [free_port() for _ in range(2)]
        self.pod_urls = {f"pod-{letter}": f"http://127.0.0.1:{free_port()}" for letter in "ab"}
        self.gateway_urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2 if with_gateways else 0)]
        managers = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self.manager_ports)
        self.managers = [
            RunningProcess(
                f"manager-{number}",
                "context_manager",
                directory,
                {
                    "MANAGER_LISTEN": f"127.0.0.1:{port}",
                    "MANAGER_REDIS_URL": self.valkey.url,
                    "MANAGER_REDIS_TIMEOUT_S": "2.5",
                    "MANAGER_SWEEP_INTERVAL_S": "0.5",
                    "MANAGER_LOG_LEVEL": "WARNING",
                },
                lambda port=port: asyncio.run(_serves(port)),
            )
            for number, port in enumerate(self.manager_ports)
        ]
        self.pods = {
            name: RunningProcess(
                name,
                "tests.kit.faults.races_pod",
                directory,
                {
                    "TURN_LISTEN_PORT": url.rpartition(":")[2],
                    "POD_PACE_S": str(pace_s),
                    "TURN_LOG_LEVEL": "WARNING",
                    "TURN_DRAIN_TIMEOUT_S": "30",
                    "TURN_MANAGER": managers,
                    "TURN_SIDECAR": f"127.0.0.1:{free_port()}",  # nobody: KV is none of this world's business
                    "TURN_SECRET_FILE": str(secret),
                    "TURN_ENDPOINT_NAME": name,
                    "TURN_LEASE_TTL_MS": str(int(LEASE_TTL_S * 1000)),
                    "TURN_RPC_DEADLINE_MS": str(int(RPC_DEADLINE_S * 1000)),
                },
                lambda url=url: _answers(url + "/health"),
            )
            for name, url in self.pod_urls.items()
        }
        self.gateways = [
            RunningProcess(
                f"gateway-{number}",
                "gateway",
                directory,
                {
                    "GATEWAY_PORT": url.rpartition(":")[2],
                    "GATEWAY_MANAGER": managers,
                    "GATEWAY_ENDPOINTS": json.dumps([{"name": n, "url": u} for n, u in self.pod_urls.items()]),
                    "GATEWAY_SECRET_FILE": str(secret),
                    "GATEWAY_API_KEYS_FILE": str(keys),
                    "GATEWAY_PROBE_INTERVAL_S": "0.2",
                    "GATEWAY_LOG_LEVEL": "ERROR",
                },
                lambda url=url: _answers(url + "/readyz"),
            )
            for number, url in enumerate(self.gateway_urls)
        ]

    @property
    def processes(self) -> list[RunningProcess]:
        return [*self.managers, *self.pods.values(), *self.gateways]

    def start(self) -> None:
        self.valkey.start()
        for process in self.processes:
            process.launch()
        for process in self.processes:
            process.await_ready()

    def mend(self) -> None:
        """Disarm, let what stands still run, start what is gone."""
        for process in self.processes:
            process.crash_file.unlink(missing_ok=True)
            process.signal(signal.SIGCONT)
            if process.process.poll() is not None:
                process.launch()
        for process in self.processes:
            process.await_ready()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        self.valkey.stop()

    async def transcript(self, session_id: str) -> tuple[int, str]:
        """Return the generation and the text, as a manager tells them to a turn that only reads."""
        client = ContextManagerClient(f"127.0.0.1:{self.manager_ports[0]}", timeout_s=20)
        begin = partial(client.begin_turn, TENANT, session_id, lease_id="reader", lease_ttl_ms=1000, read_only=True)
        try:
            session, segments = await until(begin, what="the transcript", despite=(StoreUnavailable,))
        finally:
            await client.close()
        return session.generation, "".join(segment.text for segment in segments)


async def _serves(port: int) -> bool:
    client = ContextManagerClient(f"127.0.0.1:{port}", timeout_s=1)
    try:
        return await client.is_serving()
    finally:
        await client.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


async def send(
    http: aiohttp.ClientSession,
    base: str,
    session_id: str,
    attempt: Attempt,
    *,
    stream: bool = False,
    commit: bool = True,
    if_match: int | None = None,
    cut_after: int | None = None,
    reset: bool = False,
    identity: bool = False,
) -> Attempt:
    """Send a turn and note what its client was told. `cut_after`: leave after so many events, by FIN or by `reset`.

    `identity`: signed as a gateway would, for a pod asked directly.
    """
    body = {"model": MODEL, "prompt": attempt.prompt, "session_id": session_id, "stream": stream}
    path = "/v1/context" if attempt.is_create else "/v1/completions"
    if not attempt.is_create:
        body |= {"context_mode": "replay" if attempt.is_replay else "append", "context_commit": commit}
    headers = {"authorization": f"Bearer {KEY}"} | ({} if if_match is None else {"if-match": f'"{if_match}"'})
    if identity:
        signed = Identity(TENANT, "r", time.time_ns() // 1_000_000 + 60_000, None if attempt.is_create else session_id)
        headers["x-context-identity"] = sign_identity(signed, SECRET)
    try:
        async with http.post(base + path, json=body, headers=headers) as answer:
            await _read(answer, attempt, stream=stream, cut_after=cut_after, reset=reset)
    except aiohttp.ClientConnectorError:
        attempt.told, attempt.why = Told.ABSENT, "no connection"
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        attempt.told, attempt.why = Told.UNKNOWN, f"{attempt.why} {type(exc).__name__}"
    return attempt


async def _read(answer, attempt: Attempt, *, stream: bool, cut_after: int | None, reset: bool) -> None:
    attempt.why = str(answer.status)
    if answer.status != 200:
        error = (await answer.json())["error"]
        attempt.why = f"{answer.status} {error['code']}"
        attempt.told = Told.ABSENT if answer.status in CERTAINLY_ABSENT else Told.UNKNOWN
        if error["code"] in {"context_busy", "store_unavailable", "no_ready_endpoint"}:
            assert int(answer.headers["retry-after"]) >= 1, f"{attempt.why} without Retry-After"
        return
    attempt.generation = int(answer.headers["x-context-generation"])
    if stream:
        events = await _events(answer, attempt, cut_after=cut_after, reset=reset)
        if events is None:
            return
    else:
        events = [json.loads(await answer.read())]
    attempt.answer = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    context = events[-1]["usage"]["context"]
    attempt.why = context.get("reason", "committed")
    if context["committed"]:
        attempt.told = Told.COMMITTED
    elif attempt.why == "read_only":
        attempt.told = Told.READ_ONLY
    else:
        attempt.told = Told.UNKNOWN if attempt.why == "store_unavailable" else Told.ABSENT


async def _events(answer, attempt: Attempt, *, cut_after: int | None, reset: bool) -> list | None:
    """Return the events of a whole stream; None when it was cut, by us or by a fault."""
    events = []
    async for line in answer.content:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return events
        if data:
            events.append(json.loads(data))
        # No connection: the whole answer is here, only not read yet.
        if cut_after is not None and len(events) >= cut_after and answer.connection is not None:
            transport = answer.connection.transport
            if reset:
                no_lingering = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_lingering)
            attempt.why = "cut by its client"
            answer.close()
            return None
    attempt.why = "a stream without its end"
    return None
