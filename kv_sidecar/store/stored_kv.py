"""What the store that all pods share has: KV as objects by tenant, read and written with the tenant's key.

    <tenant>/manifests/<cache_ref>            a manifest, as its file on disk
    <tenant>/blocks/<file name>               a block file or tail, as on disk; contexts that begin alike share it
    <tenant>/holders/<file name>/<session>    empty: a manifest of this session has that block
    <tenant>/sessions/<session>/<cache_ref>   empty: this manifest is of that session

With keys (encryption.py) manifests and blocks are encrypted, and `<file name>` is what the key makes of it. In which
order they come and go are the rules in writer.py; docs/project/formats.md has the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TypeVar

from contextcache.errors import CacheRefNotFound, KeyNotAtHand
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import decode_manifest
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.sealed.manifests import MAX_FILE_BYTES
from kv_sidecar.store.encryption import OVERHEAD_BYTES_MAX, StoreKeys, TenantKey, opened
from kv_sidecar.store.objects import ObjectStore
from kv_sidecar.tiers.store import BLOCK_BYTES_MAX, Buffer

Item = TypeVar("Item")
_CALLS_AT_ONCE = 16
"""Calls without bytes."""
_LISTED_MAX = 1000
"""Of a group: several pods may each have the most that a group has."""


class StoredKV:
    """Manifests and blocks in the store. Keeps nothing; used from one event loop."""

    def __init__(self, objects: ObjectStore, *, keys: StoreKeys | None, metrics: SidecarMetrics) -> None:
        """`keys`: what objects are encrypted with; None: they are not."""
        self._objects = objects
        self._keys = keys
        self._metrics = metrics

    async def block(self, tenant: TenantId, key: BlockKey) -> Buffer:
        """Return a block file, unverified. Raises CacheRefNotFound, CorruptBlock, SidecarUnavailable."""
        for file_name in self.file_names(tenant, key):
            data = await self._get(block_name(tenant, file_name), limit_bytes=BLOCK_BYTES_MAX)
            if data is not None:
                self._metrics.store_bytes.labels("read").inc(len(data))
                return data
        raise CacheRefNotFound("a block is missing in the shared store")

    async def read(self, name: str) -> Manifest | None:
        """Return the manifest under an object's name, or None. Raises CorruptBlock, SidecarUnavailable."""
        data = await self._get(name, limit_bytes=MAX_FILE_BYTES)
        # In a thread, as the names of a long context's blocks take a while.
        return None if data is None else await asyncio.to_thread(decode_manifest, memoryview(data))

    async def _get(self, name: str, *, limit_bytes: int) -> Buffer | None:
        data = await self._objects.get(name, limit_bytes=limit_bytes + OVERHEAD_BYTES_MAX)
        if data is None:
            return None
        try:
            if self._keys is None:
                return opened(None, name, memoryview(data))
            return await asyncio.to_thread(opened, self._keys.of(name.partition("/")[0]), name, memoryview(data))
        except KeyNotAtHand:
            self._metrics.store_unopened.inc()
            raise

    def file_names(self, tenant: TenantId, key: BlockKey) -> list[str]:
        """Return what a block may be called in the store, as what is written now would be first."""
        if self._keys is None:
            return [key.file_name]
        return [tenant_key.hidden(key.file_name) for tenant_key in self._keys.of(tenant)]

    def names_of(self, tenant: TenantId, keys: Iterable[BlockKey]) -> set[str]:
        """Return all names that these blocks may have."""
        return {name for key in keys for name in self.file_names(tenant, key)}

    async def put(self, name: str, data: Buffer, key: TenantKey | None) -> None:
        """Write an object, encrypted with a key if there is one. Raises SidecarUnavailable."""
        if key is not None:
            data = await asyncio.to_thread(key.encrypt, name, data)
        await self._objects.put(name, data)

    async def refs_of(self, tenant: TenantId, session_id: SessionId) -> set[CacheRef]:
        """Return the manifests that the store lists of a session. Raises SidecarUnavailable."""
        return {ref_of(it.name) async for it in self._objects.listed(f"{tenant}/sessions/{session_id}/")}

    async def used(self, tenant: TenantId, group: SessionId) -> dict[CacheRef, int]:
        """Return what the store lists of a group, the one used longest ago first, and when that was (Unix time in ms).

        `_LISTED_MAX` at most.
        """
        there = []
        async with aclosing(self._objects.listed(f"{tenant}/sessions/{group}/")) as listed:
            async for it in listed:
                there.append((it.modified_at_ms, ref_of(it.name)))
                if len(there) == _LISTED_MAX:
                    break
        return {ref: used_at_ms for used_at_ms, ref in sorted(there)}


async def each(
    items: Iterable[Item], call: Callable[[Item], Awaitable[None]], *, at_once: int = _CALLS_AT_ONCE
) -> None:
    """Make a call for each, some at a time, until one fails; when those that began have ended, raise what it did."""
    slots, has_failed = asyncio.Semaphore(at_once), False

    async def one(item: Item) -> None:
        nonlocal has_failed
        async with slots:
            if has_failed:
                return
            try:
                await call(item)
            except BaseException:
                has_failed = True
                raise

    ends = await asyncio.gather(*map(one, items), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def manifest_name(tenant: TenantId, cache_ref: CacheRef) -> str:
    """Return the name of a manifest's object."""
    return f"{tenant}/manifests/{cache_ref}"


def block_name(tenant: TenantId, file_name: str) -> str:
    """Return the name of a block file's object, by what the file is called in the store."""
    return f"{tenant}/blocks/{file_name}"


def holder_name(tenant: TenantId, file_name: str, session_id: SessionId) -> str:
    """Return the name of the object that says that a session has a block."""
    return f"{tenant}/holders/{file_name}/{session_id}"


def session_name(tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> str:
    """Return the name of the object that says that a manifest is of a session."""
    return f"{tenant}/sessions/{session_id}/{cache_ref}"


def ref_of(name: str) -> CacheRef:
    """Return the last part of an object's name."""
    return name.rpartition("/")[2]
