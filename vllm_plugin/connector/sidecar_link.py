"""The line to the kv-sidecar as the connector sees it: what may be asked, and when it is worth asking.

Nothing here runs in an engine step. The channel is made at the first use, in a transfer thread, never at import or
construction; a sidecar that is absent is asked again with growing pauses while the engine serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from typing_extensions import override

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, InvalidRequest, SidecarUnavailable
from contextcache.model import KVGroup, Manifest
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.rpc import is_late, is_unanswered
from vllm_plugin.connector.metadata import RankFacts
from vllm_plugin.connector.telemetry import Counters

log = logging.getLogger(__name__)

_FIRST_PAUSE_MS = 250
_LONGEST_PAUSE_MS = 10_000


class EngineSidecar(Protocol):
    """Calls of `kv_sidecar.client.EngineSidecarClient`; each has a deadline and fails with a ContextCacheError."""

    def handshake(self, fingerprint: str, fingerprint_json: str, rank: int, world_size: int) -> pb.HandshakeResponse:
        """Introduce a rank."""
        ...

    def prepare_save(  # noqa: PLR0913  # the fields of the message, by name
        self,
        *,
        tenant: str,
        session_id: str,
        cache_ref: str,
        fingerprint: str,
        rank: int,
        world_size: int,
        token_ids: tuple[int, ...],
        expires_at_ms: int,
        started_at_ms: int,
        groups: Sequence[KVGroup],
        early: bool,
        timeout_s: float,
    ) -> pb.PrepareSaveResponse:
        """Open a save and learn which blocks are missing."""
        ...

    def lend_slots(self, request: pb.LendSlotsRequest, timeout_s: float) -> Sequence[pb.Slot]:
        """Get room in the arena for the first of the files asked for."""
        ...

    def return_slots(self, borrower: str, slot_ids: Sequence[int]) -> None:
        """Tell that nobody will write to lent slots any more."""
        ...

    def save_blocks(self, requests: Iterator[pb.SaveBlocksRequest], timeout_s: float) -> pb.SaveBlocksResponse:
        """Hand block files over."""
        ...

    def seal(self, cache_ref: str, rank: int) -> bool:
        """End a rank's save; True when this was the last rank."""
        ...

    def abandon_save(self, tenant: str, cache_ref: str, reason: str, *, started_at_ms: int) -> None:
        """Tell that nothing is saved under a name, and why."""
        ...

    def find_manifest(
        self, request: pb.GetManifestRequest, timeout_s: float
    ) -> tuple[Manifest, pb.GetManifestResponse]:
        """Return a sealed manifest, or a beginning of what is coming, and what else is said of it."""
        ...

    def match_prefix(self, request: pb.MatchPrefixRequest, timeout_s: float) -> tuple[pb.PrefixMatch, ...]:
        """See EngineSidecarClient."""
        ...

    def load_blocks(self, request: pb.LoadBlocksRequest, timeout_s: float) -> Iterator[pb.LoadBlocksResponse]:
        """Stream blocks."""
        ...

    def end_load(self, lease_id: str) -> None:
        """End a load's lease."""
        ...

    def report_load(self, report: pb.LoadReport, *, lease_id: str = "") -> None:
        """Tell what happened to a request's prompt, and end its load's lease."""
        ...

    def close(self) -> None:
        """Close the channel."""
        ...


class Arena(Protocol):
    """`kv_sidecar.client.MappedArena`; whoever writes to a lent slot holds it."""

    borrower: str
    """What the sidecar calls this process."""
    size_bytes: int

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return a stretch of it. Raises ValueError for one that is not inside."""
        ...


OpenArena: TypeAlias = Callable[[Callable[[], None]], Arena]
"""Borrow the sidecar's arena; what is passed is called when the sidecar has gone. Raises OSError."""

Connect: TypeAlias = Callable[[float], EngineSidecar]
"""Make a client whose calls have this deadline in seconds, unless they name another."""


class MonotonicClock(Clock):
    """Time that never jumps, for deadlines inside one process."""

    @override
    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class LazySidecar:
    """One client, made at the first use by whichever thread needs it; shared by all threads after that."""

    def __init__(self, connect: Connect, *, timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: EngineSidecar | None = None
        self._closed = False

    def get(self) -> EngineSidecar:
        """Return the client. Raises SidecarUnavailable after `close`."""
        with self._lock:
            if self._closed:
                raise SidecarUnavailable("the connector is shutting down")
            if self._client is None:
                self._client = self._connect(self._timeout_s)
            return self._client

    def close(self) -> None:
        """Close the channel; calls in flight fail."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()


@dataclass(frozen=True, slots=True)
class Terms:
    """What the sidecar answered to the handshake."""

    block_tokens: int
    block_size_bytes_max: int
    arena: Arena | None = None
    """The memory that both see; None: send frames."""


class RankLink:
    """A worker rank's standing with the sidecar: introduced, with its terms, or not (yet, or again)."""

    def __init__(self, sidecar: LazySidecar, open_arena: OpenArena, clock: Clock, counters: Counters) -> None:
        self.sidecar = sidecar
        self._open_arena = open_arena
        self._clock = clock
        self._counters = counters
        self._lock = threading.Lock()
        self._facts: RankFacts | None = None
        self._terms: Terms | None = None
        self._arena: Arena | None = None
        """Kept where only the terms are in doubt."""
        self._pause_ms = 0
        self._next_try_at_ms = 0
        self._doubted_at_ms = -_LONGEST_PAUSE_MS

    def introduce(self, facts: RankFacts) -> None:
        """Set what the handshake will say."""
        self._facts = facts

    @property
    def facts(self) -> RankFacts:
        """What this rank is."""
        assert self._facts is not None, "register_kv_caches came first"
        return self._facts

    @property
    def terms_now(self) -> Terms | None:
        """The terms if they are known; never waits."""
        return self._terms

    def lost(self) -> None:
        """Forget the terms, and let go of the arena once nobody uses it: the sidecar may come back with others.

        One that has ended could not free that memory. And an answer that was lost may have lent us slots: they are free
        again with the end of the arena's connection.
        """
        self._terms = self._arena = None

    def doubt(self, error: ContextCacheError) -> None:
        """Forget the terms after a call that failed because of the sidecar, if it did.

        Mapping its memory anew is dear. It stays mapped where a call was late: a sidecar that has ended says so by the
        arena's connection. Where the sidecar speaks, of its disk or of an arena that is another by now, it is mapped
        anew once in a while.
        """
        if not isinstance(error, SidecarUnavailable) or self._terms is None:
            return  # nothing more is said by calls that fail while it is not even asked
        now_ms = self._clock.now_ms()
        if is_late(error):
            self._terms = None
        elif is_unanswered(error) or now_ms >= self._doubted_at_ms + _LONGEST_PAUSE_MS:
            self._doubted_at_ms = now_ms
            self.lost()

    def is_worth_trying(self) -> bool:
        """Return whether there are terms, or it is time to ask again. Never waits."""
        return self._terms is not None or self._clock.now_ms() >= self._next_try_at_ms

    def terms(self) -> Terms:
        """Return the terms, asking when there are none. Raises ContextCacheError.

        Called in transfer threads only. While the sidecar is absent it is asked after 0.25 s, 0.5 s … 10 s.
        """
        if self._terms is not None:
            return self._terms
        with self._lock:
            if self._terms is None:
                if not self.is_worth_trying():
                    raise SidecarUnavailable("the sidecar failed recently, no call until it is back")
                self._terms = self._ask()
            return self._terms

    def _ask(self) -> Terms:
        facts = self.facts
        try:
            answer = self.sidecar.get().handshake(
                facts.fingerprint, facts.fingerprint_json, facts.rank, facts.world_size
            )
            if answer.block_tokens < 1:
                raise InvalidRequest("the sidecar sent no block size")
        except ContextCacheError as exc:
            self._pause_ms = min(max(2 * self._pause_ms, _FIRST_PAUSE_MS), _LONGEST_PAUSE_MS)
            self._next_try_at_ms = self._clock.now_ms() + self._pause_ms
            log.warning("sidecar handshake failed", extra={"code": exc.code, "pause_ms": self._pause_ms})
            raise
        self._pause_ms = 0
        arena = self._arena = (self._arena or self._borrow()) if answer.arena else None
        log.info("sidecar handshake done", extra={"block_tokens": answer.block_tokens, "arena": arena is not None})
        return Terms(answer.block_tokens, answer.block_size_bytes_max, arena)

    def _borrow(self) -> Arena | None:
        try:
            return self._open_arena(self.lost)
        except (OSError, RuntimeError):
            # No thread to be had; another machine, another user, a sandbox that passes no descriptors: frames are
            # slower, and right.
            self._counters.add("refused_arenas")
            log.warning("no arena, KV travels in frames", exc_info=True)
            return None
