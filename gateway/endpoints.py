"""The pods named in the settings: which are ready, what they serve, how much each carries. Asks through a probe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from contextcache.model import ModelId
from gateway.metrics import Metrics
from gateway.ports import Endpoint, EndpointState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """What one probe of a pod found."""

    healthy: bool
    certain: bool = True
    """False: no answer in time, which a busy pod may mean; True: it answered, or refused the connection."""
    models: frozenset[ModelId] = frozenset()


Probe = Callable[[Endpoint], Awaitable[Health]]
"""Asks one pod how it does, within a deadline of its own. Never raises for what the pod does."""


@dataclass(slots=True)
class _Pod:
    endpoint: Endpoint
    ready: bool = False
    models: frozenset[ModelId] = frozenset()
    in_flight: int = 0
    num_routed: int = 0
    silent_probes: int = field(default=0)

    def state(self) -> EndpointState:
        return EndpointState(self.endpoint, self.ready, self.models, self.in_flight, self.num_routed)


class StaticEndpoints:
    """A fixed set of pods, probed by `run`, which its owner cancels."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        probe: Probe,
        *,
        metrics: Metrics,
        interval_s: float = 1.0,
        silent_probes_max: int = 3,
    ) -> None:
        """`silent_probes_max` probes in a row without an answer make a ready pod unready."""
        self._pods = {endpoint.name: _Pod(endpoint) for endpoint in endpoints}
        assert len(self._pods) == len(endpoints), "endpoint names must differ"
        self._probe = probe
        self._metrics = metrics
        self._interval_s = interval_s
        self._silent_probes_max = silent_probes_max
        for name in self._pods:
            metrics.endpoint_ready.labels(name).set(0)

    def states(self) -> Sequence[EndpointState]:
        """Return all pods, ready or not."""
        return [pod.state() for pod in self._pods.values()]

    def endpoint(self, name: str) -> Endpoint | None:
        """Return the pod of this name, ready or not; None when there is none."""
        pod = self._pods.get(name)
        return None if pod is None else pod.endpoint

    def note_routed(self, name: str) -> None:
        """Count one request as sent to this pod by somebody else, who will not say when it ends."""
        if name in self._pods:
            self._pods[name].num_routed += 1

    def mark_unreachable(self, name: str) -> None:
        """Take a pod that refused a connection out until it is seen healthy again."""
        self._set_ready(self._pods[name], ready=False)

    @contextmanager
    def carrying(self, name: str) -> Iterator[None]:
        """Count one request as in flight to this pod for the length of the `with` block."""
        pod = self._pods[name]
        gauge = self._metrics.requests_in_flight.labels(name)
        pod.in_flight += 1
        pod.num_routed += 1
        gauge.inc()
        try:
            yield
        finally:
            pod.in_flight -= 1
            gauge.dec()

    async def run(self) -> None:
        """Probe all pods again and again until cancelled."""
        while True:
            try:
                await self.probe_all()
            except Exception:
                # The loop must live: without it no pod would ever become ready again.
                self._metrics.probe_failures.inc()
                log.exception("probe round failed")
            await asyncio.sleep(self._interval_s)

    async def probe_all(self) -> None:
        """Probe every pod once, all at the same time."""
        pods = list(self._pods.values())
        for pod, health in zip(pods, await asyncio.gather(*(self._probe(pod.endpoint) for pod in pods)), strict=True):
            self._note(pod, health)

    def _note(self, pod: _Pod, health: Health) -> None:
        if health.healthy:
            pod.silent_probes = 0
            pod.models = health.models
            self._set_ready(pod, ready=True)
        elif health.certain:
            self._set_ready(pod, ready=False)
        else:
            pod.silent_probes += 1
            if pod.silent_probes >= self._silent_probes_max:
                self._set_ready(pod, ready=False)

    def _set_ready(self, pod: _Pod, *, ready: bool) -> None:
        if pod.ready != ready:
            pod.ready = ready
            self._metrics.endpoint_ready.labels(pod.endpoint.name).set(int(ready))
            log.info("endpoint ready" if ready else "endpoint not ready", extra={"endpoint": pod.endpoint.name})
