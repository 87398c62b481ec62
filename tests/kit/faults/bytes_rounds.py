"""Rounds on a BytesWorld: clients play, parts die at points meanwhile, then every byte is counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle

from context_manager.layout import CRASH_POINTS as MANAGER_POINTS
from contextcache.errors import ContextCacheError
from kv_sidecar.crash_points import POINTS as SIDECAR_POINTS
from kv_sidecar.format.manifest import block_key
from kv_sidecar.saves import NewSave
from tests.kit.faults.bytes_count import Count, count_quiet
from tests.kit.faults.bytes_world import BLOCK_TOKENS, BytesWorld, Part, Player, Pod
from tests.kit.faults.files import StoredFiles, flip_data_bit
from tests.kit.kv_blocks import planned

PLAYERS = 4
CALLS = 30
"""Calls without a fault that a round has at least."""
_ROUND_DEADLINE_S = 90.0
_QUARANTINE = ".quarantine"


@dataclass(frozen=True)
class Round:
    """Where the parts die."""

    pod: str
    sidecar_point: str
    manager_point: str


def plan_rounds(seed: str) -> list[Round]:
    """Return rounds in which every point of both parts comes up once at least."""
    chance = random.Random(seed)
    sidecar, manager = list(SIDECAR_POINTS), list(MANAGER_POINTS)
    chance.shuffle(sidecar)
    chance.shuffle(manager)
    number = max(len(sidecar), len(manager))
    pairs = zip(cycle(sidecar), cycle(manager), range(number), strict=False)
    # What a client reads is put aside where nothing is kept in memory: there a file on disk is read at once.
    return [
        Round("frames" if of_sidecar.endswith(_QUARANTINE) else chance.choice(["arena", "frames"]), of_sidecar, other)
        for of_sidecar, other, _ in pairs
    ]


async def run_round(world: BytesWorld, plan: Round, *, seed: str) -> Count:
    """Play until both parts have died at their points and live again, then count."""
    (pod,) = (pod for pod in world.pods if pod.name == plan.pod)
    if plan.sidecar_point.endswith(_QUARANTINE):
        await _read_damaged(world, pod, plan.sidecar_point, seed=seed)
        await play(world, seed=seed, points=[(world.manager, plan.manager_point)])
    else:
        await play(world, seed=seed, points=[(pod.part, plan.sidecar_point), (world.manager, plan.manager_point)])
    return await count_quiet(world)


async def play(world: BytesWorld, *, seed: str, points: Sequence[tuple[Part, str]] = ()) -> None:
    """Play `CALLS` calls, and until every armed part has died at its point; return when all serve again."""
    num_deaths = sum(part.restarts for part in world.parts) + len(points)
    for part, point in points:
        part.arm(point)
    done = 0

    async def play_on(number: int) -> None:
        nonlocal done
        player = Player(world, f"{seed} {number}")
        while done < CALLS or any(part.is_armed for part, _ in points):
            done += await player.play()

    try:
        async with asyncio.timeout(_ROUND_DEADLINE_S), asyncio.TaskGroup() as group:
            for number in range(PLAYERS):
                group.create_task(play_on(number))
    except TimeoutError as exc:
        armed = ", ".join(point for part, point in points if part.is_armed)
        raise AssertionError(f"nobody came by {armed}") from exc
    await world.await_restarts(num_deaths)


async def _read_damaged(world: BytesWorld, pod: Pod, point: str, *, seed: str) -> None:
    """Damage one file of KV that nobody names, and read it twice: the sidecar dies as it puts it aside."""
    new = await Player(world, seed).save_orphan(pod)
    kind = point.split(".")[1]
    files = StoredFiles(pod.data)
    manifest = planned(new, block_tokens=BLOCK_TOKENS)
    if kind == "manifest":
        path = files.manifest_of(new.cache_ref)
    else:
        name = block_key(manifest, 5 if kind == "tail" else 4, 0).file_name
        (path,) = (path for path in files.on_disk("tail" if kind == "tail" else "block") if path.name == name)
    flip_data_bit(path, path)
    num_deaths = sum(part.restarts for part in world.parts) + 1
    pod.part.arm(point)
    await _load(pod, new)
    await world.await_restarts(num_deaths)
    await _load(pod, new)
    assert not path.exists(), "a damaged file was read and is still there"


async def _load(pod: Pod, new: NewSave) -> None:
    with suppress(ContextCacheError):
        await asyncio.to_thread(pod.engine.load, new)
        raise AssertionError("a damaged file was served")
