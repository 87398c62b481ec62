"""The pods that settings, a file or Kubernetes list: which are ready, what they serve, how much each has to do.

Asks through a probe, in the background: no request waits for any of this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client import Gauge

from contextcache.model import ModelId
from gateway.metrics import Metrics
from gateway.ports import Endpoint, EndpointState, EngineLoad

log = logging.getLogger(__name__)

_LOAD_STATES = ("running", "waiting")
_LAST_POD_PATIENCE = 10
"""Times as many probes may go unanswered while no other pod is ready."""


@dataclass(frozen=True, slots=True)
class Health:
    """What one probe of a pod found."""

    healthy: bool
    certain: bool = True
    """False: no answer in time, which a busy pod may mean; True: it answered, or refused the connection."""
    models: frozenset[ModelId] = frozenset()
    load: EngineLoad | None = field(default_factory=EngineLoad)
    """Zeros when the pod does not say; None: it would have, and did not in time."""


Probe = Callable[[Endpoint], Awaitable[Health]]
"""Asks one pod how it does, within a deadline of its own. Never raises for what the pod does."""
Source = Callable[[], Sequence[Endpoint] | None]
"""Returns all pods there are when they have changed since it was asked last, else None."""


_BEGINNINGS_MAX = 4096
"""Remembered of a pod: as many as its sidecar tells."""


class _Pod:
    """One pod's state, made anew only after something changed: every request looks at every pod."""

    def __init__(self, endpoint: Endpoint, in_flight_gauge: Gauge) -> None:
        self.endpoint = endpoint
        self.in_flight_gauge = in_flight_gauge
        self.ready = False
        self.models = frozenset[ModelId]()
        self.load = EngineLoad()
        self.fingerprint = ""
        self.tiers = frozenset[str]()
        self.beginnings: dict[str, int] = {}
        self.beginnings_end = 0
        self.silent_probes = 0
        self.probes_without_load = 0
        self.in_flight = 0
        self.in_flight_at_probe = 0
        self.noted_since_probe = 0
        """Requests sent there by somebody who does not say when they end."""
        self.routed_at = 0
        self._state: EndpointState | None = None

    def changed(self) -> None:
        self._state = None

    def state(self) -> EndpointState:
        if self._state is None:
            self._state = EndpointState(
                self.endpoint,
                self.ready,
                self.models,
                self.in_flight,
                self.routed_at,
                self.load,
                self.in_flight - self.in_flight_at_probe + self.noted_since_probe,
                self.fingerprint,
                self.tiers,
                self.beginnings,
            )
        return self._state


class WatchedEndpoints:
    """The pods a source lists, probed by `run`, which its owner cancels."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        probe: Probe,
        *,
        metrics: Metrics,
        interval_s: float = 1.0,
        silent_probes_max: int = 3,
        source: Source | None = None,
    ) -> None:
        """`silent_probes_max` probes in a row without an answer make a ready pod unready; `source`: pods may change.

        The last ready pod is given ten times as long: refusing everything helps nobody whose pod is only busy.
        """
        self._probe = probe
        self._metrics = metrics
        self._interval_s = interval_s
        self._silent_probes_max = silent_probes_max
        self._source = source
        self.looked = asyncio.Event()
        """Set once `run` has asked every pod."""
        self._num_routed = 0
        self._pods: dict[str, _Pod] = {}
        self._gone: dict[str, _Pod] = {}
        """Pods no longer listed that still have requests of ours; bounded by those."""
        self.follow(endpoints)

    def states(self) -> Sequence[EndpointState]:
        """Return all pods, ready or not."""
        return [pod.state() for pod in self._pods.values()]

    def endpoint(self, name: str) -> Endpoint | None:
        """Return the pod of this name, ready or not; None when there is none."""
        pod = self._pods.get(name)
        return None if pod is None else pod.endpoint

    def note_routed(self, name: str) -> None:
        """Count one request as sent to this pod by somebody else, who will not say when it ends; a pod gone is none."""
        pod = self._pods.get(name)
        if pod is not None:
            self._used(pod)
            pod.noted_since_probe += 1

    def mark_unreachable(self, name: str, *, certain: bool = True) -> None:
        """Take a pod that refused a connection out until it is seen healthy again; a pod gone is out already.

        Not `certain`: it did not take one in time; the last ready pod stays, as long as its probes let it.
        """
        pod = self._pods.get(name)
        if pod is not None and (certain or not self._is_last(pod)):
            self._set_ready(pod, ready=False)

    def note_sidecar(self, name: str, *, fingerprint: str, tiers: frozenset[str]) -> None:
        """Remember what a pod's sidecar said; an empty fingerprint leaves the last one, which the engine still has."""
        pod = self._pods.get(name)
        if pod is not None:
            pod.fingerprint = fingerprint or pod.fingerprint
            pod.tiers = tiers
            pod.changed()

    def beginnings_end(self, name: str) -> int:
        """Return what to ask a pod's sidecar for new beginnings with; 0: for all."""
        pod = self._pods.get(name)
        return 0 if pod is None else pod.beginnings_end

    def note_beginnings(self, name: str, asked_at_ms: Mapping[str, int], end: int) -> None:
        """Remember what was asked for at a pod, and when, the newest last; of all there was, the last ones. O(new)."""
        pod = self._pods.get(name)
        if pod is None:
            return
        pod.beginnings_end = end
        for beginning, at_ms in asked_at_ms.items():
            pod.beginnings.pop(beginning, None)
            pod.beginnings[beginning] = at_ms
        while len(pod.beginnings) > _BEGINNINGS_MAX:
            del pod.beginnings[next(iter(pod.beginnings))]

    @contextmanager
    def carrying(self, name: str) -> Iterator[None]:
        """Count one request as in flight to this pod for the length of the `with` block.

        A pod that leaves the list meanwhile, and perhaps comes back, keeps its count.
        """
        pod = self._pods.get(name) or self._gone.get(name)
        if pod is None:
            # It went between the choice and now; the connection will tell.
            yield
            return
        self._used(pod)
        pod.in_flight += 1
        pod.in_flight_gauge.inc()
        try:
            yield
        finally:
            pod.in_flight -= 1
            pod.changed()
            pod.in_flight_gauge.dec()
            self._forget_if_gone(pod)

    def follow(self, endpoints: Sequence[Endpoint]) -> None:
        """Make these all the pods there are. A new one is not ready before it was asked."""
        assert len({endpoint.name for endpoint in endpoints}) == len(endpoints), "endpoint names must differ"
        before = self._pods
        self._pods = {endpoint.name: self._pod_of(endpoint) for endpoint in endpoints}
        for name, pod in before.items():
            if name not in self._pods:
                log.info("endpoint gone", extra={"endpoint": name})
                self._set_ready(pod, ready=False)
                self._gone[name] = pod
                self._forget_if_gone(pod)

    async def run(self) -> None:
        """Probe all pods again and again until cancelled."""
        while True:
            try:
                changed = self._source() if self._source is not None else None
                if changed is not None:
                    self.follow(changed)
                await self.probe_all()
            except Exception:
                # The loop must live: without it no pod would ever become ready again.
                self._metrics.probe_failures.inc()
                log.exception("probe round failed")
            self.looked.set()
            await asyncio.sleep(self._interval_s)

    async def probe_all(self) -> None:
        """Probe every pod once, all at the same time; a fault of one probe costs the others nothing."""
        found = await asyncio.gather(*map(self._probe_one, list(self._pods.values())), return_exceptions=True)
        for fault in found:
            if fault is not None:
                raise fault

    async def _probe_one(self, pod: _Pod) -> None:
        endpoint = pod.endpoint
        health = await self._probe(endpoint)
        # What answered may no longer be what is listed under this name.
        if self._pods.get(endpoint.name) is pod:
            self._note(pod, health)

    def _note(self, pod: _Pod, health: Health) -> None:
        if health.healthy:
            pod.silent_probes = 0
            pod.models = health.models
            self._note_load(pod, health.load)
            self._set_ready(pod, ready=True)
        elif health.certain:
            self._set_ready(pod, ready=False)
        else:
            pod.silent_probes += 1
            patience = self._silent_probes_max * (_LAST_POD_PATIENCE if self._is_last(pod) else 1)
            if pod.silent_probes >= patience:
                self._set_ready(pod, ready=False)

    def _is_last(self, pod: _Pod) -> bool:
        return not any(other.ready for other in self._pods.values() if other is not pod)

    def _note_load(self, pod: _Pod, load: EngineLoad | None) -> None:
        """Take what a probe found; what it should have found and did not is what it was, for a while.

        Not for ever: what is counted since the last figures would only grow.
        """
        pod.probes_without_load = 0 if load is not None else pod.probes_without_load + 1
        if load is not None:
            self._set_load(pod, load)
        elif pod.probes_without_load >= self._silent_probes_max:
            self._set_load(pod, EngineLoad())

    def _set_load(self, pod: _Pod, load: EngineLoad) -> None:
        pod.load = load
        pod.in_flight_at_probe = pod.in_flight
        pod.noted_since_probe = 0
        pod.changed()
        for state, value in zip(_LOAD_STATES, (load.running, load.waiting), strict=True):
            self._metrics.endpoint_load.labels(pod.endpoint.name, state).set(value)

    def _set_ready(self, pod: _Pod, *, ready: bool) -> None:
        if pod.ready != ready:
            pod.ready = ready
            pod.changed()
            self._metrics.endpoint_ready.labels(pod.endpoint.name).set(int(ready))
            log.info("endpoint ready" if ready else "endpoint not ready", extra={"endpoint": pod.endpoint.name})

    def _used(self, pod: _Pod) -> None:
        self._num_routed += 1
        pod.routed_at = self._num_routed
        pod.changed()

    def _pod_of(self, endpoint: Endpoint) -> _Pod:
        """Return the pod as it is known, if what is listed is still the same one; else one to be asked first."""
        pod = self._pods.get(endpoint.name) or self._gone.pop(endpoint.name, None)
        if pod is None or pod.endpoint.url != endpoint.url:
            # Requests to what had this name before end where they began.
            pod = _Pod(endpoint, self._metrics.requests_in_flight.labels(endpoint.name))
            self._metrics.endpoint_ready.labels(endpoint.name).set(0)
        elif pod.endpoint != endpoint:
            pod.endpoint = endpoint
            pod.changed()
        return pod

    def _forget_if_gone(self, pod: _Pod) -> None:
        name = pod.endpoint.name
        if self._gone.get(name) is pod and not pod.in_flight:
            del self._gone[name]
            self._forget_metrics(name)

    def _forget_metrics(self, name: str) -> None:
        for gauge in (self._metrics.endpoint_ready, self._metrics.requests_in_flight):
            with suppress(KeyError):
                gauge.remove(name)
        with suppress(KeyError):
            self._metrics.unreachable_deletes.remove(name)
        for state in _LOAD_STATES:
            with suppress(KeyError):
                self._metrics.endpoint_load.remove(name, state)
