"""Announcements of an engine, and the save that grows from them. Pure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from contextcache.errors import InvalidRequest
from contextcache.hints import RETAIN_MS_MAX
from contextcache.model import CacheRef, KVFile, KVGroup, Manifest, SessionId, TenantId, plain_group
from contextcache.names import (
    KEPT_PREFIX,
    check_cache_refs,
    check_session_id,
    check_tenant,
)
from kv_sidecar.format.block_file import BlockMeta, file_meta
from kv_sidecar.format.ids import BlockKey, check_fingerprint_text, pack_token_ids
from kv_sidecar.format.manifest import check_groups, check_rank, context_files, file_key, next_files

Source: TypeAlias = Literal["", "peer", "object"]
"""Origin of KV that a pull brings; empty: the engine of this pod."""


@dataclass(frozen=True, slots=True)
class NewSave:
    """Announcement of one rank."""

    tenant: TenantId
    session_id: SessionId
    """Session, or group of kept KV."""
    cache_ref: CacheRef
    fingerprint: str
    rank: int
    world_size: int
    token_ids: tuple[int, ...]
    expires_at_ms: int
    started_at_ms: int = 0
    """Unix time in ms when the turn began; 0: unknown."""
    groups: tuple[KVGroup, ...] = ()
    """Groups of the KV; none: the one group of a plain engine, in blocks of the sidecar's size."""
    early: bool = False
    """Whether more tokens follow, by MoreTokens."""
    tail_ref: CacheRef = ""
    """Owner of its tails; empty: itself. A fork that a peer sends has the tails of its source."""
    source: Source = ""
    interrupted: bool = False
    """Whether its turn has ended without a commit."""
    retain_ms: int = 0
    """Minimum lifetime that is asked for, from the seal on; 0: none."""
    pinned: bool = False
    """Whether it is asked for in memory too."""
    placements: tuple[str, ...] = ()
    """Placements of kept KV that are carried out after its seal."""

    @property
    def is_expendable(self) -> bool:
        """Whether it makes room for no context: see ManifestRecord."""
        return self.is_kept or self.interrupted

    @property
    def is_kept(self) -> bool:
        """Whether it is of a plain request."""
        return self.session_id.startswith(KEPT_PREFIX)

    def checked(self, *, block_tokens: int) -> NewSave:
        """Return it with its groups filled in. Raises InvalidRequest.

        `block_tokens`: the least that a whole block holds.
        """
        check_tenant(self.tenant)
        check_session_id(self.session_id)
        check_cache_refs([self.cache_ref])
        check_rank(self.rank, self.world_size)
        if not self.token_ids:
            raise InvalidRequest("a save must have at least one token", param="token_ids")
        check_fingerprint_text(self.fingerprint)
        check_retain_ms(self.retain_ms)
        groups = self.groups or (plain_group(len(self.token_ids), block_tokens),)
        check_groups(groups, len(self.token_ids), block_tokens_min=block_tokens)
        return replace(self, groups=groups)

    def terms(self) -> NewSave:
        """Return the fields on which all ranks of a save must agree beside the tokens."""
        groups = tuple(replace(group, runs=()) for group in self.groups) if _grows(self.groups) else self.groups
        own = replace(self, rank=0, token_ids=(), expires_at_ms=0, started_at_ms=0, interrupted=False)
        return replace(own, groups=groups, early=False, source="", retain_ms=0, pinned=False, placements=())


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


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """Files that a rank has to send."""

    missing_files: tuple[int, ...]
    """Positions of the files that are not here, and of every tail."""
    num_files: int


@dataclass(slots=True, eq=False)
class Save:
    """A save in flight: tokens and files that its ranks have announced. Tokens are hashed once, as they come.

    A context of one group with full attention may grow, and the names of its blocks continue from the last one. Any
    other context is announced as a whole, because its files come group by group.
    """

    new: NewSave
    """First announcement."""
    deadline_ms: int
    """Unix time in ms; every message of a rank moves it."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens so far, each added once."""
    files: list[KVFile] = field(default_factory=list)
    """Files of these tokens."""
    is_whole: bool = False
    """Whether all tokens are announced; otherwise these are files ahead of the save."""
    num_sent: dict[int, int] = field(default_factory=dict)
    """Tokens that each rank has announced."""
    keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    """Keys of the files that each rank has announced."""
    sealed: set[int] = field(default_factory=set)
    """Ranks that have sealed."""
    borrowers: set[str] = field(default_factory=set)
    """Processes of the engine that were lent slots for it."""
    num_announcing: int = 0
    """Announcements under way."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while tokens are added."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a whole block of the first group."""
        return self.new.groups[0].block_tokens

    def new_files(self, more: MoreTokens) -> tuple[KVFile, ...]:
        """Return the files of the tokens that are new. Hashes them; known tokens are compared.

        Raises InvalidRequest when the ranks disagree.
        """
        num_known, end = len(self.token_ids), more.first_token + len(more.token_ids)
        overlap = max(num_known - more.first_token, 0)
        new = more.token_ids[overlap:]
        is_other_end = (new and self.is_whole) or (end < num_known and not more.early)
        if is_other_end or more.token_ids[:overlap] != tuple(self.token_ids[more.first_token : end]):
            raise InvalidRequest("the ranks sent different data for this cache_ref", param="cache_ref")
        if more.early and (not _grows(self.new.groups) or end % self.block_tokens):
            raise InvalidRequest("an early save must have one group and whole blocks", param="early")
        if not new:
            return ()
        tail_ref, fingerprint = self.new.tail_ref or self.new.cache_ref, self.new.fingerprint
        if not _grows(self.new.groups):
            return context_files(tail_ref, fingerprint, self.new.tenant, new, self.new.groups)
        last = self.files[-1] if self.files else None
        packed = pack_token_ids(new)
        return next_files(last, tail_ref, fingerprint, self.new.tenant, packed, block_tokens=self.block_tokens)

    def grow(self, more: MoreTokens, files: Sequence[KVFile]) -> None:
        """Take the tokens that are new, with their files."""
        self.token_ids += more.token_ids[max(len(self.token_ids) - more.first_token, 0) :]
        self.files += files
        self.is_whole = self.is_whole or not more.early

    def key(self, index: int, rank: int) -> BlockKey:
        """Return where the file at a position belongs."""
        file = self.files[index]
        return file_key(file, self.new.groups[file.group].digest, rank)

    def meta(self, index: int, rank: int) -> BlockMeta:
        """Return the metadata that the file at a position must have."""
        file = self.files[index]
        return file_meta(
            file,
            group=self.new.groups[file.group].digest,
            tenant=self.new.tenant,
            fingerprint=self.new.fingerprint,
            rank=rank,
            token_ids=tuple(self.token_ids[file.first_token : file.end_token]),
        )

    def manifest(self) -> Manifest:
        """Return the manifest of all tokens, without sizes and checksums."""
        new, groups = self.new, self.new.groups
        if _grows(groups):
            groups = (replace(groups[0], runs=((0, len(self.token_ids)),)),)
        return Manifest(
            cache_ref=new.cache_ref,
            tenant=new.tenant,
            session_id=new.session_id,
            fingerprint=new.fingerprint,
            token_ids=tuple(self.token_ids),
            groups=groups,
            files=tuple(self.files),
            world_size=new.world_size,
            expires_at_ms=new.expires_at_ms,
            tail_ref=new.tail_ref,
            interrupted=new.interrupted,
        )

    def interrupt(self, expires_at_ms: int) -> None:
        """Note that its turn has ended without a commit: it expires then at the latest."""
        expires_at_ms = min(self.new.expires_at_ms, expires_at_ms)
        self.new = replace(self.new, interrupted=True, expires_at_ms=expires_at_ms, retain_ms=0)

    def cut(self, num_files: int) -> None:
        """Have it end with its first files, or, where only all of them can be continued from, with none."""
        if num_files < len(self.files):
            num_files = num_files if _grows(self.new.groups) else 0
            del self.files[num_files:]
            del self.token_ids[self.files[-1].end_token if num_files else 0 :]

    def num_files(self, num_tokens: int) -> int:
        """Return the number of files of a rank that has announced so many tokens."""
        is_all = self.is_whole and num_tokens == len(self.token_ids)
        return len(self.files) if is_all else num_tokens // self.block_tokens


def check_retain_ms(retain_ms: int) -> None:
    """Raise InvalidRequest for a lifetime that no promise can have."""
    if not 0 <= retain_ms <= RETAIN_MS_MAX:
        raise InvalidRequest(f"retain_ms must be from 0 to {RETAIN_MS_MAX}", param="retain_ms")


def _grows(groups: Sequence[KVGroup]) -> bool:
    """Return whether a context of these groups can be saved while it grows."""
    return [group.kind for group in groups] == ["full_attention"]


HOLD_DEADLINE = "hold_deadline"
"""The engine's blocks could not be held until all were copied; the blocks that came are whole."""
ENGINE_GONE = "engine_gone"
"""The engine's process has ended, and had sent nothing that a load can continue from."""
INTERRUPTED = "interrupted"
"""The turn has ended without a commit. Its save may still come."""
SAVE_DEADLINE = "save_deadline"
"""No message of the save came for too long."""
PULL_FAILED = "pull_failed"
_REASON = re.compile(r"[a-z][a-z_]{0,39}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that an engine gives up."""

    tenant: TenantId
    cache_ref: CacheRef
    reason: str
    """A short fixed phrase, such as `arena_full` or the code of an error."""
    started_at_ms: int = 0
    """Unix time in ms when its turn began; 0: unknown."""

    def check(self) -> None:
        """Raise InvalidRequest for an invalid field."""
        check_tenant(self.tenant)
        check_cache_refs([self.cache_ref])
        if not _REASON.fullmatch(self.reason):
            raise InvalidRequest("reason must be one short fixed phrase", param="reason")
