"""KV of plain requests, by group: one conversation's, as far as anybody can tell. Decides what goes; removes nothing.

Each answer leaves a longer beginning of the same conversation: what the new one begins with goes, once nobody is about
to load it. A conversation that was edited, or its sub-agents, leave several side by side, and of those the last ones
stay. What was used lives on; that is written down in the collector's pass, not while somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from contextcache.clock import Clock
from contextcache.errors import ContextExists
from contextcache.model import CacheRef, KeptGroup, KeptMiss, Manifest, SessionId, TenantId
from contextcache.names import KEPT_PREFIX
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.sealed.index import ManifestRecord
from kv_sidecar.sealed.manifests import SealedManifests
from kv_sidecar.sealed.matching import PrefixQuestion
from kv_sidecar.sealed.prefixes import beginning_of

GROUPS_SHOWN = 1000
GROUP_MAX = 64
"""Manifests in a group; the one used longest ago goes for another."""
_SHARE_USED = 4
"""Of its new life that a manifest must have lost, for its file to be written again."""


class Keeping:
    """Used from one event loop."""

    def __init__(
        self,
        manifests: SealedManifests,
        *,
        clock: Clock,
        is_wanted: Callable[[ManifestRecord], bool],
        size_bytes: Callable[[BlockKey], int | None],
    ) -> None:
        """`is_wanted`: whether somebody is loading it, or about to. `size_bytes` is of a file on disk."""
        self._size_bytes = size_bytes
        self._manifests = manifests
        self._clock = clock
        self._is_wanted = is_wanted
        self._used: dict[CacheRef, int] = {}
        """Until when it lives now."""
        self._replaced: dict[CacheRef, None] = {}
        """What goes when nobody wants it any more."""
        self._used_at_ms: dict[tuple[TenantId, SessionId], int] = {}
        self._misses: dict[tuple[TenantId, SessionId], KeptMiss] = {}
        """Of groups that are there, or were when the collector looked last."""

    def refuse_repetition(self, manifest: Manifest) -> None:
        """Raise ContextExists when exactly these tokens are kept already; they live on, as the new ones would have."""
        for cache_ref in self._manifests.index.prefixes.equals(beginning_of(manifest)):
            record = self._manifests.live(manifest.tenant, cache_ref, now_ms=self._clock.now_ms())
            if record is not None and record.is_kept and record.cache_ref not in self._replaced:
                self.use(cache_ref, manifest.expires_at_ms)
                raise ContextExists("these tokens are already kept")

    def use(self, cache_ref: CacheRef, expires_at_ms: int) -> None:
        """Note that something was used, and how long it lives for that. Nothing for what is a session's."""
        record = self._manifests.index.get(cache_ref)
        if record is None or not record.is_kept:
            return
        self._manifests.index.use(cache_ref)
        self._used_at_ms[record.tenant, record.session_id] = self._clock.now_ms()
        if expires_at_ms - record.expires_at_ms > (expires_at_ms - self._clock.now_ms()) // _SHARE_USED:
            self._used[cache_ref] = max(expires_at_ms, self._used.get(cache_ref, 0))

    def note_match(self, question: PrefixQuestion, num_tokens: int) -> None:
        """Remember where a conversation left what is kept of it, if it did."""
        group = self._manifests.index.of_session(question.tenant, question.group)
        if group and num_tokens < min(group[-1].num_tokens, question.num_tokens):
            miss = KeptMiss(num_tokens, question.num_tokens, self._clock.now_ms())
            self._misses[question.tenant, question.group] = miss

    def groups(self, tenant: TenantId, group: SessionId = "") -> list[tuple[KeptGroup, list[ManifestRecord]]]:
        """Return a tenant's groups, or one, what was used last first, `GROUPS_SHOWN` at most; `shown` has bytes."""
        index = self._manifests.index
        names = [group] if group.startswith(KEPT_PREFIX) else [] if group else index.groups(tenant)
        names.sort(key=lambda name: self._used_at_ms.get((tenant, name), 0), reverse=True)
        found = ((name, index.of_session(tenant, name)) for name in names[:GROUPS_SHOWN])
        return [(self._described(tenant, name, records), records) for name, records in found if records]

    def shown(self, groups: list[tuple[KeptGroup, list[ManifestRecord]]]) -> list[KeptGroup]:
        """Return groups with their bytes. In a thread: there may be a million files."""
        return [
            replace(group, size_bytes=sum(self._size_bytes(key) or 0 for key in {k for r in records for k in r.keys}))
            for group, records in groups
        ]

    def _described(self, tenant: TenantId, name: SessionId, records: list[ManifestRecord]) -> KeptGroup:
        return KeptGroup(
            group=name,
            num_tokens=max(record.num_tokens for record in records),
            size_bytes=0,
            expires_at_ms=max(record.expires_at_ms for record in records),
            used_at_ms=self._used_at_ms.get((tenant, name), 0),
            num_manifests=len(records),
            last_miss=self._misses.get((tenant, name)),
        )

    def take_used(self) -> list[tuple[ManifestRecord, int]]:
        """Return what was used since the last call, and until when it lives; forget what groups that are gone did."""
        for notes in (self._used_at_ms, self._misses):
            for tenant, name in [key for key in notes if not self._manifests.index.of_session(*key)]:
                del notes[tenant, name]
        used, self._used = self._used, {}
        found = [(self._manifests.index.get(cache_ref), until_ms) for cache_ref, until_ms in used.items()]
        return [(record, until_ms) for record, until_ms in found if record is not None]

    def replaced_by(self, manifest: Manifest) -> list[ManifestRecord]:
        """Return what goes now that this one is sealed; what is about to be loaded goes later."""
        self._used_at_ms[manifest.tenant, manifest.session_id] = self._clock.now_ms()
        group = self._manifests.index.of_session(manifest.tenant, manifest.session_id)
        others = [record for record in group if record.cache_ref != manifest.cache_ref]
        begun = [record for record in others if record.at.begins(manifest)]
        gone = {record.cache_ref for record in begun}
        rest = [record for record in others if record.cache_ref not in gone]
        surplus = rest[: max(len(rest) + 1 - GROUP_MAX, 0)]
        self._replaced.update(dict.fromkeys(record.cache_ref for record in (*begun, *surplus)))
        return self._unwanted([*begun, *surplus])

    def take_replaced(self) -> list[ManifestRecord]:
        """Return what had to go and can by now."""
        index = self._manifests.index
        found = [record for record in map(index.get, self._replaced) if record is not None]
        self._replaced = dict.fromkeys(record.cache_ref for record in found)
        return self._unwanted(found)

    def _unwanted(self, records: list[ManifestRecord]) -> list[ManifestRecord]:
        free = [record for record in records if not self._is_wanted(record)]
        for record in free:
            self._replaced.pop(record.cache_ref, None)
        return free
