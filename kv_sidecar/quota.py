"""Bytes of block files on disk by tenant, each file once, those being written included: counted, held to, and shown.

Not thread-safe. A file's tenant is known from the save that brought it, or from the manifests at start; a file of
nobody counts for nobody, until the collector frees it or a save brings it again. The gauge shows the largest tenants,
the rest under an empty name: a metric's labels must have a bound, whoever writes the key file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from contextcache.errors import ContextQuotaExceeded
from contextcache.model import TenantId
from kv_sidecar.format.ids import BlockKey

NOBODY: TenantId = ""
"""Owner of files no manifest names; no tenant has this name."""


class TenantQuota:
    """One hard limit for every tenant. What is reserved counts at once, so saves at the same time cannot exceed it."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` 0: no limit, counted all the same."""
        self.limit_bytes = limit_bytes
        self._used: Counter[TenantId] = Counter()
        self._owners: dict[BlockKey, TenantId] = {}

    def used_bytes(self, tenant: TenantId) -> int:
        """Return what counts for a tenant now."""
        return self._used[tenant]

    def by_tenant(self) -> Mapping[TenantId, int]:
        """Return the bytes of every tenant that has any."""
        return {tenant: size for tenant, size in self._used.copy().items() if tenant != NOBODY}

    def of(self, sizes: Mapping[BlockKey, int]) -> Mapping[TenantId, int]:
        """Return these bytes by the tenants whose files they are copies of."""
        found: Counter[TenantId] = Counter()
        for key, size_bytes in sizes.items():
            found[self._owners.get(key, NOBODY)] += size_bytes
        del found[NOBODY]
        return found

    def reserve(self, tenant: TenantId, size_bytes: int) -> None:
        """Count a file that is going to be written. Raises ContextQuotaExceeded, and then nothing has changed."""
        self.check(tenant, size_bytes)
        self._add(tenant, size_bytes)

    def check(self, tenant: TenantId, size_bytes: int) -> None:
        """Raise ContextQuotaExceeded when the tenant may not have so much more."""
        if self.limit_bytes and tenant != NOBODY and self._used[tenant] + size_bytes > self.limit_bytes:
            raise ContextQuotaExceeded("the tenant's contexts have reached their limit of bytes on this disk")

    def cancel(self, tenant: TenantId, size_bytes: int) -> None:
        """Give back what was reserved; the file counts by `settle`."""
        self._add(tenant, -size_bytes)

    def settle(self, key: BlockKey, before_bytes: int, now_bytes: int, *, owner: TenantId | None = None) -> None:
        """Count a file as it lies there: `before_bytes` of it were counted, 0 now: it is gone. `owner`: its new one."""
        held_by = self._owners.pop(key, NOBODY)
        self._add(held_by, -before_bytes)
        if now_bytes:
            self._owners[key] = held_by if owner is None else owner
            self._add(self._owners[key], now_bytes)

    def _add(self, tenant: TenantId, size_bytes: int) -> None:
        self._used[tenant] += size_bytes
        if not self._used[tenant]:
            del self._used[tenant]


OTHERS = ""
"""Label of all tenants that are not shown by name; no tenant has this one."""


class TenantBytes(Collector):
    """A gauge whose labels come and go together. Written by the collector's pass, read by whoever scrapes."""

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._shown: dict[TenantId, int] = {}
        registry.register(self)

    def show(self, found: Mapping[TenantId, int], *, tenants_max: int) -> None:
        """Show the `tenants_max` largest by name and the rest together; 0: all together."""
        largest = Counter(found).most_common(tenants_max) if tenants_max else []
        shown = dict(largest)
        rest = sum(found.values()) - sum(shown.values())
        if rest or len(found) > len(shown):
            shown[OTHERS] = rest
        self._shown = shown

    @override
    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauge as it was last shown."""
        family = GaugeMetricFamily(self._name, self._text, labels=("tenant",))
        for tenant, size_bytes in self._shown.items():
            family.add_metric((tenant,), size_bytes)
        yield family
