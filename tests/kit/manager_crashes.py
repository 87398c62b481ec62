"""A manager that dies at one crash point after the other while sessions churn, beside one that lives."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from context_manager.client import ContextManagerClient
from contextcache.errors import ContextBusy, ContextCacheError, StoreUnavailable
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from tests.kit.manager_process import ManagerProcess, running_manager_process
from tests.kit.session_churn import SessionChurn, until_nothing_is_wrong
from tests.kit.turn_load import TENANT
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer


@dataclass
class Told:
    """What was seen."""

    num_crashes: int = 0
    num_turns: int = 0
    num_live: int = 0
    faults: list[str] = field(default_factory=list)


async def crash_everywhere(
    directory: Path, valkey: ValkeyServer, points: Sequence[str], *, seed: int, **environment: str
) -> Told:
    """Die once at each of `points` under load, start again each time; then compare the store with what must be."""
    told = Told()
    async with (
        running_manager_process(directory, valkey.url, **environment) as dying,
        running_manager_process(directory, valkey.url, **environment) as living,
    ):
        churn = SessionChurn([dying.address, living.address], num_sessions=8, seed=seed)
        try:
            churn.start()
            for point in points:
                dying.crash_file.write_text(point)
                await until(lambda: not dying.is_alive, what=f"it dies at {point}", deadline_s=120)
                await dying.wait()
                told.num_crashes += 1
                await dying.start()
                await churn.until_acknowledged(10)
            await churn.stop()
        finally:
            await churn.close()
        told.num_turns = churn.num_acknowledged
        told.faults = churn.faults
        try:
            told.num_live = await until_nothing_is_wrong(valkey.port, churn.outcome)
        except AssertionError as exc:
            told.faults.append(str(exc))
    return told


async def seconds_until_free(
    giver: ManagerProcess, other: ManagerProcess, *, lease_ms: int, kill: Callable[[], object]
) -> tuple[float, float]:
    """Take a lease through one manager, kill that, and return how long another one calls the session busy.

    Second: the shortest time that would be right, without the time that passed before the answer came. All calls are
    repeated while the store does not answer: their leases make that the same as once.
    """
    clients = [ContextManagerClient(manager.address, timeout_s=30) for manager in (giver, other)]
    said = Segment(SegmentKind.PROMPT, (1,), text="hi")
    try:
        new = NewSession(TENANT, "ctx_1", "toy")
        commit = TurnCommit(TENANT, "ctx_1", "create", 0, 0, (said,), "", "pod")
        await _answer(lambda: clients[0].reserve(new, lease_id="create", lease_ttl_ms=120_000))
        await _answer(lambda: clients[0].register_session_cache(commit))
        await _answer(lambda: clients[1].locate(TENANT, "ctx_1"))
        asked_s = time.monotonic()
        await _answer(lambda: clients[0].begin_turn(TENANT, "ctx_1", lease_id="dead", lease_ttl_ms=lease_ms))
        answered_s = time.monotonic()
        kill()
        await _answer(
            lambda: clients[1].begin_turn(TENANT, "ctx_1", lease_id="next", lease_ttl_ms=lease_ms), ContextBusy
        )
        least_s = lease_ms / 1000 - (answered_s - asked_s) - 0.05
        return time.monotonic() - asked_s, least_s
    finally:
        for client in clients:
            await client.close()


async def _answer(call: Callable[[], Awaitable[object]], *despite: type[ContextCacheError]) -> None:
    await until(call, is_so=lambda _: True, what="a manager answers", despite=(StoreUnavailable, *despite))
