"""The arena over real sockets and processes: who gets it, who keeps what when somebody dies or stands still."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from contextcache.clock import SystemClock
from contextcache.errors import SidecarUnavailable
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import open_arena
from kv_sidecar.saves import NewSave
from kv_sidecar.tiers import arena as arena_module
from kv_sidecar.tiers.arena import SUFFIX, ArenaDoor, Region
from tests.kit.borrower import FILL, SIZE_BYTES, Borrower
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import TENANT, new_save
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.until import until, wait_until

PROMPT = tuple(range(10))
ARENA_BYTES = 3 * SIZE_BYTES
"""Half of it is less than two of the borrower's files."""


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    yield from running(tmp_path, memory_limit_bytes=ARENA_BYTES)


@pytest.fixture
def sidecar_of_frames(tmp_path: Path) -> Iterator[SidecarProcess]:
    yield from running(tmp_path, memory_limit_bytes=0)


def running(root: Path, **settings: int) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(root, block_tokens=4, **settings)
    sidecar.start()
    yield sidecar
    sidecar.kill()


@pytest.fixture
def rank(sidecar: SidecarProcess) -> Iterator[EngineRank]:
    with closing(EngineRank(sidecar.address)) as rank:
        yield rank


def socket_of(sidecar: SidecarProcess) -> str:
    return sidecar.address.removeprefix("unix://") + ".arena"


def lent_beside(rank: EngineRank, new: NewSave) -> bool:
    """Whether a file as large as the borrower's gets a slot too; it is given back."""
    slots = rank.lend({"cache_ref": new.cache_ref, "rank": 0, "block_index": 0}, SIZE_BYTES, timeout_ms=20)
    assert rank.arena is not None
    rank.client.return_slots(rank.arena.borrower, [slot.slot_id for slot in slots])
    return bool(slots)


def open_files(pid: int) -> list[str]:
    """Names of what a process has open."""
    return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]


def prepared(rank: EngineRank) -> NewSave:
    new = new_save(PROMPT, now_ms=SystemClock().now_ms())
    rank.prepare(new)
    return new


def test_the_descriptor_comes_over_the_socket_and_no_file_of_shared_memory_is_made(
    sidecar: SidecarProcess, rank: EngineRank
) -> None:
    new = rank.save(PROMPT)

    assert rank.load(new) == {pb.TIER_HOST}
    assert sidecar._process is not None
    theirs, ours = (Path(f"/proc/{pid}/maps").read_text() for pid in (sidecar._process.pid, "self"))
    assert "/memfd:context-cache" in theirs
    assert "/memfd:context-cache" in ours
    assert "/dev/shm" not in theirs
    assert not [name for name in open_files(sidecar._process.pid) if name.startswith("/dev/shm")]


def test_nobody_who_has_the_descriptor_can_change_the_size(sidecar: SidecarProcess, rank: EngineRank) -> None:
    """Seen failing without the seals; whoever then reads behind the end is killed by SIGBUS."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(socket_of(sidecar))
        _, (descriptor, table), _, _ = socket.recv_fds(connection, 64, 2)
    try:
        for size_bytes in (0, 2 * ARENA_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size_bytes)
            with pytest.raises(PermissionError):
                os.ftruncate(table, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(table, b"1", 0)
    finally:
        os.close(descriptor)
        os.close(table)
    assert rank.load(rank.save(PROMPT))


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_borrower_s_slots_come_back(sidecar: SidecarProcess, rank: EngineRank, forks: bool) -> None:
    """Seen failing with a child of the borrower's alive: it had the connection too."""
    new = prepared(rank)
    with Borrower(sidecar.address, new_cache_ref(), forks=forks) as borrower:
        assert not lent_beside(rank, new)
        borrower.kill()
        wait_until(lambda: lent_beside(rank, new), what="the killed process's slot is free")


def test_a_borrower_that_stands_still_keeps_its_slot_although_its_save_is_over(
    sidecar: SidecarProcess, rank: EngineRank
) -> None:
    cache_ref, new = new_cache_ref(), prepared(rank)
    with Borrower(sidecar.address, cache_ref) as borrower:
        borrower.stop()
        rank.client.abandon_save(TENANT, cache_ref, "hold_deadline", started_at_ms=0)
        for number in range(20):
            rank.save(tuple(range(100 * number, 100 * number + 100)))

        assert not lent_beside(rank, new)
        assert rank.arena is not None
        assert bytes(rank.arena.view(borrower.offset, SIZE_BYTES)) == FILL * SIZE_BYTES
        borrower.kill()
        wait_until(lambda: lent_beside(rank, new), what="the killed process's slot is free")


def test_a_borrower_learns_of_the_sidecar_s_end_and_borrows_from_the_next_one(sidecar: SidecarProcess) -> None:
    gone = threading.Event()
    with closing(EngineRank(sidecar.address)) as rank:
        new = rank.save(PROMPT)
        old = open_arena(sidecar.address, gone.set)
        old.view(0, 8)[:] = b"8 bytes."
        sidecar.kill()
        assert gone.wait(60)
        assert bytes(old.view(0, 8)) == b"8 bytes."
        sidecar.start()
        later = wait_until(lambda: prepared(rank), what="the new sidecar answers", despite=(SidecarUnavailable,))
        with pytest.raises(SidecarUnavailable, match="not lent to this process"):
            lent_beside(rank, later)

    with closing(EngineRank(sidecar.address)) as rank:
        assert rank.load(new) == {pb.TIER_DISK}
        assert rank.load(rank.save((*PROMPT, 11))) == {pb.TIER_HOST}


def test_a_save_whose_process_has_ended_is_sealed_as_far_as_it_came(sidecar: SidecarProcess, rank: EngineRank) -> None:
    new = new_save(PROMPT, now_ms=SystemClock().now_ms())
    with closing(EngineRank(sidecar.address)) as other:
        other.prepare(new)
        other.client.save_blocks(other.requests(new, [0, 1]), 60)
    sidecar.wait_sealed(new.cache_ref)

    assert rank.load(replace(new, token_ids=PROMPT[:8])) == {pb.TIER_HOST}


def test_a_sidecar_that_ends_leaves_the_save_to_the_next_one(sidecar: SidecarProcess) -> None:
    """Seen failing with the end of the door taken for the engine's: the rest of the save was refused."""
    with closing(EngineRank(sidecar.address)) as rank:
        new = new_save(PROMPT, now_ms=SystemClock().now_ms())
        rank.prepare(new)
        rank.client.save_blocks(rank.requests(new, [0, 1]), 60)
        assert sidecar._process is not None
        sidecar._process.terminate()
        sidecar._process.wait(60)
        sidecar.start()
    with closing(EngineRank(sidecar.address)) as rank:
        rank.send(new)

        assert rank.load(new)


def test_who_lets_go_himself_is_not_told_that_the_sidecar_has_gone(sidecar: SidecarProcess, rank: EngineRank) -> None:
    gone = threading.Event()
    arena = open_arena(sidecar.address, gone.set)
    attending = [thread for thread in threading.enumerate() if thread.name == "context-cache-arena"][-1]
    del arena
    attending.join(60)

    assert not attending.is_alive()
    assert not gone.is_set()
    assert rank.load(rank.save(PROMPT))


@pytest.mark.parametrize("size_bytes", [-1, 1, 1 << 40])
def test_a_stretch_outside_the_arena_cannot_be_seen(rank: EngineRank, size_bytes: int) -> None:
    assert rank.arena is not None
    with pytest.raises(ValueError, match="outside"):
        rank.arena.view(rank.arena.size_bytes, size_bytes)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:///nowhere/s.sock", "unix:///" + 100 * "long/"])
def test_an_arena_that_cannot_be_opened_is_an_oserror(address: str) -> None:
    with pytest.raises(OSError, match=r"."):
        open_arena(address, lambda: None)


def test_without_an_arena_blocks_travel_in_frames(sidecar_of_frames: SidecarProcess) -> None:
    with closing(EngineRank(sidecar_of_frames.address)) as rank:
        assert not rank.terms.arena
        assert rank.load(rank.save(PROMPT)) == {pb.TIER_DISK}
    assert not Path(socket_of(sidecar_of_frames)).exists()


def test_who_cannot_reach_the_arena_s_socket_saves_and_loads_in_frames(sidecar: SidecarProcess) -> None:
    Path(socket_of(sidecar)).unlink()
    with pytest.raises(FileNotFoundError):
        open_arena(sidecar.address, lambda: None)
    with closing(EngineRank(sidecar.address, frames=True)) as rank:
        assert rank.terms.arena
        assert rank.load(rank.save(PROMPT)) == {pb.TIER_HOST}


async def test_the_engine_fills_its_page_table_when_the_sidecar_has_put_memory_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is charged to the container that touches it first. Seen failing when the engine began at once."""
    region, path = Region(1 << 20), tmp_path / "s"
    door = ArenaDoor(Path(f"{path}{SUFFIX}"), region, on_come=lambda _: None, on_gone=lambda _: None)
    seen: list[bool] = []
    monkeypatch.setattr(arena_module, "populate", lambda *_, **__: seen.append(region.is_populated))
    await door.open()
    arena = await asyncio.to_thread(open_arena, f"unix://{path}", lambda: None)
    region.populate()
    await until(lambda: len(seen) == 2, what="both have touched it")

    assert seen == [False, True]
    del arena
    await door.close()
    region.close()
