"""`TranscriptMemory`: transcripts that a pod read or committed lately, so that a turn reads only new segments. No I/O.

A known transcript may be stale, never wrong: a turn uses only the leading segments that the row still counts for its
mark (row.py).

The memory holds text of conversations, so it is bounded in bytes, and in time by `IDLE_S` after the last use and by the
session's own life. A session that turns out to be gone is forgotten at once. A pod hears nothing of a DELETE without a
later turn: that text expires with the idle time.
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
"""Seconds after the last use: a person's pause. The turn after a longer one reads its whole transcript."""
_SWEEP_S = 30.0
"""Seconds between two passes over the entries that forget expired ones."""
_TURNS_MAX = 1024
"""Maximum number of turns that wait for their commit. Beyond it the next turn of the oldest reads its whole transcript.
"""
_OWN_BYTES = 200
"""Bytes of a segment or an entry beside its content."""

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
        """Return it with more segments behind it, without a mark."""
        return KnownTranscript(
            mark="",
            segments=(*self.segments, *added),
            num_tokens=self.num_tokens + sum(segment.num_tokens for segment in added),
            size_bytes=self.size_bytes + sum(segment.size_bytes + _OWN_BYTES for segment in added),
            until_ms=0,
        )


NOTHING_KNOWN = KnownTranscript("", (), 0, _OWN_BYTES, 0)


class TranscriptMemory:
    """The last used transcripts, up to `bytes_max`. Belongs to one event loop."""

    def __init__(self, *, bytes_max: int, clock: Clock) -> None:
        """`bytes_max`: 0 keeps none."""
        self._bytes_max = bytes_max
        self._clock = clock
        self._known: OrderedDict[_Key, KnownTranscript] = OrderedDict()
        self._begun: OrderedDict[str, KnownTranscript] = OrderedDict()
        """Transcripts at the begin of a turn by lease, until its commit or its end."""
        self._timer: asyncio.TimerHandle | None = None
        self.size_bytes = 0
        """Bytes of all known transcripts."""

    def find(self, tenant: TenantId, session_id: SessionId) -> KnownTranscript:
        """Return the known transcript of a session, or NOTHING_KNOWN."""
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
        """Forget a session."""
        if known := self._known.pop((tenant, session_id), None):
            self.size_bytes -= known.size_bytes

    def forget_due(self) -> None:
        """Forget expired transcripts. A timer calls it as long as there are any."""
        now_ms = self._clock.now_ms()
        for key in [key for key, known in self._known.items() if known.until_ms <= now_ms]:
            self.forget(*key)
        self._timer = None
        self._arm()

    def close(self) -> None:
        """Forget everything."""
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
