"""How many bytes each tenant has on disk, for the metrics; counted in tenant_quota.py.

Shown are the largest few tenants, the rest under an empty name: a metric's labels must have a bound, whoever writes
the key file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from contextcache.model import TenantId

OTHERS = ""
"""Label of all tenants that are not shown by name; no tenant has this one."""


class TenantBytes(Collector):
    """A gauge whose labels come and go together. Written by the collector's pass, read by whoever scrapes."""

    def __init__(self) -> None:
        self._shown: dict[TenantId, int] = {}

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
        family = GaugeMetricFamily(
            "contextcache_sidecar_tenant_bytes",
            "Bytes of block files on disk by tenant, each file once: the `SIDECAR_TENANTS_SHOWN_MAX` largest by name, "
            "all others under an empty one. `SIDECAR_TENANT_LIMIT_BYTES` is held against it; shown anew in each pass "
            "of the collector.",
            labels=("tenant",),
        )
        for tenant, size_bytes in self._shown.items():
            family.add_metric((tenant,), size_bytes)
        yield family
