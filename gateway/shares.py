"""Requests in flight of each tenant on one pod, and whether a tenant has its share of that pod. Pure.

The pod reports the requests in flight of each tenant with every probe, from all gateways. Between two probes this
gateway adds the requests it placed. The HTTP front subtracts ended requests. Of the requests that Envoy carries, as
many are assumed to have ended as in the interval before. A pod without the plugin reports nothing: then only requests
of the HTTP front, and requests placed since the last probe, count. ADR 0089 has the alternatives.

Sharing limits a tenant only while both hold: the pod has as many requests as it computes at one time, and another
tenant has a request there, or had one in the last SHARING_S. A tenant alone on a pod is never limited here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from contextcache.requests import fair_share

SHARING_S = 60.0
"""Seconds after its last request for which a tenant counts as one of those that share a pod: a person reads an answer
and writes the next turn."""
SHARE_MIN = 8
"""Requests of one tenant that a pod always takes, however small its batch."""
FIRST_ROOM = 64
"""Requests that a pod takes before its batch is known, from all tenants that share it."""
LIGHT_AT_PROBE = 2
"""Requests at the last probe, up to which a tenant may be one client that sends one request after another.

Envoy does not report their ends. The tenant has FIRST_ROOM until the next probe shows how many are in flight."""
GROWTH_UNKNOWN, GROWTH_KNOWN = 2.0, 1.25
"""Times the last rate of ends that is assumed while no request waits: before the pod's batch is known, and after."""
_INTERVAL_S_MIN = 0.1
"""Seconds between two probes, at the least, of which a rate is made."""
_TENANTS_MAX = 4096
"""Tenants remembered of a pod between two probes."""


@dataclass(slots=True)
class _Requests:
    """Requests of one tenant, or of all."""

    seen_at_s: float
    """Time of the last one that this gateway placed or the pod reported."""
    at_probe: int = 0
    since_probe: int = 0
    """Requests placed since the probe, minus the requests reported as ended."""
    carried: int = 0
    """Requests in flight that the HTTP front carries: it reports their end."""
    ended_per_s: float = 0.0

    def at(self, elapsed_s: float, growth: float) -> int:
        """Return those in flight, so long after the last probe."""
        ended = int(self.ended_per_s * growth * elapsed_s)
        return max(self.carried, self.at_probe + self.since_probe - ended)

    def probed(self, at_probe: int, elapsed_s: float) -> None:
        ended = max(0, self.at_probe + self.since_probe - at_probe)
        self.ended_per_s = ended / max(elapsed_s, _INTERVAL_S_MIN)
        self.at_probe, self.since_probe = at_probe, 0


class PodTenants:
    """Requests in flight of each tenant on one pod. Tenants are named by their tags (`identity.tenant_tag`)."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """`clock_s`: seconds since any moment; never set back."""
        self._clock_s = clock_s
        self._probed_at_s = clock_s()
        self._all = _Requests(self._probed_at_s)
        """Requests of the engine: computed or waiting."""
        self._of: dict[str, _Requests] = {}
        """Requests of each tenant that shares the pod, as the pod's API server counts them."""
        self._batch = 0
        """Requests that the pod computed when others last waited for room; 0: none has waited yet."""
        self._room = FIRST_ROOM
        self._growth = GROWTH_UNKNOWN

    def routed(self, tenant: str) -> None:
        """Count a request without a report of its end."""
        found = self._of.get(tenant)
        if found is None:
            if len(self._of) >= _TENANTS_MAX:
                return
            found = self._of[tenant] = _Requests(0.0)
        found.seen_at_s = self._clock_s()
        found.since_probe += 1
        self._all.since_probe += 1

    @contextmanager
    def carried(self, tenant: str) -> Iterator[None]:
        """Count a request for the length of a `with` block."""
        self.routed(tenant)
        found = self._of.get(tenant)
        both = (self._all,) if found is None else (self._all, found)
        for one in both:
            one.carried += 1
        try:
            yield
        finally:
            for one in both:
                one.carried -= 1
                one.since_probe -= 1

    def probed(self, *, running: int, waiting: int, deferred: int, tenants: Mapping[str, int] | None) -> None:
        """Take the report of the pod. `waiting` includes the `deferred`, which wait for their KV and not for room.

        `tenants`: requests in flight of the tenants with most of them; None: the pod reports none.
        """
        now_s = self._clock_s()
        elapsed_s, self._probed_at_s = now_s - self._probed_at_s, now_s
        self._all.probed(running + waiting, elapsed_s)
        if running and waiting > deferred:
            self._batch = self._room = running
            self._growth = 1.0
        else:
            # The pod may take more than it has: growing finds out within a few probes, as TCP's slow start does.
            self._room = max(self._batch or FIRST_ROOM, 2 * running)
            self._growth = GROWTH_KNOWN if self._batch else GROWTH_UNKNOWN
        for tenant in tenants or ():
            self._of.setdefault(tenant, _Requests(now_s)).seen_at_s = now_s
        for tenant, found in list(self._of.items()):
            found.probed(found.carried if tenants is None else tenants.get(tenant, 0), elapsed_s)
            if not found.at_probe and not found.carried and now_s - found.seen_at_s > SHARING_S:
                del self._of[tenant]

    def takes(self, tenant: str) -> bool:
        """Return whether a tenant may have another request here."""
        in_flight = self._all.at(self._clock_s() - self._probed_at_s, self._growth)
        return in_flight < self._room or self._num_sharing(tenant) == 1 or self.is_below_share(tenant)

    def is_below_share(self, tenant: str) -> bool:
        """Return whether others share the pod and a tenant has less than its equal share of it."""
        num_sharing, found = self._num_sharing(tenant), self._of.get(tenant)
        if num_sharing == 1 or found is None:
            return num_sharing > 1
        share_min = FIRST_ROOM if found.at_probe <= LIGHT_AT_PROBE else SHARE_MIN
        share = max(share_min, fair_share(self._room, num_sharing))
        return found.at(self._clock_s() - self._probed_at_s, self._growth) < share

    def reported(self, tenant: str) -> int:
        """Return a tenant's requests that the pod reported and this gateway does not carry itself."""
        found = self._of.get(tenant)
        return 0 if found is None else max(0, found.at_probe - found.carried)

    def _num_sharing(self, tenant: str) -> int:
        return len(self._of) + (tenant not in self._of)
