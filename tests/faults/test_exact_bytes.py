"""TTL and DELETE under load, parts dying at their crash points: after one collector pass every stored byte is named.

What is counted: tests/kit/faults/bytes_count.py. Every point in both orders: tests/torture/orphans.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.kit.faults.bytes_count import count_quiet
from tests.kit.faults.bytes_rounds import Round, play, run_round
from tests.kit.faults.bytes_world import BytesWorld

pytestmark = pytest.mark.timeout(400)
SEED = "exact bytes"
FIRST = Round("arena", "sidecar.manifest.rename", "manager.commit.before")
MORE = (
    Round("frames", "sidecar.manifest.unlink", "manager.unregister.after"),
    Round("frames", "sidecar.tail.quarantine", "manager.reserve.after"),
)
COMMIT_FIRST = (
    Round("frames", "sidecar.pull.between-blocks", "manager.commit.after"),
    Round("arena", "sidecar.seal.after", "manager.sweep.before"),
)


@asynccontextmanager
async def started(directory: Path, *, seal_first: bool) -> AsyncIterator[BytesWorld]:
    world = BytesWorld(directory, seal_first=seal_first)
    try:
        await world.start()
        yield world
    finally:
        await world.close()


async def check(world: BytesWorld, *rounds: Round) -> None:
    """Play without a crash, then the rounds; what is stored must be exact after each."""
    await play(world, seed=SEED)
    count = await count_quiet(world)
    print(f"no crash: {count}")

    assert count.wrong == []

    for one in rounds:
        count = await run_round(world, one, seed=f"{SEED} {one}")
        print(f"{one}: {count}")

        assert count.wrong == []

    assert count.num_manifests
    assert count.num_orphaned


@pytest.mark.parametrize("rounds", [(FIRST,), pytest.param(MORE, marks=pytest.mark.thorough)], ids=["one", "more"])
async def test_after_one_pass_the_stored_bytes_are_those_that_live_sessions_reach(tmp_path: Path, rounds) -> None:
    """Two sidecars, a manager and Valkey under creates, turns, pulls, deletes, touches and expiries, with crashes.

    Seen to fail without the question to the manager (18 manifests that no session named), and with orphans taken out
    of the index while their files stay (149 files too many), and without
    the look for blocks that no manifest holds (a tail that a crash before the rename of its manifest left).
    """
    async with started(tmp_path, seal_first=True) as world:
        await check(world, *rounds)


@pytest.mark.thorough
async def test_so_they_are_where_turns_are_committed_before_their_kv_is_sealed(tmp_path: Path) -> None:
    async with started(tmp_path, seal_first=False) as world:
        await check(world, *COMMIT_FIRST)
