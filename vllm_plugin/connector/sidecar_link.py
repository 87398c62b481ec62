"""The line to the kv-sidecar as the connector sees it: what may be asked, and when it is worth asking.

Nothing here runs in an engine step. The channel is made at the first use, in a transfer thread, never at import or
construction; a sidecar that is absent is asked again with growing pauses while the engine serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from typing_extensions import override

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, InvalidRequest, SidecarUnavailable
from contextcache.wire.rpc import is_late, is_unanswered
from kv_sidecar.client import EngineSidecarClient, MappedArena
from vllm_plugin.connector.metadata import RankFacts
from vllm_plugin.connector.telemetry import Counters

log = logging.getLogger(__name__)

_FIRST_PAUSE_MS = 250
_LONGEST_PAUSE_MS = 10_000

Arena: TypeAlias = MappedArena
"""The sidecar's memory. A writer to a lent slot holds it."""

OpenArena: TypeAlias = Callable[[Callable[[], None]], Arena]
"""Borrow the sidecar's arena; what is passed is called when the sidecar has gone. Raises OSError."""

Connect: TypeAlias = Callable[[float], EngineSidecarClient]
"""Make a client whose calls have this deadline in seconds, unless they name another."""


class MonotonicClock(Clock):
    """Time that never jumps, for deadlines inside one process."""

    @override
    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The sidecar's answer to a handshake. Calls made under these terms are in doubt together."""

    block_tokens: int
    block_size_bytes_max: int
    arena: Arena | None = None
    """Memory that the sidecar shares; None: nothing is saved or loaded."""


@dataclass(eq=False)
class RankLink:
    """A worker rank's standing with the sidecar: introduced, with its terms, or not (yet, or again)."""

    sidecar: EngineSidecarClient
    open_arena: OpenArena
    clock: Clock
    counters: Counters
    facts: RankFacts = field(init=False)
    """Facts of this rank, from `introduce` on."""
    lacks_arena: bool = False
    """Whether the sidecar shared no memory when it was asked, or has gone."""
    _asking: threading.Lock = field(default_factory=threading.Lock)
    """Held for a handshake: seconds."""
    _changing: threading.Lock = field(default_factory=threading.Lock)
    """Held for a few lines, by the engine's thread too."""
    _terms: Terms | None = None
    _arena: Arena | None = None
    """Outlives terms that are in doubt."""
    _num_arenas: int = 0
    _pause_ms: int = 0
    _next_try_at_ms: int = 0
    _doubted_at_ms: int = -_LONGEST_PAUSE_MS

    def introduce(self, facts: RankFacts) -> None:
        """Set the facts of the next handshake, and forget the terms of the last one. Never waits."""
        with self._changing:
            self.facts, self._terms = facts, None

    @property
    def terms_now(self) -> Terms | None:
        """The terms if they are known; never waits. Terms without an arena are asked for again after 10 s."""
        terms = self._terms
        if terms is not None and terms.arena is None and self.clock.now_ms() >= self._next_try_at_ms:
            return None
        return terms

    def lost(self, terms: Terms | None, *, keeps_arena: bool = False) -> None:
        """Forget these terms, and let go of their arena once no thread uses it. Harmless for terms of the past.

        A sidecar that has ended cannot free that memory, and comes back with another arena. A late answer may have lent
        slots: the end of the arena's connection frees them.
        """
        with self._changing:
            if terms is not None and self._terms is terms:
                self._terms = None
            if terms is not None and self._arena is terms.arena and not keeps_arena:
                self._arena = None

    def doubt(self, error: ContextCacheError, terms: Terms | None) -> None:
        """Forget the terms under which a call failed, if it failed because of the sidecar.

        To map the arena again costs seconds. It stays mapped if a call was late: the arena's connection tells of a
        sidecar that has ended. If the sidecar blames its disk, or says that it has another arena, the rank maps it
        again, at most once in 10 s.
        """
        if not isinstance(error, SidecarUnavailable) or terms is None or self._terms is not terms:
            return
        now_ms = self.clock.now_ms()
        if is_late(error):
            self.lost(terms, keeps_arena=True)
        elif is_unanswered(error) or now_ms >= self._doubted_at_ms + _LONGEST_PAUSE_MS:
            self._doubted_at_ms = now_ms
            self.lost(terms)

    def is_worth_trying(self) -> bool:
        """Return whether there are terms, or it is time to ask again. Never waits."""
        return self._terms is not None or self.clock.now_ms() >= self._next_try_at_ms

    def terms(self) -> Terms:
        """Return the terms; ask for them when there are none. Raises ContextCacheError.

        Called in transfer threads only. The pauses between failed handshakes grow from 0.25 s to 10 s.
        """
        if (terms := self.terms_now) is not None:
            return terms
        with self._asking:
            if (terms := self.terms_now) is None:
                if not self.is_worth_trying():
                    raise SidecarUnavailable("the sidecar failed recently, no call until it is back")
                terms = self._ask()
            return terms

    def close(self) -> None:
        """Forget the terms, and let go of the arena."""
        with self._changing:
            self._terms, self._arena, self.lacks_arena = None, None, True

    def _ask(self) -> Terms:
        facts = self.facts
        if self._pause_ms:
            # The handshake waits for a sidecar that restarts. Meanwhile no save waits for the handshake.
            self._next_try_at_ms = self.clock.now_ms() + _LONGEST_PAUSE_MS
        try:
            answer = self.sidecar.handshake(facts.fingerprint, facts.fingerprint_json, facts.rank, facts.world_size)
            if answer.block_tokens < 1:
                raise InvalidRequest("the sidecar sent no block size")
        except ContextCacheError as exc:
            self._pause_ms = min(max(2 * self._pause_ms, _FIRST_PAUSE_MS), _LONGEST_PAUSE_MS)
            self._next_try_at_ms = self.clock.now_ms() + self._pause_ms
            log.warning("sidecar handshake failed", extra={"code": exc.code, "pause_ms": self._pause_ms})
            raise
        self._pause_ms = self._next_try_at_ms = 0
        arena = self._arena or (self._borrow() if answer.arena else None)
        if arena is None:
            self.counters.add("refused_arenas")
            self._next_try_at_ms = self.clock.now_ms() + _LONGEST_PAUSE_MS
            log.warning("the sidecar shares no memory with this engine: no KV is saved or loaded")
        log.info("sidecar handshake done", extra={"block_tokens": answer.block_tokens, "arena": arena is not None})
        terms = Terms(answer.block_tokens, answer.block_size_bytes_max, arena)
        with self._changing:
            self._arena, self.lacks_arena = arena, arena is None
            if self.facts is facts:
                self._terms = terms
        return terms

    def _borrow(self) -> Arena | None:
        self._num_arenas += 1
        number = self._num_arenas

        def ended() -> None:
            # Waits for a handshake under way, whose arena this may be.
            with self._asking:
                if number == self._num_arenas:
                    self.close()

        try:
            return self.open_arena(ended)
        except (OSError, RuntimeError):
            # No thread to be had; another machine, another user, a sandbox that passes no descriptors.
            log.warning("arena not opened", exc_info=True)
            return None
