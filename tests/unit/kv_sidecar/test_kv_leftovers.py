"""A sidecar comes up over whatever lies in its directories, serves what was whole, and follows no link out of them.

Seen failing: with the code before (`path.unlink()`, `glob`, `stat`, `Path.read_bytes`), 69 of these cases: a start that
dies on a directory, a link that is indexed and served, a name no save can be written to; a FIFO hangs the start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contextcache.clock import ManualClock
from contextcache.errors import CacheRefNotFound, CorruptBlock
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import block_key
from kv_sidecar.tiers.data_directory import entries, open_regular, regular_size, remove_old, remove_whatever
from tests.kit.kv_blocks import TENANT, SidecarUnderTest

TEN = tuple(range(10))
START_DEADLINE_S = 60
REF = "ref_" + "ab" * 16
NAMES = (
    "x",
    ".hidden",
    "ab",
    "lock",
    f"{'ab' * 32}.r0.safetensors",
    f"{REF}.r0.safetensors",
    f"{REF}.safetensors",
    f"{'n' * 255}",
    "naïve \n name",
    os.fsdecode(b"\xff\xfe"),
)
PLACES = (
    "data",
    "data/tmp",
    "data/blocks",
    "data/blocks/ab",
    "data/tails",
    "data/tails/ab",
    "data/manifests",
    "data/manifests/ab",
    "data/quarantine",
    "shared",
    "shared/incoming",
    "shared/blocks",
    "shared/writing",
)
KINDS = (
    "empty",
    "foreign",
    "huge",
    "directory",
    "full directory",
    "link to file",
    "link to directory",
    "dangling",
    "link to itself",
    "fifo",
    "socket",
    "unreadable",
)
LEFTOVER = st.tuples(st.sampled_from(PLACES), st.sampled_from(NAMES), st.sampled_from(KINDS))
DAMAGES = ("lost block", "truncated block", "lost manifest", "truncated manifest", "grown manifest", "lost directory")


def leave(root: Path, outside: Path, place: str, name: str, kind: str) -> None:
    """Put something where a file of ours, or nothing, belongs; what is there already makes way."""
    path = root / place / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        return  # an earlier leftover is in the way
    if path.parent.is_symlink() or any(parent.is_symlink() for parent in path.parents if root in parent.parents):
        return
    remove_whatever(path)
    if kind in {"empty", "foreign", "unreadable"}:
        path.write_bytes(b"" if kind == "empty" else b"\xff" * 100)
        path.chmod(0 if kind == "unreadable" else 0o640)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind in {"directory", "full directory"}:
        path.mkdir()
        if kind == "full directory":
            (path / "deep" / "er").mkdir(parents=True)
            (path / "deep" / "file").write_bytes(b"x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        target = {"link to file": outside / "file", "link to directory": outside, "dangling": outside / "nothing"}
        path.symlink_to(target.get(kind, path))


def damage(kv: SidecarUnderTest, ref: str, what: str) -> None:
    manifest_path = kv.settings.data_dir / "manifests" / ref[4:6] / f"{ref}.safetensors"
    tail_path = kv.path_of(BlockKey("tail", ref, 0))
    path = tail_path if "block" in what else manifest_path
    if what.startswith("lost directory"):
        shutil.rmtree(kv.settings.data_dir / "tails")
    elif what.startswith("lost"):
        path.unlink()
    elif what.startswith("truncated"):
        os.truncate(path, path.stat().st_size // 2)
    else:
        os.truncate(path, 1 << 40)


async def start_over(root: Path, clock: ManualClock, kept: object, outside: Path) -> None:
    """Start, collect, serve, save, load, end; all within a deadline, and nothing outside is touched."""
    before = sorted(path.name for path in outside.iterdir())
    async with asyncio.timeout(START_DEADLINE_S):
        async with SidecarUnderTest(root, clock=clock) as kv:
            await kv.sidecar.collect()
            if kept is not None:
                assert await kv.load(kept)  # type: ignore[arg-type]  # a NewSave
            new = await kv.save((1, 2, 3, 4, 5), session_id="ctx_new")
            assert await kv.load(new)
            assert list(kv.sidecar.directory.tmp.iterdir()) == []
            await kv.catalog.delete(TENANT, "ctx_new", [])
    assert sorted(path.name for path in outside.iterdir()) == before
    assert (outside / "file").read_bytes() == b"somebody else's"


def play(leftovers: list[tuple[str, str, str]], damages: list[str]) -> None:
    async def run(root: Path, outside: Path) -> None:
        clock = ManualClock()
        async with SidecarUnderTest(root, clock=clock) as kv:
            kept = await kv.save(TEN, session_id="ctx_kept", cache_ref="ref_" + "1" * 32)
            lost = await kv.save((*TEN[:4], 50, 51), session_id="ctx_lost", cache_ref="ref_" + "2" * 32)
        for place, name, kind in leftovers:
            leave(root, outside, place, name, kind)
        for what in damages:
            damage_if_there(kv, lost.cache_ref, what)
        await start_over(root, clock, None if "lost directory" in damages else kept, outside)

    with tempfile.TemporaryDirectory() as directory:
        root, outside = Path(directory, "root"), Path(directory, "outside")
        root.mkdir()
        outside.mkdir()
        (outside / "file").write_bytes(b"somebody else's")
        asyncio.run(run(root, outside))


def damage_if_there(kv: SidecarUnderTest, ref: str, what: str) -> None:
    with suppress(OSError):  # a leftover or another damage came first
        damage(kv, ref, what)


@settings(deadline=None, max_examples=20)
@given(st.lists(LEFTOVER, max_size=8), st.lists(st.sampled_from(DAMAGES), max_size=2))
@example([(place, "x", kind) for place in PLACES for kind in ("directory",)], [])
@example([("data/tmp", "x", "full directory"), ("data/manifests/ab", f"{REF}.safetensors", "fifo")], ["lost block"])
@example([("data/manifests/ab", f"{REF}.safetensors", "huge"), ("data", "lock", "dangling")], ["grown manifest"])
def test_a_sidecar_starts_over_any_leftover_and_serves_what_was_whole(
    leftovers: list[tuple[str, str, str]], damages: list[str]
) -> None:
    play(leftovers, damages)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sidecar_starts_where_something_else_lies_under_each_name_of_its_own(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"somebody else's")
    for place in ("tmp", "blocks", "tails", "manifests", "quarantine", "lock"):
        leave(tmp_path, outside, "data", place, kind)

    await start_over(tmp_path, ManualClock(), None, outside)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_takes_the_place_of_a_stored_file_is_a_miss_and_in_nobody_s_way(tmp_path: Path, kind: str) -> None:
    """Of one context its first block, of others the tail, the manifest, the folder of the first block."""
    clock, outside = ManualClock(), tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"somebody else's")
    async with SidecarUnderTest(tmp_path, clock=clock) as kv:
        saved = [await kv.save(tuple(range(start, start + 10))) for start in (0, 100, 200, 300)]
        ref = saved[2].cache_ref
        paths = [
            kv.path_of(block_key(kv.plan(saved[0]), 0, 0)),
            kv.path_of(block_key(kv.plan(saved[1]), 2, 0)),
            kv.settings.data_dir / "manifests" / ref[4:6] / f"{ref}.safetensors",
            kv.path_of(block_key(kv.plan(saved[3]), 0, 0)).parent,
        ]
    for path in paths:
        remove_whatever(path)
        leave(tmp_path, outside, str(path.parent.relative_to(tmp_path)), path.name, kind)
    async with asyncio.timeout(START_DEADLINE_S), SidecarUnderTest(tmp_path, clock=clock) as kv:
        await kv.sidecar.collect()
        for new in saved:
            with pytest.raises((CorruptBlock, CacheRefNotFound)):
                await kv.load(new)
        for new in saved:
            again = await kv.save(tuple(new.token_ids), session_id="ctx_again")
            assert await kv.load(again)
    assert (outside / "file").read_bytes() == b"somebody else's"


def test_old_leftovers_of_any_kind_go_and_young_ones_stay(tmp_path: Path) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "tmp"
    outside.mkdir()
    (outside / "file").write_bytes(b"somebody else's")
    for number, kind in enumerate(KINDS):
        leave(tmp_path, outside, "tmp", f"{number}", kind)
    now_ms = max(path.lstat().st_mtime_ns for path in directory.iterdir()) // 1_000_000

    assert remove_old(directory, before_ms=now_ms - 600_000) == 0
    assert len(list(directory.iterdir())) == len(KINDS)
    assert remove_old(directory, before_ms=now_ms + 1) == 100 + 100 + (1 << 40)
    assert list(directory.iterdir()) == []
    assert (outside / "file").exists()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "socket"])
def test_nothing_but_a_regular_file_is_read_or_measured(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    {
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(__file__),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK | 0o600),
    }[kind]()
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CorruptBlock):
        open_regular(path)

    assert regular_size(path) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_a_leftover_that_cannot_be_removed_is_left_and_counts_as_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "stays").write_bytes(b"12345")

    def refuse(*_args, **_more):
        raise PermissionError

    with monkeypatch.context() as stubborn:
        stubborn.setattr(Path, "unlink", refuse)
        assert remove_whatever(tmp_path / "stays") == 0
        stubborn.setattr(os, "scandir", refuse)
        assert list(entries(tmp_path)) == []
    assert remove_whatever(tmp_path / "stays") == 5
