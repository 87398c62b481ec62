"""One record a block: phase, tenant, size on disk, checksum, slot in memory and references. No I/O, one event loop.

Rules:
1. A step (write, read, removal) has a block alone: it changes the phase, and `Block.over` is set until it ends.
2. A block may be freed when nothing refers to it, nothing spares it and no step runs on it: `Block.may_go`.
3. Bytes count for their tenant before they are written, so that concurrent saves keep every limit.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from contextcache.errors import ContextQuotaExceeded, StorageFull
from contextcache.model import SessionId, TenantId
from contextcache.phases import Phases
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers.memory import Memory, Slot

SPARED_MAX = 256
"""Sessions whose blocks are spared at once: some ten thousand names of blocks in long contexts."""
NO_TENANT: TenantId = ""
"""Tenant of a file that no manifest names. No tenant has this name, and no limit applies to it."""
_UPPER_MARK, _LOWER_MARK = 0.95, 0.9
"""Shares of the limit between which contexts are evicted: concurrent saves fit above."""
_INODES_LOW, _INODES_ENOUGH = 1024, 2048
"""Free inodes below which contexts are evicted, and up to which: a save of 128 000 tokens has some 500 files.

A small filesystem has the shares of bytes instead.
"""


class BlockPhase(Enum):
    """State of a block's file on disk."""

    __hash__ = object.__hash__  # of the identity, not of the name: each step of each block looks its phase up

    NEW = "new"
    """Not on disk. A record in this phase exists only while a save refers to it."""
    WRITING = "writing"
    STORED = "stored"
    READING_IN = "reading_in"
    """On disk and being read, as a rule into a slot."""
    LEAVING = "leaving"
    QUARANTINED = "quarantined"
    """Its bytes are wrong and its file is being moved."""


_NEW, _STORED = BlockPhase.NEW, BlockPhase.STORED
_STEPS = (BlockPhase.WRITING, BlockPhase.READING_IN, BlockPhase.LEAVING, BlockPhase.QUARANTINED)
PHASES = Phases[BlockPhase](
    [
        ((_NEW, _STORED), "write", BlockPhase.WRITING),
        ((_STORED,), "read", BlockPhase.READING_IN),
        ((_STORED,), "leave", BlockPhase.LEAVING),
        ((_STORED,), "condemn", BlockPhase.QUARANTINED),
        (_STEPS, "on disk", _STORED),
        (_STEPS, "not on disk", _NEW),
    ]
)
"""Every step ends with the state of the disk. A file that could not be removed is stored again."""

PromiseKind: TypeAlias = Literal["promise", "pin"]
"""References of a manifest with a promise, beside its own: on disk, and if it is pinned, in memory too."""
Holder: TypeAlias = Literal["manifest", "kept", "save", "lease"] | PromiseKind
"""Kinds of references. A manifest of kept KV refers as `kept` only."""


_PINNING: tuple[Holder, ...] = ("lease", "pin")
"""References that keep a block's slot in memory."""


@dataclass(slots=True)
class References:
    """Number of references to a block, by kind."""

    manifest: int = 0
    kept: int = 0
    save: int = 0
    lease: int = 0
    promise: int = 0
    pin: int = 0

    def __bool__(self) -> bool:
        """Return whether anything refers to the block."""
        return bool(self.manifest or self.kept or self.save or self.lease or self.promise)

    @property
    def is_sealed(self) -> bool:
        """Whether a manifest refers to it, so that a load can ask for it."""
        return bool(self.manifest or self.kept)

    @property
    def is_kept_alone(self) -> bool:
        """Whether manifests of kept KV refer to it, none of a session and no promise."""
        return bool(self.kept and not self.manifest and not self.promise)


@dataclass(slots=True, eq=False)
class Block:
    """Everything that the sidecar knows of one block."""

    key: BlockKey
    tenant: TenantId = NO_TENANT
    disk_bytes: int | None = None
    """Size of its file; None: there is none."""
    checksum: str | None = None
    """Checksum that the save or the manifests vouch for. None: unknown. Empty: two manifests differ."""
    slot: Slot | None = None
    """Latest slot in memory; valid while `Slot.is_kept`."""
    is_from_disk: bool = False
    """Whether its slot was read from disk and not served since."""
    refs: References = field(default_factory=References)
    spared_until_ms: int = 0
    """Unix time in ms until which it stays without a reference."""
    phase: BlockPhase = BlockPhase.NEW
    over: asyncio.Event | None = None
    """Set at the end of the step that runs now; None: no step runs."""

    @property
    def is_stored(self) -> bool:
        """Whether it is on disk and stays there."""
        return self.disk_bytes is not None and self.phase not in (BlockPhase.LEAVING, BlockPhase.QUARANTINED)

    @property
    def stored_bytes(self) -> int | None:
        """Size of its file while it is stored; None: it is not."""
        return self.disk_bytes if self.is_stored else None

    @property
    def vouched(self) -> str:
        """Checksum of its file while it is stored; empty: it is not, or nothing vouches for its bytes."""
        return (self.checksum or "") if self.is_stored else ""

    @property
    def in_memory(self) -> Slot | None:
        """The slot that has its bytes now."""
        return self.slot if self.slot is not None and self.slot.is_kept else None

    def may_go(self, now_ms: int) -> bool:
        """Return whether it may be freed."""
        return not self.refs and now_ms >= self.spared_until_ms and self.phase is BlockPhase.STORED


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Blocks and bytes of a tier."""

    num_blocks: int
    size_bytes: int
    limit_bytes: int
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes and files to delete before a new file is written; 0 or less: none."""

    size_bytes: int
    num_files: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing has to leave."""
        return self.size_bytes <= 0 and self.num_files <= 0


class Blocks:
    """All records, and the bytes that they have on disk by tenant."""

    def __init__(self, memory: Memory, *, limit_bytes: int = 0, tenant_limit_bytes: int = 0) -> None:
        """Limits of 0: none."""
        self._memory = memory
        self._limit_bytes, self._tenant_limit_bytes = limit_bytes, tenant_limit_bytes
        self._blocks: dict[BlockKey, Block] = {}
        self._spared: OrderedDict[tuple[TenantId, SessionId], tuple[int, dict[BlockKey, None]]] = OrderedDict()
        """End of the time (Unix time in ms) and spared blocks by session, at most `SPARED_MAX`, the oldest first."""
        self._num_stored = self._stored_bytes = self._reserved_bytes = 0
        self._used: Counter[TenantId] = Counter()
        """Bytes on disk and bytes reserved, by tenant."""
        self._kept: Counter[TenantId] = Counter()
        """Bytes that only kept KV without a promise refers to, by tenant."""
        self._promised: dict[PromiseKind, Counter[TenantId]] = {"promise": Counter(), "pin": Counter()}
        """Bytes under promises, by tenant: each block once."""
        self.inodes: tuple[int, int] | None = None
        """Free inodes and all inodes of the filesystem at the last change; None: unknown."""
        self._on_change: Callable[[BlockKey], None] = lambda _key: None

    def __iter__(self) -> Iterator[Block]:
        """Iterate over a snapshot of all records. Safe in any thread."""
        return iter(list(self._blocks.values()))

    def watch(self, on_change: Callable[[BlockKey], None]) -> None:
        """Call `on_change` after each step, each eviction from memory and each change of a block's manifests."""
        self._on_change = self._memory.on_evict = on_change

    def get(self, key: BlockKey) -> Block:
        """Return a block's record; a new one is stored once a reference or a step begins."""
        return self._blocks.get(key) or Block(key)

    def open(self, sizes: Mapping[BlockKey, int], inodes: tuple[int, int] | None) -> None:
        """Add the files that were found on disk."""
        for key, size_bytes in sizes.items():
            block = self._blocks[key] = Block(key, phase=BlockPhase.STORED)
            self._resize(block, size_bytes)
        self.inodes = inodes

    def vouch(self, key: BlockKey, tenant: TenantId, checksum: str | None) -> None:
        """Note a stored block's tenant and checksum, as a manifest names them; two that differ vouch for nothing."""
        block = self._blocks.get(key)
        if block is None:
            return
        self._resize(block, block.disk_bytes, tenant)
        if checksum is not None:
            block.checksum = checksum if block.checksum in (None, checksum) else ""

    def hold(self, keys: Iterable[BlockKey], who: Holder) -> None:
        """Add a reference to each block; a block that is not here yet gets a record."""
        for key in keys:
            block = self._blocks.get(key) or self._blocks.setdefault(key, Block(key))
            self._refer(block, who, 1)
            if who in _PINNING and getattr(block.refs, who) == 1 and (slot := block.in_memory) is not None:
                self._memory.pin(slot)

    def let_go(self, keys: Iterable[BlockKey], who: Holder) -> list[BlockKey]:
        """Remove a reference from each block; return the blocks without any: the caller frees them."""
        left = []
        for key in keys:
            block = self._blocks[key]
            self._refer(block, who, -1)
            if who in _PINNING and not getattr(block.refs, who) and (slot := block.in_memory) is not None:
                self._memory.unpin(slot)
            if not block.refs:
                left.append(key)
                self._forget_empty(block)
        return left

    def spare(self, keys: Iterable[BlockKey], *, until_ms: int, whose: tuple[TenantId, SessionId]) -> None:
        """Keep stored whole blocks until a Unix time in ms, or until `unspare` of their session.

        The session of the oldest loses its sparing to the session after `SPARED_MAX`.
        """
        _, spared = self._spared.pop(whose, (0, {}))
        for key in keys:
            block = self.get(key)
            if key.kind == "block" and block.is_stored:
                block.spared_until_ms = until_ms
                spared[key] = None
        if spared:
            self._spared[whose] = until_ms, spared
        if len(self._spared) > SPARED_MAX:
            self.unspare(next(iter(self._spared)))

    def unspare(self, whose: tuple[TenantId, SessionId]) -> list[BlockKey]:
        """End the sparing of a session's blocks and return them: the caller frees them."""
        _, spared = self._spared.pop(whose, (0, {}))
        keys = [key for key in spared if key in self._blocks]
        for key in keys:
            self._blocks[key].spared_until_ms = 0
        return keys

    def forget_spared(self, now_ms: int) -> None:
        """Forget the names of blocks whose time is over: another session may spare them anew."""
        while self._spared and next(iter(self._spared.values()))[0] <= now_ms:
            self._spared.popitem(last=False)

    def garbage(self, now_ms: int) -> list[BlockKey]:
        """Return all blocks that may be freed. Looks at every record; safe in any thread."""
        return [block.key for block in self if block.may_go(now_ms)]

    def is_leased(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether a lease is on any of these blocks."""
        return any(self.get(key).refs.lease for key in keys)

    async def settled(self, key: BlockKey) -> Block:
        """Return a block's record once no step runs on it; this holds until the caller awaits."""
        while (over := self.get(key).over) is not None:
            await over.wait()
        return self.get(key)

    @contextmanager
    def step(self, event: Literal["write", "read", "leave", "condemn"], *blocks: Block) -> Iterator[None]:
        """Have settled blocks alone. The step says by `found` how the disk changed."""
        over = asyncio.Event()
        begun: list[Block] = []
        try:
            for block in blocks:
                block.phase = PHASES.after(block.phase, event)
                self._blocks[block.key], block.over = block, over
                begun.append(block)
            yield
        finally:
            for block in begun:
                block.phase = PHASES.after(block.phase, "not on disk" if block.disk_bytes is None else "on disk")
                block.over = None
                self._forget_empty(block)
                self._on_change(block.key)
            over.set()

    def found(self, block: Block, size_bytes: int | None, *, tenant: TenantId | None = None) -> int:
        """Note the size of a block's file, None: there is none; return the bytes freed. `tenant`: its new owner."""
        before = block.disk_bytes or 0
        self._resize(block, size_bytes, tenant)
        if size_bytes is None:
            block.checksum = None
            self.drop_copy(block)
        return max(before - (size_bytes or 0), 0)

    def keep_copy(self, block: Block, slot: Slot, *, is_from_disk: bool = False) -> None:
        """Make a filled slot the copy in memory of a block; the copy before is freed."""
        self.drop_copy(block)
        block.slot, block.is_from_disk = slot, is_from_disk
        self._memory.keep(slot, block.key, block.tenant)
        for who in _PINNING:
            if getattr(block.refs, who):
                self._memory.pin(slot)

    def drop_copy(self, block: Block) -> None:
        """Free a block's slot. A reader that has it notices by its generation."""
        if (slot := block.in_memory) is not None:
            self._memory.free(slot)
        block.slot = None

    @contextmanager
    def reserved(self, tenant: TenantId, size_bytes: int) -> Iterator[None]:
        """Count the bytes of a tenant's files that are being written. Raises StorageFull, ContextQuotaExceeded."""
        wanted = self._stored_bytes + self._reserved_bytes + size_bytes
        if size_bytes and self._limit_bytes and wanted > self._limit_bytes:
            raise StorageFull("the disk tier has reached its limit")
        if size_bytes:
            self.check_tenant(tenant, size_bytes)
        self._reserve(tenant, size_bytes)
        try:
            yield
        finally:
            self._reserve(tenant, -size_bytes)

    def check_tenant(self, tenant: TenantId, size_bytes: int = 1) -> None:
        """Raise ContextQuotaExceeded when the tenant may not have so many more bytes."""
        if self._tenant_limit_bytes and tenant and self._used[tenant] + size_bytes > self._tenant_limit_bytes:
            raise ContextQuotaExceeded("the tenant's contexts have reached their limit of bytes on this disk")

    def tenant_bytes(self, tenant: TenantId) -> tuple[int, int]:
        """Return the bytes of a tenant's files, files being written included, and their limit; 0: no limit."""
        return self._used[tenant], self._tenant_limit_bytes

    def kept_bytes(self, tenant: TenantId) -> int:
        """Return the bytes of a tenant that only kept KV without a promise refers to: its contexts can have them."""
        return self._kept[tenant]

    def promised_bytes(self, kind: PromiseKind, tenant: TenantId) -> int:
        """Return the bytes of a tenant under promises."""
        return self._promised[kind][tenant]

    def all_promised_bytes(self, kind: PromiseKind) -> int:
        """Return the bytes of all tenants under promises."""
        return self._promised[kind].total()

    def bytes_by_tenant(self) -> Mapping[TenantId, int]:
        """Return the bytes of every tenant's files."""
        return {tenant: used for tenant, used in self._used.items() if used and tenant != NO_TENANT}

    def memory_by_tenant(self) -> Mapping[TenantId, int]:
        """Return the bytes of every tenant's blocks in memory."""
        return {tenant: size for tenant, size in self._memory.kept_by.items() if tenant != NO_TENANT}

    def usage(self) -> TierUsage:
        """Return the usage of the disk."""
        return TierUsage(self._num_stored, self._stored_bytes, self._limit_bytes)

    def memory_usage(self) -> TierUsage:
        """Return the usage of the memory tier."""
        memory = self._memory
        return TierUsage(memory.num_kept, memory.kept_by.total, memory.limit_bytes)

    def free_inodes(self) -> float:
        """Return the number of files that the filesystem can still create; infinite: unknown."""
        return math.inf if self.inodes is None else self.inodes[0]

    def shortage(self, size_bytes: int) -> Shortage:
        """Return the bytes and files that have to leave before a file of this size is written."""
        wanted = self._stored_bytes + self._reserved_bytes + size_bytes
        is_over = self._limit_bytes and wanted > self._limit_bytes * _UPPER_MARK
        missing_bytes = wanted - int(self._limit_bytes * _LOWER_MARK) if is_over else 0
        if self.inodes is None:
            return Shortage(missing_bytes)
        free, inodes = self.inodes
        if free >= min(_INODES_LOW, inodes - int(inodes * _UPPER_MARK)):
            return Shortage(missing_bytes)
        return Shortage(missing_bytes, min(_INODES_ENOUGH, inodes - int(inodes * _LOWER_MARK)) - free)

    def tenant_shortage(self, tenant: TenantId, size_bytes: int) -> Shortage:
        """Return the bytes of a tenant that have to leave before it may have so many more."""
        limit_bytes = self._tenant_limit_bytes
        return Shortage(self._used[tenant] + size_bytes - limit_bytes if limit_bytes else 0)

    def _refer(self, block: Block, who: Holder, change: int) -> None:
        is_counted = who in ("kept", "promise", "pin") or (who == "manifest" and block.refs.kept)
        if is_counted:
            self._count(block, -1)
        setattr(block.refs, who, getattr(block.refs, who) + change)
        if is_counted:
            self._count(block, 1)
        if who in {"manifest", "kept"}:
            self._on_change(block.key)

    def _resize(self, block: Block, size_bytes: int | None, tenant: TenantId | None = None) -> None:
        for sign in (-1, 1):
            if block.disk_bytes is not None:
                self._num_stored += sign
                self._stored_bytes += sign * block.disk_bytes
                self._used[block.tenant] += sign * block.disk_bytes
                self._count(block, sign)
            if sign < 0:
                block.disk_bytes, block.tenant = size_bytes, block.tenant if tenant is None else tenant

    def _count(self, block: Block, sign: int) -> None:
        size_bytes = sign * (block.disk_bytes or 0)
        if block.refs.is_kept_alone:
            self._kept[block.tenant] += size_bytes
        for kind, counted in self._promised.items():
            if getattr(block.refs, kind):
                counted[block.tenant] += size_bytes

    def _reserve(self, tenant: TenantId, size_bytes: int) -> None:
        self._reserved_bytes += size_bytes
        self._used[tenant] += size_bytes

    def _forget_empty(self, block: Block) -> None:
        if block.phase is BlockPhase.NEW and not block.refs and block.over is None:
            self._blocks.pop(block.key, None)
