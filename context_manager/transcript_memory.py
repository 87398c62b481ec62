"""`TranscriptMemory`: transcripts a pod has read or committed lately, so that a turn brings only what is new. No I/O.

Nothing here is believed by itself: a transcript is used as far as the row says that its mark still stands for leading
segments (row.py), and not at all otherwise. It may be stale, never wrong.

It holds text of conversations, so it holds little and not for long: a bound in bytes, `IDLE_S` after the last use, and
never beyond the session's own life. A session that turns out to be gone is forgotten at once; of a DELETE that no later
turn follows nobody tells us, and its text goes with the idle time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from context_manager.segments import PackedSegment, packed
from contextcache.clock import Clock
from contextcache.model import CacheSessionMetadata, SessionId, SessionMode, TenantId, TurnCommit

IDLE_S = 600
"""A person's pause; the turn after a longer one reads its transcript whole, once."""
_SWEEP_S = 30.0
"""Between two looks for what is past its time; one pass over the entries."""
_TURNS_MAX = 1024
"""Turns whose commit is awaited; one more than that, and the oldest one's next turn reads its transcript whole."""
_OWN_BYTES = 200
"""What a segment or an entry takes beside its content."""

_Key = tuple[TenantId, SessionId]


@dataclass(frozen=True, slots=True)
class KnownTranscript:
    """A transcript as it was at a mark."""

    mark: str
    segments: tuple[PackedSegment, ...]
    num_tokens: int
    size_bytes: int
    until_ms: int
    """Unix time after which it is forgotten."""

    def head(self, num_segments: int) -> KnownTranscript:
        """Return its leading segments."""
        if num_segments == len(self.segments):
            return self
        return NOTHING_KNOWN.grown(self.segments[:num_segments])

    def grown(self, added: Sequence[PackedSegment]) -> KnownTranscript:
        """Return it with more segments behind it, without a mark. The ids of what was there are not looked at."""
        return KnownTranscript(
            mark="",
            segments=(*self.segments, *added),
            num_tokens=self.num_tokens + sum(segment.num_tokens for segment in added),
            size_bytes=self.size_bytes + sum(segment.size_bytes + _OWN_BYTES for segment in added),
            until_ms=0,
        )


NOTHING_KNOWN = KnownTranscript("", (), 0, _OWN_BYTES, 0)


class TranscriptMemory:
    """The last used transcripts, `bytes_max` of them at most. Belongs to one event loop."""

    def __init__(self, *, bytes_max: int, clock: Clock) -> None:
        """`bytes_max`: 0 keeps none."""
        self._bytes_max = bytes_max
        self._clock = clock
        self._known: OrderedDict[_Key, KnownTranscript] = OrderedDict()
        self._begun: OrderedDict[str, KnownTranscript] = OrderedDict()
        """By lease: what a turn was built on, until its commit or its end."""
        self._timer: asyncio.TimerHandle | None = None
        self.size_bytes = 0
        """Of all that is kept."""

    def find(self, tenant: TenantId, session_id: SessionId) -> KnownTranscript:
        """Return what is known of a session; NOTHING_KNOWN for most."""
        known = self._known.get((tenant, session_id), NOTHING_KNOWN)
        return known if self._clock.now_ms() < known.until_ms else NOTHING_KNOWN

    def begun(self, session: CacheSessionMetadata, transcript: KnownTranscript, *, lease_id: str) -> None:
        """Note the whole transcript that a turn began with. `lease_id`: empty for a reader."""
        self._keep(session, transcript)
        if lease_id and session.mode is SessionMode.SESSION and self._bytes_max:
            self._begun[lease_id] = transcript
            if len(self._begun) > _TURNS_MAX:
                self._begun.popitem(last=False)

    def committed(self, session: CacheSessionMetadata, commit: TurnCommit) -> CacheSessionMetadata:
        """Note the transcript of a turn that was committed; return its session."""
        begun = self._begun.pop(commit.lease_id, None)
        base = NOTHING_KNOWN if commit.keep_segments == 0 else begun
        if base is None:
            self.forget(session.tenant, session.session_id)
        else:
            self._keep(session, base.head(commit.keep_segments).grown(tuple(map(packed, commit.segments))))
        return session

    def ended(self, lease_id: str) -> None:
        """Note that a turn ended without a commit."""
        self._begun.pop(lease_id, None)

    def forget(self, tenant: TenantId, session_id: SessionId) -> None:
        """Drop what is known of a session."""
        if known := self._known.pop((tenant, session_id), None):
            self.size_bytes -= known.size_bytes

    def forget_due(self) -> None:
        """Drop what is past its time. A timer calls it as long as there is anything."""
        now_ms = self._clock.now_ms()
        for key in [key for key, known in self._known.items() if known.until_ms <= now_ms]:
            self.forget(*key)
        self._timer = None
        self._arm()

    def close(self) -> None:
        """Drop everything."""
        self._known.clear()
        self._begun.clear()
        self.size_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep(self, session: CacheSessionMetadata, transcript: KnownTranscript) -> None:
        self.forget(session.tenant, session.session_id)
        if not session.mark or transcript.size_bytes > self._bytes_max:
            return
        until_ms = min(session.expires_at_ms, self._clock.now_ms() + IDLE_S * 1000)
        known = replace(transcript, mark=session.mark, until_ms=until_ms)
        self._known[session.tenant, session.session_id] = known
        self.size_bytes += transcript.size_bytes
        while self.size_bytes > self._bytes_max:
            self.forget(*next(iter(self._known)))
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._known:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_S, self.forget_due)
