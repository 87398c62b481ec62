"""Requests in flight of each tenant on one pod, and the tenant's fair share of that pod. Pure.

With every probe the pod reports the requests in flight of each tenant, from all gateways. Between two probes this
gateway adds the requests that it placed. The HTTP front subtracts ended requests. Requests behind Envoy are assumed to
end at the rate of the interval before. A pod without the plugin reports nothing: then requests of the HTTP front count,
and requests placed since the last probe. ADR 0089 has the alternatives.

The turn process reports the requests that it carries. Requests that go to vLLM directly are only in the engine's total.
They go there only while the pod has room, so while a limit holds, each further request is counted under its tenant.

A tenant is limited only while both hold: the pod has as many requests as it computes at one time, and another tenant
has a request there, or had one in the last SHARING_S. A tenant alone on a pod is never limited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from contextcache.requests import fair_share

SHARING_S = 60.0
"""Seconds after its last request for which a tenant still shares a pod: time to read an answer and write a turn."""
SHARE_MIN = 8
"""Requests of one tenant that a pod always takes, even with a small batch."""
FIRST_ROOM = 64
"""Requests of all tenants that a pod takes before its batch size is known."""
LIGHT_AT_PROBE = 2
"""Requests at the last probe up to which a tenant may be one client that sends requests in sequence.

Envoy does not report their ends, so the tenant has FIRST_ROOM until the next probe counts its requests."""
GROWTH_UNKNOWN, GROWTH_KNOWN = 2.0, 1.25
"""Factors of the last rate of ends, assumed while no request waits: before the pod's batch size is known, and after."""
_INTERVAL_S_MIN = 0.1
"""Minimum number of seconds between two probes that give a rate."""
_TENANTS_MAX = 4096
"""Maximum number of tenants stored for a pod between two probes."""


@dataclass(slots=True)
class _Requests:
    """Requests of one tenant, or of all tenants."""

    seen_at_s: float
    """Time of the last request that this gateway placed or the pod reported."""
    at_probe: int = 0
    since_probe: int = 0
    """Requests placed since the probe, minus the requests reported as ended."""
    carried: int = 0
    """Requests in flight of the HTTP front, which reports their ends."""
    elsewhere: int = 0
    """Requests at the probe that this gateway did not carry itself."""
    direct: int = 0
    """Requests in flight of the HTTP front that went to vLLM directly. The pod's report lacks them."""
    ended_per_s: float = 0.0

    def at(self, elapsed_s: float, growth: float) -> int:
        """Return the requests in flight `elapsed_s` after the last probe."""
        ended = int(self.ended_per_s * growth * elapsed_s)
        return self.direct + max(self.carried, self.at_probe + self.since_probe - ended)

    def probed(self, at_probe: int, elapsed_s: float) -> None:
        ended = max(0, self.at_probe + self.since_probe - at_probe)
        self.ended_per_s = ended / max(elapsed_s, _INTERVAL_S_MIN)
        self.at_probe, self.since_probe, self.elsewhere = at_probe, 0, max(0, at_probe - self.carried)


class PodTenants:
    """Requests in flight of each tenant on one pod. A tenant's name here is its tag (`identity.tenant_tag`)."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """`clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._probed_at_s = clock_s()
        self._all = _Requests(self._probed_at_s)
        """Requests of the engine, computed or waiting."""
        self._of: dict[str, _Requests] = {}
        """Requests of each tenant that shares the pod, counted by the pod's turn process."""
        self._batch = 0
        """Requests that the pod computed when requests last waited for room; 0: none has waited yet."""
        self._room = FIRST_ROOM
        self._growth = GROWTH_UNKNOWN

    def routed(self, tenant: str, *, is_direct: bool = False) -> None:
        """Count a request without a report of its end; `is_direct`: no report lists it under its tenant either."""
        found = self._of.get(tenant)
        if found is None:
            if len(self._of) >= _TENANTS_MAX:
                return
            found = self._of[tenant] = _Requests(0.0)
        found.seen_at_s = self._clock_s()
        if not is_direct:
            found.since_probe += 1
        self._all.since_probe += 1

    @contextmanager
    def carried(self, tenant: str, *, is_direct: bool = False) -> Iterator[None]:
        """Count a request during a `with` block; `is_direct`: see routed."""
        self.routed(tenant, is_direct=is_direct)
        found = self._of.get(tenant)
        both = (self._all,) if found is None or is_direct else (self._all, found)
        for one in both:
            one.carried += 1
        if found is not None:
            found.direct += is_direct
        try:
            yield
        finally:
            for one in both:
                one.carried -= 1
                one.since_probe -= 1
            if found is not None:
                found.direct -= is_direct

    def probed(self, *, running: int, waiting: int, deferred: int, tenants: Mapping[str, int] | None) -> None:
        """Take the pod's report. `waiting` includes `deferred`, the requests that wait for their KV and not for room.

        `tenants`: requests in flight of the tenants with the most; None: the pod reports none.
        """
        now_s = self._clock_s()
        elapsed_s, self._probed_at_s = now_s - self._probed_at_s, now_s
        self._all.probed(running + waiting, elapsed_s)
        if running and waiting > deferred:
            self._batch = self._room = running
            self._growth = 1.0
        else:
            # The pod may take more than it has. Growth finds its limit within a few probes, as in TCP's slow start.
            self._room = max(self._batch or FIRST_ROOM, 2 * running)
            self._growth = GROWTH_KNOWN if self._batch else GROWTH_UNKNOWN
        for tenant in tenants or ():
            self._of.setdefault(tenant, _Requests(now_s)).seen_at_s = now_s
        for tenant, found in list(self._of.items()):
            found.probed(found.carried if tenants is None else tenants.get(tenant, 0), elapsed_s)
            if not found.at_probe and not found.carried and not found.direct and now_s - found.seen_at_s > SHARING_S:
                del self._of[tenant]

    def has_room(self) -> bool:
        """Return whether the pod has fewer requests than it computes at one time. No tenant is limited then."""
        return self._all.at(self._clock_s() - self._probed_at_s, self._growth) < self._room

    def takes(self, tenant: str) -> bool:
        """Return whether a tenant may have another request here."""
        return self.has_room() or self._num_sharing(tenant) == 1 or self.is_below_share(tenant)

    def is_below_share(self, tenant: str) -> bool:
        """Return whether others share the pod and a tenant has less than its equal share of it."""
        num_sharing, found = self._num_sharing(tenant), self._of.get(tenant)
        if num_sharing == 1 or found is None:
            return num_sharing > 1
        share_min = FIRST_ROOM if found.at_probe <= LIGHT_AT_PROBE else SHARE_MIN
        share = max(share_min, fair_share(self._room, num_sharing))
        return found.at(self._clock_s() - self._probed_at_s, self._growth) < share

    def reported(self, tenant: str) -> int:
        """Return a tenant's requests in the pod's report that this gateway does not carry itself."""
        found = self._of.get(tenant)
        return 0 if found is None else found.elsewhere

    def _num_sharing(self, tenant: str) -> int:
        return len(self._of) + (tenant not in self._of)
