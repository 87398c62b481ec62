"""The pods behind Services of a Kubernetes namespace, followed while they come, drain and go.

In memory: with the API server away the last known pods stay. How they do is asked elsewhere, by the probe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from contextcache.clock import Clock
from contextcache.kubernetes_objects import ENDPOINT_SLICES, PODS, KubernetesReader, Selection
from gateway.endpoint_slices import SliceRules, addresses_of, endpoints_of, pod_of
from gateway.metrics import Metrics
from gateway.ports import Endpoint
from gateway.reflector import Reflector

log = logging.getLogger(__name__)


class KubernetesEndpoints:
    """Endpoints from EndpointSlices and Pods; `changed` is a Source of WatchedEndpoints."""

    def __init__(
        self,
        api: KubernetesReader,
        *,
        namespace: str,
        selector: str,
        rules: SliceRules,
        resync_s: float,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`selector` chooses the slices, which have the labels of their Service, and the pods, which have them too."""
        slices, pods = (Selection(resource, namespace, selector) for resource in (ENDPOINT_SLICES, PODS))
        self._slices = Reflector(api, slices, addresses_of, resync_s=resync_s, metrics=metrics, clock=clock)
        self._pods = Reflector(api, pods, pod_of, resync_s=resync_s, metrics=metrics, clock=clock)
        self._rules = rules
        self._versions = (0, 0)
        self.endpoints: tuple[Endpoint, ...] = ()
        """The last known ones."""

    async def run(self) -> None:
        """Follow both kinds until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slices.run(), name="endpoint slices")
            group.create_task(self._pods.run(), name="pods")

    async def until_tried(self, timeout_s: float) -> bool:
        """Wait until both kinds were asked for once; False when that took too long, or the slices did not come."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slices.tried.wait()
                await self._pods.tried.wait()
        except TimeoutError:
            return False
        return self._slices.listed

    def changed(self) -> Sequence[Endpoint] | None:
        """Return all endpoints when they have changed, else None: nothing before the first list of slices."""
        versions = (self._slices.version, self._pods.version)
        if versions == self._versions or not self._slices.listed:
            return None
        self._versions = versions
        addresses = (address for found in self._slices.objects.values() for address in found)
        endpoints = endpoints_of(addresses, self._pods.objects, rules=self._rules)
        if endpoints == self.endpoints:
            return None
        self.endpoints = endpoints
        log.info("endpoints discovered", extra={"num_endpoints": len(endpoints)})
        return endpoints
