"""A plain request whose KV is kept: the client's own bytes, an order of ours behind them, and a receipt.

vLLM renders the prompt as always, so nothing stored can get into it: a wrong match costs time, never an answer. No
session, no lease, no transcript, no manager: with all of those away it still hits. A fault here leaves a plain request.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from contextcache.claim import RESPONSES_PATH, Claims
from contextcache.clock import Clock
from contextcache.hints import Hints, marked_ms, read_hints
from contextcache.identity import Identity, KVTransfer, cache_salt, sign_kv_transfer
from contextcache.model import LoadedKV, ModelId
from contextcache.names import new_cache_ref
from vllm_plugin.turn.answer.events import begins_stream
from vllm_plugin.turn.answer.plain_diagnostics import Asked, Diagnosed, PlainDiagnostics
from vllm_plugin.turn.answer.receipt import TIER_SOURCES
from vllm_plugin.turn.engine import Message, Send
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import KVStore

_TTL_S = 3600
"""Seconds for which the KV of a request without a context is kept after its last use: an agent's pause."""
_REQUEST_ID_CHARS = 64


@dataclass
class KeptRequests:
    """Gives the engine its orders, and the client its receipt. One per turn process."""

    secret: bytes
    kv: KVStore
    clock: Clock
    metrics: TurnMetrics
    diagnostics: PlainDiagnostics = field(default_factory=PlainDiagnostics)

    def begin(
        self, path: str, identity: Identity, claims: Claims, send: Send, asked: Asked | None = None
    ) -> tuple[bytes, Send]:
        """Return the engine's body and the `send` of its answer. `asked`: its request for diagnostics.

        Raises InvalidRequest for malformed hints.
        """
        if asked is not None:
            send = Diagnosed(self.diagnostics, identity.tenant, asked, send)
        # Join the gateway's name and one of ours: retries of a proxy share the first.
        request_id = f"{identity.request_id[:_REQUEST_ID_CHARS]}-{secrets.token_hex(8)}"
        hints = Hints(read_hints(claims.value("kv_hints")), marked_ms(claims.body))
        order = KVTransfer(
            tenant=identity.tenant,
            session_id=identity.kept,
            request_id=request_id,
            load=(),
            save=new_cache_ref(),
            expires_at_ms=self.clock.now_ms() + _TTL_S * 1000,
            beginning=identity.beginning,
            prefix_at=identity.prefix_at,
            retain_ms=hints.retain_ms(),
            pinned=hints.pinned,
        )
        # No model in the salt: it is that of the tenant's requests which are not kept.
        salt = cache_salt(identity.tenant, ModelId(""), self.secret)
        body = claims.changed(salt=salt, order=sign_kv_transfer(order, self.secret))
        assert body is not None, "an order is a change"
        return body, _Receipt(self, request_id, send, comes_first=path == RESPONSES_PATH)

    async def receipt(self, request_id: str, *, is_whole: bool) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reuse, and count it; no headers without the connector's report.

        `is_whole`: the answer is made, so the word is on its way, and is waited for longer.
        """
        report = await self.kv.loaded(request_id, {}, is_whole=is_whole)
        if report is None:
            self.metrics.kept_requests.labels(verdict="unknown", reason="").inc()
            return []
        verdict, cached, source = _verdict(report)
        self.metrics.kept_requests.labels(verdict=verdict, reason=report.reason).inc()
        headers = [("x-context-cache", verdict), ("x-context-cached-tokens", str(cached)), ("x-context-source", source)]
        if report.loaded_tokens and report.restore_ms is not None:
            headers.append(("server-timing", f"restore;dur={report.restore_ms:.1f}"))
        return [(name.encode(), value.encode()) for name, value in headers]


@dataclass
class _Receipt:
    """Holds the head of an answer until its first bytes are there: by then the engine has reported its reuse."""

    kept: KeptRequests
    request_id: str
    send: Send
    comes_first: bool
    """vLLM 0.32 begins a stream of this route before it asks the engine: it has no receipt, and counts at its end."""
    _head: Message | None = None
    _is_counted_late: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:  # OK
            if not (self.comes_first and begins_stream(message)):
                self._head = message
                return
            self._is_counted_late = True
        head, self._head = self._head, None
        if head is not None:
            receipt = await self.kept.receipt(self.request_id, is_whole=not begins_stream(head))
            await self.send({**head, "headers": [*head.get("headers", ()), *receipt]})
        await self.send(message)
        if self._is_counted_late and message["type"] == "http.response.body" and not message.get("more_body"):
            await self.kept.receipt(self.request_id, is_whole=True)


def _verdict(report: LoadedKV) -> tuple[str, int, str]:
    """Return hit, miss or recomputed, the tokens that were not computed, and where most of them came from."""
    if report.failed:
        return "recomputed", report.device_tokens, "recompute"
    cached = report.device_tokens + report.loaded_tokens
    if not cached:
        return "miss", 0, "none"
    source = report.tier if report.loaded_tokens > report.device_tokens and report.tier in TIER_SOURCES else "device"
    return "hit", cached, source
