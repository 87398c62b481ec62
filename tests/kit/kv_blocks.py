"""Small block files and a sidecar without a wire, for tests of kv_sidecar."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType

import numpy as np
from prometheus_client import CollectorRegistry

from contextcache.clock import Clock, ManualClock
from contextcache.errors import CacheRefNotFound
from contextcache.model import KVGroup, Manifest
from contextcache.names import new_cache_ref
from kv_sidecar.format.block_file import BlockFile, BlockFileWriter, BlockMeta, parse_block_file
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import block_meta, num_files
from kv_sidecar.moving.pulling import ConnectPeer
from kv_sidecar.orphans import ManagerQuestions
from kv_sidecar.saves import MoreTokens, NewSave, PreparedSave, Save
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.sidecar import Sidecar
from kv_sidecar.tiers.data_directory import DataDirectory, Step
from kv_sidecar.tiers.memory import Place, Slot, rounded
from tests.kit.bounded_sidecar import BoundedSettings
from tests.kit.until import until

TENANT = "demo"
SESSION = "ctx_1"
FINGERPRINT = "f" * 64
BLOCK_TOKENS = 4
LAYERS, ENGINE_BLOCKS, PAGE_BYTES = 2, 2, 64
TTL_MS = 3_600_000
BORROWER = "engine"


def block_meta_of(name: str = "", *, kind: str = "tail", token_ids: tuple[int, ...] = (1, 2, 3)) -> BlockMeta:
    name = name or new_cache_ref()
    return BlockMeta(kind, name, "", TENANT, FINGERPRINT, 0, token_ids)  # type: ignore[arg-type]  # a literal in tests


def fill_of(meta: BlockMeta) -> int:
    """What the pages of a block are filled with: it depends on the tokens, the rank and the group."""
    return (sum(meta.token_ids) * 7 + meta.rank * 101 + len(meta.parent) + int(meta.group or "0", 16)) % 251


def block_file_bytes(meta: BlockMeta, *, fill: int | None = None, page_bytes: int = PAGE_BYTES) -> bytes:
    writer = BlockFileWriter(meta, pages_bytes=LAYERS * ENGINE_BLOCKS * page_bytes)
    writer.begin(memoryview(bytearray(writer.size_bytes)))
    writer.pages[:] = fill_of(meta) if fill is None else fill
    return bytes(writer.finish())


def open_block_file(path: Path) -> BlockFile:
    return parse_block_file(path.read_bytes())


def new_save(
    token_ids: tuple[int, ...],
    *,
    now_ms: int,
    cache_ref: str | None = None,
    session_id: str = SESSION,
    tenant: str = TENANT,
    fingerprint: str = FINGERPRINT,
    rank: int = 0,
    world_size: int = 1,
    started_at_ms: int = 0,
    groups: tuple[KVGroup, ...] = (),
) -> NewSave:
    return NewSave(
        tenant=tenant,
        session_id=session_id,
        cache_ref=cache_ref or new_cache_ref(),
        fingerprint=fingerprint,
        rank=rank,
        world_size=world_size,
        token_ids=token_ids,
        expires_at_ms=now_ms + TTL_MS,
        started_at_ms=started_at_ms,
        groups=groups,
    )


def planned(new: NewSave, *, block_tokens: int) -> Manifest:
    """Return the manifest to be, without sizes and checksums."""
    new = new.checked(block_tokens=block_tokens)
    save = Save(new, 0)
    first = MoreTokens(new.tenant, new.cache_ref, new.rank, 0, new.token_ids, new.early)
    save.grow(first, save.new_files(first))
    return save.manifest()


class SidecarUnderTest:
    """A Sidecar over a directory with a ManualClock; an async context manager."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock | None = None,
        slots: bool = True,
        step: Step | None = None,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
        connect_peer: ConnectPeer | None = None,
        manager: ManagerQuestions | None = None,
        **settings: object,
    ) -> None:
        """`slots`: blocks come in slots of the arena, else in frames. `settings`: fields, or bounds, by name."""
        self.root = root
        self.clock = clock or ManualClock()
        defaults: dict[str, object] = {
            "block_tokens": BLOCK_TOKENS,
            "spare_ms": 0,
            "io_threads": 2,
            "listen": "127.0.0.1:0",
            "memory_limit_bytes": 1 << 20,
        }
        given = defaults | settings
        bounds = {name: given.pop(name) for name in given.keys() - SidecarSettings.model_fields}
        self.settings = BoundedSettings(data_dir=root / "data", bounds=bounds, **given)  # type: ignore[arg-type]  # fields
        self.slots = slots and self.settings.memory_limit_bytes != 0
        directory = DataDirectory(self.settings.data_dir, statvfs=statvfs, **({"step": step} if step else {}))
        self.registry = CollectorRegistry()
        self.sidecar = Sidecar(
            self.settings,
            clock=self.clock,
            registry=self.registry,
            directory=directory,
            connect_peer=connect_peer,
            manager=manager,
        )
        self.catalog = self.sidecar.catalog
        self.disk = self.sidecar.disk
        self.blocks = self.sidecar.blocks
        self.memory = self.sidecar.memory
        self.memory.borrowers.add(BORROWER)

    async def __aenter__(self) -> SidecarUnderTest:
        await self.sidecar.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.sidecar.close()

    def plan(self, new: NewSave) -> Manifest:
        return planned(new, block_tokens=self.settings.block_tokens)

    async def send(self, new: NewSave, block_index: int, *, fill: int | None = None) -> int:
        """Write one block file and hand it over, in a slot when there is an arena."""
        data = block_file_bytes(block_meta(self.plan(new), block_index, new.rank), fill=fill)
        if not self.slots:
            return await self.catalog.take_block(new.cache_ref, new.rank, block_index, data)
        place = Place(new.cache_ref, new.rank, block_index)
        return await self.catalog.take_slots(
            new.cache_ref, new.rank, [(block_index, await self.fill_slot(place, data))]
        )

    async def fill_slot(self, place: Place, data: bytes) -> int:
        """Do as an engine does that is about to hand a file over; return the slot's id."""
        (lent,) = await self.catalog.lend(BORROWER, [(place, len(data))], timeout_s=10)
        self.memory.view(lent.slot)[:] = data
        return lent.slot_id

    async def send_all(self, new: NewSave) -> PreparedSave:
        """Announce a save and send what is missing."""
        prepared = await self.catalog.prepare_save(new)
        for block_index in prepared.missing_files:
            await self.send(new, block_index)
        return prepared

    async def sent(self, token_ids: tuple[int, ...], **fields: object) -> NewSave:
        """Announce a save of one rank and send what is missing."""
        new = new_save(token_ids, now_ms=self.clock.now_ms(), **fields)  # type: ignore[arg-type]  # fields of new_save
        await self.send_all(new)
        return new

    async def save(self, token_ids: tuple[int, ...], **fields: object) -> NewSave:
        """Save a context of one rank and seal it."""
        new = await self.sent(token_ids, **fields)
        assert await self.catalog.seal(new.cache_ref, new.rank)
        return new

    async def share(self, token_ids: tuple[int, ...], **fields: object) -> NewSave:
        """Save a context and return when the shared store has it."""
        new = await self.save(token_ids, **fields)
        await written(self)
        return new

    async def collect(self, *, ms: int = 0, s: float = 0.0) -> None:
        """Advance the clock, then free what has expired and what no session names."""
        self.clock.advance(ms=ms, s=s)
        await self.sidecar.collect()

    async def collect_shared(self, *, ms: int = 0, s: float = 0.0) -> None:
        """Advance the clock, then do the same in the shared store."""
        self.clock.advance(ms=ms, s=s)
        await self.sidecar.collect_shared()

    async def has(self, new: NewSave) -> bool:
        """Open a context; return whether that succeeded."""
        try:
            await self.catalog.open(new.tenant, new.cache_ref)
        except CacheRefNotFound:
            return False
        return True

    async def load(self, new: NewSave, *, in_slots: bool | None = None) -> list[str]:
        """Load all blocks of a context's rank, check every byte, return the tiers."""
        manifest = await self.catalog.open(new.tenant, new.cache_ref)
        assert manifest.token_ids == new.token_ids
        indices = range(num_files(manifest))
        tiers = []
        in_slots = self.slots if in_slots is None else in_slots
        blocks = self.catalog.load(manifest, new.fingerprint, new.rank, indices, in_slots=in_slots)
        async with aclosing(blocks):
            async for block in (block async for together in blocks for block in together):
                expected = block_meta(manifest, block.block_index, new.rank)
                file = parse_block_file(block.data if block.slot is None else self.memory.view(block.slot))
                file.verify(expected)
                assert np.all(file.pages == fill_of(expected))
                file.close()
                tiers.append(block.tier)
        assert len(tiers) == len(indices)
        return tiers

    async def fetch(self, new: NewSave) -> list[str]:
        """Have a context fetched from the shared store, and load it; return the tiers."""
        await brought(self, new.cache_ref)
        return await self.load(new)

    def counted(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 when it was never counted."""
        return self.registry.get_sample_value(f"contextcache_sidecar_{name}", labels) or 0

    def block_files(self) -> set[BlockKey]:
        """The block files that lie on disk, looked up there."""
        found = [BlockKey.from_file_name(p.name) for d in ("blocks", "tails") for p in self._files(d)]
        assert None not in found
        return {key for key in found if key}

    def missing_bytes(self) -> int:
        """Bytes of the arena that nobody has and that no block has that can be found: pinned after a delete, or lost.

        What is lent is missing too.
        """
        slots = [slot for block in self.blocks if (slot := block.in_memory) is not None]
        found = sum(rounded(slot.size_bytes) for slot in slots)
        return rounded(self.memory.limit_bytes) - self.memory.free_bytes - found

    def in_memory(self) -> list[BlockKey]:
        """The blocks that have a copy in memory."""
        return [block.key for block in self.blocks if block.in_memory is not None]

    def slot_of(self, key: BlockKey) -> Slot | None:
        """The slot of a block in memory."""
        return self.blocks.get(key).in_memory

    def drop_copy(self, key: BlockKey) -> None:
        """Have a block on disk only."""
        self.blocks.drop_copy(self.blocks.get(key))

    @property
    def has_leases(self) -> bool:
        """Whether a load keeps any block in place."""
        return any(block.refs.lease for block in self.blocks)

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for directory in ("blocks", "tails") for path in self._files(directory))

    def manifest_files(self) -> set[str]:
        return {path.name.removesuffix(".safetensors") for path in self._files("manifests")}

    def path_of(self, key: BlockKey) -> Path:
        directory = "tails" if key.kind == "tail" else "blocks"
        return self.settings.data_dir / directory / key.fan_out / key.file_name

    def _files(self, directory: str) -> list[Path]:
        return [path for path in (self.settings.data_dir / directory).glob("*/*") if path.is_file()]


async def written(kv: SidecarUnderTest) -> None:
    """Return when the shared store has what was sealed."""
    assert await kv.sidecar.shared.flush(60) == 0


async def brought(kv: SidecarUnderTest, cache_ref: str) -> None:
    """Have KV fetched from the shared store, and return when that has ended, well or badly."""
    assert kv.sidecar.resolver.bring(TENANT, [cache_ref])

    async def num_pulls() -> int:
        return kv.sidecar.pulls.num_pulls

    await until(num_pulls, is_so=lambda number: not number, what="the pull has ended")
