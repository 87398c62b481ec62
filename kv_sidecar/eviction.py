"""Which blocks leave a tier of fixed size: the least recently used that nobody has pinned. Pure, not thread-safe."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from kv_sidecar.block_key import BlockKey


class ByteLru:
    """Sizes of the blocks in a tier, in order of use. What it holds plus what is reserved never exceeds the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._sizes: OrderedDict[BlockKey, int] = OrderedDict()
        """Least recently used first."""
        self._pins: Counter[BlockKey] = Counter()
        self._reserved_bytes = 0
        """Room made for blocks that are being written."""
        self._held_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the blocks held."""
        return self._held_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes held and reserved."""
        return self._held_bytes + self._reserved_bytes

    @property
    def has_pins(self) -> bool:
        """Whether any block is pinned."""
        return bool(self._pins)

    def get(self, key: BlockKey) -> int | None:
        """Return a block's size."""
        return self._sizes.get(key)

    def reserve(self, size_bytes: int) -> list[BlockKey] | None:
        """Make room; return the blocks that leave, or None (and change nothing) when pinned blocks are in the way."""
        victims: list[BlockKey] = []
        missing = self.used_bytes + size_bytes - self.limit_bytes
        for key, size in self._sizes.items():
            if missing <= 0:
                break
            if key not in self._pins:
                victims.append(key)
                missing -= size
        if missing > 0:
            return None
        for key in victims:
            self.remove(key)
        self._reserved_bytes += size_bytes
        return victims

    def cancel(self, size_bytes: int) -> None:
        """Give reserved room back."""
        self._reserved_bytes -= size_bytes

    def add(self, key: BlockKey, size_bytes: int) -> None:
        """Turn reserved room into a block, the most recently used one; a block of the same name is replaced."""
        self.cancel(size_bytes)
        self.remove(key)
        self._sizes[key] = size_bytes
        self._held_bytes += size_bytes

    def remove(self, key: BlockKey) -> int:
        """Forget a block, pinned or not; return its size, 0 when it was not there."""
        size = self._sizes.pop(key, 0)
        self._held_bytes -= size
        return size

    def touch(self, key: BlockKey) -> None:
        """Make a block the most recently used one."""
        self._sizes.move_to_end(key)

    def pin(self, key: BlockKey) -> None:
        """Keep a block from leaving until `unpin`; pins count."""
        self._pins[key] += 1

    def unpin(self, key: BlockKey) -> None:
        """Take one pin back."""
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]
