"""Which contexts leave the shared store when it is fuller than it may be: pure, over what a listing tells.

A session leaves as a whole, the one used longest ago first: its generations share blocks, so one of them alone frees
little. Kept conversations go before any of them. What leaves can be written again, and nothing that is saved is ever
refused for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.names import KEPT_PREFIX

UPPER_MARK, LOWER_MARK = 0.95, 0.9


@dataclass(slots=True)
class StoredSession:
    """One context in the store."""

    cache_refs: set[CacheRef] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    """Names of the blocks that it holds, as the store has them."""
    used_at_ms: int = 0
    """When it was last written or noted as used, by the store's clock."""


class Shelf:
    """What a tenant has in the store."""

    def __init__(self, sizes_bytes: Mapping[str, int], sessions: Mapping[SessionId, StoredSession]) -> None:
        """`sizes_bytes`: of all its block files, those that no session holds as well."""
        self.sessions = dict(sessions)
        self.size_bytes = sum(sizes_bytes.values())
        self._sizes_bytes = sizes_bytes
        self._num_holders = Counter(name for session in sessions.values() for name in session.files)

    def take(self, session_id: SessionId) -> StoredSession:
        """Remove a session, and the bytes that only it held."""
        session = self.sessions.pop(session_id)
        for name in session.files:
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                self.size_bytes -= self._sizes_bytes.get(name, 0)
        return session


@dataclass(frozen=True, slots=True)
class Leaving:
    """A session that is to leave."""

    tenant: TenantId
    session_id: SessionId
    session: StoredSession


def leaving(shelves: Mapping[TenantId, Shelf], *, limit_bytes: int, tenant_limit_bytes: int) -> list[Leaving]:
    """Take off the shelves what has to leave: of each tenant that has too much, then of all. 0: no limit."""
    gone: list[Leaving] = []
    for tenant, shelf in shelves.items():
        gone += _down_to({tenant: shelf}, tenant_limit_bytes, lambda shelf=shelf: shelf.size_bytes)  # type: ignore[misc]
    return gone + _down_to(shelves, limit_bytes, lambda: _total(shelves.values()))


def _down_to(shelves: Mapping[TenantId, Shelf], limit_bytes: int, size_bytes: Callable[[], int]) -> list[Leaving]:
    if not limit_bytes or size_bytes() <= limit_bytes * UPPER_MARK:
        return []
    by_use = sorted(
        (not session_id.startswith(KEPT_PREFIX), session.used_at_ms, tenant, session_id)
        for tenant, shelf in shelves.items()
        for session_id, session in shelf.sessions.items()
    )
    gone = []
    for *_, tenant, session_id in by_use:
        if size_bytes() <= limit_bytes * LOWER_MARK:
            break
        gone.append(Leaving(tenant, session_id, shelves[tenant].take(session_id)))
    return gone


def _total(shelves: Iterable[Shelf]) -> int:
    return sum(shelf.size_bytes for shelf in shelves)
