"""The worker's half and a real sidecar's arena: lost, refused, and written over under an engine that stood still."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contextcache.model import Manifest
from contextcache.names import new_cache_ref
from kv_sidecar.client import pack_token_ids
from kv_sidecar.tiers.arena import SUFFIX
from tests.kit.connector_rank import BLOCK_BYTES, BLOCK_TOKENS, HEAD_BYTES, Rank, door_of, load_plan, save_plan
from tests.kit.process_memory import arenas_of
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.until import wait_until
from vllm_plugin.connector.copies.pages import Landed, PageCopy, Spent

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = BLOCK_TOKENS + 7
"""A block and a tail: as many files as a load copies at once, so that both stand still together."""
OLD, NEW = list(range(5)), list(range(30, 35))
ARENA_BYTES = 5 * (BLOCK_BYTES + HEAD_BYTES)
"""The stopped engine's context, and another one."""


@contextmanager
def running(directory: Path, **settings: float) -> Iterator[SidecarProcess]:
    process = SidecarProcess(directory, block_tokens=BLOCK_TOKENS, memory_limit_bytes=ARENA_BYTES, **settings)
    process.start()
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def ranks_of(process: SidecarProcess, num_ranks: int = 1) -> Iterator[list[Rank]]:
    """Each of a model of its own: they share no block."""
    ranks = [Rank(door_of(process), model=f"m{number}") for number in range(num_ranks)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.side.shutdown()


def saved(rank: Rank, number: int = 0) -> Manifest:
    plan = save_plan(rank, new_cache_ref(), NUM_TOKENS, OLD)
    rank.run(save=replace(plan, token_ids=pack_token_ids(range(number, NUM_TOKENS + number))))
    return rank.manifest(plan.cache_ref)


def saved_after_a_restart(rank: Rank, number: int) -> Manifest:
    """Save until one is kept: a call soon after a restart may meet gRPC's back-off, and its save is then skipped."""
    counters, found = rank.side.counters, list[Manifest]()

    def ended() -> int:
        return counters.get("saves") + counters.get("skipped_saves", "sidecar_unavailable")

    def is_kept() -> bool:
        num_ended, num_kept = ended(), counters.get("saves")
        plan = save_plan(rank, new_cache_ref(), NUM_TOKENS, OLD)
        rank.run(save=replace(plan, token_ids=pack_token_ids(range(number, NUM_TOKENS + number))))
        wait_until(lambda: ended() > num_ended, what="the save ends", deadline_s=60)
        if counters.get("saves") > num_kept:
            found.append(rank.manifest(plan.cache_ref))
        return bool(found)

    wait_until(is_kept, what="a save is kept", deadline_s=60)
    return found[0]


def comes_back(rank: Rank, manifest: Manifest) -> bool:
    """Load into other blocks; return whether every byte is there."""
    for tensor in rank.kv.values():
        tensor[NEW] = 0
    assert rank.run(load=load_plan(rank, manifest, NEW)).failed == set()
    return all(torch.equal(tensor[NEW], tensor[OLD]) for tensor in rank.kv.values())


def arena_of(process: SidecarProcess) -> int:
    assert process._process is not None
    inode, _ = sorted(arenas_of(process._process.pid))  # the memory, and the table of its generations
    return inode


def has_arena(rank: Rank) -> bool:
    rank.side.take_results()  # greets the sidecar again, as every engine step does
    terms = rank.side._link.terms_now
    return terms is not None and terms.arena is not None


def kill_while(rank: Rank, process: SidecarProcess) -> None:
    """Save, and have the sidecar killed when the first of the slots it has lent is filled."""
    layers: Any = rank.side._layers
    gather = layers.gather

    def gather_and_kill(*args: Any, **more: Any) -> Any:
        layers.gather = gather  # the next save is whole
        process.kill()
        return gather(*args, **more)

    layers.gather = gather_and_kill
    rank.run(save=save_plan(rank, new_cache_ref(), NUM_TOKENS, OLD))
    counters = rank.side.counters
    wait_until(lambda: counters.get("skipped_saves", "sidecar_unavailable") == 1, what="the save is given up")


@pytest.mark.parametrize(
    "in_a_save",
    [
        pytest.param(False, id="between two turns"),
        pytest.param(True, id="in the middle of a save", marks=pytest.mark.thorough),
    ],
)
def test_an_engine_lets_go_of_a_killed_sidecars_memory_and_goes_on_in_the_next_ones(
    tmp_path: Path, *, in_a_save: bool
) -> None:
    with running(tmp_path) as process, ranks_of(process) as (rank,):
        first, old = saved(rank), arena_of(process)
        assert old in arenas_of(os.getpid())
        if in_a_save:
            kill_while(rank, process)
        else:
            process.kill()

        wait_until(lambda: old not in arenas_of(os.getpid()), what="the old memory is let go")
        process.start()
        wait_until(lambda: has_arena(rank), what="the new arena is borrowed")
        assert comes_back(rank, first)
        assert comes_back(rank, saved_after_a_restart(rank, 1))
        assert rank.side.counters.get("refused_arenas") == 0
        assert arena_of(process) in arenas_of(os.getpid())


def test_what_was_written_over_under_an_engine_that_stood_still_is_not_taken_for_its_kv(tmp_path: Path) -> None:
    """It stands still with the heads compared and the pages not yet copied; its lease ends without it.

    Seen failing without the comparison after the copy: another context's KV under this one's name.
    """
    held: list[tuple[Any, bytes]] = []
    going_on = threading.Event()
    with (
        running(tmp_path, lease_ms=1_000, collect_interval_s=0.1) as process,
        ranks_of(process, 2) as (stopped, other),
        ThreadPoolExecutor(1) as pool,
    ):
        manifest = saved(stopped)
        layers: Any = stopped.side._layers
        scatter = layers.scatter

        def late(copies: Sequence[PageCopy], spent: Spent) -> list[Landed]:
            if not going_on.is_set():
                held.extend((copy.pages, bytes(copy.pages)) for copy in copies)
                assert going_on.wait(120)
            return scatter(copies, spent)

        layers.scatter = late
        loading = pool.submit(comes_back, stopped, manifest)
        try:
            wait_until(lambda: len(held) == 2, what="the engine stands still")
            numbers = iter(range(1000))
            wait_until(
                lambda: saved(other, next(numbers)) and all(bytes(pages) != was for pages, was in held),
                what="its slots are others'",
            )
        finally:
            going_on.set()

        assert loading.result()
        assert stopped.side.counters.get("renewed_loads") == 1


def unlinked(path: Path) -> None:
    path.unlink()


def ended_at_once(path: Path) -> None:
    _answer_with(b"", path)


def without_a_descriptor(path: Path) -> None:
    _answer_with(b"0" * 32, path)


def _answer_with(word: bytes, path: Path) -> None:
    """Sit at the door's place, as a sandbox does that passes no descriptors."""
    path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.sendall(word)

    threading.Thread(target=answer).start()


@pytest.mark.parametrize(
    "refused",
    [*(pytest.param(way, marks=pytest.mark.thorough) for way in (unlinked, ended_at_once)), without_a_descriptor],
)
def test_an_engine_that_is_refused_the_arena_computes(tmp_path: Path, refused: Callable[[Path], None]) -> None:
    with running(tmp_path) as process, ranks_of(process) as (first,):
        manifest = saved(first)
        refused(Path(process.address.removeprefix("unix://") + SUFFIX))
        with ranks_of(process) as (rank,):
            assert rank.run(load=load_plan(rank, manifest, NEW)).failed == {"engine-load"}
            assert rank.side.counters.get("refused_arenas") == 1
