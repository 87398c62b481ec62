"""Managers that die at their crash points, and TTL, DELETE and commits that race: nothing lost, nothing left behind.

Seen to fail: with `ZREM KEYS[4]` taken out of unregister.lua (a tenant's entries of nothing), with the tombstone's
PEXPIRE taken out of sweep.lua (tombstones for ever).
"""

from __future__ import annotations

import ast
import signal
from pathlib import Path

import pytest

from context_manager import manager
from context_manager.client import ContextManagerClient
from context_manager.layout import CRASH_POINTS, load_scripts
from tests.kit.manager_crashes import crash_everywhere, seconds_until_free
from tests.kit.manager_process import running_manager_process
from tests.kit.seed import SEED
from tests.kit.session_churn import SessionChurn, until_nothing_is_wrong
from tests.kit.valkey import ValkeyServer

FEW = ("manager.commit.after", "manager.share.after", "manager.unregister.after", "manager.sweep.after")
IN_A_CLUSTER = ("manager.admit.before", "manager.admit.after")
"""Scripts that a single Valkey never runs."""
MORE = tuple(point for point in CRASH_POINTS if point not in (*FEW, *IN_A_CLUSTER))


def test_there_is_a_point_on_either_side_of_every_script() -> None:
    """Each point is named by its script; `get` writes nothing."""
    writing = load_scripts().keys() - {"get"}
    assert {f"manager.{name}.{side}" for name in writing for side in ("before", "after")} == set(CRASH_POINTS)
    nodes = [node for node in ast.walk(ast.parse(Path(manager.__file__).read_text())) if isinstance(node, ast.Call)]
    calls = [node for node in nodes if ast.unparse(node.func) == "crash_point"]
    told = {ast.unparse(call.args[0]) for call in calls}
    assert told == {"f'manager.{script}.before'", "f'manager.{script}.after'"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("points", [FEW, pytest.param(MORE, marks=pytest.mark.thorough)], ids=["few", "more"])
async def test_managers_that_die_anywhere_lose_nothing_and_leave_nothing(
    tmp_path: Path, valkey: ValkeyServer, points: tuple[str, ...]
) -> None:
    told = await crash_everywhere(tmp_path, valkey, points, seed=SEED)

    print(told)
    assert told.faults == []


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_managers_of_a_cluster_that_die_at_a_tenants_limit_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, cluster=True) as valkey:
        limit = {"MANAGER_TENANT_CONTEXTS_MAX": "1000000"}
        told = await crash_everywhere(tmp_path, valkey, IN_A_CLUSTER, seed=SEED, **limit)

    print(told)
    assert told.faults == []


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_expiry_deletes_and_commits_that_race_leave_nothing_behind(tmp_path: Path, valkey: ValkeyServer) -> None:
    async with (
        running_manager_process(tmp_path, valkey.url) as one,
        running_manager_process(tmp_path, valkey.url, MANAGER_SWEEP_INTERVAL_S="0.05") as other,
    ):
        churn = SessionChurn([one.address, other.address], num_sessions=16, seed=SEED)
        try:
            churn.start()
            await churn.until_acknowledged(400)
            await churn.stop()
        finally:
            await churn.close()
        assert churn.faults == []
        num_live = await until_nothing_is_wrong(valkey.port, churn.outcome)
        print(f"{churn.num_acknowledged} turns, {num_live} sessions live")
        client = ContextManagerClient(one.address, timeout_s=30)
        for name in churn.outcome.live:
            await client.unregister_session_cache("demo", name)
        await client.close()
        churn.outcome.live.clear()
        await until_nothing_is_wrong(valkey.port, churn.outcome)


@pytest.mark.timeout(300)
async def test_a_turn_whose_process_died_frees_its_session_within_the_leases_life(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    """The manager that gave the lease dies with it; another one gives it to the next when its time is over."""
    async with (
        running_manager_process(tmp_path, valkey.url) as one,
        running_manager_process(tmp_path, valkey.url) as other,
    ):
        waited_s, least_s = await seconds_until_free(one, other, lease_ms=2000, kill=lambda: one.send(signal.SIGKILL))
    print(f"free after {waited_s:.2f} s of a lease of 2 s")
    assert least_s <= waited_s < 2 + 20, "a busy machine may be seconds late"
