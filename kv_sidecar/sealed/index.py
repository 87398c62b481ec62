"""Index of the sealed manifests, and names that are remembered for a while. One event loop; bounded.

The index keeps token ids of tails only: a manifest's file is read, and verified, each time it is opened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.names import KEPT_PREFIX
from kv_sidecar.blocks import Blocks, Holder
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys
from kv_sidecar.refs import Refs
from kv_sidecar.sealed.prefixes import Beginning, PrefixIndex, beginning_of


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """One sealed manifest."""

    cache_ref: CacheRef
    tenant: TenantId
    session_id: SessionId
    keys: tuple[BlockKey, ...]
    """All its block files, all ranks."""
    num_tokens: int
    expires_at_ms: int
    size_bytes: int
    at: Beginning
    """Where it lies among others."""

    @property
    def is_kept(self) -> bool:
        """Whether it is of plain requests: no session names it."""
        return self.session_id.startswith(KEPT_PREFIX)

    @property
    def holder(self) -> Holder:
        """Kind of its references to blocks."""
        return "kept" if self.is_kept else "manifest"


def record_of(manifest: Manifest) -> ManifestRecord:
    """Return the record of a manifest."""
    return ManifestRecord(
        cache_ref=manifest.cache_ref,
        tenant=manifest.tenant,
        session_id=manifest.session_id,
        keys=all_keys(manifest),
        num_tokens=len(manifest.token_ids),
        expires_at_ms=manifest.expires_at_ms,
        size_bytes=manifest.size_bytes,
        at=beginning_of(manifest),
    )


class ManifestIndex:
    """Records by cache_ref, the one used longest ago first, and by session. A record refers to its blocks."""

    def __init__(self, blocks: Blocks, refs: Refs) -> None:
        self._blocks = blocks
        self._refs = refs
        self._records: dict[CacheRef, ManifestRecord] = {}
        self._sessions: dict[tuple[TenantId, SessionId], dict[CacheRef, None]] = {}
        self.prefixes = PrefixIndex()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, cache_ref: CacheRef) -> ManifestRecord | None:
        """Return a record, expired or not."""
        return self._records.get(cache_ref)

    def add(self, record: ManifestRecord) -> None:
        """Add a record, replacing one of the same name."""
        self._blocks.hold(record.keys, record.holder)
        if (before := self._records.get(record.cache_ref)) is not None:
            self._forget(before)
        self._records[record.cache_ref] = record
        self._sessions.setdefault((record.tenant, record.session_id), {})[record.cache_ref] = None
        self.prefixes.add(record.cache_ref, record.at)
        self._refs.sealed(record.tenant, record.cache_ref)

    def use(self, cache_ref: CacheRef) -> None:
        """Make a record the one that was used last. Harmless when there is none."""
        record = self._records.pop(cache_ref, None)
        if record is not None:
            self._records[cache_ref] = record
            refs = self._sessions[record.tenant, record.session_id]
            del refs[cache_ref]
            refs[cache_ref] = None

    def remove(self, cache_ref: CacheRef) -> None:
        """Remove a record. Harmless when there is none."""
        record = self._records.get(cache_ref)
        if record is not None:
            self._forget(record)
            self._refs.unsealed(record.tenant, cache_ref)

    def _forget(self, record: ManifestRecord) -> None:
        del self._records[record.cache_ref]
        session = (record.tenant, record.session_id)
        del self._sessions[session][record.cache_ref]
        if not self._sessions[session]:
            del self._sessions[session]
        self.prefixes.remove(record.cache_ref, record.at)
        self._blocks.let_go(record.keys, record.holder)

    def move_expiry(self, cache_ref: CacheRef, expires_at_ms: int) -> ManifestRecord:
        """Change the expiry of a record; return the new one."""
        record = self._records[cache_ref] = replace(self._records[cache_ref], expires_at_ms=expires_at_ms)
        return record

    def of_session(self, tenant: TenantId, session_id: SessionId) -> list[ManifestRecord]:
        """Return a session's records, or a group's, the one used longest ago first."""
        return [self._records[ref] for ref in self._sessions.get((tenant, session_id), ())]

    def groups(self, tenant: TenantId) -> list[SessionId]:
        """Return a tenant's groups of kept KV, for a list; looks at all sessions."""
        return [name for owner, name in self._sessions if owner == tenant and name.startswith(KEPT_PREFIX)]

    def of_refs(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> list[ManifestRecord]:
        """Return the records among `cache_refs` that are this tenant's."""
        found = (self._records.get(ref) for ref in dict.fromkeys(cache_refs))
        return [record for record in found if record is not None and record.tenant == tenant]

    def expired(self, now_ms: int) -> list[ManifestRecord]:
        """Return the records whose time is over."""
        return [record for record in self._records.values() if record.expires_at_ms <= now_ms]

    def records(self) -> list[ManifestRecord]:
        """Return all records, the one used longest ago first."""
        return list(self._records.values())

    def holders(self, key: BlockKey) -> list[ManifestRecord]:
        """Return the records that hold a block; looks at all of them, for the rare corrupt block."""
        return [record for record in self._records.values() if key in record.keys]


Name = TypeVar("Name", bound=Hashable)


class RecentNames(Generic[Name]):
    """At most `max_names` names, each for `keep_ms`; the oldest go first."""

    def __init__(self, *, keep_ms: int, max_names: int) -> None:
        self._keep_ms = keep_ms
        self._max_names = max_names
        self._added: OrderedDict[Name, int] = OrderedDict()
        """Times of the names, Unix time in ms."""

    def __len__(self) -> int:
        return len(self._added)

    def __contains__(self, name: Name) -> bool:
        """Return whether the name was remembered when old ones were last forgotten."""
        return name in self._added

    def add(self, name: Name, now_ms: int) -> None:
        """Remember a name from now on."""
        self._added[name] = now_ms
        self._added.move_to_end(name)
        self._forget_old(now_ms)
        while len(self._added) > self._max_names:
            self._added.popitem(last=False)

    def added_at_ms(self, name: Name, now_ms: int) -> int | None:
        """Return when the name was last added (Unix time in ms), or None when it is not, or no longer, remembered."""
        self._forget_old(now_ms)
        return self._added.get(name)

    def _forget_old(self, now_ms: int) -> None:
        while self._added:
            name, added_at_ms = next(iter(self._added.items()))
            if now_ms - added_at_ms < self._keep_ms:
                break
            del self._added[name]
