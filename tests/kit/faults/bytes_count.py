"""Counts a quiet BytesWorld: every file and byte of every tier against what live sessions name. Reads files itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from contextcache.errors import ContextCacheError, ContextExpired, ContextNotFound
from contextcache.model import CacheRef, CacheSessionMetadata, Manifest, SessionId
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import block_key, block_meta, decode_manifest, num_files
from tests.kit.faults.arena import copies
from tests.kit.faults.bytes_world import (
    LEASE_MS,
    ORPHAN_AFTER_S,
    SAVE_DEADLINE_S,
    SHORT_TTL_S,
    BytesWorld,
    Pod,
)
from tests.kit.kv_blocks import TENANT, fill_of, open_block_file

_SLACK_S = 0.2
"""Between two clocks' readings of the same moment: a file's time and a process's."""


@dataclass
class Count:
    """What was found. `wrong` is empty when every byte is accounted for and nothing live is lost."""

    wrong: list[str] = field(default_factory=list)
    num_sessions: int = 0
    num_manifests: int = 0
    num_bytes: int = 0
    num_orphaned: int = 0

    def add(self, other: Count) -> None:
        self.wrong += other.wrong
        self.num_sessions += other.num_sessions
        self.num_manifests += other.num_manifests
        self.num_bytes += other.num_bytes
        self.num_orphaned += other.num_orphaned


async def count_quiet(world: BytesWorld) -> Count:
    """Let leases, short lives and unsealed saves end, wait for one collector pass at each pod, and count."""
    await asyncio.sleep(max(LEASE_MS / 1000, SHORT_TTL_S, SAVE_DEADLINE_S))
    # Whatever was named until now, and asked about, is asked about again so much later.
    quiet_since_s = time.time() + ORPHAN_AFTER_S + _SLACK_S
    rows = await _live_rows(world)
    total = Count(num_sessions=len(rows))
    for pod in world.pods:
        await pod.await_pass(quiet_since_s)
        total.add(await asyncio.to_thread(_count_pod, world, pod, rows))
        await _compare_statistics(pod, total)
    total.wrong += _lost_sessions(world, rows)
    return total


async def _live_rows(world: BytesWorld) -> Mapping[SessionId, CacheSessionMetadata]:
    rows = {}
    for session_id in world.ledger.sessions:
        try:
            row = await world.client.get_session_metadata(TENANT, session_id)
        except (ContextNotFound, ContextExpired):
            continue
        rows[session_id] = row
    return rows


def _lost_sessions(world: BytesWorld, rows: Mapping[SessionId, CacheSessionMetadata]) -> list[str]:
    """Sessions that were acknowledged, not deleted and have time left, and are not at their generation."""
    wrong = []
    for session_id, known in world.ledger.sessions.items():
        if known.deleted or not known.generation or known.expires_at_ms <= time.time() * 1000:
            continue
        row = rows.get(session_id)
        if row is None or row.generation < known.generation:
            wrong.append(f"session {session_id} was acknowledged at generation {known.generation} and is {row}")
    return wrong


def _count_pod(world: BytesWorld, pod: Pod, rows: Mapping[SessionId, CacheSessionMetadata]) -> Count:
    count = Count(num_orphaned=round(pod.counted("orphaned_contexts_total")))
    manifests = _read_manifests(pod, count)
    named = {ref for row in rows.values() for ref in row.cache_refs}
    count.wrong += [f"{pod.name}: {ref} is stored and no session names it" for ref in manifests.keys() - named]
    wanted = _wanted(world, pod, named)
    count.wrong += [f"{pod.name}: {ref} was sealed, is named and is gone" for ref in wanted - manifests.keys()]
    expected = {
        block_key(manifest, index, 0): (manifest, index)
        for manifest in manifests.values()
        for index in range(num_files(manifest))
    }
    on_disk = {path: _key_of(path) for kind in ("blocks", "tails") for path in _files(pod.data / kind)}
    count.wrong += [f"{pod.name}: {path} is reachable from no manifest" for path in _strays(on_disk, expected)]
    found = {key: path for path, key in on_disk.items() if key is not None}
    count.wrong += [f"{pod.name}: {key} of a manifest is not there" for key in expected.keys() - found.keys()]
    for key in expected.keys() & found.keys():
        count.wrong += _content_faults(found[key], *expected[key])
    count.wrong += _memory_faults(pod, manifests.values(), found)
    for left in ("tmp", "quarantine"):
        count.wrong += [f"{pod.name}: {path} was left" for path in _files(pod.data / left)]
    for ref, manifest in manifests.items():
        keys = [block_key(manifest, index, 0) for index in range(num_files(manifest))]
        size = sum(found[key].stat().st_size for key in keys if key in found)
        if size != manifest.size_bytes:
            count.wrong.append(f"{pod.name}: {ref} says {manifest.size_bytes} bytes and has {size}")
    count.num_manifests = len(manifests)
    count.num_bytes = sum(path.stat().st_size for path in on_disk)
    return count


def _wanted(world: BytesWorld, pod: Pod, named: set[CacheRef]) -> set[CacheRef]:
    """KV whose seal was acknowledged, that a live session names and that nobody asked to be removed."""
    now_ms = time.time() * 1000
    sessions = world.ledger.sessions
    return {
        ref
        for (holder, ref), new in world.ledger.sealed.items()
        if holder == pod.name and ref in named and sessions[new.session_id].expires_at_ms > now_ms
    }


def _read_manifests(pod: Pod, count: Count) -> dict[CacheRef, Manifest]:
    manifests = {}
    for path in _files(pod.data / "manifests"):
        try:
            manifest = decode_manifest(path.read_bytes())
        except ContextCacheError as exc:
            count.wrong.append(f"{pod.name}: {path} is no manifest: {exc}")
        else:
            manifests[manifest.cache_ref] = manifest
    return manifests


def _strays(on_disk: Mapping[Path, BlockKey | None], expected: Mapping[BlockKey, object]) -> list[Path]:
    return [path for path, key in on_disk.items() if key not in expected]


def _content_faults(path: Path, manifest: Manifest, index: int) -> list[str]:
    """Compare a block file with what its tokens say it must hold, byte for byte."""
    meta = block_meta(manifest, index, 0)
    try:
        file = open_block_file(path)
        file.verify(meta)
        same = bool(np.all(file.pages == fill_of(meta)))
        file.close()
    except ContextCacheError as exc:
        return [f"{path} is bad: {exc}"]
    return [] if same else [f"{path} holds other pages"]


def _memory_faults(pod: Pod, manifests: Iterable[Manifest], found: Mapping[BlockKey, Path]) -> list[str]:
    """Compare what lies in slots with the files on disk. Everything is asked for, and then memory holds that alone."""
    wrong = []
    if lent_bytes := pod.counted("lent_bytes"):
        wrong.append(f"{pod.name}: {lent_bytes:.0f} bytes are lent, and nobody saves")
    if pod.engine.arena is None:
        return wrong
    in_memory: dict[BlockKey, int] = {}
    for manifest in manifests:
        with copies(pod.engine.client, pod.engine.arena, manifest) as slots:
            in_memory |= {key: len(copy) for key, copy in slots.items()}
            wrong += [
                f"{pod.name}: {key} differs from the disk's"
                for key, copy in slots.items()
                if key in found and copy != found[key].read_bytes()
            ]
    if (size_bytes := sum(in_memory.values())) != (said_bytes := pod.counted("bytes", tier="host")):
        wrong.append(f"{pod.name}: has {said_bytes:.0f} bytes in memory, and manifests reach {size_bytes}")
    return wrong


async def _compare_statistics(pod: Pod, count: Count) -> None:
    """Compare what the sidecar says it has with what lies on disk."""
    stats = await pod.client.stats()
    disk_bytes = sum(path.stat().st_size for kind in ("blocks", "tails") for path in _files(pod.data / kind))
    (said_bytes,) = (tier.size_bytes for tier in stats.tiers if tier.tier == pb.TIER_DISK)
    if said_bytes != disk_bytes:
        count.wrong.append(f"{pod.name}: says {said_bytes} bytes and has {disk_bytes} on disk")
    usage = await pod.client.tenant_usage(TENANT)
    if usage.size_bytes != disk_bytes:
        count.wrong.append(f"{pod.name}: says the tenant has {usage.size_bytes} bytes, and it has {disk_bytes}")


def _key_of(path: Path) -> BlockKey | None:
    return BlockKey.from_file_name(path.name)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())
