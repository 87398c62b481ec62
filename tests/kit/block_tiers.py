"""One tier of blocks by itself: put, read, delete and count files as tiers.py does, without an event loop."""

from __future__ import annotations

from contextcache.errors import StorageFull
from contextcache.model import TenantId
from kv_sidecar.blocks import Blocks, TierUsage
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers.data_directory import DataDirectory
from kv_sidecar.tiers.disk import Disk
from kv_sidecar.tiers.memory import Memory, Slot


class MemoryBlocks:
    """Copies in memory of files that are on no disk."""

    def __init__(self, limit_bytes: int) -> None:
        self.memory = Memory(limit_bytes=limit_bytes)
        self.memory.open()
        self.blocks = Blocks(self.memory)

    def put(self, key: BlockKey, data: bytes | bytearray | memoryview) -> Slot:
        slot = self.memory.allocate(len(data))
        if slot is None:
            raise StorageFull("no room in the memory tier")
        self.memory.view(slot)[:] = data
        return self.keep(key, slot)

    def keep(self, key: BlockKey, slot: Slot) -> Slot:
        if self.blocks.get(key) not in self.blocks:
            self.blocks.open({key: slot.size_bytes}, None)
        self.blocks.keep_copy(self.blocks.get(key), slot)
        return slot

    def slot_of(self, key: BlockKey) -> Slot | None:
        return self.blocks.get(key).in_memory

    def read(self, key: BlockKey) -> bytes | None:
        slot = self.slot_of(key)
        return None if slot is None else bytes(self.memory.view(slot))

    def delete(self, key: BlockKey) -> int:
        slot = self.slot_of(key)
        if slot is None:
            return 0
        self.blocks.drop_copy(self.blocks.get(key))
        return slot.size_bytes

    def size_bytes(self, key: BlockKey) -> int | None:
        slot = self.slot_of(key)
        return None if slot is None else slot.size_bytes

    def keys(self) -> list[BlockKey]:
        return [block.key for block in self.blocks if block.in_memory is not None]

    def usage(self) -> TierUsage:
        return self.blocks.memory_usage()


class DiskBlocks:
    """Files on disk, without a memory tier."""

    def __init__(self, directory: DataDirectory, *, limit_bytes: int = 0, tenant_limit_bytes: int = 0) -> None:
        self.disk = Disk(directory)
        self.blocks = Blocks(Memory(limit_bytes=0), limit_bytes=limit_bytes, tenant_limit_bytes=tenant_limit_bytes)
        self.blocks.open(self.disk.sizes(), directory.inodes())

    def put(self, key: BlockKey, data: bytes | bytearray | memoryview, *, tenant: TenantId = "") -> None:
        block = self.blocks.get(key)
        with self.blocks.reserved(tenant, len(data)), self.blocks.step("write", block):
            try:
                self.disk.put(key, data)
            except BaseException:
                self.blocks.found(block, self.disk.size_bytes(key))
                raise
            self.blocks.found(block, len(data), tenant=tenant)

    def read(self, key: BlockKey) -> bytes | None:
        block = self.blocks.get(key)
        if not block.is_stored:
            return None
        room = bytearray(block.disk_bytes or 0)
        with self.blocks.step("read", block):
            try:
                self.disk.read_into(key, memoryview(room))
            except FileNotFoundError:
                self.blocks.found(block, None)
                return None
        return bytes(room)

    def delete(self, key: BlockKey) -> int:
        block = self.blocks.get(key)
        if not block.is_stored:
            return 0
        with self.blocks.step("leave", block):
            return self.blocks.found(block, self.disk.delete(key))

    def put_aside(self, key: BlockKey) -> None:
        block = self.blocks.get(key)
        if block.is_stored:
            with self.blocks.step("condemn", block):
                self.blocks.found(block, self.disk.put_aside(key))

    def size_bytes(self, key: BlockKey) -> int | None:
        return self.blocks.get(key).stored_bytes

    def keys(self) -> list[BlockKey]:
        return [block.key for block in self.blocks]

    def usage(self) -> TierUsage:
        return self.blocks.usage()
