"""Keys, prompts, answers, metadata and secrets leave by no side door: logs at DEBUG, metrics, traces, errors.

The story is told with marked words to real processes, which are then searched for them. Seen failing: with the engine's
own words in the log line of a refused turn (they may quote a prompt), and with each mark put into a log line of the
gateway, the manager and the pod.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from contextcache.errors import SidecarUnavailable
from contextcache.identity import cache_salt
from contextcache.process.logs import _JsonLines
from contextcache.wire.tracing import open_tracer
from kv_sidecar.client import KVSidecarClient
from tests.kit.engine_rank import EngineRank
from tests.kit.fake_vllm import _json
from tests.kit.gateway_parts import SECRET, write_keys
from tests.kit.ports import free_port
from tests.kit.tenant_world import SavingEngine
from tests.kit.trace_collector import running_collector
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90
TENANT = "demo"
KEY = "canary-key-0123456789abcdef"
WORD = "canary"
"""Stands in every key, prompt, answer, message and metadata of this file, and in no name of ours."""
ENGINE_FAULT = "boom-at: canary-quoted"
FORBIDDEN = {
    "a marked word": re.compile(WORD, re.IGNORECASE),
    "its token ids": re.compile(", ?".join(str(ord(letter)) for letter in WORD)),
    "the signing secret": re.compile(re.escape(SECRET.decode())),
    "a cache salt": re.compile(cache_salt(TENANT, MODEL, SECRET)),
    "a signed token": re.compile(r"v1\.[A-Za-z0-9_-]{20,}\.[0-9a-f]{64}"),
}


class MarkedEngine(SavingEngine):
    """Answers with a marked word; fails, quoting the prompt, when it finds `fail` in it."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = lambda ids: "canary-answer"

    async def _complete(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        prompt = request.get("prompt")
        if isinstance(prompt, list) and "fail" in "".join(map(chr, prompt)):
            await _json(send, 500, {"error": {"message": ENGINE_FAULT}})
            return
        await super()._complete(scope, request, send)


class Part:
    """A process of ours with its log in a file."""

    def __init__(self, module: str, directory: Path, **settings: str) -> None:
        self._module = module
        prefix = {"context_manager": "MANAGER_", "kv_sidecar": "SIDECAR_", "gateway": "GATEWAY_"}[module]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
        self.metrics_port = free_port()
        everywhere = {"LOG_LEVEL": "DEBUG", "TRACES_SAMPLE_RATIO": "1", "METRICS_PORT": str(self.metrics_port)}
        self.environment = kept | {f"{prefix}{name}": value for name, value in (everywhere | settings).items()}
        self.log = directory / f"{module}.log"
        self.process: asyncio.subprocess.Process | None = None

    @property
    def proc(self) -> Path:
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}")

    async def start(self) -> None:
        with self.log.open("wb") as log:
            # With core files allowed, as far as they may be: the process has to forbid them itself.
            allowed = ["sh", "-c", 'ulimit -c "$(ulimit -H -c)"; exec "$0" -m "$1"', sys.executable, self._module]
            self.process = await asyncio.create_subprocess_exec(
                *allowed, env=self.environment, cwd=ROOT, stderr=log, stdout=log
            )

    async def stop(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def pod_log() -> AsyncIterator[io.StringIO]:
    """Everything the pod, in this very process, would log as JSON lines at DEBUG."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


async def tell_the_story(http: aiohttp.ClientSession, url: str) -> list[tuple[int, str]]:
    """Return the status and body of every answer that is an error of ours."""
    errors = []

    async def call(method: str, path: str, body: Any = None, *, key: str = KEY, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else None
        sent = {"authorization": f"Bearer {key}", "content-type": "application/json"} | headers
        async with http.request(
            method, URL(url + path, encoded=True), data=data, json=None if data else body, headers=sent
        ) as answer:
            text = await answer.text()
            if answer.status >= 400 and ENGINE_FAULT not in text:
                errors.append((answer.status, f"{text} {dict(answer.headers)}"))
            return answer.status, text

    named = {"model": MODEL}
    create = {**named, "prompt": "canary-prompt", "metadata": {"canary-name": "canary-value"}, "session_id": "ctx_1"}
    assert (await call("POST", "/v1/context", create))[0] == 200
    turn = {**named, "session_id": "ctx_1"}
    assert (await call("POST", "/v1/completions", {**turn, "prompt": " canary-more"}))[0] == 200
    assert (await call("POST", "/v1/completions", {**turn, "prompt": " canary-more", "stream": True}))[0] == 200
    ids = [ord(one) for one in "canary"]
    assert (await call("POST", "/v1/completions", {**turn, "prompt": ids}))[0] == 200
    said = [{"role": "user", "content": "canary-message"}]
    assert (await call("POST", "/v1/context", {**named, "messages": said, "session_id": "ctx_2"}))[0] == 200
    assert (await call("POST", "/v1/chat/completions", {**turn, "session_id": "ctx_2", "messages": said}))[0] == 200
    assert (await call("POST", "/v1/completions", {**named, "prompt": "canary-stateless"}))[0] == 200
    assert (await call("POST", "/v1/completions", {**turn, "prompt": "canary, fail"}))[0] == 502
    for path in ("/v1/context/ctx_1", "/v1/context"):
        assert (await call("GET", path))[0] == 200
    wrong = [
        ("POST", "/v1/context", b'{"prompt": "canary",,}', {}),
        ("POST", "/v1/context", b'{"prompt": "canary" "x"}', {}),
        ("POST", "/v1/context", b"\xff canary", {}),
        ("POST", "/v1/context", {**create, "ttl": "canary"}, {}),
        ("POST", "/v1/context", {**create, "ttl_policy": "canary"}, {}),
        ("POST", "/v1/context", {**create, "metadata": {"canary": 7}}, {}),
        ("POST", "/v1/context", {**create, "session_id": "canary/canary"}, {}),
        ("POST", "/v1/context", create, {}),
        ("POST", "/v1/completions", {**turn, "prompt": "canary", "context_mode": "canary"}, {}),
        ("POST", "/v1/completions", {**turn, "prompt": "canary", "model": "canary-model"}, {}),
        ("POST", "/v1/completions", {**turn, "prompt": "canary"}, {"if-match": "canary"}),
        ("POST", "/v1/completions", {**turn, "prompt": "canary"}, {"x-session-id": "ctx_canary"}),
        ("POST", "/v1/completions", {**turn, "prompt": "canary" * 50_000}, {}),
        ("GET", "/v1/context?limit=canary", None, {}),
        ("GET", "/v1/context?after=canary", None, {}),
        ("GET", "/v1/context/canary", None, {}),
        ("GET", "/canary", None, {}),
        ("GET", "/v1/context", None, {"x-api-key": "canary-of-another"}),
    ]
    for method, path, body, headers in wrong:
        assert (await call(method, path, body, **headers))[0] in range(400, 500), (method, path)
    for method, path, _, _ in wrong:
        assert (await call(method, path, {}, key="canary-of-nobody"))[0] in (401, 404)
    for session_id in ("ctx_1", "ctx_2"):
        assert (await call("DELETE", f"/v1/context/{session_id}"))[0] == 200
    assert len(errors) == 2 * len(wrong)
    return errors


@pytest.mark.timeout(240)
async def test_no_key_prompt_answer_or_secret_is_in_a_log_a_metric_a_trace_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    write_keys(tmp_path / "keys.json", {KEY: TENANT})
    manager_port, sidecar_port, http_port = free_port(), free_port(), free_port()
    socket = tmp_path / "s.sock"
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(pod_log())
        collector = await stack.enter_async_context(running_collector())
        valkey = ValkeyServer(tmp_path)
        await asyncio.to_thread(valkey.start)
        stack.callback(valkey.stop)
        engine = MarkedEngine()
        tracer = open_tracer(collector.endpoint, part="turn", sample_ratio=1, on_lost=lambda _number: None)
        reports = KVSidecarClient(f"unix://{socket}", timeout_s=20)
        pod = await stack.enter_async_context(
            running_turn_pod(
                tmp_path,
                manager_port=manager_port,
                engine=engine,
                sidecar=reports,
                tracer=tracer,
                max_body_bytes=1 << 20,
                rpc_deadline_ms=30_000,
            )
        )
        traced = {"TRACES_ENDPOINT": collector.endpoint}
        parts = {
            "manager": Part(
                "context_manager",
                tmp_path,
                LISTEN=f"127.0.0.1:{manager_port}",
                REDIS_URL=valkey.url,
                REDIS_TIMEOUT_S="15",
                **traced,
            ),
            "sidecar": Part(
                "kv_sidecar",
                tmp_path,
                LISTEN=f"127.0.0.1:{sidecar_port}",
                UNIX_SOCKET=str(socket),
                DATA_DIR=str(tmp_path / "data"),
                BLOCK_TOKENS="4",
                **traced,
            ),
            "gateway": Part(
                "gateway",
                tmp_path,
                PORT=str(http_port),
                MANAGER=f"127.0.0.1:{manager_port}",
                ENDPOINTS=f'[{{"name": "pod-a", "url": "{pod.url}", "sidecar": "127.0.0.1:{sidecar_port}"}}]',
                SECRET_FILE=str(tmp_path / "secret"),
                API_KEYS_FILE=str(tmp_path / "keys.json"),
                PROBE_TIMEOUT_S="15",
                MANAGER_TIMEOUT_S="30",
                MAX_BODY_BYTES=str(256 << 10),
                **traced,
            ),
        }
        for part in parts.values():
            await part.start()
            stack.push_async_callback(part.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)))
        await until(lambda: _answers(http, f"http://127.0.0.1:{http_port}/readyz"), what="the gateway is ready")
        engine.sidecar = KVSidecarClient(f"unix://{socket}", timeout_s=20)
        stack.push_async_callback(engine.sidecar.close)
        await until(engine.sidecar.stats, what="the sidecar serves", despite=(SidecarUnavailable,))
        engine.rank = await asyncio.to_thread(_rank, f"unix://{socket}")
        stack.callback(engine.rank.close)
        errors = await tell_the_story(http, f"http://127.0.0.1:{http_port}")
        told: dict[str, str] = {f"error {number}": str(error) for number, error in enumerate(errors)}
        limits = {}
        for name, part in parts.items():
            async with http.get(f"http://127.0.0.1:{part.metrics_port}/metrics") as answer:
                told[f"{name}'s metrics"] = await answer.text()
            told[f"{name}'s command line"] = (part.proc / "cmdline").read_text()
            told[f"{name}'s environment"] = (part.proc / "environ").read_text()
            limits[name] = re.search(r"Max core file size +(\S+)", (part.proc / "limits").read_text())[1]
        # There is something to find it in: the last spans may be lost when a part ends in haste.
        await collector.until(lambda: len({span.service for span in collector.spans}) == 4)
        await asyncio.to_thread(tracer.close)
        for part in reversed(parts.values()):
            await part.stop()
        told |= {f"{name}'s log": part.log.read_text() for name, part in parts.items()}
        told["the pod's log"] = log.getvalue()
        told["the traces"] = str(collector.spans)
    found = {
        f"{what} in {where}": match[0]
        for where, text in told.items()
        for what, pattern in FORBIDDEN.items()
        if (match := re.search(f".{{0,200}}{pattern.pattern}.{{0,60}}", text, pattern.flags))
    }

    assert found == {}
    assert limits == dict.fromkeys(parts, "0")
    # There was something to find it in.
    assert len({span.service for span in collector.spans}) == 4
    assert min(len(told[f"{name}'s {place}"]) for name in parts for place in ("log", "metrics")) > 1000
    assert "turn refused" in told["the pod's log"]


def _rank(address: str) -> EngineRank:
    return EngineRank(address)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
