"""Saves in flight and saves that failed: what was announced, which blocks they count on, which ranks have sealed. Pure.

What ended without a manifest is remembered, bounded by count and age: whose it was, and why. All ranks of one attempt
name the same start: what one of them gave up is refused to the others, whoever comes first.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from contextcache.errors import ERRORS_BY_CODE, InvalidRequest
from contextcache.model import CacheRef, KVGroup, Manifest, SessionId, TenantId, plain_group
from contextcache.names import (
    KEPT_PREFIX,
    check_cache_refs,
    check_session_id,
    check_tenant,
)
from kv_sidecar.format.ids import BlockKey, check_fingerprint_text
from kv_sidecar.format.manifest import MAX_WORLD_SIZE, check_groups, rank_keys, with_files


@dataclass(frozen=True, slots=True)
class CatalogLimits:
    """Times in ms, counts in entries."""

    block_tokens: int
    save_deadline_ms: int = 120_000
    """A save ends if no block arrives for this long. Longer than an engine's pause under load."""
    max_saves: int = 1024
    """Saves in flight; a further save is refused. More than an engine has requests."""
    tombstone_ms: int = 3_600_000
    """Deleted refs and sessions refuse saves for this long. Longer than any request runs."""
    max_tombstones: int = 65_536
    """Deleted names remembered, about 10 MB; the oldest are forgotten first."""
    spare_ms: int = 300_000
    """Blocks of an incomplete context stay for this long, for the save that follows its recompute."""
    max_waiters: int = 4096
    """Calls that wait for a seal; a further call gets its answer at once."""
    max_leases: int = 1024
    """Loads that hold a lease; a further load holds its blocks until its stream ends."""
    lease_ms: int = 300_000
    """Longest life of a lease without an end. Longer than any load takes."""
    tenant_guarantee_bytes: int = 0
    """On disk, of each tenant: no other tenant's saves push them out."""


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
    tail_ref: CacheRef = ""
    """Whose tails these are; empty: its own. Of a fork that comes from a peer."""

    @property
    def is_kept(self) -> bool:
        """Whether it is of a plain request; `session_id` is its group then."""
        return self.session_id.startswith(KEPT_PREFIX)

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        check_tenant(self.tenant)
        check_session_id(self.session_id)
        check_cache_refs([self.cache_ref])
        if not 0 <= self.rank < self.world_size <= MAX_WORLD_SIZE:
            raise InvalidRequest(
                f"rank must be below world_size, and world_size at most {MAX_WORLD_SIZE}", param="rank"
            )
        if not self.token_ids:
            raise InvalidRequest("a save must have at least one token", param="token_ids")
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
                tail_ref=self.tail_ref,
            )
        )


@dataclass(frozen=True, slots=True)
class MoreTokens:
    """Tokens that one rank adds to its save."""

    tenant: TenantId
    cache_ref: CacheRef
    rank: int
    first_token: int
    """Position of the first of `token_ids`."""
    token_ids: tuple[int, ...]
    early: bool
    """Whether more tokens follow."""


@dataclass(slots=True)
class SaveInFlight:
    """One cache_ref on its way to a manifest."""

    manifest: Manifest
    deadline_ms: int
    """Unix time in ms after which it is dropped, unless it is announced again or another block comes before."""
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
    def is_kept(self) -> bool:
        """Whether it is of a plain request."""
        return self.manifest.session_id.startswith(KEPT_PREFIX)

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


HOLD_DEADLINE = "hold_deadline"
"""The connector could not hold the engine's blocks until all were copied; those that came are whole."""
SAVE_DEADLINE = "save_deadline"
"""Nothing came of it for too long."""
_REASON = re.compile(r"[a-z][a-z_]{0,39}", re.ASCII)
_COUNTED = frozenset(ERRORS_BY_CODE) | {
    # The connector's own words.
    "blocks_gone",
    HOLD_DEADLINE,
    "multimodal",
    "not_computed",
    "not_finite",
    "null_block",
    "pipeline_parallel",
    "overtaken",
    "prepare_deadline",
    "queue_full",
    "ranks_unknown",
    "staging_error",
    "prompt_embeds",
    "staging_full",
    "state_ahead",
    "weights_changed",
    # Its words for engines that it leaves alone.
    "context_parallel",
    "encoder_decoder",
    "failure_policy",
    "adapter_changed",
    "adapter_unknown",
    "adapters_mixed_up",
    "kv_dtype",
    "no_layers",
    "ranks_differ",
    "unsupported_layers",
    # Ours.
    "pull_failed",
    SAVE_DEADLINE,
}


@dataclass(frozen=True, slots=True)
class FailedSave:
    """One attempt that came to nothing."""

    tenant: TenantId
    cache_ref: CacheRef
    reason: str
    """A short fixed phrase, such as `staging_full` or the code of an error."""
    started_at_ms: int = 0
    """Unix time in ms when its turn began; 0: not known."""

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        check_tenant(self.tenant)
        check_cache_refs([self.cache_ref])
        if not _REASON.fullmatch(self.reason):
            raise InvalidRequest("reason must be one short fixed phrase", param="reason")


def counted_reason(reason: str) -> str:
    """Return the reason as a metric's label: those of a later release are one."""
    return reason if reason in _COUNTED else "other"


class FailedSaves:
    """At most `max_names`, each for `keep_ms`; the oldest go first."""

    def __init__(self, *, keep_ms: int, max_names: int) -> None:
        self._keep_ms = keep_ms
        self._max_names = max_names
        self._saves: OrderedDict[CacheRef, tuple[int, FailedSave]] = OrderedDict()

    def add(self, failed: FailedSave, now_ms: int) -> None:
        """Remember a failure from now on. The first reason of an attempt stays: what follows comes of it."""
        before = self.get(failed.cache_ref, now_ms)
        same = before is not None and (before.tenant, before.started_at_ms) == (failed.tenant, failed.started_at_ms)
        if before is not None and same and failed.started_at_ms:
            return
        self._saves[failed.cache_ref] = (now_ms, failed)
        self._saves.move_to_end(failed.cache_ref)
        while len(self._saves) > self._max_names:
            self._saves.popitem(last=False)

    def get(self, cache_ref: CacheRef, now_ms: int) -> FailedSave | None:
        """Return what failed under a name, or None when nothing did, or nothing is remembered."""
        while self._saves:
            oldest, (added_at_ms, _) = next(iter(self._saves.items()))
            if now_ms - added_at_ms < self._keep_ms:
                break
            del self._saves[oldest]
        kept = self._saves.get(cache_ref)
        return None if kept is None else kept[1]

    def is_over(self, cache_ref: CacheRef, started_at_ms: int, now_ms: int) -> bool:
        """Return whether this very attempt has failed already."""
        failed = self.get(cache_ref, now_ms)
        return failed is not None and started_at_ms > 0 and failed.started_at_ms == started_at_ms

    def discard(self, cache_ref: CacheRef) -> None:
        """Forget a failure: a new attempt has begun."""
        self._saves.pop(cache_ref, None)
