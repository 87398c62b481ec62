"""Reading ahead of a load: from disk into memory, once, within bounds, and harmless to give up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers import tiers
from kv_sidecar.tiers.disk import Disk
from tests.kit.kv_blocks import SidecarUnderTest, new_save
from tests.kit.until import until

MANY = tuple(range(40))
"""Ten whole blocks and no tail."""


@pytest.fixture
def gate() -> threading.Event:
    """Reading from disk waits for it."""
    opened = threading.Event()
    opened.set()
    return opened


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> list[BlockKey]:
    """The files that are read from disk into slots."""
    found: list[BlockKey] = []
    read_into = Disk.read_into

    def counted(self: Disk, key: BlockKey, room: memoryview) -> None:
        found.append(key)
        gate.wait(30)
        read_into(self, key, room)

    monkeypatch.setattr(Disk, "read_into", counted)
    # A file at a time, so that reading is in the middle of something.
    monkeypatch.setattr(tiers, "_TOGETHER_BYTES", 1)
    return found


async def saved(root: Path) -> str:
    """Leave a context on disk only."""
    async with SidecarUnderTest(root) as kv:
        return (await kv.save(MANY)).cache_ref


async def test_what_was_read_ahead_is_loaded_without_the_disk_and_is_told_as_the_disks_once(
    tmp_path: Path, reads: list[BlockKey]
) -> None:
    ref = await saved(tmp_path)
    async with SidecarUnderTest(tmp_path) as kv:
        new = new_save(MANY, now_ms=kv.clock.now_ms(), cache_ref=ref)
        await kv.catalog.read_ahead(new.tenant, ["ref_" + "0" * 32, ref])
        assert len(reads) == len(set(reads)) == 10
        manifest = await kv.catalog.open(new.tenant, ref)
        assert kv.catalog.tier_of(manifest) == "host"

        assert await kv.load(new) == ["disk"] * 10
        assert await kv.load(new) == ["host"] * 10
        assert len(reads) == 10


async def test_a_load_beside_reading_ahead_reads_nothing_twice(tmp_path: Path, reads: list[BlockKey]) -> None:
    ref = await saved(tmp_path)
    async with SidecarUnderTest(tmp_path) as kv:
        new = new_save(MANY, now_ms=kv.clock.now_ms(), cache_ref=ref)
        tiers, _ = await asyncio.gather(kv.load(new), kv.catalog.read_ahead(new.tenant, [ref]))

        assert tiers == ["disk"] * 10
        assert len(reads) == len(set(reads)) == 10


async def test_no_more_is_read_ahead_than_half_the_memory(tmp_path: Path, reads: list[BlockKey]) -> None:
    ref = await saved(tmp_path)
    async with SidecarUnderTest(tmp_path) as kv:
        keys = [block.key for block in kv.blocks]
        size_bytes = max(kv.blocks.get(key).stored_bytes or 0 for key in keys)
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=7 * size_bytes) as kv:
        new = new_save(MANY, now_ms=kv.clock.now_ms(), cache_ref=ref)
        await kv.catalog.read_ahead(new.tenant, [ref])

        assert len(reads) == 3
        assert await kv.load(new, in_slots=False) == ["disk"] * 10


async def test_another_tenant_has_nothing_read_ahead(tmp_path: Path, reads: list[BlockKey]) -> None:
    ref = await saved(tmp_path)
    async with SidecarUnderTest(tmp_path) as kv:
        await kv.catalog.read_ahead("another", [ref])

        assert reads == []


async def test_reading_ahead_that_is_given_up_leaves_nothing_behind(
    tmp_path: Path, reads: list[BlockKey], gate: threading.Event
) -> None:
    ref = await saved(tmp_path)
    async with SidecarUnderTest(tmp_path) as kv:
        new = new_save(MANY, now_ms=kv.clock.now_ms(), cache_ref=ref)
        gate.clear()
        reading = asyncio.create_task(kv.catalog.read_ahead(new.tenant, [ref]))
        await until(lambda: bool(reads), what="it has begun")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        gate.set()

        assert len(reads) < 10
        assert await kv.load(new) == ["disk"] * 10
        assert (await kv.catalog.delete(new.tenant, new.session_id, (ref,))).num_manifests == 1
        assert kv.blocks.memory_usage().num_blocks == 0
        assert not kv.has_leases


async def test_a_spoilt_file_is_found_by_the_load_not_by_reading_ahead(tmp_path: Path) -> None:
    ref = await saved(tmp_path)
    async with SidecarUnderTest(tmp_path) as kv:
        new = new_save(MANY, now_ms=kv.clock.now_ms(), cache_ref=ref)
        kv.path_of([block.key for block in kv.blocks][4]).write_bytes(b"nothing of ours")
        await kv.catalog.read_ahead(new.tenant, [ref])

        assert kv.counted("quarantined_files_total") == 0


async def test_sixteen_files_are_on_their_way_from_the_disk_when_the_first_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[BlockKey], gate: threading.Event
) -> None:
    """Seen failing without `prefetch`: the disk reads two files at a time."""
    begun: list[BlockKey] = []
    monkeypatch.setattr(Disk, "prefetch", lambda _, keys: begun.extend(keys))
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(tuple(range(30 * kv.settings.block_tokens)))
        for block in kv.blocks:
            kv.blocks.drop_copy(block)
        gate.clear()
        reading = asyncio.create_task(kv.catalog.read_ahead(new.tenant, [new.cache_ref]))
        await until(lambda: bool(reads) and len(begun) >= 16, what="the disk has been told")

        assert 16 <= len(begun) <= 18
        gate.set()
        await reading
        assert len(begun) == len(set(begun)) == 30
