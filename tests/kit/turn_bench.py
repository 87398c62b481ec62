"""A pod without an engine: the turn middleware over a real manager (in memory) and a toy vLLM, driven as ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from context_manager.manager import ContextCacheManager
from contextcache.clock import Clock, ManualClock
from contextcache.identity import Identity, Standby, sign_identity
from contextcache.model import NO_PROMISE, Placement, Promise, SaveOutcome
from integrations.lmcache.instead_of_sidecar import LMCacheKV
from tests.kit.fake_vllm import FakeVllm
from tests.kit.session_store import in_valkey
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.middleware import TurnMiddleware
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.sidecar_kv import SidecarKV
from vllm_plugin.turn.story import TurnStory

SECRET = b"a-secret-for-tests-only-32-bytes!"


class DirectoryInProcess(ContextCacheManager):
    """The manager without its wire; `fault` is raised by the next call of a named method."""

    fault: tuple[str, Exception] | None = None

    async def close(self) -> None:
        """Nothing to close."""

    def _maybe_fail(self, method: str) -> None:
        if self.fault is not None and self.fault[0] == method:
            raise self.fault[1]

    async def begin_turn(self, *arguments, **options):
        begun = await super().begin_turn(*arguments, **options)
        return begun.session, begun.transcript()

    async def read_transcript(self, tenant, session_id, *, generation=None):
        self._maybe_fail("read_transcript")
        return await self.begin_turn(
            tenant, session_id, lease_id="reader", lease_ttl_ms=1, read_only=True, at_generation=generation
        )

    async def commit_turn(self, commit):
        self._maybe_fail("commit_turn")
        return await super().commit_turn(commit)

    async def register_session_cache(self, commit):
        self._maybe_fail("register_session_cache")
        return await super().commit_turn(commit)


@dataclass
class SidecarInProcess:
    """Remembers what it was told; answers what a test sets."""

    sealed: bool = True
    no_kv: str = ""
    """Why there will be no KV."""
    promise: Promise = NO_PROMISE
    placed: dict[str, Placement] = field(default_factory=dict)
    """Answers to placements; empty: none is carried out."""
    report: Any = None
    fault: Exception | None = None
    deleted: list[tuple[str, ...]] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    touched: list[tuple[str, int]] = field(default_factory=list)
    read: list[tuple[str, ...]] = field(default_factory=list)
    """What was asked to be read ahead."""

    async def read_ahead(self, tenant, cache_refs):
        self.read.append(cache_refs)

    async def wait_sealed(self, tenant, cache_ref, *, timeout_ms, placements=()):
        if self.fault:
            raise self.fault
        placed = tuple(self.placed[name] for name in placements if self.placed)
        return SaveOutcome(self.sealed and not self.no_kv, self.no_kv, self.promise, placed)

    async def load_report(self, request_id, *, timeout_ms):
        if self.fault:
            raise self.fault
        return self.report

    async def touch_context(self, tenant, session_id, expires_at_ms):
        self.touched.append((session_id, expires_at_ms))
        return 1

    async def delete_context(self, tenant, *, session_id="", cache_refs=(), replaced=False):
        self.deleted.append(cache_refs)
        return 0

    async def interrupt_save(self, tenant, cache_ref):
        self.interrupted.append(cache_ref)

    async def close(self):
        pass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        parts = [part for part in self.body.split(b"\n\n") if part]
        return [json.loads(part[6:]) for part in parts if part != b"data: [DONE]" and not part.startswith(b":")]


class Pod:
    """One pod under test."""

    def __init__(
        self,
        tmp_path: Path,
        engine: FakeVllm,
        *,
        lmcache: Callable[[Clock], LMCacheKV] | None = None,
        **settings: Any,
    ) -> None:
        """`lmcache`: makes what stands in the sidecar's place."""
        secret_file = tmp_path / "secret"
        secret_file.write_bytes(SECRET)
        self.clock = ManualClock()
        self.engine = engine
        self.sidecar = SidecarInProcess()
        self.lmcache = None if lmcache is None else lmcache(self.clock)
        self.registry = CollectorRegistry()
        self.manager = DirectoryInProcess(**in_valkey(clock=self.clock))
        # By default a broken answer ends at once.
        defaults = {"rpc_deadline_ms": 60_000, "resume_timeout_s": 0}
        self.settings = TurnSettings(secret_file=secret_file, **(defaults | settings))
        self.kv = self.lmcache or SidecarKV(self.sidecar, secret=SECRET, report_deadline_ms=50)
        metrics = TurnMetrics(self.registry)
        self.story = TurnStory(self.settings, self.manager, self.kv, self.clock, metrics, lambda _standby: engine)
        self.stuck_after = 1 << 30
        """From its so many-th message on, an answer is not read."""
        self.standby: Standby | None = None
        self.gone = asyncio.Event()
        """Set when the client leaves."""
        self.on_end: Callable[[], None] = lambda: None
        """Called with the last byte of every answer."""
        self.app = TurnMiddleware(engine, story=self.story)

    def identity(self, session_id: str | None = None, tenant: str = "demo", *, kept: str = "") -> str:
        now = self.clock.now_ms()
        signed = Identity(tenant, "req", now + 60_000, session_id, kept=kept, standby=self.standby)
        return sign_identity(signed, SECRET)

    async def create(self, tenant: str = "demo", **body: Any) -> Answer:
        return await self.post("/v1/context", {"model": "m", **body}, self.identity(tenant=tenant))

    async def ask(self, session_id: str, *, path: str = "/v1/completions", headers=(), **body: Any) -> Answer:
        body = {"model": "m", "session_id": session_id, **body}
        return await self.post(path, body, self.identity(session_id), headers=headers)

    async def chat(self, session_id: str, **body: Any) -> Answer:
        return await self.ask(session_id, path="/v1/chat/completions", **body)

    async def get(self, path: str) -> Answer:
        return await self.post(path, b"", method="GET")

    async def post(self, path: str, body: Any, identity: str | None = None, headers=(), method="POST") -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        is_declared = any(name == b"content-type" for name, _ in headers)
        pairs = [*headers] if is_declared else [(b"content-type", b"application/json"), *headers]
        if identity is not None:
            pairs.append((b"x-context-identity", identity.encode()))
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": pairs}
        scope |= {"app": self.engine, "server": ("10.0.0.7", 8000)}
        sent: list[Any] = []
        first = True

        async def receive():
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": raw, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if len(sent) >= self.stuck_after:
                await asyncio.get_running_loop().create_future()
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.on_end()

        await self.app(scope, receive, send)
        await self.story.background.drain()
        start = next((message for message in sent if message["type"] == "http.response.start"), None)
        bodies = [message for message in sent if message["type"] == "http.response.body"]
        return Answer(
            status=start["status"] if start else 0,
            headers={name.decode(): value.decode() for name, value in start["headers"]} if start else {},
            body=b"".join(message.get("body", b"") for message in bodies),
            complete=bool(bodies) and not bodies[-1].get("more_body", False),
        )

    async def transcript(self, session_id: str, tenant: str = "demo"):
        session, segments = await self.manager.begin_turn(
            tenant, session_id, lease_id="reader", lease_ttl_ms=1000, read_only=True
        )
        return session, segments

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"contextcache_turn_{name}_total", labels) or 0.0
