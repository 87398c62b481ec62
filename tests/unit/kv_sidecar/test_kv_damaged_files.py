"""A damaged or replaced file costs its own context only: look-ups go on, nothing blocks, the file is counted.

Seen failing on the version before: a manifest with an overwritten head ended every look-up that reached it with
OverflowError, and a FIFO in its place blocked an I/O thread for ever.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contextcache.errors import CacheRefNotFound, CorruptBlock
from contextcache.names import KEPT_PREFIX
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.format.manifest import block_key
from kv_sidecar.saves import NewSave
from kv_sidecar.sealed.prefixes import PrefixQuestion
from kv_sidecar.store.objects import ObjectStore
from kv_sidecar.tiers.data_directory import DataDirectory, remove_whatever
from tests.kit.kv_blocks import FINGERPRINT, TENANT, SidecarUnderTest

COMMON = tuple(range(1, 9))
DAMAGED, INTACT = (*COMMON, 9, 10, 11, 12, 70), (*COMMON, 9, 10, 11, 12, 80)
PROMPT = (*COMMON, 9, 10, 99)
"""Leaves both contexts in the middle of the same block, so that a look-up reads a manifest."""
SHARED = 10
HANG_S = 60
"""Far beyond any look-up here; a test that reaches it has found one that blocks."""


def manifest_path(kv: SidecarUnderTest, new: NewSave) -> Path:
    ref = new.cache_ref
    return kv.settings.data_dir / "manifests" / ref[4:6] / f"{ref}.safetensors"


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        remove_whatever(path)
        make(path)

    return replace


def written(path: Path, data: bytes) -> None:
    path.chmod(0o640)
    path.write_bytes(data)


def with_head(raw: bytes) -> Callable[[Path], None]:
    """Overwrite the JSON of the head, and say its new length; the tensor follows."""

    def overwrite(path: Path) -> None:
        whole = path.read_bytes()
        tensor = whole[8 + int.from_bytes(whole[:8], "little") :]
        written(path, len(raw).to_bytes(8, "little") + raw + tensor)

    return overwrite


def with_length(length: int) -> Callable[[Path], None]:
    return lambda path: written(path, length.to_bytes(8, "little") + path.read_bytes()[8:])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "head-length-huge": with_length(2**64 - 1),
    "head-length-signed-max": with_length(2**63 - 9),
    "head-length-negative-place": with_length(2**63),
    "head-length-zero": with_length(0),
    "head-beyond-the-end": with_length(1 << 20),
    "head-of-no-text": with_head(b"\xff\xfe\xfd" * 30),
    "head-nested": with_head(b"[" * 5000),
    "head-of-another-type": with_head(b'{"__metadata__":[],"token_ids":7}'),
    "head-without-metadata": with_head(b"{}"),
    "empty": lambda path: written(path, b""),
    "truncated-in-its-length": lambda path: written(path, path.read_bytes()[:5]),
    "truncated": lambda path: written(path, path.read_bytes()[:-9]),
    "grown": lambda path: os.truncate(path, 1 << 40),
    "zeros": lambda path: written(path, bytes(path.stat().st_size)),
    "fifo": replaced_by(os.mkfifo),
    "directory": replaced_by(Path.mkdir),
    "socket": replaced_by(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    "link-to-itself": replaced_by(lambda path: path.symlink_to(path)),
    "link-to-a-device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "link-to-a-file": replaced_by(lambda path: path.symlink_to(__file__)),
}
KINDS = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


async def forget_manifests(kv: SidecarUnderTest) -> None:
    """Have the sidecar remember other manifests than those saved first: it must read these again."""
    for number in range(4):
        await kv.save((1000 + number,), session_id="ctx_other")


async def found(kv: SidecarUnderTest, token_ids: tuple[int, ...] = PROMPT) -> list[tuple[str, int]]:
    async with asyncio.timeout(HANG_S):
        question = PrefixQuestion(TENANT, FINGERPRINT, pack_token_ids(token_ids), tokens_min=1)
        return [(one.cache_ref, one.num_tokens) for one in await kv.catalog.match_prefix(question)]


@KINDS
@pytest.mark.parametrize("session_id", ["ctx_damaged", f"{KEPT_PREFIX}damaged"])
async def test_a_lookup_that_reaches_a_damaged_manifest_finds_the_intact_kv_behind_it(
    kv: SidecarUnderTest, damage: Callable[[Path], None], session_id: str
) -> None:
    bad = await kv.save(DAMAGED, session_id=session_id)
    good = await kv.save(INTACT, session_id="ctx_intact")
    await forget_manifests(kv)
    damage(manifest_path(kv, bad))

    assert (await found(kv))[0] == (good.cache_ref, SHARED)
    assert await kv.load(good)


@KINDS
async def test_a_damaged_manifest_is_put_aside_counted_and_saved_anew(
    kv: SidecarUnderTest, damage: Callable[[Path], None]
) -> None:
    bad = await kv.save(DAMAGED, session_id="ctx_damaged")
    path = manifest_path(kv, bad)
    await forget_manifests(kv)
    damage(path)
    assert await found(kv) == []
    assert await found(kv) == []

    assert not os.path.lexists(path)
    assert [it.name for it in kv.sidecar.directory.quarantine.iterdir()] == [path.name]
    assert kv.counted("quarantined_files_total") == kv.sidecar.directory.num_quarantined == 1
    with pytest.raises(CacheRefNotFound):
        await kv.load(bad)
    again = await kv.save(DAMAGED, session_id="ctx_damaged")
    assert await found(kv) == [(again.cache_ref, SHARED)]


@KINDS
async def test_a_damaged_block_file_is_a_miss_counted_and_saved_anew(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        bad = await kv.save(DAMAGED, session_id="ctx_damaged")
        path = kv.path_of(block_key(kv.plan(bad), 1, 0))
        damage(path)
        async with asyncio.timeout(HANG_S):
            with pytest.raises((CorruptBlock, CacheRefNotFound)):
                await kv.load(bad)

            assert kv.counted("quarantined_files_total") == kv.sidecar.directory.num_quarantined == 1
            assert await kv.load(await kv.save(DAMAGED, session_id="ctx_damaged"))


@KINDS
async def test_a_context_whose_files_were_replaced_can_be_deleted_and_saved_under_the_same_blocks(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Seen failing: a directory in a file's place refused every delete, and every save of that block."""
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        bad = await kv.save(DAMAGED, session_id="ctx_damaged")
        for path in (manifest_path(kv, bad), *(kv.path_of(block_key(kv.plan(bad), index, 0)) for index in range(4))):
            damage(path)
        async with asyncio.timeout(HANG_S):
            assert (await kv.catalog.delete(TENANT, "ctx_damaged", [])).num_manifests == 1

            assert kv.manifest_files() == set()
            assert await kv.load(await kv.save(DAMAGED, session_id="ctx_again"))


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "link-to-itself", "link-to-a-file"])
@pytest.mark.parametrize("of_blocks", [False, True], ids=["manifests", "blocks"])
async def test_a_fan_out_directory_that_was_replaced_costs_what_lay_in_it(
    tmp_path: Path, kind: str, of_blocks: bool
) -> None:
    """Seen failing: what lay below a file was "a fault that passes", for ever, and no save could be written there."""
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        bad = await kv.save(DAMAGED, session_id="ctx_damaged")
        other = await kv.save((500, 501, 502), session_id="ctx_other")
        path = kv.path_of(block_key(kv.plan(bad), 0, 0)) if of_blocks else manifest_path(kv, bad)
        DAMAGES[kind](path.parent)
        async with asyncio.timeout(HANG_S):
            with pytest.raises((CorruptBlock, CacheRefNotFound)):
                await kv.load(bad)
            beside = f"{bad.cache_ref[:6]}{'0' * 30}"
            again = await kv.save(DAMAGED, session_id="ctx_again", cache_ref=beside)

            assert await kv.load(again)
            assert await kv.load(other)


@pytest.mark.parametrize(
    "kind", ["fifo", "directory", "socket", "link-to-itself", "link-to-a-device", "link-to-a-file"]
)
async def test_what_lies_in_the_place_of_a_shared_object_is_corrupt_and_makes_way_for_the_object(
    tmp_path: Path, kind: str
) -> None:
    """Seen failing: each read of a FIFO held a thread of obstore for ever, and was a store that does not serve."""
    objects = ObjectStore(f"file://{tmp_path}", timeout_s=1)
    await objects.put("demo/blocks/beside", b"whole")
    path = tmp_path / "demo/blocks/it"
    DAMAGES[kind](path)

    with pytest.raises(CorruptBlock):
        await objects.get("demo/blocks/it", limit_bytes=100)
    assert await objects.head("demo/blocks/it") is None
    if kind != "directory":
        await objects.put("demo/blocks/it", b"new")
        assert bytes(await objects.get("demo/blocks/it", limit_bytes=100) or b"") == b"new"
    assert bytes(await objects.get("demo/blocks/beside", limit_bytes=100) or b"") == b"whole"


MUTATION = st.sampled_from(["flip", "cut", "insert", "overwrite"])
MUTATIONS = st.lists(st.tuples(MUTATION, st.floats(0, 1), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


def mutated(whole: bytes, mutations: list[tuple[str, float, bytes]]) -> bytes:
    data = bytearray(whole)
    for kind, where, extra in mutations:
        at = int(where * len(data))
        if kind == "flip" and at < len(data):
            data[at] ^= extra[0] or 1
        elif kind == "cut":
            del data[at : at + extra[0]]
        elif kind == "insert":
            data[at:at] = extra
        else:
            data[at : at + len(extra)] = extra
    return bytes(data)


@settings(deadline=None, max_examples=40)
@given(manifest=MUTATIONS, block=st.none() | MUTATIONS)
@example(manifest=[("overwrite", 0.0, b"\xff" * 8)], block=None)
@example(manifest=[("overwrite", 0.0, b"\xff" * 7 + b"\x7f")], block=[("overwrite", 0.0, b"\xff" * 8)])
def test_whatever_became_of_one_context_s_files_the_other_one_is_found_and_served(
    manifest: list[tuple[str, float, bytes]], block: list[tuple[str, float, bytes]] | None
) -> None:
    async def play(root: Path) -> None:
        async with SidecarUnderTest(root, memory_limit_bytes=0) as kv:
            bad = await kv.save(DAMAGED, session_id="ctx_damaged")
            good = await kv.save(INTACT, session_id="ctx_intact")
            await forget_manifests(kv)
            path = manifest_path(kv, bad)
            path.write_bytes(mutated(path.read_bytes(), manifest))
            if block is not None:
                tail = kv.path_of(block_key(kv.plan(bad), 3, 0))
                tail.write_bytes(mutated(tail.read_bytes(), block))

            named = await found(kv)
            assert (good.cache_ref, SHARED) in named or (bad.cache_ref, SHARED) in named
            with suppress(CorruptBlock, CacheRefNotFound):
                await kv.load(bad)
            assert (await found(kv, (*INTACT, 1)))[0] == (good.cache_ref, len(INTACT))
            assert await kv.load(good)
        async with SidecarUnderTest(root, clock=kv.clock) as kv:
            assert (await found(kv, (*INTACT, 1)))[0] == (good.cache_ref, len(INTACT))
            assert await kv.load(good)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(asyncio.wait_for(play(Path(directory)), HANG_S))


def test_threads_that_make_the_same_directory_put_it_aside_for_none(tmp_path: Path):
    """Seen to fail: a thread took the directory that another one had just made for damage, and moved it away."""
    directory, interval_s = DataDirectory(tmp_path / "data"), sys.getswitchinterval()
    directory.open()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for fan_out in range(16):
                files = [directory.root / "blocks" / f"{fan_out:02x}" / f"file-{number}" for number in range(8)]
                list(pool.map(lambda file: directory.publish(b"kv", file), files))
                assert all(file.read_bytes() == b"kv" for file in files)
    finally:
        sys.setswitchinterval(interval_s)
        directory.close()

    assert directory.num_quarantined == 0
