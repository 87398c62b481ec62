"""Room in a region of fixed size: stretches of it, and which blocks leave it first. Pure, not thread-safe."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kv_sidecar.format.ids import BlockKey

ALIGNMENT = 64
"""Slots begin on a cache line."""


@dataclass(slots=True, eq=False)
class Slot:
    """A stretch of the region that is somebody's."""

    offset: int
    size_bytes: int
    pins: int = 0
    """Readers that it must stay in place for."""
    key: BlockKey | None = None
    """The block in it, while it can be found under that name."""


class Extents:
    """Which stretches are free: first fit, neighbours joined."""

    def __init__(self, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size_bytes)] if size_bytes else []
        """(offset, length), ascending and apart."""
        self.free_bytes = size_bytes

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of a stretch that is now taken, None when there is none so long."""
        length = rounded(size_bytes)
        for index, (_, room) in enumerate(self._free):
            if room >= length:
                return self._cut(index, length)
        return None

    def give_back(self, offset: int, size_bytes: int) -> int:
        """Free a stretch that was taken; return where the free stretch begins that it is part of now."""
        length = rounded(size_bytes)
        self.free_bytes += length
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before, room = self._free.pop(index - 1)
            offset, length = before, room + length
        insort(self._free, (offset, length))
        return offset

    def take_at(self, offset: int, size_bytes: int) -> int | None:
        """As `take`, of the free stretch that begins there."""
        index, length = bisect_left(self._free, (offset, 0)), rounded(size_bytes)
        return self._cut(index, length) if self._free[index][1] >= length else None

    def _cut(self, index: int, length: int) -> int:
        offset, room = self._free.pop(index)
        if room > length:
            self._free.insert(index, (offset + length, room - length))
        self.free_bytes -= length
        return offset


def rounded(size_bytes: int) -> int:
    """Return what a slot of this size takes up."""
    return -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT


class SlotLru:
    """Blocks in slots, the least recently used first to leave; what is pinned stays in place until it is not."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._extents = Extents(limit_bytes)
        self._slots: OrderedDict[BlockKey, Slot] = OrderedDict()
        """Least recently used first."""
        self.held_bytes = 0
        """Bytes of the blocks that can be found."""
        self.num_pins = 0
        self._evictable_bytes = 0
        """Taken up by blocks that nobody has pinned."""

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._slots)

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        return self._extents.free_bytes

    def get(self, key: BlockKey) -> Slot | None:
        """Return a block's slot."""
        return self._slots.get(key)

    def allocate(self, size_bytes: int) -> Slot | None:
        """Return a slot; blocks leave for it, the least recently used first. None when those that may are too few."""
        offset = self._extents.take(size_bytes)
        while offset is None and rounded(size_bytes) <= self.free_bytes + self._evictable_bytes:
            # What is pinned was used last: there are few before the first that may leave.
            victim = next((slot for slot in self._slots.values() if not slot.pins), None)
            if victim is None:
                break
            self._forget(victim)
            freed = self._extents.give_back(victim.offset, victim.size_bytes)
            offset = self._extents.take_at(freed, size_bytes)
        return None if offset is None else Slot(offset, size_bytes)

    def install(self, key: BlockKey, slot: Slot) -> None:
        """Make a slot findable, as the most recently used; one under the same name leaves."""
        if (before := self._slots.get(key)) is not None:
            self.remove(before)
        slot.key = key
        self._slots[key] = slot
        self.held_bytes += slot.size_bytes
        if not slot.pins:
            self._evictable_bytes += rounded(slot.size_bytes)

    def remove(self, slot: Slot) -> None:
        """Forget a slot's block, and free it: at once, or with its last pin."""
        self._forget(slot)
        if not slot.pins:
            self._extents.give_back(slot.offset, slot.size_bytes)

    def _forget(self, slot: Slot) -> None:
        if slot.key is not None:
            del self._slots[slot.key]
            slot.key = None
            self.held_bytes -= slot.size_bytes
            if not slot.pins:
                self._evictable_bytes -= rounded(slot.size_bytes)

    def pin(self, slot: Slot) -> None:
        """Keep a slot in place, and count it as used now; pins count."""
        slot.pins += 1
        self.num_pins += 1
        if slot.key is not None:
            self._slots.move_to_end(slot.key)
            if slot.pins == 1:
                self._evictable_bytes -= rounded(slot.size_bytes)

    def unpin(self, slot: Slot) -> None:
        """Take one pin back."""
        slot.pins -= 1
        self.num_pins -= 1
        if slot.pins:
            return
        if slot.key is None:
            self._extents.give_back(slot.offset, slot.size_bytes)
        else:
            self._evictable_bytes += rounded(slot.size_bytes)
