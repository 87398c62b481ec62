"""The memory tier: slots of one region, the least recently used evicted first, under a hard byte limit.

The engine copies its pages into slots that it was lent, and out of slots that its loads have pinned. A lent slot
belongs to the engine until the engine hands it over, returns it or ends: no other writer gets it before.
Used from one event loop. Nothing survives a start; every block in memory is also on disk.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from contextcache.errors import SidecarUnavailable
from contextcache.model import CacheRef, TenantId
from contextcache.requests import TenantShares, fair_share
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers.arena import Region

ALIGNMENT = 64
"""Slots begin on a cache line."""


@dataclass(slots=True, eq=False)
class Slot:
    """A stretch of the region."""

    offset: int
    size_bytes: int
    room_bytes: int
    """Bytes that it takes up."""
    generation: int = 0
    """Counter that the region has for it until it is freed."""
    pins: int = 0
    """Readers for which it stays in place."""
    is_kept: bool = False
    """Whether it has a block's bytes: it may be evicted while nothing pins it."""
    key: BlockKey | None = None
    """Block that it was kept for."""
    tenant: TenantId = ""
    """Owner of that block."""


@dataclass(frozen=True, slots=True)
class Place:
    """File of a save in flight for which a slot is lent."""

    cache_ref: CacheRef
    rank: int
    block_index: int


@dataclass(frozen=True, slots=True)
class LentSlot:
    """A slot that an engine writes to."""

    slot_id: int
    """Never given twice."""
    slot: Slot
    borrower: str
    place: Place


class Memory:
    """Slots in a region: free, being filled, lent, or kept as the copy of a block."""

    def __init__(self, *, limit_bytes: int) -> None:
        """0: there is no memory tier."""
        self.limit_bytes = limit_bytes
        self.region: Region | None = None
        self._extents = Extents(rounded(limit_bytes) if limit_bytes else 0)
        self._idle: OrderedDict[Slot, None] = OrderedDict()
        """Kept slots without a pin, the least recently used first."""
        self._idle_bytes = 0
        """Bytes that the idle slots take up."""
        self.num_kept = 0
        self.kept_by = TenantShares()
        """Bytes of kept slots by tenant."""
        self._lent: dict[int, LentSlot] = {}
        self._last_id = secrets.randbits(40) << 20
        """A slot id of the sidecar before this one is not taken for one of this one."""
        self.borrowers: set[str] = set()
        """Names of the processes that see the region."""
        self.lent_bytes = 0
        """Bytes of slots that engines may be writing to."""
        self.on_evict: Callable[[BlockKey], None] = lambda _key: None
        """Called with the block of each evicted slot."""
        self._room = asyncio.Event()
        self._is_watched = False
        """Whether a call may wait for `_room`."""

    @property
    def free_bytes(self) -> int:
        """Bytes of no slot."""
        return self._extents.free_bytes

    def open(self) -> None:
        """Get the region, and begin to put memory behind it. Raises OSError."""
        if self.limit_bytes:
            self.region = Region(rounded(self.limit_bytes))
            self.region.populate()

    def close(self) -> None:
        """Let go of the region. Harmless when repeated."""
        if self.region is not None:
            self.region.close()

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of a slot that is pinned, lent or being filled."""
        assert self.region is not None, "a slot is of an open region"
        return self.region.view[slot.offset : slot.offset + slot.size_bytes]

    def allocate(self, size_bytes: int) -> Slot | None:
        """Return a slot to fill, then to `keep` or `free`; evicts idle slots for it. None: there is no room."""
        room_bytes = rounded(size_bytes)
        offset = self._extents.take(room_bytes)
        while offset is None and self._idle and room_bytes <= self.free_bytes + self._idle_bytes:
            offset = self._extents.take_at(self.evict(next(iter(self._idle))), room_bytes)
        return None if offset is None else self._slot_at(offset, size_bytes)

    def share_bytes(self, tenant: TenantId) -> int:
        """Return a tenant's share of the memory: an equal part for it and for each tenant with KV here."""
        return fair_share(self.limit_bytes, len(self.kept_by) + (tenant not in self.kept_by))

    def allocate_fairly(
        self, size_bytes: int, *, tenant: TenantId, bound_bytes: int, idle: Iterator[Slot]
    ) -> Slot | None:
        """As `allocate`, at no other tenant's cost; None: there is no such room.

        `bound_bytes`: most bytes that the tenant may keep. `idle`: slots to evict in order: those of the tenant, and
        those of tenants that keep their share, while the tenant has less than its own.
        """
        while True:
            after_bytes = self.kept_by.get(tenant, 0) + size_bytes
            if after_bytes <= bound_bytes and (offset := self._extents.take(rounded(size_bytes))) is not None:
                return self._slot_at(offset, size_bytes)
            share_bytes = self.share_bytes(tenant)
            for slot in idle:
                is_surplus = after_bytes <= share_bytes <= self.kept_by.get(slot.tenant, 0) - slot.size_bytes
                if slot in self._idle and (slot.tenant == tenant or is_surplus):
                    self.evict(slot)
                    break
            else:
                return None

    def _slot_at(self, offset: int, size_bytes: int) -> Slot:
        generation = 0 if self.region is None else self.region.generation(offset)
        return Slot(offset, size_bytes, rounded(size_bytes), generation)

    def idle(self) -> list[Slot]:
        """Return the slots that may be evicted, the least recently used first."""
        return list(self._idle)

    def evict(self, slot: Slot) -> int:
        """Free an idle slot whose block stays on disk; return the start of the free stretch."""
        start = self.free(slot)
        if slot.key is not None:
            self.on_evict(slot.key)
        return start

    def keep(self, slot: Slot, key: BlockKey | None = None, tenant: TenantId = "") -> None:
        """Keep a filled slot as a block's copy, as the most recently used."""
        slot.is_kept, slot.key, slot.tenant = True, key, tenant
        self.num_kept += 1
        self.kept_by.add(tenant, slot.size_bytes)
        self._add_idle(slot)

    def free(self, slot: Slot) -> int:
        """Free a slot in any state; return where the free stretch begins that it is part of now."""
        if slot.is_kept:
            slot.is_kept = False
            self.num_kept -= 1
            self.kept_by.add(slot.tenant, -slot.size_bytes)
            if not slot.pins:
                self._drop_idle(slot)
        if self.region is not None:
            self.region.retire(slot.offset)
        self._tell_of_room()
        return self._extents.give_back(slot.offset, slot.room_bytes)

    def pin(self, slot: Slot) -> None:
        """Keep a kept slot in place; pins count."""
        slot.pins += 1
        if slot.pins == 1:
            self._drop_idle(slot)

    def unpin(self, slot: Slot) -> None:
        """Remove one pin; the slot counts as used now. Harmless when it was freed meanwhile."""
        slot.pins -= 1
        if not slot.pins and slot.is_kept:
            self._add_idle(slot)

    def lend(self, borrower: str, place: Place, size_bytes: int) -> LentSlot | None:
        """Lend a slot for one file; None when there is no room for it now.

        All lent slots have at most half of the region, unless one file is larger: the rest stays for restores.
        Raises SidecarUnavailable for a borrower that this region does not have.
        """
        if borrower not in self.borrowers:
            raise SidecarUnavailable("the arena was not lent to this process")
        if self._lent and self.lent_bytes + size_bytes > self.limit_bytes // 2:
            return None
        slot = self.allocate(size_bytes)
        if slot is None:
            return None
        self._last_id += 1
        lent = self._lent[self._last_id] = LentSlot(self._last_id, slot, borrower, place)
        self.lent_bytes += size_bytes
        return lent

    def hand_over(self, slot_id: int, place: Place) -> Slot | None:
        """Take a lent slot back with its bytes; the caller keeps or frees it. None: it was not lent for this file."""
        lent = self._lent.get(slot_id)
        return self._end_loan(lent) if lent is not None and lent.place == place else None

    def give_back(self, borrower: str, slot_ids: Iterable[int]) -> None:
        """Free slots that their borrower will not write to any more. Slots of other borrowers are ignored."""
        for slot_id in slot_ids:
            lent = self._lent.get(slot_id)
            if lent is not None and lent.borrower == borrower:
                self.free(self._end_loan(lent))

    def end_borrower(self, borrower: str) -> None:
        """Free all slots that were lent to a process that has ended."""
        self.borrowers.discard(borrower)
        self.give_back(borrower, list(self._lent))

    def next_room(self) -> asyncio.Event:
        """Return what is set once a loan, a slot or the last pin of a slot ends, which may make room.

        Ask for it before the look for room: room that comes between the look and the wait then counts.
        """
        self._is_watched = True
        return self._room

    def _tell_of_room(self) -> None:
        if self._is_watched:
            self._room.set()
            self._room, self._is_watched = asyncio.Event(), False

    def _end_loan(self, lent: LentSlot) -> Slot:
        del self._lent[lent.slot_id]
        self.lent_bytes -= lent.slot.size_bytes
        self._tell_of_room()
        return lent.slot

    def _add_idle(self, slot: Slot) -> None:
        self._idle[slot] = None
        self._idle_bytes += slot.room_bytes
        self._tell_of_room()

    def _drop_idle(self, slot: Slot) -> None:
        del self._idle[slot]
        self._idle_bytes -= slot.room_bytes


class Extents:
    """Free stretches of the region: first fit, neighbours joined."""

    def __init__(self, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []
        """(offset, length), ascending and apart."""
        self.free_bytes = size_bytes

    def take(self, length: int) -> int | None:
        """Return the offset of a stretch that is now taken, None when there is none so long."""
        for index, (_, room) in enumerate(self._free):
            if room >= length:
                return self._cut(index, length)
        return None

    def take_at(self, offset: int, length: int) -> int | None:
        """As `take`, of the free stretch that begins there."""
        index = bisect_left(self._free, (offset, 0))
        return self._cut(index, length) if self._free[index][1] >= length else None

    def give_back(self, offset: int, length: int) -> int:
        """Free a stretch that was taken; return where the free stretch begins that it is part of now."""
        self.free_bytes += length
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before, room = self._free.pop(index - 1)
            offset, length = before, room + length
        insort(self._free, (offset, length))
        return offset

    def _cut(self, index: int, length: int) -> int:
        offset, room = self._free.pop(index)
        if room > length:
            self._free.insert(index, (offset + length, room - length))
        self.free_bytes -= length
        return offset


def rounded(size_bytes: int) -> int:
    """Return the bytes that a slot of this size takes up."""
    return -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT
