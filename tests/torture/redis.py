"""Redis and managers that die, stand still and fail over under turns, again and again: what was acknowledged stays.

Rounds: every crash point of the manager (plain and Cluster); kill -9 and SIGSTOP of a Valkey with `appendfsync always`
and with `everysec`; failovers by a Sentinel with and without WAIT. Lost turns are failures where the promise in
docs/operations/redis.md is "nothing", and figures where it is not.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

from context_manager.client import ContextManagerClient
from context_manager.layout import CRASH_POINTS as POINTS
from tests.kit.manager_crashes import crash_everywhere
from tests.kit.manager_process import running_manager_process
from tests.kit.turn_load import TurnLoad
from tests.kit.valkey import ValkeyServer
from tests.kit.valkey_failover import FailoverPair
from tests.torture.report import Options, Report

_ONLY_IN_A_CLUSTER = {"manager.admit.before", "manager.admit.after"}
_NUM_SESSIONS = 8


async def run(options: Options) -> Report:
    """Do every round once per 500 turns asked for."""
    report = Report("redis")
    random = options.random("redis")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(1, options.turns // 500)):
            directory = Path(folder) / str(number)
            await _crash_points(report, directory / "points", random)
            for appendfsync in ("always", "everysec"):
                await _restarts(report, directory / appendfsync, random, appendfsync)
            for num_replicas in (1, 0):
                await _failover(report, directory / f"failover{num_replicas}", random, num_replicas)
    return report


async def _crash_points(report: Report, directory: Path, random: Random) -> None:
    for cluster in (False, True):
        folder = directory / str(cluster)
        folder.mkdir(parents=True)
        valkey = ValkeyServer(folder, cluster=cluster)
        valkey.start()
        points = [point for point in POINTS if (point in _ONLY_IN_A_CLUSTER) == cluster]
        random.shuffle(points)
        limit = {"MANAGER_TENANT_CONTEXTS_MAX": "1000000"} if cluster else {}
        try:
            told = await crash_everywhere(folder, valkey, points, seed=random.randrange(1 << 30), **limit)
        finally:
            valkey.stop()
        report.count("managers killed at a point", told.num_crashes)
        report.count("turns around them", told.num_turns)
        report.failures += [f"crash points, cluster {cluster}: {fault}" for fault in told.faults]


async def _restarts(report: Report, directory: Path, random: Random, appendfsync: str) -> None:
    directory.mkdir(parents=True)
    valkey = ValkeyServer(directory, appendfsync=appendfsync)
    valkey.start()
    try:
        async with running_manager_process(directory, valkey.url) as manager:
            load = TurnLoad([manager.address], num_sessions=_NUM_SESSIONS)
            try:
                load.start()
                for _ in range(6):
                    await load.until_acknowledged(random.randrange(1, 200))
                    if random.random() < 0.6:
                        valkey.kill()
                        await load.until_refused(_NUM_SESSIONS)
                        valkey.start()
                    else:
                        valkey.pause()
                        await load.until_refused(_NUM_SESSIONS)
                        valkey.resume()
                await load.until_acknowledged(_NUM_SESSIONS)
                row = f"appendfsync {appendfsync}"
                await _compare(report, load, manager.address, row, may_lose=appendfsync != "always")
            finally:
                await load.close()
    finally:
        valkey.stop()


async def _failover(report: Report, directory: Path, random: Random, num_replicas: int) -> None:
    pair = FailoverPair(directory)
    try:
        pair.start()
        async with AsyncExitStack() as stack:
            wait = {"MANAGER_REDIS_WAIT_REPLICAS": str(num_replicas)}
            managers = [
                await stack.enter_async_context(running_manager_process(directory, pair.url, **wait)) for _ in range(2)
            ]
            load = TurnLoad([manager.address for manager in managers], num_sessions=_NUM_SESSIONS)
            stack.push_async_callback(load.close)
            load.start()
            await load.until_acknowledged(random.randrange(50, 200))
            pair.primary.kill()
            await asyncio.to_thread(pair.until_promoted)
            pair.primary.start()
            await load.until_acknowledged(100)
            row = f"failover, waiting for {num_replicas}"
            await _compare(report, load, managers[0].address, row, may_lose=num_replicas == 0)
    finally:
        pair.stop()


async def _compare(report: Report, load: TurnLoad, address: str, row: str, *, may_lose: bool) -> None:
    await load.stop()
    client = ContextManagerClient(address, timeout_s=30)
    num_lost = await load.check(client)
    await client.close()
    waited_s = sorted(load.refused_s) or [0.0]
    report.count(f"{row}: turns acknowledged", load.num_acknowledged)
    report.count(f"{row}: of them lost", num_lost)
    report.rows[f"{row}: unavailable, median and longest s"] = f"{waited_s[len(waited_s) // 2]:.2f} {waited_s[-1]:.2f}"
    report.failures += [f"{row}: {fault}" for fault in load.faults]
    if num_lost and not may_lose:
        report.failures.append(f"{row}: {num_lost} acknowledged turns are lost")
