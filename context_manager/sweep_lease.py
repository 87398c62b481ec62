"""`SweepLease`: of all managers the one that holds a Kubernetes Lease sweeps. As client-go's leaderelection, with less.

Two never hold it at once, whatever the API server and the network do, while clocks run at most 15 % wrong:
- A holder counts from before it sent its last good write, and gives up after two thirds of the duration.
- Another one counts from after it saw the Lease change last, by its own clock, and waits for the whole duration.
- Every write names the version it read, so that of two the server takes one.

Who holds nothing and sees nobody hold it (no server, no role, a broken Lease) sweeps after all after four durations:
sweeping twice is as right as once, and not at all fills Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from context_manager.metrics import ManagerMetrics
from contextcache.clock import Clock
from contextcache.kubernetes_objects import (
    LEASES,
    KubernetesConflict,
    KubernetesError,
    KubernetesLeases,
    KubernetesNotFound,
    KubernetesObject,
)

log = logging.getLogger(__name__)

_HELD_SHARE = 2 / 3
"""Of the duration, in which a holder must renew: 0.67 / 0.85 < 1 / 1.15."""
_LOOK_SHARE, _CALL_SHARE = 1 / 6, 1 / 10
"""Of the duration, between two looks and for one call: a look may fail, and the next one is still in time."""
_BLIND_DURATIONS = 4
_DURATION_MAX_S = 3600
"""Longest duration that is believed of a Lease: a mistake in it must not stop the sweeping for ever."""


def uptime_s() -> float:
    """Return a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Which Lease, and for whom."""

    name: str
    namespace: str
    identity: str
    """Another one for every process there ever is: who finds its own name there takes itself for the holder."""
    duration_s: float
    """3 or more; after it a holder that was not heard of is succeeded."""


class SweepLease:
    """One candidate. `start` begins a task that looks again and again, `stop` ends it and gives the Lease back."""

    def __init__(
        self,
        api: KubernetesLeases,
        terms: LeaseTerms,
        *,
        metrics: ManagerMetrics,
        clock: Clock,
        now_s: Callable[[], float] = uptime_s,
    ) -> None:
        """`clock` only dates what people read; `now_s` counts."""
        self._api = api
        self._name, self._namespace, self._identity = terms.name, terms.namespace, terms.identity
        self._duration_s = terms.duration_s
        self._metrics = metrics
        self._clock = clock
        self._now_s = now_s
        self._held_until_s = -math.inf
        self._seen_version = ""
        self._seen_at_s = -math.inf
        """When the Lease was first seen at that version."""
        self._orderly_at_s = now_s()
        """When somebody, perhaps this one, was last known to hold it."""
        self._failing: type[Exception] | None = None
        self._task: asyncio.Task[None] | None = None
        metrics.sweep_lease_held.set_function(lambda: float(self.is_held()))

    def is_held(self) -> bool:
        """Return whether this one holds the Lease at this moment."""
        return self._now_s() < self._held_until_s

    def may_sweep(self) -> bool:
        """Return whether it holds the Lease, or nobody is known to have held it for long."""
        return self.is_held() or self._now_s() - self._orderly_at_s > _BLIND_DURATIONS * self._duration_s

    def start(self) -> None:
        """Begin to look, at once."""
        assert self._task is None, "a candidate is started once"
        self._task = asyncio.create_task(self._look_for_ever(), name="sweep-lease")

    async def stop(self) -> None:
        """End the task and give the Lease back, so that another one need not wait; bounded, harmless when it fails."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        held, self._held_until_s = self.is_held(), -math.inf
        if held:
            await self._give_back()

    async def look(self) -> None:
        """Look at the Lease once: renew it, take it when it is free. Raises KubernetesError."""
        was_held = self.is_held()
        try:
            await self._renew_or_take()
        except KubernetesConflict:
            # Somebody else was faster; the next look shows who.
            self._held_until_s = -math.inf
        finally:
            if was_held != self.is_held():
                log.info("sweep lease lost" if was_held else "sweep lease acquired", extra={"lease": self._name})

    async def _renew_or_take(self) -> None:
        try:
            found = await self._api.get(
                LEASES, namespace=self._namespace, name=self._name, timeout_s=_CALL_SHARE * self._duration_s
            )
        except KubernetesNotFound:
            self._held_until_s = -math.inf
            await self._write(self._api.create, {"metadata": {"name": self._name}}, new=True)
            return
        self._note_seen(found)
        if _holder(found) == self._identity:
            await self._write(self._api.replace, found, new=False)
            return
        self._held_until_s = -math.inf
        if self._is_free(found):
            await self._write(self._api.replace, found, new=True)
        else:
            self._orderly_at_s = self._now_s()

    async def _write(self, write: Callable[..., Any], found: KubernetesObject, *, new: bool) -> None:
        """Store the Lease with this one as its holder; it counts from before the call."""
        body = self._body(found, new=new)
        sent_s = self._now_s()
        stored = await write(LEASES, body, namespace=self._namespace, timeout_s=_CALL_SHARE * self._duration_s)
        self._note_seen(stored)
        self._held_until_s = sent_s + _HELD_SHARE * self._duration_s
        self._orderly_at_s = sent_s

    def _note_seen(self, found: KubernetesObject) -> None:
        version = found["metadata"]["resourceVersion"]
        if version != self._seen_version:
            self._seen_version = version
            self._seen_at_s = self._now_s()

    def _is_free(self, found: KubernetesObject) -> bool:
        if not _holder(found):
            return True
        said = (found.get("spec") or {}).get("leaseDurationSeconds")
        # The holder's word counts: it may be of a release with another setting.
        said_s = min(said, _DURATION_MAX_S) if isinstance(said, int) else 0
        return self._now_s() - self._seen_at_s >= max(self._duration_s, said_s)

    def _body(self, found: KubernetesObject, *, new: bool) -> dict[str, Any]:
        spec = dict(found.get("spec") or {})
        now = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration_s),
            "renewTime": now,
        }
        if new:
            transitions = spec.get("leaseTransitions")
            spec |= {"acquireTime": now, "leaseTransitions": transitions + 1 if isinstance(transitions, int) else 0}
        return {"apiVersion": LEASES.group_version, "kind": LEASES.kind, "metadata": found["metadata"], "spec": spec}

    async def _give_back(self) -> None:
        timeout_s = _CALL_SHARE * self._duration_s
        try:
            found = await self._api.get(LEASES, namespace=self._namespace, name=self._name, timeout_s=timeout_s)
            if _holder(found) != self._identity:
                return
            spec = dict(found.get("spec") or {}) | {"holderIdentity": "", "leaseDurationSeconds": 1}
            await self._api.replace(LEASES, {**found, "spec": spec}, namespace=self._namespace, timeout_s=timeout_s)
        except KubernetesError as exc:
            log.info("sweep lease not given back, it ends by itself", extra={"error": str(exc)})
        else:
            log.info("sweep lease given back", extra={"lease": self._name})

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.look()
            except KubernetesError as exc:
                self._failed(exc, exc.reason)
            except Exception as exc:
                # Without this loop the Lease would be another's for good.
                self._failed(exc, "internal")
                log.exception("sweep lease failed by a fault of our own")
            else:
                self._failing = None
            # Not all at the same moment.
            await asyncio.sleep(_LOOK_SHARE * self._duration_s * random.uniform(0.8, 1.0))  # noqa: S311 - no secret

    def _failed(self, exc: Exception, reason: str) -> None:
        self._metrics.sweep_lease_failures.labels(reason).inc()
        if self._failing is not type(exc):
            self._failing = type(exc)
            fields = {"lease": self._name, "namespace": self._namespace, "error": str(exc)}
            log.warning("sweep lease cannot be had", extra=fields)


def _holder(found: KubernetesObject) -> str:
    return str((found.get("spec") or {}).get("holderIdentity") or "")
