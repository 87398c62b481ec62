"""Candidates for one Lease in virtual time: clocks that run wrong, and a server that loses, delays and refuses."""

from __future__ import annotations

import asyncio
import copy
import random
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry
from typing_extensions import override

from context_manager.metrics import ManagerMetrics
from context_manager.sweep_lease import LeaseTerms, SweepLease
from contextcache.clock import ManualClock
from contextcache.kubernetes_objects import (
    KubernetesConflict,
    KubernetesError,
    KubernetesNotFound,
    KubernetesUnavailable,
)

DURATION_S = 15.0


class LeaseServer:
    """One Lease, with versions; calls take no time and do not fail unless told to."""

    def __init__(self, rng: random.Random | None = None) -> None:
        """`rng`: lose requests and answers, be late, and stand still, as it says."""
        self.stored: dict[str, Any] | None = None
        self.error: KubernetesError | None = None
        """Raised instead of any answer."""
        self.write_error: KubernetesError | None = None
        self.calls: list[str] = []
        self.is_calm = False
        """Whether calls are to succeed from now on."""
        self.rng = rng
        self._version = 0
        self._late: set[asyncio.Task[None]] = set()

    async def get(self, _resource, *, namespace, name, timeout_s):
        return await self._call("get", timeout_s, self._get)

    async def create(self, _resource, body, *, namespace, timeout_s):
        return await self._call("create", timeout_s, lambda: self._write(body, ""))

    async def replace(self, _resource, body, *, namespace, timeout_s):
        return await self._call("replace", timeout_s, lambda: self._write(body, body["metadata"]["resourceVersion"]))

    @property
    def holder(self) -> str:
        return "" if self.stored is None else self.stored["spec"]["holderIdentity"]

    def _get(self):
        if self.stored is None:
            raise KubernetesNotFound("no such lease")
        return copy.deepcopy(self.stored)

    def _write(self, body, version):
        if self.write_error is not None:
            raise self.write_error
        if version != ("" if self.stored is None else self.stored["metadata"]["resourceVersion"]):
            raise KubernetesConflict("somebody else was faster")
        self._version += 1
        self.stored = copy.deepcopy(body)
        self.stored["metadata"]["resourceVersion"] = str(self._version)
        return copy.deepcopy(self.stored)

    async def _call(self, name, timeout_s, act):
        self.calls.append(name)
        if self.error is not None:
            raise self.error
        if self.rng is None or self.is_calm:
            return act()
        match self.rng.choices(["good", "lost", "unanswered", "late", "stall"], [80, 5, 5, 5, 5])[0]:
            case "good":
                await asyncio.sleep(self.rng.uniform(0, timeout_s / 2))
                found = act()
                await asyncio.sleep(self.rng.uniform(0, timeout_s / 2))
                return found
            case "stall":
                # The process stands still after the server has answered: the answer is seen much later, as good.
                found = act()
                await asyncio.sleep(self.rng.uniform(0, 3 * DURATION_S))
                return found
            case "unanswered":
                act()
            case "late":
                # The server does it long after the caller has given up.
                self._late.add(asyncio.create_task(self._act_later(act)))
        await asyncio.sleep(timeout_s)
        raise KubernetesUnavailable("no answer")

    async def _act_later(self, act) -> None:
        assert self.rng is not None
        await asyncio.sleep(self.rng.uniform(0, 3 * DURATION_S))
        with suppress(KubernetesError):
            act()


class Candidate(SweepLease):
    """One that tells when it has looked."""

    def __init__(self, server, identity="a", *, rate=1.0, offset_s=0.0, duration_s=DURATION_S, on_looked=None) -> None:
        self.registry = CollectorRegistry()
        self.on_looked = on_looked or (lambda: None)
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            LeaseTerms("cc", "ns", identity, duration_s),
            metrics=ManagerMetrics(self.registry),
            clock=ManualClock(),
            now_s=lambda: loop.time() * rate + offset_s,
        )

    @override
    async def look(self) -> None:
        try:
            await super().look()
        finally:
            self.on_looked()

    def sample(self, name: str, labels: dict[str, str] | None = None) -> float | None:
        return self.registry.get_sample_value(f"contextcache_manager_{name}", labels)
