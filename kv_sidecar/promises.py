"""Promises: sealed KV that stays until a time, whatever else needs its room. Grants what can be kept, denies the rest.

A promise belongs to a manifest and is written with it, so it survives the process. It ends at its time, with a delete,
or when a longer manifest of its session has a promise that covers it. A promise counts the blocks that no other promise
counts already.

Promises have at most a share of each tier, so that saves and loads always find room. A tenant gets no more than is left
free by all tenants (dynamic thresholds): one tenant has at most half, two a third each, and the next one always finds
some. On disk a tenant may also promise at most half of its quota, so that its turns go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contextcache.model import NO_PROMISE, Manifest, Promise, TenantId
from kv_sidecar.blocks import Blocks, PromiseKind
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys
from kv_sidecar.limits import Limits
from kv_sidecar.runtime import Runtime
from kv_sidecar.saves import NewSave
from kv_sidecar.sealed.manifests import ManifestRecord, Manifests

NO_ROOM, TENANT_SHARE, NOT_SAVED = "no_room", "tenant_share", "not_saved"


@dataclass(eq=False)
class Promises:
    """Decides on promises. Used from one event loop."""

    runtime: Runtime
    manifests: Manifests
    blocks: Blocks
    limits: Limits

    def is_promised(self, record: ManifestRecord) -> bool:
        """Return whether nothing may evict a record now."""
        return self.runtime.clock.now_ms() < record.promise.until_ms

    def at_seal(self, manifest: Manifest, new: NewSave) -> Manifest:
        """Return a manifest that is about to be written with the promise that its save asked for."""
        if not new.retain_ms:
            return manifest
        promise = self.granted(manifest.tenant, all_keys(manifest), retain_ms=new.retain_ms, pinned=new.pinned)
        expires_at_ms = max(manifest.expires_at_ms, promise.until_ms) if new.is_kept else manifest.expires_at_ms
        return replace(manifest, promise=promise, expires_at_ms=expires_at_ms)

    def later(self, record: ManifestRecord, *, retain_ms: int, pinned: bool) -> ManifestRecord:
        """Return a sealed record with the promise that it has from now on. An earlier promise never shrinks."""
        before = record.promise if self.is_promised(record) else NO_PROMISE
        pinned = pinned or before.pinned
        promise = self.granted(record.tenant, record.keys, retain_ms=retain_ms, pinned=pinned)
        until_ms, pinned = max(promise.until_ms, before.until_ms), promise.pinned or before.pinned
        promise = Promise(until_ms, pinned, promise.reason)
        expires_at_ms = max(record.expires_at_ms, promise.until_ms) if record.is_kept else record.expires_at_ms
        return replace(record, promise=promise, expires_at_ms=expires_at_ms)

    def granted(self, tenant: TenantId, keys: Sequence[BlockKey], *, retain_ms: int, pinned: bool) -> Promise:
        """Return a promise on these blocks, or the reason for its denial. Takes no room yet.

        KV for which memory has no room is promised on disk.
        """
        self.manifests.end_promises()
        reason = self.refusal(tenant, keys, pinned=pinned)
        if pinned and (reason or not all(self.blocks.get(key).in_memory for key in keys)):
            return self.granted(tenant, keys, retain_ms=retain_ms, pinned=False)
        return Promise(reason=reason) if reason else Promise(self.runtime.clock.now_ms() + retain_ms, pinned)

    def count(self, promise: Promise) -> None:
        """Count an answer."""
        self.runtime.metrics.promises.labels(promise.reason or "accepted").inc()

    def refusal(self, tenant: TenantId, keys: Sequence[BlockKey], *, pinned: bool) -> str:
        """Return why there is no room for a promise on these blocks; empty: there is."""
        held = [self.blocks.get(key) for key in keys]
        share = self.limits.promised_share
        limits_bytes: dict[PromiseKind, int] = {"promise": int(share * self.blocks.usage().limit_bytes)}
        if pinned:  # engines are lent up to half of the memory, and loads need some too
            limits_bytes["pin"] = int(share / 2 * self.blocks.memory_usage().limit_bytes)
        for kind, limit_bytes in limits_bytes.items():
            wanted = sum(block.stored_bytes or 0 for block in held if not getattr(block.refs, kind))
            free_bytes = limit_bytes - self.blocks.all_promised_bytes(kind)
            if not wanted:
                continue
            if wanted > free_bytes:
                return NO_ROOM
            _, quota_bytes = self.blocks.tenant_bytes(tenant)
            tenant_bytes = self.blocks.promised_bytes(kind, tenant) + wanted
            is_over_quota = kind == "promise" and quota_bytes and tenant_bytes > quota_bytes // 2
            if is_over_quota or tenant_bytes > free_bytes - wanted:
                return TENANT_SHARE
        return ""

    def end_covered(self, manifest: Manifest) -> None:
        """End the promises of a session that the promise of its newly sealed manifest covers."""
        promise = manifest.promise
        for record in self.manifests.of_session(manifest.tenant, manifest.session_id) if promise.until_ms else ():
            before = record.promise
            lasts = 0 < before.until_ms <= promise.until_ms and promise.pinned >= before.pinned
            if lasts and record.cache_ref != manifest.cache_ref and record.at.is_plain and record.at.begins(manifest):
                self.manifests.end_promise(record)
