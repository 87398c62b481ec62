"""A plain request whose KV is kept: the client's own bytes, an order of ours behind them, and a receipt.

vLLM renders the prompt as always, so nothing stored can get into it: a wrong match costs time, never an answer. No
session, no lease, no transcript, no manager: with all of those away it still hits. A fault here leaves a plain request.

The answer outlives its engine as a turn's does (`resuming.py`). A stream of one completion or chat is read on its way,
so that it can continue in its middle. All other answers pass unread, and begin anew if the client has nothing of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from typing_extensions import override

from contextcache.claim import RESPONSES_PATH, Claims, read_object
from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.hints import Hints, marked_ms, read_hints
from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, cache_salt, sign_kv_transfer
from contextcache.model import LoadedKV, ModelId
from contextcache.names import new_cache_ref
from vllm_plugin.turn.answer.chat import GIVEN_UP, UNREADABLE, JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.events import Event
from vllm_plugin.turn.answer.plain_diagnostics import Asked, Diagnosed, PlainDiagnostics
from vllm_plugin.turn.answer.receipt import TIER_SOURCES
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import KVStore
from vllm_plugin.turn.prompt.request import CHAT_PATH, COMPLETIONS_PATH, ClientPrompt, TurnRequest, read_turn
from vllm_plugin.turn.resuming import Resuming
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.turn import AnsweredRequest, Client

_TTL_S = 3600
"""Seconds for which the KV of a request without a context is kept after its last use: an agent's pause."""
_ABORT = b'"abort"'
"""In a text the quotation marks are escaped."""


def read_kept(path: str, raw: bytes, headers: Mapping[str, str]) -> tuple[TurnRequest, bool]:
    """Return a kept request as a turn's, and whether it asks for a stream.

    Its `stream` is false if the answer passes unread: then no other field of it has a meaning.
    """
    request = TurnRequest(path, "", ClientPrompt(), {}, commit=False)
    try:
        body = read_object(raw) if b'"stream"' in raw else {}
        is_stream = body.get("stream") is True
        if is_stream and path in (COMPLETIONS_PATH, CHAT_PATH):
            read = read_turn(path, body, headers)
            request = request if read.prefill_only else read
    except InvalidRequest:
        return request, b'"stream"' in raw  # the engine may read it
    return request, is_stream


@dataclass
class KeptRequests:
    """Gives the engine its orders, and the client its receipt. One per turn process."""

    secret: bytes
    settings: TurnSettings
    kv: KVStore
    clock: Clock
    metrics: TurnMetrics
    diagnostics: PlainDiagnostics = field(default_factory=PlainDiagnostics)

    async def answer(
        self, client: Client, claims: Claims, read: tuple[TurnRequest, bool], asked: Asked | None = None
    ) -> None:
        """Have the engine answer. `asked`: its request for diagnostics.

        Raises InvalidRequest for malformed hints, EngineFailed, NoReadyEndpoint.
        """
        if asked is not None:
            client.send = Diagnosed(self.diagnostics, client.identity.tenant, asked, client.send)
        hints = Hints(read_hints(claims.value("kv_hints")), marked_ms(claims.body))
        request, is_stream = read
        group, save_ref = client.identity.kept, new_cache_ref()
        kept = AnsweredRequest(client, request, save_ref=save_ref, session_id=group)
        reader = partial(_ReadStream, kept) if request.stream else partial(_UnreadAnswer, kept, is_stream=is_stream)
        body_of = partial(self._engine_body, kept, claims, hints)
        resuming = Resuming(kept, self, reader, self.settings, self.metrics, body_of)
        try:
            async with client.keep_alive.filling(stream=is_stream):
                await resuming.run()
        except ContextCacheError:
            if not (client.search.has_left or await resuming.delivery.send_refusal()):
                raise

    def _engine_body(
        self, kept: AnsweredRequest, claims: Claims, hints: Hints, known_ids: Sequence[int], changed: dict[str, Any]
    ) -> dict[str, Any] | bytes:
        """Return the client's bytes with an order; for the rest of an answer, a body with ids."""
        identity = kept.client.identity
        order = KVTransfer(
            tenant=identity.tenant,
            session_id=kept.session_id,
            request_id=kept.part_id,
            load=(),
            save=kept.save_ref,
            expires_at_ms=self.clock.now_ms() + _TTL_S * 1000,
            beginning=identity.beginning,
            prefix_at=kept.kv_at or identity.prefix_at,
            retain_ms=hints.retain_ms(),
            pinned=hints.pinned,
            placements=hints.placements,
        )
        signed = sign_kv_transfer(order, self.secret)
        # No model in the salt: it is that of the tenant's requests which are not kept.
        salt = cache_salt(identity.tenant, ModelId(""), self.secret)
        if known_ids:
            prompt, messages = [*kept.prompt_ids, *known_ids], kept.request.prompt.messages or ()
            return kept.request.engine_body(prompt, messages, {KV_TRANSFER_KEY: signed}, salt) | changed
        body = claims.changed(salt=salt, order=signed, returns_token_ids=kept.request.stream)
        assert body is not None, "an order is a change"
        return body

    async def stream_receipt(self, kept: AnsweredRequest) -> list[tuple[str, str]]:
        """Return a stream's headers at its first bytes: by then the engine has reported its reuse.

        vLLM 0.32 begins a stream of responses before it asks the engine: it has no receipt, and counts at its end.
        """
        return [] if kept.request.path == RESPONSES_PATH else await self._receipt(kept, is_whole=False)

    async def settle(
        self, kept: AnsweredRequest, answer: JsonAnswer | SseAnswer
    ) -> tuple[list[tuple[str, str]], bytes]:
        """Return the headers of a whole answer, and the end of the bytes."""
        is_counted = kept.client.keep_alive.has_begun and kept.request.path != RESPONSES_PATH
        return [] if is_counted else await self._receipt(kept, is_whole=True), answer.closing({}, {})

    async def abort(self, kept: AnsweredRequest) -> None:
        """Do nothing: the KV is kept as far as it was computed."""

    async def _receipt(self, kept: AnsweredRequest, *, is_whole: bool) -> list[tuple[str, str]]:
        """Return the headers of the reuse, and count it; no headers without the connector's report.

        `is_whole`: the answer is made, so the word is on its way, and is waited for longer.
        """
        report = None if kept.holder else await self.kv.loaded(kept.part_id, {}, is_whole=is_whole)
        kept.loaded = report  # another pod's sidecar tells its own requests alone
        if report is None:
            self.metrics.kept_requests.labels(verdict="unknown", reason="").inc()
            return []
        verdict, cached, source = _verdict(report)
        self.metrics.kept_requests.labels(verdict=verdict, reason=report.reason).inc()
        headers = [("x-context-cache", verdict), ("x-context-cached-tokens", str(cached)), ("x-context-source", source)]
        if report.loaded_tokens and report.restore_ms is not None:
            headers.append(("server-timing", f"restore;dur={report.restore_ms:.1f}"))
        return headers


class _ReadStream(SseAnswer):
    """Stream of one completion or chat, without the token ids that only we asked for."""

    def __init__(self, kept: AnsweredRequest) -> None:
        super().__init__(kept.request)
        self._kept = kept

    @override
    def complete(self) -> None:
        """Check that the stream came to its end. Raises EngineFailed, NoReadyEndpoint."""
        if self._usage_event is None and not self._request.wants_usage_chunk:
            self._usage_event = {}
        super().complete()

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the last events as the engine sent them."""
        return self.told_end()

    @override
    def _take_answer_event(self, event: Event, answer: dict[str, Any]) -> bytes:
        if not self._kept.prompt_ids:
            choice = (answer.get("choices") or [{}])[0]
            self._kept.prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
        return super()._take_answer_event(event, answer)


class _UnreadAnswer(JsonAnswer):
    """Answer of any kind, byte for byte."""

    def __init__(self, kept: AnsweredRequest, *, is_stream: bool) -> None:
        super().__init__(kept.request)
        self._is_stream = is_stream

    @override
    def feed(self, chunk: bytes) -> bytes:
        return chunk if self._is_stream else super().feed(chunk)

    @override
    def complete(self) -> None:
        """Raise NoReadyEndpoint for a whole completion or chat that the engine gave up."""
        if _ABORT in self._body:
            with suppress(*UNREADABLE):
                reasons = {choice["finish_reason"] for choice in json.loads(bytes(self._body))["choices"]}
                self.result.finish_reason = next(iter(reasons & GIVEN_UP), None)
        self.result.finish(prefill_only=False)

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        return bytes(self._body)


def _verdict(report: LoadedKV) -> tuple[str, int, str]:
    """Return hit, miss or recomputed, the tokens that were not computed, and where most of them came from."""
    if report.failed:
        return "recomputed", report.device_tokens, "recompute"
    cached = report.device_tokens + report.loaded_tokens
    if not cached:
        return "miss", 0, "none"
    source = report.tier if report.loaded_tokens > report.device_tokens and report.tier in TIER_SOURCES else "device"
    return "hit", cached, source
