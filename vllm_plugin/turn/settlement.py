"""How a turn ends for its session: commit, receipt, and what is tidied up afterwards.

Rules: a refused commit is told in the answer, which is delivered in full all the same; the session stays at its
generation. KV of a turn that was not committed is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context, get_current
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
    CacheRef,
    CacheSessionMetadata,
    SaveOutcome,
    Segment,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageFormat,
)
from contextcache.process.crash_points import crash_point
from contextcache.wire.tracing import child_span, within
from vllm_plugin.turn.answer import AnswerResult
from vllm_plugin.turn.background import Background
from vllm_plugin.turn.composition import ComposedPrompt, answer_segment
from vllm_plugin.turn.crash_points import BEFORE_ABORT, BEFORE_COMMIT
from vllm_plugin.turn.delivery import Closing, Render
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import KVSidecar, SessionDirectory, TokenAddressed
from vllm_plugin.turn.repeats import Recording
from vllm_plugin.turn.request import TurnRequest
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.usage import CommitOutcome, LoadedKV, TurnUsage, receipt_headers, usage_object

log = logging.getLogger(__name__)

_SEGMENT_DEADLINE_S = 30.0
"""To find the ids of an answer's text: some tokeniser calls, dozens where a stop string cuts a token."""

_COUNT_AGAIN_S = 0.5
_REPORT_WAIT_MS = 1000
"""For a report that is asked for before there is one; longer than the sidecar lets anybody wait."""
LAST_WORD_MS = 500
"""For one that is on its way, at an answer's end: without it cached tokens would be taken for the engine's own."""
EXPECTED_MAX = 32
"""Of those at a time: a sidecar serves its engine's calls beside them, 256 in all. Others ask at the first token."""
_LATE = "seal_deadline"
"""Why a create has no KV yet: it may still come."""


@dataclass(slots=True)
class Turn:
    """One turn while it runs."""

    request: TurnRequest
    session: CacheSessionMetadata
    request_id: str
    lease_id: str
    """Empty: this turn commits nothing and holds no lease."""
    save_ref: CacheRef | None
    is_create: bool
    usage: UsageFormat
    key: str = ""
    """Name of the API key that it is counted under."""
    beginning: str = ""
    """See contextcache.identity.Identity, as `prefix_at`."""
    prefix_at: str = ""
    prompt: ComposedPrompt | None = None
    loaded: LoadedKV | None = None
    report: asyncio.Task[LoadedKV | None] | None = None
    """The question for what was loaded, while it is on its way."""
    no_kv: str = ""
    """Why there was no KV to reuse, or, after a create, why there is none."""
    settled: bool = False
    """Committed, refused, aborted, or nothing to commit: no abort is due."""
    may_be_counted: bool = False
    """A commit of it got no answer: its usage may be counted with it, whatever became of the context since."""
    started_ms: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)
    first_token_s: float | None = None
    """From the lease to the first token, of a stream."""
    recording: Recording | None = None
    """Of a request that may come again."""
    trace: Context = field(default_factory=get_current)
    """The turn's own span is in it; what ends a turn runs where the engine sends from."""


class Settlement:
    """Ends turns. One per API server process."""

    def __init__(
        self,
        settings: TurnSettings,
        *,
        manager: SessionDirectory,
        sidecar: KVSidecar,
        clock: Clock,
        metrics: TurnMetrics,
        background: Background,
        by_tokens: TokenAddressed | None = None,
    ) -> None:
        """Take everything from outside. `by_tokens`: the `sidecar`, where it is LMCache."""
        self._by_tokens = by_tokens
        self._settings = settings
        self._manager = manager
        self._sidecar = sidecar
        self._clock = clock
        self._metrics = metrics
        self._background = background
        self._num_expected = 0
        self._is_silent = False
        """Whether one was waited for in vain at an answer's end: until a word comes, the wait is a stream's."""

    async def settle(self, engine: Engine, turn: Turn, result: AnswerResult, render: Render) -> Closing:
        """End the turn for the session, whatever the session says, and return what the client is told.

        `render` makes the end of the answer of it, for the commit to keep.
        """
        with within(turn.trace):
            if self._by_tokens is not None:
                turn.loaded = self._by_tokens.loaded(result.kv_transfer)
            else:
                await self._take_load_report(turn, has_cached=result.cached_tokens > 0)
            outcome = await self._commit(engine, turn, result, render)
        turn.settled = True
        usage = self._usage(turn, result.cached_tokens, result.completion_tokens)
        if not outcome.committed and not turn.may_be_counted:
            self._background.start(self._count(turn, usage))
        self._metrics.count_turn(usage, created=turn.is_create)
        self._metrics.time_turn(usage, created=turn.is_create, first_token_s=turn.first_token_s)
        _describe(get_current_span(turn.trace), usage, outcome)
        return self._closing(turn, usage, outcome)

    def _closing(self, turn: Turn, usage: TurnUsage, outcome: CommitOutcome) -> Closing:
        exists = outcome.committed or not turn.is_create
        session: dict[str, Any] = {
            "session_id": turn.session.session_id if exists else None,
            "expires_at": outcome.expires_at_ms // 1000,
        }
        return Closing(
            usage=usage_object(usage, outcome, openai_format=turn.usage is UsageFormat.OPENAI),
            session=session,
            headers=self._receipt(turn, usage, generation=outcome.generation, expires_at_ms=outcome.expires_at_ms),
        )

    async def _kept(self, turn: Turn, result: AnswerResult, render: Render) -> bytes:
        """Return the answer as it is given once it is committed, packed; empty: there is none to keep."""
        if turn.recording is None:
            return b""
        usage = self._usage(turn, result.cached_tokens, result.completion_tokens)
        end_ms = turn.recording.expires_at_s * 1000
        outcome = CommitOutcome(committed=True, generation=turn.session.generation + 1, expires_at_ms=end_ms)
        closing = self._closing(turn, usage, outcome)
        return await turn.recording.packed(closing.headers, render(closing.usage, closing.session))

    async def _commit(self, engine: Engine, turn: Turn, result: AnswerResult, render: Render) -> CommitOutcome:
        session, prompt = turn.session, turn.prompt
        assert prompt is not None
        if not turn.lease_id:
            return CommitOutcome(
                committed=False, generation=session.generation, expires_at_ms=session.expires_at_ms, reason="read_only"
            )
        try:
            answer = await self._answer_segment(engine, turn, result)
            if turn.is_create:
                await self._wait_sealed(turn)
            usage = self._usage(turn, result.cached_tokens, result.completion_tokens)
            commit = TurnCommit(
                tenant=session.tenant,
                session_id=session.session_id,
                lease_id=turn.lease_id,
                expected_generation=session.generation,
                keep_segments=prompt.keep_segments,
                segments=prompt.segments + ((answer,) if answer else ()),
                cache_ref=turn.save_ref or "",
                holder=self._settings.endpoint_name,
                repeatable=turn.request.repeatable,
                answer=await self._kept(turn, result, render),
                usage=_counted(turn, usage, committed=True),
                receipt=self._receipt_kept(turn, usage),
            )
            crash_point(BEFORE_COMMIT)
            committed = await self._commit_twice(turn, commit)
        except ContextCacheError as exc:
            self._metrics.refused_commits.labels(reason=exc.code).inc()
            log.warning("commit refused", extra={"session_id": session.session_id, "reason": exc.code})
            self._drop(turn)
            # Whatever was refused: nobody renews the lease any more, and the next turn need not wait for its end.
            self._background.start(self._give_back(turn))
            return CommitOutcome(
                committed=False, generation=session.generation, expires_at_ms=session.expires_at_ms, reason=exc.code
            )
        self._after_commit(turn, committed)
        if self._by_tokens is not None and turn.save_ref is not None:
            whole = prompt.token_ids + (answer.token_ids if answer else ())
            self._background.start(self._by_tokens.keep(committed, turn.save_ref, whole))
        return CommitOutcome(committed=True, generation=committed.generation, expires_at_ms=committed.expires_at_ms)

    async def _count(self, turn: Turn, usage: TurnUsage) -> None:
        """Count a turn that committed nothing, also when the manager is away for a moment."""
        while True:
            try:
                await self._manager.add_usage(
                    turn.session.tenant, turn.request_id, [_counted(turn, usage, committed=False)]
                )
            except StoreUnavailable:
                await asyncio.sleep(_COUNT_AGAIN_S)  # as long as a background call may take
            else:
                return

    async def _answer_segment(self, engine: Engine, turn: Turn, result: AnswerResult) -> Segment | None:
        try:
            async with asyncio.timeout(_SEGMENT_DEADLINE_S):
                return await answer_segment(engine, turn.request, result)
        except TimeoutError as exc:
            raise EngineFailed("the engine did not return the answer's token ids") from exc

    async def _commit_twice(self, turn: Turn, commit: TurnCommit) -> CacheSessionMetadata:
        """Commit; once more when no answer came, because the first may have been made durable all the same.

        Raises StoreUnavailable when it is not known whether it was; any other error: it was not.
        """
        send = self._manager.register_session_cache if turn.is_create else self._manager.commit_turn
        try:
            return await send(commit)
        except StoreUnavailable as first:
            turn.may_be_counted = True
            try:
                return await send(commit)
            except (ContextNotFound, ContextExpired):
                raise  # whatever was committed is gone with its context
            except ContextCacheError:
                # Another turn's commit may have come after ours, which then counts; or the store refuses for a reason
                # that says nothing of the first.
                raise first from None

    async def _wait_sealed(self, turn: Turn) -> None:
        """Give the first save its time to become durable. Too late is counted, not an error: the KV may still come."""
        assert turn.save_ref is not None
        begun_ms = self._clock.now_ms()
        with child_span("turn wait for seal"):
            try:
                outcome = await self._sidecar.wait_sealed(
                    turn.session.tenant, turn.save_ref, timeout_ms=self._settings.seal_deadline_ms
                )
            except ContextCacheError as exc:
                outcome = SaveOutcome(is_sealed=False, reason=exc.code)
        if not outcome.is_sealed:
            turn.no_kv = outcome.reason or _LATE
            self._metrics.unsealed_creates.inc()
        turn.timings_ms["seal"] = self._clock.now_ms() - begun_ms

    def _after_commit(self, turn: Turn, committed: CacheSessionMetadata) -> None:
        """Tidy up beside the answer: the KV of two generations ago, and an expiry that moved since the turn began."""
        before = turn.session
        if before.previous_cache_ref:
            self._background.start(self._sidecar.delete_context(before.tenant, cache_refs=(before.previous_cache_ref,)))
        was_patched = committed.expires_at_ms != before.expires_at_ms
        if was_patched or committed.ttl_policy is TtlPolicy.SLIDING:
            self._background.start(
                self._sidecar.touch_context(before.tenant, before.session_id, committed.expires_at_ms)
            )

    async def stream_receipt(self, turn: Turn) -> list[tuple[str, str]]:
        """Return a stream's headers at its first token; what the engine reused is known from the load report."""
        turn.first_token_s = (self._clock.now_ms() - turn.started_ms) / 1000
        if self._by_tokens is None:
            await self._take_load_report(turn)
        loaded = turn.loaded
        planned = 0 if loaded is None else loaded.device_tokens + loaded.loaded_tokens
        usage = self._usage(turn, planned, 0)
        generation = turn.session.generation + (1 if turn.lease_id else 0)
        return self._receipt(turn, usage, generation=generation, expires_at_ms=turn.session.expires_at_ms)

    def expect_load(self, turn: Turn) -> None:
        """Ask for the load report before there is one: at the first token, when every core computes, it is here."""
        if self._by_tokens is None and turn.session.cache_refs and self._num_expected < EXPECTED_MAX:
            self._num_expected += 1
            asking = self._sidecar.load_report(turn.request_id, timeout_ms=_REPORT_WAIT_MS)
            turn.report = asyncio.create_task(asking)
            turn.report.add_done_callback(self._has_answered)

    def _has_answered(self, _report: asyncio.Task[LoadedKV | None]) -> None:
        self._num_expected -= 1

    async def forget_load(self, turn: Turn) -> None:
        """End a question that nobody needs the answer of."""
        if turn.report is not None:
            turn.report.cancel()
            await asyncio.gather(turn.report, return_exceptions=True)

    async def _load_report(self, turn: Turn, deadline_ms: int) -> LoadedKV | None:
        if turn.report is not None:
            expected, turn.report = turn.report, None
            with suppress(ContextCacheError):
                try:
                    async with asyncio.timeout(deadline_ms / 1000):
                        found = await expected
                except TimeoutError:
                    return None
                if found is not None:
                    return found
        return await self._sidecar.load_report(turn.request_id, timeout_ms=deadline_ms)

    async def _take_load_report(self, turn: Turn, *, has_cached: bool = False) -> None:
        """`has_cached`: the answer is whole, and the engine did start from something."""
        # Nothing was named for a create: the engine tells where it started from only if it was from something.
        if turn.loaded is not None or not (turn.session.cache_refs or has_cached):
            return
        deadline_ms = self._settings.report_deadline_ms
        if has_cached and not self._is_silent:
            deadline_ms = max(deadline_ms, LAST_WORD_MS)
        with suppress(ContextCacheError):
            turn.loaded = await self._load_report(turn, deadline_ms)
            self._is_silent = turn.loaded is None and (self._is_silent or has_cached)
            if turn.loaded is not None:
                turn.no_kv = "" if turn.loaded.reason == COMPUTED_SOON else turn.loaded.reason
            if turn.no_kv == CacheRefNotFound.code:
                # Never saved, perhaps: then the sidecar knows why.
                found = await self._sidecar.wait_sealed(turn.session.tenant, turn.session.cache_ref, timeout_ms=0)
                turn.no_kv = found.reason or turn.no_kv

    def _usage(self, turn: Turn, engine_cached_tokens: int, completion_tokens: int) -> TurnUsage:
        assert turn.prompt is not None
        return TurnUsage(
            prompt_tokens=len(turn.prompt.token_ids),
            context_tokens=turn.prompt.context_tokens,
            engine_cached_tokens=engine_cached_tokens,
            completion_tokens=completion_tokens,
            loaded=turn.loaded,
            no_kv=turn.no_kv,
            match="" if turn.is_create else turn.prompt.outcome.value,
            diverged=turn.prompt.diverged,
            truncated_tokens=turn.prompt.truncated_tokens,
        )

    def _receipt_kept(self, turn: Turn, usage: TurnUsage) -> TurnReceipt:
        """Return what the session's history keeps of a turn that is about to be committed."""
        now_ms = self._clock.now_ms()
        restore_ms = None if usage.loaded is None else usage.loaded.restore_ms
        return TurnReceipt(
            generation=turn.session.generation + 1,
            at_ms=now_ms,
            computed_tokens=usage.computed_tokens,
            cached_tokens=usage.cached_tokens,
            context_tokens=usage.context_tokens,
            completion_tokens=usage.completion_tokens,
            source=usage.source,
            match=usage.match,
            # A commit is not refused for what a sidecar says.
            reason=usage.no_kv[:MAX_WORD_CHARS] if usage.no_kv.isascii() and usage.no_kv.isprintable() else "",
            restore_ms=None if restore_ms is None else max(round(restore_ms), 0),
            first_token_ms=None if turn.first_token_s is None else max(round(turn.first_token_s * 1000), 0),
            took_ms=max(now_ms - turn.started_ms, 0),
        )

    def _receipt(self, turn: Turn, usage: TurnUsage, *, generation: int, expires_at_ms: int) -> list[tuple[str, str]]:
        assert turn.prompt is not None
        return receipt_headers(
            usage,
            session_id=turn.session.session_id,
            context_mode=turn.prompt.outcome.context_mode,
            generation=generation,
            expires_at_ms=expires_at_ms,
            timings_ms=turn.timings_ms,
        )

    async def abort(self, turn: Turn) -> None:
        """Release the lease of a turn that ended early, before the client is told: who tries again at once may.

        A create's reservation goes with it. Bounded by one call's deadline; goes on when the caller is cancelled.
        Does nothing for a turn that is settled or holds no lease.
        """
        if turn.settled or not turn.lease_id:
            return
        turn.settled = True
        self._metrics.aborts.labels(reason="turn").inc()
        self._drop(turn)
        crash_point(BEFORE_ABORT)
        await self._background.finish(self._give_back(turn))

    async def _give_back(self, turn: Turn) -> None:
        """Release the lease; a commit that is still under way then comes too late."""
        await self._manager.abort_turn(turn.session.tenant, turn.session.session_id, lease_id=turn.lease_id)

    def _drop(self, turn: Turn) -> None:
        """Have the sidecar forget what an uncommitted turn saved, or is about to save."""
        if turn.save_ref is not None:
            self._background.start(self._sidecar.delete_context(turn.session.tenant, cache_refs=(turn.save_ref,)))


def _counted(turn: Turn, usage: TurnUsage, *, committed: bool) -> Usage:
    """Return what a turn took, as its receipt says it."""
    counts = {
        "contexts": int(turn.is_create and committed),
        "turns": 1,
        "computed_tokens": usage.computed_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "saved_ms": usage.saved_ms or 0,
    }
    return Usage(turn.key, counts)


def _describe(span: Span, usage: TurnUsage, outcome: CommitOutcome) -> None:
    """Say on the turn's span what it reused and how it ended."""
    span.set_attribute("contextcache.source", usage.source)
    span.set_attribute("contextcache.verdict", usage.verdict)
    span.set_attribute("contextcache.cached_tokens", usage.cached_tokens)
    span.set_attribute("contextcache.computed_tokens", usage.computed_tokens)
    span.set_attribute("contextcache.generation", outcome.generation)
    span.set_attribute("contextcache.committed", outcome.committed)
