"""The memory tier: blocks in slots of one region, least recently used out first, under a hard byte limit.

The engine copies its pages into slots that it was lent, and out of slots that its loads have pinned. A lent slot is the
engine's until it hands it over or says that it has stopped writing; an engine that says neither, and lives, keeps it:
a slot that somebody may still write to is nobody else's. Nothing here survives a start; everything is also on disk.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from typing_extensions import override

from contextcache.errors import SidecarUnavailable, StorageFull
from contextcache.model import CacheRef
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers.arena import Region
from kv_sidecar.tiers.eviction import Slot, SlotLru, rounded
from kv_sidecar.tiers.store import BlockStore, Buffer, TierUsage


@dataclass(frozen=True, slots=True)
class Place:
    """What a lent slot is for: one file of a save in flight."""

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


class MemoryStore(BlockStore):
    """Blocks in a region. `put` raises StorageFull when pinned and lent slots leave no room."""

    def __init__(self, *, limit_bytes: int) -> None:
        """0: nothing is ever kept."""
        self.limit_bytes = limit_bytes
        self.region: Region | None = None
        self._lock = threading.Lock()
        self._lru = SlotLru(rounded(limit_bytes) if limit_bytes else 0)
        self._lent: dict[int, LentSlot] = {}
        self._last_id = secrets.randbits(40) << 20
        """What the sidecar before this one has lent, under whatever id, is not taken for ours."""
        self.borrowers: set[str] = set()
        """Names of the processes that see the region. Changed in the event loop."""
        self.lent_bytes = 0
        """Bytes of slots that engines may be writing to."""

    def open(self) -> None:
        """Get the region, and begin to put memory behind it. Raises OSError."""
        if self._lru.limit_bytes:
            self.region = Region(self._lru.limit_bytes)
            self.region.populate()

    def close(self) -> None:
        """Let go of the region. Harmless when repeated."""
        if self.region is not None:
            self.region.close()

    @override
    def put(self, key: BlockKey, data: Buffer) -> None:
        with self.filling(key, len(data)) as view:
            view[:] = data

    @contextmanager
    def filling(self, key: BlockKey, size_bytes: int) -> Iterator[memoryview]:
        """Give room for a block; it can be found once the caller has filled it. Raises StorageFull."""
        with self._lock:
            slot = self._lru.allocate(size_bytes)
        if slot is None:
            raise StorageFull("leased and lent slots leave no room in the memory tier")
        try:
            yield self.view(slot)
        except BaseException:
            with self._lock:
                self._lru.remove(slot)
            raise
        with self._lock:
            self._lru.install(key, slot)

    def lend(self, borrower: str, place: Place, size_bytes: int) -> LentSlot | None:
        """Lend a slot for one file; None when there is no room for it now.

        All that is lent is at most half of the region, unless one file is more: the rest stays for restores.
        Raises SidecarUnavailable for a borrower that this region does not have.
        """
        with self._lock:
            if borrower not in self.borrowers:
                raise SidecarUnavailable("the arena was not lent to this process")
            if self._lent and self.lent_bytes + size_bytes > self.limit_bytes // 2:
                return None
            slot = self._lru.allocate(size_bytes)
            if slot is None:
                return None
            self._last_id += 1
            lent = self._lent[self._last_id] = LentSlot(self._last_id, slot, borrower, place)
            self.lent_bytes += size_bytes
            return lent

    def hand_over(self, slot_id: int, place: Place) -> Slot | None:
        """Take a lent slot back with what is in it, from whoever said that it has stopped writing.

        The caller then `keep`s or `drop`s it. None when no such slot was lent for that file.
        """
        with self._lock:
            lent = self._lent.get(slot_id)
            return self._end_loan(lent) if lent is not None and lent.place == place else None

    def keep(self, key: BlockKey, slot: Slot) -> None:
        """Make what was handed over the block of this name."""
        with self._lock:
            self._lru.install(key, slot)

    def drop(self, slot: Slot) -> None:
        """Free what was handed over."""
        with self._lock:
            self._lru.remove(slot)

    def give_back(self, borrower: str, slot_ids: Iterable[int]) -> None:
        """Free slots that their borrower will not write to any more. Those it does not have are passed over."""
        with self._lock:
            for slot_id in slot_ids:
                lent = self._lent.get(slot_id)
                if lent is not None and lent.borrower == borrower:
                    self._lru.remove(self._end_loan(lent))

    def end_borrower(self, borrower: str) -> None:
        """Free all that was lent to a process that has ended."""
        self.borrowers.discard(borrower)
        self.give_back(borrower, list(self._lent))

    def _end_loan(self, lent: LentSlot) -> Slot:
        del self._lent[lent.slot_id]
        self.lent_bytes -= lent.slot.size_bytes
        return lent.slot

    @override
    def read(self, key: BlockKey) -> memoryview | None:
        pins = self.pins()
        try:
            slot = pins.take(key)
            return None if slot is None else memoryview(bytes(self.view(slot)))
        finally:
            pins.close()

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of a slot that is pinned, lent or handed over."""
        assert self.region is not None, "a slot is of an open region"
        return self.region.view[slot.offset : slot.offset + slot.size_bytes]

    @override
    def delete(self, key: BlockKey) -> int:
        with self._lock:
            slot = self._lru.get(key)
            if slot is None:
                return 0
            self._lru.remove(slot)
            return slot.size_bytes

    @override
    def size_bytes(self, key: BlockKey) -> int | None:
        with self._lock:
            slot = self._lru.get(key)
            return None if slot is None else slot.size_bytes

    def sizes(self) -> dict[BlockKey, int]:
        """Return the bytes of every block that is held."""
        with self._lock:
            found = ((key, self._lru.get(key)) for key in self._lru)
            return {key: slot.size_bytes for key, slot in found if slot is not None}

    @override
    def keys(self) -> list[BlockKey]:
        with self._lock:
            return list(self._lru)

    @override
    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._lru), self._lru.held_bytes, self.limit_bytes)

    def pins(self) -> Pins:
        """Return an empty set of pins."""
        return Pins(self._lock, self._lru)

    @property
    def has_pins(self) -> bool:
        """Whether any reader keeps a slot in place."""
        with self._lock:
            return bool(self._lru.num_pins)


class Pins:
    """Slots kept in place for one reader, until `close()`. Safe from several threads."""

    def __init__(self, lock: threading.Lock, lru: SlotLru) -> None:
        self._lock = lock
        self._lru = lru
        self._slots: list[Slot] = []
        self._closed = False

    def take(self, key: BlockKey) -> Slot | None:
        """Pin a block and make it the most recently used; None when it is not there, or `close` came first."""
        with self._lock:
            slot = self._lru.get(key)
            if self._closed or slot is None:
                return None
            self._lru.pin(slot)
            self._slots.append(slot)
            return slot

    def close(self) -> None:
        """Let all of them go. Harmless when repeated."""
        with self._lock:
            self._closed = True
            for slot in self._slots:
                self._lru.unpin(slot)
            self._slots.clear()
