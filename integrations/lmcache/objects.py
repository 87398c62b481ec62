"""LMCache's objects as KV of a sidecar's: bytes under a key, by the calls that an engine's connector makes.

One object is one manifest with one file: its bytes are opaque pages, its tokens eight numbers made of its key, its
group its own. The sidecar has no call for LMCache alone. It treats objects as kept conversations: quota, TTL, a
checksum at each load, and eviction before contexts, the least recently used first.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contextcache.errors import CacheRefNotFound, ContextExists, CorruptBlock
from contextcache.names import OBJECT_PREFIX
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.rpc import FRAME_BYTES
from kv_sidecar.client import BlockFileWriter, BlockMeta, EngineSidecarClient, pack_token_ids, parse_block_file

FINGERPRINT = hashlib.sha256(b'{"format":"lmcache-0.5"}').hexdigest()
"""Bytes of another minor release of LMCache's may mean something else: they are never found."""


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """Name of one of LMCache's objects in the sidecar."""

    cache_ref: str
    group: str
    token_ids: tuple[int, ...]
    """Eight numbers of 32 bits: as good as the key itself, and fewer than a block of any engine's (a tail)."""

    @classmethod
    def of(cls, key: Any) -> ObjectAddress:
        """Name the object of a key (lmcache 0.5.6 v1/distributed/api.py ObjectKey). Every field of the key counts."""
        fields = [key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash.hex()]
        digest = hashlib.sha256(json.dumps(fields).encode()).digest()
        name = digest.hex()[:32]
        token_ids = tuple(int.from_bytes(digest[start : start + 4], "little") for start in range(0, 32, 4))
        return cls(f"ref_{name}", f"{OBJECT_PREFIX}{name}", token_ids)


class SidecarObjects:
    """Bytes under a key, in the sidecar. Safe to use from several threads; each call is one object's."""

    def __init__(
        self, sidecar: str, *, tenant: str = "lmcache", ttl_s: int = 7 * 24 * 3600, timeout_ms: int = 10_000
    ) -> None:
        """`sidecar`: `unix:///path` or `host:port`; `tenant`: has the objects in its quota and its lists."""
        self._tenant = tenant
        self._ttl_s = ttl_s
        self._timeout_s = timeout_ms / 1000
        self._client = EngineSidecarClient(sidecar, timeout_s=self._timeout_s)

    def put(self, key: Any, data: memoryview) -> int:
        """Save an object unless it is there; return its bytes. Raises ContextCacheError: it is not there, then."""
        stored = ObjectAddress.of(key)
        try:
            self._client.prepare_save(
                pb.PrepareSaveRequest(
                    tenant=self._tenant,
                    session_id=stored.group,
                    cache_ref=stored.cache_ref,
                    fingerprint=FINGERPRINT,
                    world_size=1,
                    token_ids=pack_token_ids(stored.token_ids),
                    expires_at_ms=time.time_ns() // 1_000_000 + self._ttl_s * 1000,
                ),
                self._timeout_s,
            )
        except ContextExists:
            return len(data)
        writer = BlockFileWriter(self._meta(stored), pages_bytes=len(data))
        writer.begin(memoryview(bytearray(writer.size_bytes)))
        writer.pages.data[:] = data
        self._client.save_blocks(_frames(stored.cache_ref, writer.finish()), self._timeout_s)
        self._client.seal(stored.cache_ref, 0, self._timeout_s)
        return len(data)

    def has(self, key: Any) -> bool:
        """Return whether it can be loaded. Raises ContextCacheError but for a miss."""
        try:
            self._client.get_manifest(self._tenant, ObjectAddress.of(key).cache_ref, self._timeout_s)
        except CacheRefNotFound:
            return False
        return True

    def get(self, key: Any, room: memoryview) -> None:
        """Fill `room` with an object of its size, verified. Raises ContextCacheError; `room` is as it was, then."""
        stored = ObjectAddress.of(key)
        request = pb.LoadBlocksRequest(
            tenant=self._tenant,
            cache_ref=stored.cache_ref,
            fingerprint=FINGERPRINT,
            rank=0,
            block_indices=[0],
        )
        data = bytearray()
        for answer in self._client.load_blocks(request, self._timeout_s):
            data += answer.frame
        file = parse_block_file(data)
        file.verify(self._meta(stored))
        if file.pages.nbytes != len(room):
            raise CorruptBlock("the object has a different size")
        room[:] = file.pages.data

    def delete(self, key: Any) -> int:
        """Delete it in all tiers, and refuse saves of it that come late; return the bytes freed."""
        return self._client.delete_context(self._tenant, cache_refs=(ObjectAddress.of(key).cache_ref,))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _meta(self, stored: ObjectAddress) -> BlockMeta:
        return BlockMeta("tail", stored.cache_ref, "", self._tenant, FINGERPRINT, 0, stored.token_ids)


def _frames(cache_ref: str, file: memoryview) -> Iterator[pb.SaveBlocksRequest]:
    for start in range(0, len(file), FRAME_BYTES):
        frame = bytes(file[start : start + FRAME_BYTES])
        is_last = start + FRAME_BYTES >= len(file)
        yield pb.SaveBlocksRequest(cache_ref=cache_ref, rank=0, block_index=0, frame=frame, last_frame=is_last)
