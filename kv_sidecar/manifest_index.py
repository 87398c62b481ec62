"""What the catalog knows about all sealed manifests without reading them, and who holds which block. Pure.

Token ids are not kept here: a manifest's file is read, and verified, each time it is opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from kv_sidecar.block_key import BlockKey
from kv_sidecar.manifest import all_keys


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


def record_of(manifest: Manifest) -> ManifestRecord:
    """Return what is kept of a manifest."""
    return ManifestRecord(
        cache_ref=manifest.cache_ref,
        tenant=manifest.tenant,
        session_id=manifest.session_id,
        keys=all_keys(manifest),
        num_tokens=len(manifest.token_ids),
        expires_at_ms=manifest.expires_at_ms,
        size_bytes=manifest.size_bytes,
    )


class ManifestIndex:
    """Records by cache_ref and by session, and a count of holders for each block."""

    def __init__(self) -> None:
        self._records: dict[CacheRef, ManifestRecord] = {}
        self._sessions: dict[tuple[TenantId, SessionId], set[CacheRef]] = {}
        self._holders: Counter[BlockKey] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, cache_ref: CacheRef) -> ManifestRecord | None:
        """Return a record, expired or not."""
        return self._records.get(cache_ref)

    def add(self, record: ManifestRecord) -> None:
        """Add a record, replacing one of the same name."""
        self.remove(record.cache_ref)
        self._records[record.cache_ref] = record
        self._sessions.setdefault((record.tenant, record.session_id), set()).add(record.cache_ref)
        self._holders.update(record.keys)

    def use(self, cache_ref: CacheRef) -> None:
        """Make a record the one that was used last. Harmless when there is none."""
        record = self._records.pop(cache_ref, None)
        if record is not None:
            self._records[cache_ref] = record

    def remove(self, cache_ref: CacheRef) -> ManifestRecord | None:
        """Remove and return a record; its blocks lose one holder."""
        record = self._records.pop(cache_ref, None)
        if record is None:
            return None
        session = (record.tenant, record.session_id)
        self._sessions[session].discard(cache_ref)
        if not self._sessions[session]:
            del self._sessions[session]
        for key in record.keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
        return record

    def move_expiry(self, cache_ref: CacheRef, expires_at_ms: int) -> None:
        """Change when a record expires."""
        self._records[cache_ref] = replace(self._records[cache_ref], expires_at_ms=expires_at_ms)

    def of_session(self, tenant: TenantId, session_id: SessionId) -> list[ManifestRecord]:
        """Return a session's records."""
        return [self._records[ref] for ref in sorted(self._sessions.get((tenant, session_id), ()))]

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

    def num_holders(self, key: BlockKey) -> int:
        """Return how many manifests hold the block."""
        return self._holders[key]

    def is_held(self, key: BlockKey) -> bool:
        """Return whether any manifest holds the block."""
        return key in self._holders

    def holders(self, key: BlockKey) -> list[ManifestRecord]:
        """Return the records that hold a block; looks at all of them, for the rare corrupt block."""
        return [record for record in self._records.values() if key in record.keys]
