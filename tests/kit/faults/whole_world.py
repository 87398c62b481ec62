"""The stack with every link through a proxy, its data on a disk of its own, its clocks at our mercy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.kit.faults.clock_shift import Interposed
from tests.kit.faults.disk import SmallDisk, small_disk
from tests.kit.faults.world import World
from tests.kit.links import LINKS
from tests.kit.stack import Stack
from tests.kit.tiny_stack import TinyStack

DISK_BYTES = 128 << 20
DRAIN_S = 20
"""How long an engine that is told to end goes on with what it has."""
ENV = {
    "TURN_DRAIN_TIMEOUT_S": str(DRAIN_S),
    "TURN_RESUME_TIMEOUT_S": "5",
    "TURN_LEASE_TTL_MS": "5000",
    "SIDECAR_COLLECT_INTERVAL_S": "1",
    "MANAGER_SWEEP_INTERVAL_S": "1",
}
"""Waits that a test would have to sit through; every other deadline is the product's own."""
IDLE_TIMEOUT_S = 20.0
"""Ten minutes by default, as a long prompt may take; a busy machine may need seconds for a token."""


class WholeWorld(World):
    """A world that a test may break anywhere and `mend`."""

    def __init__(
        self, stack: Stack, *, seed: int, orders: Interposed, disk: SmallDisk | None, idle_timeout_s: float
    ) -> None:
        super().__init__(stack, seed=seed, idle_timeout_s=idle_timeout_s)
        self._saved_with = stack.starts.copy()
        self.orders = orders
        self.disk = disk
        """The sidecar's; None where mounting is not allowed."""

    def mend(self) -> None:
        """Take every fault back, start what is gone, have KV saved again, and take the engine for what it is now."""
        self.orders.heal()
        if self.disk is not None:
            self.disk.free()
        self.stack.mend()
        self.engine_pids = self.stack.engine_pids()
        if self.stack.starts != self._saved_with:
            # A connector that has lost its sidecar skips saves for up to ten seconds, and looks for it at the next one.
            self.new(1)
            self._saved_with = self.stack.starts.copy()


@contextlib.contextmanager
def whole_world(
    directory: Path,
    *,
    seed: int,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    connector: Mapping[str, int | str] | None = None,
) -> Iterator[WholeWorld]:
    """Start the stack, with `env` and `connector` laid over it, and warm it up: the first turn takes seconds."""
    orders = Interposed(directory / "orders")
    idle = {"GATEWAY_IDLE_TIMEOUT_S": str(idle_timeout_s)}
    links = [*LINKS, "client-envoy"]
    stack = TinyStack(
        directory / "faults",
        proxied=links,
        env=ENV | orders.environment | idle | dict(env or {}),
        engine_args=["--shutdown-timeout", str(DRAIN_S)],
        connector=connector,
    )
    with small_disk(stack.data(), size_bytes=DISK_BYTES) as disk, stack:
        world = WholeWorld(stack, seed=seed, orders=orders, disk=disk, idle_timeout_s=idle_timeout_s)
        print(f"seed {seed}")
        try:
            told = world.new()
            world.stack.forget_prefixes()
            world.ask("warm up", told)
            refused = stack.counted("engine", "contextcache_connector_events_total", event="refused_arenas")
            assert not refused, "the engine has no arena, and faults there would meet nobody"
            yield world
        finally:
            world.close()
