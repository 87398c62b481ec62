"""Faults that leave every process what it is: links cut and slowed, parts stopped, files broken; Redis restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tests.kit.faults import files
from tests.kit.stack import Stack

LINKS = (
    "manager-redis", "gateway-manager", "gateway-turn", "turn-engine", "gateway-sidecar", "turn-manager",
    "turn-sidecar", "connector-sidecar", "client-envoy", "client-front",
)  # fmt: skip
_STOPPED = ("redis", "manager", "sidecar", "gateway", "engine", "turn", "envoy")
_BREAKS = (files.flip_data_bit, files.halve, files.remove, files.empty, files.cut_last_byte, files.flip_header_bit)
_QUIET_MAX_S = 8.0
_LASTS_MAX_S = 3.0
_REDIS_RESTART_EVERY = 40
"""Faults between two of them."""


@dataclass
class Faults:
    """One fault at a time, until `stop` is set; then all is mended."""

    stack: Stack
    random: Random
    seen: Counter[str] = field(default_factory=Counter)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        try:
            number = 0
            while not await self._waited(self.random.uniform(1, _QUIET_MAX_S)):
                number += 1
                await self._one(number)
        finally:
            await asyncio.to_thread(self.stack.mend)

    async def _one(self, number: int) -> None:
        if number % _REDIS_RESTART_EVERY == 0:
            self.seen["redis restarted"] += 1
            await asyncio.to_thread(self.stack.restart, "redis")
        elif self.random.random() < 0.45:
            await self._link()
        elif self.random.random() < 0.5:
            await self._stopped()
        else:
            await asyncio.to_thread(self._broken_file)

    async def _link(self) -> None:
        name = self.random.choice(LINKS)
        proxy = self.stack.links.proxies[name]
        fault = self.random.choice(("cut", "blackhole", "delay", "reset"))
        self.seen[f"{fault} {name}"] += 1
        try:
            if fault == "delay":
                proxy.delay(self.random.randrange(20, 300))
            else:
                getattr(proxy, fault)()
            if fault != "reset":
                await self._waited(self.random.uniform(0.2, _LASTS_MAX_S))
        finally:
            proxy.heal()

    async def _stopped(self) -> None:
        part = self.random.choice(_STOPPED)
        self.seen[f"stopped {part}"] += 1
        self.stack.stop(part)
        try:
            await self._waited(self.random.uniform(0.2, _LASTS_MAX_S))
        finally:
            self.stack.cont(part)

    def _broken_file(self) -> None:
        # By name alone: any of them may be deleted at any moment.
        stored = sorted(self.stack.data().glob("*/*/*.safetensors"))
        if not stored:
            return
        change = self.random.choice(_BREAKS)
        self.seen[f"{change.__name__} of a file"] += 1
        try:
            change(self.random.choice(stored), self.random.choice(stored))
        except (OSError, ValueError):
            # It was deleted meanwhile, or broken before.
            self.seen["files already gone"] += 1

    async def _waited(self, seconds: float) -> bool:
        """Return whether `stop` was set meanwhile."""
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True
