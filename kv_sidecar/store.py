"""What a tier of block files must do. The two shipped ones (memory, disk) pass the same tests; bytes only, no meaning.

Rules for every implementation:
- Calls block and may come from several threads at once.
- `put` is atomic: a reader sees the whole file or none, also after a crash. It is idempotent; a second file under
  the same key replaces the first, which those who read it still see whole.
- `delete` is idempotent and frees the bytes before it returns.
- The limit holds at every moment, also while a file is being written.
- StorageFull is permanent for the file at hand: trying again without freeing anything fails again. OSError is a fault
  of the device and may pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kv_sidecar.block_key import BlockKey

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is."""

    num_blocks: int
    size_bytes: int
    limit_bytes: int
    """0: no limit."""


class BlockStore(Protocol):
    """One tier of block files."""

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Keep a whole block file. Raises StorageFull, and then nothing has changed but that others may have left."""
        ...

    def read(self, key: BlockKey) -> memoryview | None:
        """Return the bytes as they were put, unverified, or None. Valid until the same thread's next `read`."""
        ...

    def delete(self, key: BlockKey) -> int:
        """Remove a file; return the bytes freed, 0 when there was none."""
        ...

    def size_bytes(self, key: BlockKey) -> int | None:
        """Return a file's size, or None when there is none. Does not touch the device."""
        ...

    def keys(self) -> list[BlockKey]:
        """Return the keys of all files."""
        ...

    def usage(self) -> TierUsage:
        """Return how full the tier is."""
        ...
