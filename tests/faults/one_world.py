"""One stack for all the matrix's modules: it takes half a minute to start. Import `world` to use it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.parts import LINKS
from tests.faults.clock_shift import Interposed
from tests.faults.disk import SmallDisk, small_disk
from tests.faults.stack import FaultStack
from tests.faults.world import World

DISK_BYTES = 128 << 20
SEED = int(os.environ.get("FAULT_SEED", "5"))
ENV = {
    "TURN_LEASE_TTL_MS": "5000",
    "SIDECAR_COLLECT_INTERVAL_S": "1",
    "MANAGER_SWEEP_INTERVAL_S": "1",
}
"""Waits that a test would have to sit through; every other deadline is the product's own."""
IDLE_TIMEOUT_S = 20.0
"""Ten minutes by default, as a long prompt may take; a busy machine may need seconds for a token."""


class WholeWorld(World):
    """The stack with every link through a proxy, its data on a disk of its own, its clocks at our mercy."""

    def __init__(
        self, stack: FaultStack, *, seed: int, orders: Interposed, disk: SmallDisk | None, idle_timeout_s: float
    ) -> None:
        super().__init__(stack, seed=seed, idle_timeout_s=idle_timeout_s)
        self.orders = orders
        self.disk = disk
        """The sidecar's; None where mounting is not allowed."""


@contextlib.contextmanager
def whole_world(directory: Path, *, seed: int = SEED, idle_timeout_s: float = IDLE_TIMEOUT_S) -> Iterator[WholeWorld]:
    """Start the stack and warm it up: the first turn of an engine takes seconds."""
    orders = Interposed(directory / "orders")
    idle = {"GATEWAY_IDLE_TIMEOUT_S": str(idle_timeout_s)}
    links = [*LINKS, "client-envoy"]
    stack = FaultStack(directory / "faults", proxied=links, env=ENV | orders.environment | idle)
    with small_disk(stack.data(), size_bytes=DISK_BYTES) as disk, stack:
        world = WholeWorld(stack, seed=seed, orders=orders, disk=disk, idle_timeout_s=idle_timeout_s)
        print(f"seed {seed}")
        try:
            told = world.new()
            world.stack.forget_prefixes()
            world.ask("warm up", told)
            yield world
        finally:
            world.close()


_OPEN = contextlib.ExitStack()
_WORLDS: list[WholeWorld] = []


@pytest.fixture(scope="session")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeWorld]:
    """Open it at the first use, close it with the session; each module that imports this shares it."""
    if not _WORLDS:
        _WORLDS.append(_OPEN.enter_context(whole_world(tmp_path_factory.mktemp("world"))))
    yield _WORLDS[0]
    _WORLDS.clear()
    _OPEN.close()


@pytest.fixture
def world(_world: WholeWorld) -> Iterator[WholeWorld]:
    """The stack, whole before and after."""
    yield _world
    _world.orders.heal()
    if _world.disk is not None:
        _world.disk.free()
    _world.stack.mend()
