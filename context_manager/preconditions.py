"""Settings that Redis needs, so that no context is lost or refused without a warning.

`judged` checks them. `StoreWatch` polls Redis and logs each setting that is wrong. It polls at the start and every
minute, because the configuration can change and a failover can bring another server. The manager refuses no request
for it: turns stay correct while contexts are there, and an operator can configure Redis while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from context_manager.metrics import ManagerMetrics
from contextcache.errors import ContextCacheError, StoreUnavailable

log = logging.getLogger(__name__)

Info = Mapping[str, Any]
"""The fields that INFO answers, of one primary."""
_VERSION_MIN = (6, 2)
_TENANTS_MIN = 2
"""Tenants at their limit that Redis must have room for: one must not fill it."""
_INTERVAL_S = 60.0
_AWAY_INTERVAL_S = 1.0
"""Redis that comes back may be another one."""
_REFUSED_INTERVAL_S = 600.0
"""Each refused question is an error in the log, until the ACL is right."""
NAMES = ("eviction_policy", "version", "append_only_file", "memory", "replicas")


@dataclass(frozen=True, slots=True)
class Precondition:
    """A setting of Redis that a promise depends on."""

    name: str
    is_met: bool
    told: str
    """Consequence of a wrong setting, and the change that mends it."""


def judged(info: Info, *, tenant_bytes_max: int, wait_replicas: int) -> list[Precondition]:
    """Return each precondition of one primary, met or not. Preconditions without a field in INFO are left out."""
    found = []
    if policy := str(info.get("maxmemory_policy", "")):
        told = f"redis may evict contexts: maxmemory-policy is {policy}, it must be noeviction"
        found.append(Precondition("eviction_policy", policy == "noeviction", told))
    if version := re.match(r"(\d+)\.(\d+)", str(info.get("redis_version", ""))):
        told = f"redis is {version[0]}, at least 6.2 is needed"
        found.append(Precondition("version", (int(version[1]), int(version[2])) >= _VERSION_MIN, told))
    if "aof_enabled" in info:
        told = "redis writes no append-only file, so a crash loses contexts: set appendonly yes"
        found.append(Precondition("append_only_file", bool(info["aof_enabled"]), told))
    if "maxmemory" in info:
        maxmemory, wanted = int(info["maxmemory"]), _TENANTS_MIN * tenant_bytes_max
        told = f"one tenant may fill redis: MANAGER_TENANT_BYTES_MAX is {tenant_bytes_max}, maxmemory is {maxmemory}"
        is_met = not maxmemory or 0 < wanted <= maxmemory
        found.append(Precondition("memory", is_met, told))
    if "connected_slaves" in info and wait_replicas:
        num_replicas = int(info["connected_slaves"])
        told = f"commits wait for {wait_replicas} replicas (MANAGER_REDIS_WAIT_REPLICAS), but redis has {num_replicas}"
        found.append(Precondition("replicas", num_replicas >= wait_replicas, told))
    return found


class StoreWatch:
    """Polls the settings of Redis."""

    def __init__(
        self,
        read_info: Callable[[], Awaitable[Sequence[Info]]],
        *,
        metrics: ManagerMetrics,
        tenant_bytes_max: int,
        wait_replicas: int,
    ) -> None:
        """`read_info` asks every primary."""
        self._read_info = read_info
        self._metrics = metrics
        self._tenant_bytes_max = tenant_bytes_max
        self._wait_replicas = wait_replicas
        self._unmet: dict[str, str] = {}
        """Unmet preconditions by name, as last logged."""
        self._num_evicted = 0
        self._was_refused = False

    async def look(self) -> float:
        """Poll once, log the changes, and return the seconds until the next poll."""
        try:
            infos = await self._read_info()
        except StoreUnavailable:
            self._forget()
            return _AWAY_INTERVAL_S
        except ContextCacheError:
            self._forget()
            if not self._was_refused:
                log.warning("redis settings unreadable: the ACL user needs +info")
            self._was_refused = True
            return _REFUSED_INTERVAL_S
        self._was_refused = False
        self._take(infos)
        return _INTERVAL_S

    async def watch_forever(self) -> None:
        """Poll at once and then again and again, until cancelled."""
        while True:
            wait_s = _INTERVAL_S
            try:
                wait_s = await self.look()
            except Exception:
                # A gauge must not end the manager; the next poll tries again.
                log.exception("redis settings check failed by an internal fault")
            await asyncio.sleep(wait_s)

    def _forget(self) -> None:
        for name in NAMES:
            self._metrics.redis_preconditions.labels(name).set(math.nan)
        self._metrics.redis_evicted_keys.set(math.nan)

    def _take(self, infos: Sequence[Info]) -> None:
        found: dict[str, list[Precondition]] = {name: [] for name in NAMES}
        for info in infos:
            for one in judged(info, tenant_bytes_max=self._tenant_bytes_max, wait_replicas=self._wait_replicas):
                found[one.name].append(one)
        unmet = {one.name: one.told for group in found.values() for one in group if not one.is_met}
        for name, group in found.items():
            is_met = float(name not in unmet) if group else math.nan
            self._metrics.redis_preconditions.labels(name).set(is_met)
        for name, told in unmet.items():
            if self._unmet.get(name) != told:
                log.warning(told, extra={"precondition": name})
        self._unmet = unmet
        num_evicted = sum(int(info.get("evicted_keys", 0)) for info in infos)
        self._metrics.redis_evicted_keys.set(num_evicted)
        if num_evicted > self._num_evicted:
            log.error("redis evicted keys: contexts are lost", extra={"evicted_keys": num_evicted})
        self._num_evicted = num_evicted
