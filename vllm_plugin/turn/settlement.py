"""The end of a turn for its session: commit, receipt, and deletes afterwards.

Rules: a refused commit is told in the answer, which is delivered in full all the same; the session stays at its
generation. KV of a turn is dropped once its commit was refused. KV of a turn that ended early stays for a retry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span, get_current_span

from contextcache.clock import Clock
from contextcache.errors import (
    CacheRefNotFound,
    ContextCacheError,
    ContextExpired,
    ContextNotFound,
    EngineFailed,
    StoreUnavailable,
)
from contextcache.identity import COMPUTED_SOON
from contextcache.model import (
    MAX_WORD_CHARS,
    CacheSessionMetadata,
    SaveOutcome,
    Segment,
    TurnCommit,
    TurnReceipt,
    Usage,
)
from contextcache.process.crash_points import crash_point
from contextcache.wire.tracing import child_span, within
from vllm_plugin.turn.answer.chat import AnswerResult, JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.receipt import CommitOutcome, TurnUsage, receipt_headers, usage_object
from vllm_plugin.turn.crash_points import BEFORE_ABORT, BEFORE_COMMIT
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import KVStore
from vllm_plugin.turn.prompt.composition import answer_segment
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.turn import Phase, Turn
from vllm_plugin.turn.waiting import Background

if TYPE_CHECKING:
    from context_manager.client import ContextManagerClient

log = logging.getLogger(__name__)

_SEGMENT_DEADLINE_S = 30.0
"""To find the ids of an answer's text: some tokeniser calls, dozens where a stop string cuts a token."""

_COUNT_AGAIN_S = 0.5
_LATE = "seal_deadline"
"""Why a create has no KV yet: it may still come."""


@dataclass
class Settlement:
    """Ends turns. One per API server process."""

    settings: TurnSettings
    manager: ContextManagerClient
    kv: KVStore
    clock: Clock
    metrics: TurnMetrics
    background: Background

    async def settle(self, turn: Turn, answer: JsonAnswer | SseAnswer) -> tuple[list[tuple[str, str]], bytes]:
        """End the turn for the session, committed or not. Return the headers and the end of the client's answer."""
        turn.advance("answer whole")
        result = answer.result
        with within(turn.trace):
            await self._take_load(turn, result.kv_transfer, is_whole=result.cached_tokens > 0)
            usage = _usage(turn, result.cached_tokens, result.completion_tokens)
            outcome = await self._commit(turn, answer, usage)
        if turn.phase in (Phase.READ_ONLY, Phase.REFUSED):
            self.background.start(self._count(turn, usage))
        self.metrics.count_turn(usage, created=turn.is_create, first_token_s=turn.first_token_s)
        _describe(get_current_span(turn.trace), usage, outcome)
        return _end(turn, answer, usage, outcome)

    async def _commit(self, turn: Turn, answer: JsonAnswer | SseAnswer, usage: TurnUsage) -> CommitOutcome:
        session, prompt = turn.session, turn.prompt
        outcome = CommitOutcome(False, session.generation, session.expires_at_ms, "read_only")
        if turn.save_ref is None:
            turn.advance("nothing to commit")
            return outcome
        try:
            segment = await self._answer_segment(turn, answer.result)
            is_awaited = turn.is_create or turn.request.hints.asked
            if is_awaited and not turn.holder:  # another pod's sidecar tells its own turns alone
                await self._wait_sealed(turn)
            commit = TurnCommit(
                tenant=session.tenant,
                session_id=session.session_id,
                lease_id=turn.lease_id,
                expected_generation=session.generation,
                keep_segments=prompt.keep_segments,
                segments=prompt.segments + ((segment,) if segment else ()),
                cache_ref=turn.save_ref,
                holder=turn.holder or self.settings.endpoint_name,
                repeatable=turn.request.repeatable,
                answer=await _kept(turn, answer, usage),
                usage=_counted(turn, usage, committed=True),
                receipt=self._receipt_kept(turn, usage),
                model_id=session.model_id,
            )
            crash_point(BEFORE_COMMIT)
            turn.advance("commit sent")
            committed = await self._commit_twice(turn, commit)
        except ContextCacheError as exc:
            self.metrics.refused_commits.labels(reason=exc.code).inc()
            log.warning("commit refused", extra={"session_id": session.session_id, "reason": exc.code})
            # An answer that names no durable commit leaves nothing to load; without one, the KV may be the context's.
            if turn.phase is not Phase.IN_DOUBT or isinstance(exc, (ContextNotFound, ContextExpired)):
                self.background.start(self.kv.drop(session.tenant, turn.save_ref))
            # No task renews the lease any more, and the next turn need not wait for its end.
            self.background.start(self._give_back(turn))
            turn.advance("commit refused")
            return replace(outcome, reason=exc.code)
        turn.advance("committed")
        ids = (prompt.token_ids, segment.token_ids if segment else ())
        self.background.start(self.kv.committed(session, committed, ids))
        return CommitOutcome(True, committed.generation, committed.expires_at_ms)

    async def _count(self, turn: Turn, usage: TurnUsage) -> None:
        """Count a turn that committed nothing, also when the manager is away for a moment."""
        while True:
            try:
                await self.manager.add_usage(
                    turn.session.tenant, turn.request_id, [_counted(turn, usage, committed=False)]
                )
            except StoreUnavailable:
                await asyncio.sleep(_COUNT_AGAIN_S)  # as long as a background call may take
            else:
                return

    async def _answer_segment(self, turn: Turn, result: AnswerResult) -> Segment | None:
        try:
            async with asyncio.timeout(_SEGMENT_DEADLINE_S):
                return await answer_segment(turn.client.engine, turn.request, result)
        except TimeoutError as exc:
            raise EngineFailed("the engine did not return the answer's token ids") from exc

    async def _commit_twice(self, turn: Turn, commit: TurnCommit) -> CacheSessionMetadata:
        """Commit; once more when no answer came, because the first may have been made durable all the same.

        Raises StoreUnavailable when it is not known whether it was; any other error: it was not.
        """
        send = self.manager.register_session_cache if turn.is_create else self.manager.commit_turn
        try:
            return await send(commit)
        except StoreUnavailable as first:
            turn.advance("commit unanswered")
            try:
                return await send(commit)
            except (ContextNotFound, ContextExpired):
                raise  # whatever was committed is gone with its context
            except ContextCacheError:
                # Another turn's commit may have come after ours, which then counts; or the store refuses for a reason
                # that says nothing of the first.
                raise first from None

    async def _wait_sealed(self, turn: Turn) -> None:
        """Give a save its time to become durable, for its promise, and for a create's first turn after it.

        Too late is counted, not an error: the KV may still come.
        """
        assert turn.save_ref is not None
        begun_ms, placements = self.clock.now_ms(), turn.request.hints.placements
        with child_span("turn wait for seal"):
            try:
                turn.saved = await self.kv.wait_sealed(
                    turn.session.tenant, turn.save_ref, timeout_ms=self.settings.rpc_deadline_ms, placements=placements
                )
            except ContextCacheError as exc:
                turn.saved = SaveOutcome(is_sealed=False, reason=exc.code)
        if not turn.saved.is_sealed and turn.is_create:
            turn.no_kv = turn.saved.reason or _LATE
            self.metrics.unsealed_creates.inc()
        turn.timings_ms["seal"] = self.clock.now_ms() - begun_ms

    async def stream_receipt(self, turn: Turn) -> list[tuple[str, str]]:
        """Return a stream's headers at its first token; the load report says which tokens the engine reused."""
        turn.first_token_s = (self.clock.now_ms() - turn.started_ms) / 1000
        await self._take_load(turn, {}, is_whole=False)
        loaded = turn.loaded
        planned = 0 if loaded is None else loaded.device_tokens + loaded.loaded_tokens
        generation = turn.session.generation + (0 if turn.save_ref is None else 1)
        expires_at_ms = turn.session.expires_at_ms
        return receipt_headers(turn, _usage(turn, planned, 0), generation=generation, expires_at_ms=expires_at_ms)

    async def _take_load(self, turn: Turn, told: Mapping[str, Any], *, is_whole: bool) -> None:
        # Nothing was named for most creates: the engine tells where it started from only if it was from something.
        if turn.holder or turn.loaded is not None or not (turn.load_refs or is_whole):
            return
        turn.loaded = await self.kv.loaded(turn.request_id, told, is_whole=is_whole)
        if turn.loaded is not None:
            turn.no_kv = "" if turn.loaded.reason == COMPUTED_SOON else turn.loaded.reason
        if turn.no_kv == CacheRefNotFound.code and turn.is_create:
            turn.no_kv = ""  # the parent's KV was only worth a try
        elif turn.no_kv == CacheRefNotFound.code:
            # Never saved, perhaps: then the store knows why.
            with suppress(ContextCacheError):
                found = await self.kv.wait_sealed(turn.session.tenant, turn.session.cache_ref, timeout_ms=0)
                turn.no_kv = found.reason or turn.no_kv

    def _receipt_kept(self, turn: Turn, usage: TurnUsage) -> TurnReceipt:
        """Return the receipt that the session's history keeps of a turn about to be committed."""
        now_ms = self.clock.now_ms()
        return TurnReceipt(
            generation=turn.session.generation + 1,
            at_ms=now_ms,
            computed_tokens=usage.computed_tokens,
            cached_tokens=usage.cached_tokens,
            context_tokens=usage.context_tokens,
            completion_tokens=usage.completion_tokens,
            source=usage.source,
            match=turn.match,
            # A word of the sidecar must not make a commit invalid.
            reason=turn.no_kv[:MAX_WORD_CHARS] if turn.no_kv.isascii() and turn.no_kv.isprintable() else "",
            restore_ms=None if usage.restore_ms is None else max(round(usage.restore_ms), 0),
            first_token_ms=None if turn.first_token_s is None else max(round(turn.first_token_s * 1000), 0),
            took_ms=max(now_ms - turn.started_ms, 0),
        )

    async def abort(self, turn: Turn) -> None:
        """Release the lease of a turn that ended early, before the client hears of it and tries again.

        A create's reservation goes with it. The KV so far stays for a retry, for a while. Bounded by one call's
        deadline; goes on when the caller is cancelled. Does nothing for a turn that is settled or holds no lease.
        """
        if turn.has_ended:
            return
        leaves_kv = turn.phase in (Phase.GENERATING, Phase.SETTLING)
        turn.advance("aborted")
        if turn.save_ref is None:
            return
        self.metrics.aborts.labels(reason="turn").inc()
        if leaves_kv:
            self.background.start(self.kv.interrupt(turn.session.tenant, turn.save_ref))
        crash_point(BEFORE_ABORT)
        await self.background.finish(self._give_back(turn))

    async def _give_back(self, turn: Turn) -> None:
        """Release the lease; a commit that is still under way then comes too late."""
        await self.manager.abort_turn(turn.session.tenant, turn.session.session_id, lease_id=turn.lease_id)


def _usage(turn: Turn, engine_cached_tokens: int, completion_tokens: int) -> TurnUsage:
    num_tokens, num_known = len(turn.prompt.token_ids), turn.prompt.context_tokens
    cached_before = engine_cached_tokens - turn.num_precomputed
    return TurnUsage(num_tokens, num_known, cached_before, completion_tokens, turn.loaded)


def _end(
    turn: Turn, answer: JsonAnswer | SseAnswer, usage: TurnUsage, outcome: CommitOutcome
) -> tuple[list[tuple[str, str]], bytes]:
    """Return the headers and the end of an answer whose turn has this outcome."""
    exists = outcome.committed or not turn.is_create
    session = {
        "session_id": turn.session.session_id if exists else None,
        "expires_at": outcome.expires_at_ms // 1000,
    }
    headers = receipt_headers(turn, usage, generation=outcome.generation, expires_at_ms=outcome.expires_at_ms)
    return headers, answer.closing(usage_object(turn, usage, outcome), session)


async def _kept(turn: Turn, answer: JsonAnswer | SseAnswer, usage: TurnUsage) -> bytes:
    """Return the answer as it is given once it is committed, packed; empty: there is none to keep."""
    if turn.recording is None:
        return b""
    outcome = CommitOutcome(True, turn.session.generation + 1, expires_at_ms=turn.recording.expires_at_s * 1000)
    return await turn.recording.packed(*_end(turn, answer, usage, outcome))


def _counted(turn: Turn, usage: TurnUsage, *, committed: bool) -> Usage:
    """Return a turn's counts, as its receipt has them."""
    counts = {
        "contexts": int(turn.is_create and committed),
        "turns": 1,
        "computed_tokens": usage.computed_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "saved_ms": usage.saved_ms or 0,
    }
    return Usage(turn.client.identity.key, counts, turn.session.model_id)


def _describe(span: Span, usage: TurnUsage, outcome: CommitOutcome) -> None:
    """Add the turn's reuse and its end to its span."""
    told: dict[str, str | int] = {
        "source": usage.source,
        "verdict": usage.verdict,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "generation": outcome.generation,
        "committed": outcome.committed,
    }
    span.set_attributes({f"contextcache.{name}": value for name, value in told.items()})
