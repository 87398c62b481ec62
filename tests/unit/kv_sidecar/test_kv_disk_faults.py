"""A disk that is full, broken, read-only or slow: saves are refused and counted, reads are misses, the rest goes on.

Faults are raised where the kernel would raise them. Seen failing: without EFBIG in `_NO_ROOM`; without the `except
OSError` in `Saving.publish` (the save stays in flight, its waiter waits); without `_finish` (an OSError reaches gRPC as
UNKNOWN); with loads and saves on the same threads (the load waits for the slow disk).
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import CacheRefNotFound, CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.names import KEPT_PREFIX
from kv_sidecar.format.ids import BlockKey, pack_token_ids
from kv_sidecar.format.manifest import block_key, block_meta
from kv_sidecar.saves import NewSave
from kv_sidecar.sealed.prefixes import PrefixQuestion
from kv_sidecar.tiers import data_directory
from kv_sidecar.tiers import disk as disk_tier
from kv_sidecar.tiers.store import Buffer
from tests.kit.kv_blocks import FINGERPRINT, TENANT, SidecarUnderTest, block_file_bytes, new_save

TEN = tuple(range(10))
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BROKEN = (errno.EIO, errno.EROFS)
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class FaultyDisk:
    """A `step` that raises an error at every step of some kinds on disk."""

    def __init__(self) -> None:
        self.fails: Callable[[str], bool] = lambda step: False
        self.number = 0

    def __call__(self, step: str) -> None:
        if self.fails(step):
            raise OSError(self.number, os.strerror(self.number))

    def break_at(self, verbs: str, number: int) -> None:
        self.fails, self.number = (lambda step: step.partition(" ")[0] in verbs.split()), number

    def heal(self) -> None:
        self.fails = lambda step: False


@pytest.mark.parametrize("number", [*FULL, *BROKEN], ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["write", "rename", "sync"])
async def test_a_save_the_disk_refuses_is_dropped_whole_and_the_next_one_is_made(
    tmp_path: Path, verb: str, number: int
) -> None:
    disk = FaultyDisk()
    async with SidecarUnderTest(tmp_path, step=disk) as kv:
        kept = await kv.save((50, 51, 52, 53, 54), session_id="ctx_kept")
        before = kv.block_files()
        disk.break_at(verb, number)
        error = StorageFull if number in FULL else SidecarUnavailable
        with pytest.raises(error):
            await kv.save(TEN)
        disk.heal()

        assert kv.counted("refused_saves_total", code=error.code) == 1
        assert kv.block_files() == before
        assert list(kv.sidecar.directory.tmp.iterdir()) == []
        assert kv.catalog.tenant_usage(TENANT)[0] == kv.disk_bytes()
        assert await kv.load(kept)
        assert await kv.load(await kv.save(TEN))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["write", "rename", "sync"])
async def test_a_manifest_the_disk_refuses_ends_the_save_and_whoever_waits_for_it(
    tmp_path: Path, verb: str, number: int
) -> None:
    disk, clock = FaultyDisk(), ManualClock()
    async with SidecarUnderTest(tmp_path, step=disk, clock=clock) as kv:
        new = await kv.sent(TEN)
        waiting = asyncio.create_task(kv.catalog.wait_sealed(TENANT, new.cache_ref, timeout_s=60))
        await asyncio.sleep(0)
        disk.break_at(verb, number)
        with pytest.raises(StorageFull if number in FULL else SidecarUnavailable):
            await kv.catalog.seal(new.cache_ref, 0)
        disk.heal()

        assert await asyncio.wait_for(waiting, 30) is None
        assert kv.block_files() == set()
        assert kv.manifest_files() == set()
        assert await kv.load(await kv.save(TEN))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["block", "manifest"])
async def test_a_stored_file_that_cannot_be_read_is_a_miss_and_is_saved_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        new = await kv.save(TEN)
        with unreadable(monkeypatch, name_of(kv, new, what), number), pytest.raises((CorruptBlock, CacheRefNotFound)):
            await kv.load(new)

        with pytest.raises(CacheRefNotFound):
            await kv.load(new)
        assert await kv.load(await kv.save(TEN))


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["block", "manifest"])
async def test_a_fault_that_passes_puts_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """Seen failing: a context was lost for good because too many files were open for a moment."""
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        new = await kv.save(TEN)
        with unreadable(monkeypatch, name_of(kv, new, what), number):
            await kv.catalog.read_ahead(TENANT, [new.cache_ref])
            with pytest.raises(SidecarUnavailable):
                await kv.load(new)

        assert await kv.load(new) == ["disk"] * 3


async def test_a_touch_meets_a_fault_that_passes_and_leaves_the_context(
    kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = await kv.save(TEN)
    with unreadable(monkeypatch, name_of(kv, new, "manifest"), errno.EMFILE), pytest.raises(SidecarUnavailable):
        await kv.catalog.touch(TENANT, new.session_id, new.expires_at_ms + 1)

    assert await kv.load(new)


async def test_a_start_that_meets_a_fault_that_passes_fails_and_the_next_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(TEN)
    again = SidecarUnderTest(tmp_path)
    with unreadable(monkeypatch, name_of(again, new, "manifest"), errno.ENFILE), pytest.raises(SidecarUnavailable):
        await again.sidecar.open()
    await again.sidecar.close()

    async with SidecarUnderTest(tmp_path) as kv:
        assert await kv.load(new)


@pytest.mark.parametrize("directory", ["blocks", "manifests"])
async def test_a_start_that_cannot_look_into_a_directory_for_a_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    """Seen failing: what was not seen counted as gone, and the contexts with it were removed."""
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(TEN)
    real = os.scandir

    def scandir(path: Path) -> Iterator[os.DirEntry[str]]:
        if Path(path).parent.name == directory:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path)

    again = SidecarUnderTest(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with suppress(OSError):
            await again.sidecar.open()
            await again.sidecar.collect()
    await again.sidecar.close()

    async with SidecarUnderTest(tmp_path) as kv:
        assert await kv.load(new)


async def test_a_pass_goes_on_where_what_was_used_cannot_be_read_for_a_moment(
    kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await kv.save(TEN, session_id=f"{KEPT_PREFIX}1")
    until_ms = kept.expires_at_ms + 3_600_000
    await kv.catalog.match_prefix(PrefixQuestion(TENANT, FINGERPRINT, pack_token_ids(TEN), 1, until_ms))
    with unreadable(monkeypatch, name_of(kv, kept, "manifest"), errno.EMFILE):
        await kv.catalog.collect()
    await kv.catalog.collect()

    record = kv.catalog.manifests.get(kept.cache_ref)
    assert record is not None
    assert record.expires_at_ms == until_ms


@pytest.mark.parametrize("number", [*PASSING, errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
async def test_a_new_expiry_that_may_not_be_durable_takes_no_context_away(tmp_path: Path, number: int) -> None:
    """Seen failing: the rename had replaced the manifest, and what it was replaced with was removed."""
    disk, clock = FaultyDisk(), ManualClock()
    async with SidecarUnderTest(tmp_path, step=disk, clock=clock) as kv:
        new = await kv.save(TEN)
        disk.break_at("sync", number)
        with pytest.raises((SidecarUnavailable, StorageFull)):
            await kv.catalog.touch(TENANT, new.session_id, new.expires_at_ms + 1)
        disk.heal()
        assert await kv.load(new)
    async with SidecarUnderTest(tmp_path, clock=clock) as kv:
        assert await kv.load(new)


def name_of(kv: SidecarUnderTest, new: NewSave, what: str) -> str:
    """Return the name of a context's manifest, or of a block file of it."""
    if what == "manifest":
        return f"{new.cache_ref}.safetensors"
    return kv.path_of(block_key(kv.plan(new), 1, 0)).name


@contextmanager
def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> Iterator[None]:
    """Have every open of a file of this name fail."""

    def failing(path: Path | str, real: Callable[[Path | str], tuple[int, int]]) -> tuple[int, int]:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number))
        return real(path)

    with monkeypatch.context() as patch:
        real = data_directory.open_regular
        patch.setattr(data_directory, "open_regular", lambda path: failing(path, real))
        yield


@pytest.mark.parametrize("number", BROKEN, ids=errno.errorcode.get)
async def test_a_disk_that_nothing_can_be_removed_from_says_so_and_serves_what_it_has(
    tmp_path: Path, number: int
) -> None:
    disk = FaultyDisk()
    async with SidecarUnderTest(tmp_path, step=disk) as kv:
        new, other = await kv.save(TEN), await kv.save((7, 8, 9), session_id="ctx_other")
        disk.break_at("unlink quarantine write", number)
        for attempt in (
            kv.catalog.delete(TENANT, "ctx_other", []),
            kv.catalog.touch(TENANT, "ctx_other", new.expires_at_ms + 1),
        ):
            with pytest.raises(SidecarUnavailable):
                await attempt
        assert await kv.load(new)
        disk.heal()

        removed = await kv.catalog.delete(TENANT, "ctx_other", [])
        assert removed.num_manifests == 1
        with pytest.raises(CacheRefNotFound):
            await kv.load(other)
        assert await kv.load(new)


@pytest.mark.parametrize("number", BROKEN, ids=errno.errorcode.get)
async def test_a_bad_block_on_a_disk_that_cannot_be_written_is_a_miss_all_the_same(tmp_path: Path, number: int) -> None:
    disk = FaultyDisk()
    async with SidecarUnderTest(tmp_path, step=disk, memory_limit_bytes=0) as kv:
        new, other = await kv.save(TEN), await kv.save((7, 8, 9), session_id="ctx_other")
        path = kv.path_of(block_key(kv.plan(new), 1, 0))
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        disk.break_at("unlink quarantine write", number)
        with pytest.raises(CorruptBlock):
            await kv.load(new)
        with pytest.raises(CacheRefNotFound):
            await kv.load(new)

        assert await kv.load(other)


async def test_a_file_too_large_for_the_process_is_a_full_disk(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as the kernel does it, for the moment of one write."""
    async with SidecarUnderTest(tmp_path, slots=False) as kv:
        kept = await kv.save((50, 51, 52))
        new = new_save(TEN, now_ms=kv.clock.now_ms())
        await kv.catalog.prepare_save(new)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        data = block_file_bytes(block_meta(kv.plan(new), 0, 0), page_bytes=1 << 20)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, before[1]))
            (outcome,) = await asyncio.gather(kv.catalog.take_block(new.cache_ref, 0, 0, data), return_exceptions=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

        assert isinstance(outcome, StorageFull)
        assert len(kv.block_files()) == 1
        assert await kv.load(kept)


async def test_a_slow_disk_slows_the_saver_only(tmp_path: Path) -> None:
    """Every thread that writes stands still in the middle of a write; loads, questions and waits are answered."""
    go_on, standing = threading.Event(), threading.Semaphore(0)
    slow = threading.Event()

    def step(name: str) -> None:
        if slow.is_set() and name.startswith("rename"):
            standing.release()
            assert go_on.wait(120)

    async with SidecarUnderTest(tmp_path, step=step, io_threads=2, memory_limit_bytes=0) as kv:
        kept = await kv.save(TEN, session_id="ctx_kept")
        slow.set()
        saves = [asyncio.create_task(kv.save((n, *TEN), session_id=f"ctx_{n}")) for n in range(100, 104)]
        for _ in range(2):
            assert await asyncio.to_thread(standing.acquire, timeout=60)
        try:
            async with asyncio.timeout(60):
                assert await kv.load(kept) == ["disk"] * 3
                assert (await kv.catalog.open(TENANT, kept.cache_ref)).cache_ref == kept.cache_ref
                assert kv.catalog.tenant_usage(TENANT)[0] > 0
                assert not any(save.done() for save in saves)
        finally:
            go_on.set()
        for new in await asyncio.gather(*saves):
            assert await kv.load(new)


async def test_a_start_leaves_what_cannot_be_looked_at_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: both errors ended the start; one damaged inode kept the sidecar from coming up."""
    disk = FaultyDisk()
    async with SidecarUnderTest(tmp_path) as kv:
        whole, hurt = await kv.save((50, 51, 52, 53, 54)), await kv.save(TEN)
        bad = kv.path_of(block_key(kv.plan(hurt), 0, 0))
    real = disk_tier.regular_size

    def size(path: Path | str) -> int | None:
        if str(path) == str(bad):
            raise OSError(errno.EIO, "injected")
        return real(path)

    monkeypatch.setattr(disk_tier, "regular_size", size)
    disk.break_at("unlink", errno.EIO)

    async with SidecarUnderTest(tmp_path, step=disk) as kv:
        assert await kv.load(whole)
        with pytest.raises(CacheRefNotFound):
            await kv.load(hurt)


async def test_one_manifest_that_cannot_be_removed_does_not_keep_the_other_expired_ones(tmp_path: Path) -> None:
    """Seen failing: with the collector using `remove`, the pass broke off at that file, each time."""
    disk, clock = FaultyDisk(), ManualClock()
    async with SidecarUnderTest(tmp_path, step=disk, clock=clock) as kv:
        stays = await kv.save((50, 51, 52, 53, 54), session_id="ctx_stays")
        await kv.save(TEN)
        clock.advance(s=7200)
        disk.number = errno.EIO
        disk.fails = lambda step: step == f"unlink {stays.cache_ref}.safetensors"

        assert (await kv.catalog.collect()).num_manifests == 1
        assert kv.manifest_files() == {stays.cache_ref}
        disk.heal()
        assert (await kv.catalog.collect()).num_manifests == 1
        assert kv.block_files() == set()


async def test_the_event_loop_never_waits_for_a_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: with one lock for both, the question for a tenant's bytes waited for the disk, and all with it."""
    looking, go_on, answered = threading.Event(), threading.Event(), threading.Event()
    async with SidecarUnderTest(tmp_path) as kv:
        put = kv.disk.put

        def put_slowly(key: BlockKey, data: Buffer) -> None:
            looking.set()
            go_on.wait(60)
            put(key, data)

        monkeypatch.setattr(kv.disk, "put", put_slowly)
        saving = asyncio.create_task(kv.save(TEN))
        await asyncio.to_thread(looking.wait, 30)

        def ask() -> None:
            kv.catalog.tenant_usage(TENANT)
            kv.blocks.check_tenant(TENANT)
            kv.blocks.usage()
            answered.set()

        # In a thread of its own: were it to wait, the test would hang instead of failing.
        asker = threading.Thread(target=ask)
        asker.start()
        is_answered = await asyncio.to_thread(answered.wait, 10)
        go_on.set()
        await asyncio.to_thread(asker.join)
        await saving

        assert is_answered
        assert kv.catalog.tenant_usage(TENANT)[0] == kv.disk_bytes()


def test_a_file_is_not_durable_before_the_new_directory_that_another_thread_makes_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: the second file was called durable while a power cut would have taken its directory."""
    directory = data_directory.DataDirectory(tmp_path)
    blocks, begun, go_on = tmp_path / "blocks", threading.Event(), threading.Event()
    directory.open()
    blocks.mkdir()
    sync = data_directory._fsync_directory

    def slow(path: Path | str) -> None:
        if Path(path) == blocks and not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        sync(path)

    monkeypatch.setattr(data_directory, "_fsync_directory", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(directory.publish, b"1", blocks / "aa" / "1")
        assert begun.wait(60)
        second = threads.submit(directory.publish, b"2", blocks / "aa" / "2")
        is_early = bool(wait([second], timeout=0.2).done)
        go_on.set()
        first.result(60)
        second.result(60)
    directory.close()

    assert not is_early


def test_the_directories_of_a_first_start_outlive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: the first saved context was durable in a directory that was not."""
    durable: set[Path] = set()
    monkeypatch.setattr(data_directory, "_fsync_directory", lambda path: durable.update(Path(path).iterdir()))
    directory = data_directory.DataDirectory(tmp_path)
    directory.open()
    directory.fan_out_files("manifests", is_ours=lambda *_: True)
    directory.close()

    assert tmp_path / "manifests" in durable
