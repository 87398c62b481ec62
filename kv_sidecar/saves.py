"""Saves in flight: what was announced, which blocks they count on, which ranks have sealed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from contextcache.errors import InvalidRequest
from contextcache.model import (
    CACHE_REF_PATTERN,
    SESSION_ID_PATTERN,
    TENANT_PATTERN,
    CacheRef,
    KVGroup,
    Manifest,
    SessionId,
    TenantId,
    plain_group,
)
from kv_sidecar.block_key import BlockKey
from kv_sidecar.context_files import check_groups, with_files
from kv_sidecar.fingerprint import check_fingerprint_text
from kv_sidecar.manifest import MAX_WORLD_SIZE, rank_keys


@dataclass(frozen=True, slots=True)
class NewSave:
    """What one rank announces."""

    tenant: TenantId
    session_id: SessionId
    cache_ref: CacheRef
    fingerprint: str
    rank: int
    world_size: int
    token_ids: tuple[int, ...]
    expires_at_ms: int
    started_at_ms: int = 0
    """Unix time in ms when the turn began; 0: not known."""
    groups: tuple[KVGroup, ...] = ()
    """What the KV is of; none: a plain engine's, in blocks of the sidecar's size."""
    early: bool = False
    """Whether these are files ahead of the save itself: its tokens begin with these."""

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        if not TENANT_PATTERN.fullmatch(self.tenant):
            raise InvalidRequest("not a tenant", param="tenant")
        if not SESSION_ID_PATTERN.fullmatch(self.session_id):
            raise InvalidRequest("not a session_id", param="session_id")
        if not CACHE_REF_PATTERN.fullmatch(self.cache_ref):
            raise InvalidRequest("not a cache_ref", param="cache_ref")
        if not 0 <= self.rank < self.world_size <= MAX_WORLD_SIZE:
            raise InvalidRequest("rank and world_size do not fit", param="rank")
        if not self.token_ids:
            raise InvalidRequest("a save needs at least one token", param="token_ids")
        check_fingerprint_text(self.fingerprint)

    def manifest(self, *, block_tokens: int) -> Manifest:
        """Return the manifest to be; its size is known once its blocks are there. Raises InvalidRequest.

        `block_tokens`: the least that a whole block holds.
        """
        groups = self.groups or (plain_group(len(self.token_ids), block_tokens),)
        check_groups(groups, len(self.token_ids), block_tokens_min=block_tokens)
        return with_files(
            Manifest(
                cache_ref=self.cache_ref,
                tenant=self.tenant,
                session_id=self.session_id,
                fingerprint=self.fingerprint,
                token_ids=self.token_ids,
                groups=groups,
                files=(),
                world_size=self.world_size,
                expires_at_ms=self.expires_at_ms,
            )
        )


@dataclass(slots=True)
class SaveInFlight:
    """One cache_ref on its way to a manifest."""

    manifest: Manifest
    deadline_ms: int
    """Unix time in ms after which it is dropped, unless another block comes before."""
    started_at_ms: int = 0
    """Unix time in ms when its turn began, the same for all ranks; 0: not known."""
    prepared: set[int] = field(default_factory=set)
    sealed: set[int] = field(default_factory=set)
    publishing: bool = False
    """Set while its manifest is being written: too late to drop it for its deadline."""
    early: bool = False
    """Whether only files ahead of it were announced so far: it cannot be sealed, and its end is nobody's loss."""
    dropped: bool = False
    """Set when it ends without a manifest: what still comes in for it is removed again."""

    @property
    def is_complete(self) -> bool:
        """Whether every rank has sealed."""
        return len(self.sealed) == self.manifest.world_size


class SavesInFlight:
    """All saves, and the blocks that must not be collected because a save counts on them."""

    def __init__(self) -> None:
        self._saves: dict[CacheRef, SaveInFlight] = {}
        self._pins: Counter[BlockKey] = Counter()

    def __len__(self) -> int:
        return len(self._saves)

    def __iter__(self) -> Iterator[SaveInFlight]:
        return iter(list(self._saves.values()))

    def get(self, cache_ref: CacheRef) -> SaveInFlight | None:
        """Return the save of a cache_ref."""
        return self._saves.get(cache_ref)

    def prepare(self, save: SaveInFlight, rank: int) -> None:
        """Add a rank, and the save itself when it is the first; pins the rank's blocks. Harmless when repeated."""
        self._saves[save.manifest.cache_ref] = save
        if rank not in save.prepared:
            save.prepared.add(rank)
            self._pins.update(rank_keys(save.manifest, rank))

    def become(self, save: SaveInFlight, manifest: Manifest) -> None:
        """Give a save other tokens; what it does not count on any more is left to the collector."""
        before = [key for rank in save.prepared for key in rank_keys(save.manifest, rank)]
        save.manifest = manifest
        self._pins.update(key for rank in save.prepared for key in rank_keys(manifest, rank))
        self._unpin(before)

    def _unpin(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def remove(self, save: SaveInFlight) -> list[BlockKey]:
        """End a save; return the blocks it no longer pins. Harmless when repeated."""
        if self._saves.get(save.manifest.cache_ref) is not save:
            return []
        del self._saves[save.manifest.cache_ref]
        keys = [key for rank in save.prepared for key in rank_keys(save.manifest, rank)]
        self._unpin(keys)
        return keys

    def is_pinned(self, key: BlockKey) -> bool:
        """Return whether a save counts on the block."""
        return key in self._pins

    def of_session(self, tenant: TenantId, session_id: SessionId) -> list[SaveInFlight]:
        """Return the saves of a session."""
        return [save for save in self if (save.manifest.tenant, save.manifest.session_id) == (tenant, session_id)]
