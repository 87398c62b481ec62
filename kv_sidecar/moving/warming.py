"""The story of a pod that starts beside a shared store: it takes over what pods that are gone used last.

1. Each pod leaves a list of what it used last in the store (shared/hot_lists.py), again and again, and when it ends.
2. Once its engine has spoken, a pod that starts takes the list that its own name left, then, for a while, those of
   pods that are gone, one at a time.
3. Of each context the manager is asked where it is. Where that still is the pod that is gone: the manager notes this
   one (the pointer before the bytes), the KV is pulled as nothing that anybody waits for (pace.py), and once
   it is sealed this pod is the holder, unless another is by now.
4. It ends with its number of contexts, half of the disk, its time, or its pod. Whatever breaks off leaves a session
   that names the pod that is gone: its next turn pulls or computes, as it would have.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from contextcache.errors import ContextCacheError, ContextExpired, ContextNotFound, SidecarUnavailable
from contextcache.model import CacheSessionMetadata, SessionId, TenantId
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.moving import leaving
from kv_sidecar.moving.pulling import Pulls, Wanted
from kv_sidecar.store.hot_lists import LISTED_MAX, HotList, HotLists

log = logging.getLogger(__name__)

Result = TypeVar("Result")
GONE_AFTER = 6
"""Intervals after which a list that was not written again is of a pod that is gone."""
_LOOKS_MAX = 30
_ENGINE_S = 1.0
_FAILURES_MAX = 3
"""Of one list: the manager or the store is away."""
_LEAVE_S = 2.0
_NOTHING_TO_DO = frozenset({"elsewhere", "gone", "no_room", "present"})


@dataclass(frozen=True, slots=True)
class WarmingLimits:
    """What a start may take."""

    endpoint: str
    """This pod, as sessions name it."""
    contexts_max: int
    interval_s: float
    """Between two lists that this pod writes, and between two looks, about."""


class Sessions(leaving.Sessions, Protocol):
    """Whoever knows the sessions."""

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.locate."""
        ...


class Warming:
    """Owns the task that writes this pod's list, and takes those of others over. Used from one event loop."""

    def __init__(  # noqa: PLR0913  # whom it works with, by name
        self,
        lists: HotLists,
        sessions: Sessions,
        *,
        catalog: ContextCatalog,
        pulls: Pulls,
        fingerprint: Callable[[], str | None],
        room_bytes: Callable[[TenantId], int],
        limits: WarmingLimits,
        metrics: SidecarMetrics,
    ) -> None:
        """`room_bytes`: what may come of a tenant's without a question, now; of the empty one's: at all."""
        self._lists = lists
        self._sessions = sessions
        self._catalog = catalog
        self._pulls = pulls
        self._fingerprint = fingerprint
        self._room_bytes = room_bytes
        self._limits = limits
        self._metrics = metrics
        self._num_left = limits.contexts_max
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take over nothing more, and write no list but by `leave`. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def leave(self) -> None:
        """Let who starts know that this pod ends. Ends in bounded time; where the store does not work its age tells."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._guarded(lambda: self.tell(leaves=True))

    async def tell(self, *, leaves: bool = False) -> None:
        """Write what was used here last. Raises SidecarUnavailable."""
        fingerprint = self._fingerprint()
        if fingerprint is None:
            return
        contexts: dict[tuple[TenantId, SessionId], None] = {}
        for record in reversed(self._catalog.sealed()):
            contexts[record.tenant, record.session_id] = None
            if len(contexts) == LISTED_MAX:
                break
        await self._lists.write(fingerprint, tuple(contexts), leaves=leaves)
        self._metrics.hot_lists.labels("written").inc()

    async def take_over(self, found: HotList | None) -> None:
        """Fetch what a list names and nobody holds, the one used last first, as far as there is room."""
        if found is None:
            return
        self._metrics.hot_lists.labels("taken").inc()
        num_warmed = num_failures = 0
        for tenant, session_id in found.contexts:
            if self._num_left <= 0 or num_failures == _FAILURES_MAX:
                break
            try:
                outcome = await self._take_over(found.endpoint, tenant, session_id)
            except (ContextNotFound, ContextExpired):
                outcome = "gone"
            except ContextCacheError as exc:
                outcome = exc.code
                num_failures += 1
            except Exception:
                outcome = "internal_error"
                num_failures += 1
                log.exception("context not taken over", extra={"session_id": session_id})
            self._metrics.warmed.labels(outcome).inc()
            self._num_left -= outcome not in _NOTHING_TO_DO
            num_warmed += outcome == "warmed"
            num_failures += outcome == SidecarUnavailable.code
        log.info("contexts of a gone pod taken over", extra={"endpoint": found.endpoint, "num_contexts": num_warmed})

    async def _take_over(self, gone: str, tenant: TenantId, session_id: SessionId) -> str:
        """Take over one context; return how that ended."""
        me, session = self._limits.endpoint, await self._sessions.locate(tenant, session_id)
        if session.holder != gone:
            return "elsewhere"
        if not session.cache_refs:
            return "gone"
        if self._room_bytes("") <= 0:
            self._num_left = 0
        room_bytes = self._room_bytes(tenant)
        if room_bytes <= 0:
            return "no_room"
        if gone != me:
            await self._sessions.note_holder(tenant, session_id, holder=me)
        outcome = await self._pulls.fetch(Wanted(tenant, session.cache_refs, "", unasked_bytes_max=room_bytes))
        if not await self._is_here(tenant, session.cache_refs):
            return outcome
        if gone != me:
            await self._sessions.note_holder(tenant, session_id, holder=me, instead_of=gone)
        return outcome if outcome == "present" else "warmed"

    async def _is_here(self, tenant: TenantId, cache_refs: tuple[str, ...]) -> bool:
        found = [await self._catalog.wait_sealed(tenant, ref, timeout_s=0) for ref in cache_refs]
        return any(found)

    async def _run(self) -> None:
        while self._fingerprint() is None:  # noqa: ASYNC110  # once, and a second is soon enough
            await asyncio.sleep(_ENGINE_S)
        own = await self._guarded(lambda: self._lists.take_own(self._known_fingerprint()))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_always())
            group.create_task(self._warm_up(own))

    async def _tell_always(self) -> None:
        while True:
            await self._guarded(self.tell)
            await asyncio.sleep(self._limits.interval_s)

    async def _warm_up(self, found: HotList | None) -> None:
        until_s = asyncio.get_running_loop().time() + _LOOKS_MAX * self._limits.interval_s
        await self._guarded(lambda: self.take_over(found))
        # Who has no room leaves the lists to others.
        while self._num_left > 0 < self._room_bytes("") and asyncio.get_running_loop().time() < until_s:
            found = await self._guarded(lambda: self._lists.take(self._known_fingerprint()))
            await self._guarded(lambda found=found: self.take_over(found))  # type: ignore[misc]
            if found is None:
                # Not all at the same moment that began at the same moment.
                await asyncio.sleep(self._limits.interval_s * random.uniform(0.5, 1.5))  # noqa: S311  # no secret

    def _known_fingerprint(self) -> str:
        return self._fingerprint() or ""

    async def _guarded(self, work: Callable[[], Awaitable[Result]]) -> Result | None:
        """Do it; None where the store does not work, or it broke: it must not end for that."""
        try:
            return await work()
        except SidecarUnavailable as exc:
            self._metrics.hot_lists.labels("unavailable").inc()
            log.warning("shared store unavailable for the lists of hot contexts", extra={"reason": exc.message})
        except Exception:
            self._metrics.hot_lists.labels("internal_error").inc()
            log.exception("hot contexts not taken over")
        return None
