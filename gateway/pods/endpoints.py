"""The pods that settings, a file or Kubernetes list: which are ready, what they serve, how much each has to do.

Asks through a probe, in the background: no request waits for any of this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random

from prometheus_client import Gauge

from contextcache.model import ModelId
from gateway.metrics import Metrics
from gateway.pods.roster import Roster
from gateway.pods.routing import Choice, ChoiceReason, RouteQuery, choose_endpoint
from gateway.pods.state import Endpoint, EndpointState, EngineLoad, LoadLimits
from gateway.shares import PodTenants

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
    tenants: Mapping[str, int] | None = None
    """Requests in flight by tenant's tag, of those that have most; None: the pod does not say."""
    clock_skew_s: float | None = field(default=None, compare=False)
    """The pod's clock less this machine's; None: the pod does not say."""


Probe = Callable[[Endpoint], Awaitable[Health]]
"""Asks one pod how it does, within a deadline of its own. Never raises for what the pod does."""
Source = Callable[[], Sequence[Endpoint] | None]
"""Returns all pods there are when they have changed since it was asked last, else None."""


_BEGINNINGS_MAX = 4096
"""Remembered of a pod: as many as its sidecar tells."""
_SETTLED_PROBES = 3
"""Answered by a pod that comes while others are ready, before it is: Envoy asks DNS once a second for those it may send
to, and sends what is for one that it does not know to any, whatever its model."""
_MODEL_PROBES = 600
"""Rounds for which a model counts as one that is to be served, after its last pod was: some ten minutes."""
_ALL_BEGINNINGS_MAX = 1 << 19
"""Remembered of all pods, some 500 bytes each; of more than 128 pods fewer of each are."""
_PLACED_WINDOW = 128
"""New contexts a pod, on average, after which those before count half: enough that chance moves few of them."""


class _Pod:
    """One pod as requests see it, and what is kept to know that."""

    def __init__(self, endpoint: Endpoint, in_flight_gauge: Gauge, tenants: PodTenants) -> None:
        self.state = EndpointState(endpoint, ready=False, models=frozenset(), in_flight=0, routed_at=0, tenants=tenants)
        self.in_flight_gauge = in_flight_gauge
        self.beginnings: dict[str, bool] = {}
        """Whether its sidecar told of them; the one heard of last is last."""
        self.beginnings_end = 0
        self.unsettled_probes = _SETTLED_PROBES
        """That it has to answer before it is ready."""
        self.silent_probes = 0
        self.probes_without_load = 0


class WatchedEndpoints:
    """The pods a source lists, probed by `run`, which its owner cancels."""

    def __init__(  # noqa: PLR0913  # one place is told everything, by name
        self,
        endpoints: Sequence[Endpoint],
        probe: Probe,
        *,
        metrics: Metrics,
        interval_s: float = 1.0,
        silent_probes_max: int = 3,
        source: Source | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        limits: LoadLimits | None = None,
        rng: Random | None = None,
    ) -> None:
        """`silent_probes_max` probes in a row without an answer make a ready pod unready; `source`: pods may change.

        The last ready pod is given ten times as long: refusing everything helps nobody whose pod is only busy.
        """
        self._probe = probe
        self._metrics = metrics
        self._interval_s = interval_s
        self._silent_probes_max = silent_probes_max
        self._source = source
        self._clock_s = clock_s
        self._limits = limits or LoadLimits()
        self._rng = rng if rng is not None else Random()  # noqa: S311 - spreads load, guards nothing
        self._choices = {reason: metrics.choices.labels(reason.value) for reason in ChoiceReason}
        self.looked = asyncio.Event()
        """Set once `run` has asked every pod."""
        self._num_routed = 0
        self._pods: dict[str, _Pod] = {}
        self._gone: dict[str, _Pod] = {}
        """Pods no longer listed that still have requests of ours; bounded by those."""
        self._roster: Roster | None = None
        self._knowing: dict[str, dict[str, int]] = {}
        """By beginning, see Roster.knowing."""
        self._num_placed = 0
        self._num_rounds = 0
        self._had_ready = False
        """Whether some pod was ready when this round began."""
        self._models_seen: dict[ModelId, int] = {}
        """The round in which a model was seen served last."""
        self.follow(endpoints)

    def choose(self, query: RouteQuery, *, is_made: bool = True) -> Choice:
        """Return the pod for a request. Raises NoReadyEndpoint, EndpointsSaturated, TooManyInFlight.

        Not `is_made`: the caller only asks whether there is one, and the choice is not counted.
        """
        choice = choose_endpoint(self.roster(), query, limits=self._limits, rng=self._rng)
        if is_made:
            self._choices[choice.reason].inc()
        return choice

    def roster(self) -> Roster:
        """Return all pods, ready or not; the same object until one comes, goes, or serves something else."""
        if self._roster is None:
            states = [pod.state for pod in self._pods.values()]
            self._roster = Roster(states, self._knowing, frozenset(self._models_seen))
        return self._roster

    def states(self) -> Sequence[EndpointState]:
        """Return all pods, ready or not."""
        return self.roster().states

    def endpoint(self, name: str) -> Endpoint | None:
        """Return the pod of this name, ready or not; None when there is none."""
        pod = self._pods.get(name)
        return None if pod is None else pod.state.endpoint

    def note_routed(self, name: str, tenant: str | None = None) -> None:
        """Count one request as sent to this pod by a proxy that does not report its end; a pod gone counts none."""
        pod = self._pods.get(name)
        if pod is not None:
            self._used(pod)
            pod.state.since_probe += 1
            if tenant is not None:
                pod.state.tenants.routed(tenant)

    def num_reported(self, tenant: str) -> int:
        """Return a tenant's requests that the pods reported and this gateway does not carry itself. O(pods)."""
        return sum(pod.state.tenants.reported(tenant) for pod in self._pods.values())

    def note_placed(self, name: str, beginning: str, *, at_ms: int, is_new: bool) -> Callable[[], None]:
        """Remember what was just sent to a pod, before its reports tell; a pod gone is none. See WatchedEndpoints."""
        pod = self._pods.get(name)
        if pod is None:
            return lambda: None
        before_ms = self._knowing.get(beginning, {}).get(name)
        if beginning:
            self._note_beginning(pod, beginning, at_ms, is_told=False)
        if is_new:
            pod.state.placed += 1
            self._num_placed += 1
            if self._num_placed >= _PLACED_WINDOW * len(self._pods):
                for other in self._pods.values():
                    other.state.placed //= 2
                self._num_placed = sum(other.state.placed for other in self._pods.values())
        return partial(self._take_back, pod, beginning, at_ms=at_ms, before_ms=before_ms, is_new=is_new)

    def _take_back(self, pod: _Pod, beginning: str, *, at_ms: int, before_ms: int | None, is_new: bool) -> None:
        name = pod.state.endpoint.name
        if self._pods.get(name) is not pod:
            return
        if self._knowing.get(beginning, {}).get(name) == at_ms:
            if before_ms is None:
                self._forget_beginning(pod, beginning)
            else:
                self._knowing[beginning][name] = before_ms
        if is_new and pod.state.placed:
            pod.state.placed -= 1
            self._num_placed -= 1

    def mark_unreachable(self, name: str, *, certain: bool = True) -> None:
        """Take a pod that refused a connection out until it is seen healthy again; a pod gone is out already.

        Not `certain`: it did not take one in time; the last ready pod stays, as long as its probes let it.
        """
        pod = self._pods.get(name)
        if pod is not None and (certain or not self._is_last(pod)):
            self._set_ready(pod, ready=False)

    def note_sidecar(self, name: str, *, fingerprint: str, tiers: Mapping[str, float]) -> None:
        """Remember what a pod's sidecar said; an empty fingerprint leaves the last one, which the engine still has."""
        pod = self._pods.get(name)
        if pod is not None:
            pod.state.fingerprint = fingerprint or pod.state.fingerprint
            pod.state.tiers = tiers

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
            self._note_beginning(pod, beginning, at_ms, is_told=True)

    @contextmanager
    def carrying(self, name: str, tenant: str | None = None) -> Iterator[None]:
        """Count one request as in flight to this pod for the length of the `with` block.

        A pod that leaves the list meanwhile, and perhaps comes back, keeps its count.
        """
        pod = self._pods.get(name) or self._gone.get(name)
        if pod is None:
            # It went between the choice and now; the connection will tell.
            yield
            return
        self._used(pod)
        pod.state.in_flight += 1
        pod.state.since_probe += 1
        pod.in_flight_gauge.inc()
        try:
            with nullcontext() if tenant is None else pod.state.tenants.carried(tenant):
                yield
        finally:
            pod.state.in_flight -= 1
            pod.state.since_probe -= 1
            pod.in_flight_gauge.dec()
            self._forget_if_gone(pod)

    def follow(self, endpoints: Sequence[Endpoint]) -> None:
        """Make these all the pods there are. A new one is not ready before it was asked."""
        assert len({endpoint.name for endpoint in endpoints}) == len(endpoints), "endpoint names must differ"
        before = self._pods
        self._pods = {endpoint.name: self._pod_of(endpoint) for endpoint in endpoints}
        self._roster = None
        for name, pod in before.items():
            if self._pods.get(name) is not pod:
                self._forget_placed(pod)
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
        self._num_rounds += 1
        self._had_ready = any(pod.state.ready for pod in self._pods.values())
        for model in [model for model, seen in self._models_seen.items() if self._num_rounds - seen >= _MODEL_PROBES]:
            del self._models_seen[model]
            self._roster = None
        found = await asyncio.gather(*map(self._probe_one, list(self._pods.values())), return_exceptions=True)
        for fault in found:
            if fault is not None:
                raise fault

    async def _probe_one(self, pod: _Pod) -> None:
        endpoint = pod.state.endpoint
        health = await self._probe(endpoint)
        # What answered may no longer be what is listed under this name.
        if self._pods.get(endpoint.name) is pod:
            self._note(pod, health)

    def _note(self, pod: _Pod, health: Health) -> None:
        if health.healthy:
            pod.silent_probes = 0
            self._note_clock(pod, health.clock_skew_s)
            self._models_seen.update(dict.fromkeys(health.models, self._num_rounds))
            if pod.state.models != health.models:
                pod.state.models = health.models
                self._roster = None
            self._note_load(pod, health)
            pod.unsettled_probes = max(0, pod.unsettled_probes - 1) if self._had_ready else 0
            self._set_ready(pod, ready=pod.unsettled_probes == 0)
        elif health.certain:
            self._set_ready(pod, ready=False)
        else:
            pod.silent_probes += 1
            patience = self._silent_probes_max * (_LAST_POD_PATIENCE if self._is_last(pod) else 1)
            if pod.silent_probes >= patience:
                self._set_ready(pod, ready=False)

    def _note_clock(self, pod: _Pod, skew_s: float | None) -> None:
        pod.state.clock_skew_s = skew_s
        if skew_s is not None:
            self._metrics.endpoint_clock_skew.labels(pod.state.endpoint.name).set(skew_s)

    def _is_last(self, pod: _Pod) -> bool:
        return not any(other.state.ready for other in self._pods.values() if other is not pod)

    def _note_load(self, pod: _Pod, health: Health) -> None:
        """Take what a probe found; what it should have found and did not is what it was, for a while.

        Not for ever: what is counted since the last figures would only grow.
        """
        pod.probes_without_load = 0 if health.load is not None else pod.probes_without_load + 1
        if health.load is not None:
            self._set_load(pod, health.load, health.tenants)
        elif pod.probes_without_load >= self._silent_probes_max:
            self._set_load(pod, EngineLoad(), health.tenants)

    def _set_load(self, pod: _Pod, load: EngineLoad, tenants: Mapping[str, int] | None) -> None:
        pod.state.load = load
        pod.state.since_probe = 0
        pod.state.tenants.probed(running=load.running, waiting=load.waiting, deferred=load.deferred, tenants=tenants)
        for state, value in zip(_LOAD_STATES, (load.running, load.waiting), strict=True):
            self._metrics.endpoint_load.labels(pod.state.endpoint.name, state).set(value)

    def _set_ready(self, pod: _Pod, *, ready: bool) -> None:
        if pod.state.ready != ready:
            name = pod.state.endpoint.name
            pod.state.ready = ready
            self._roster = None
            self._metrics.endpoint_ready.labels(name).set(int(ready))
            log.info("endpoint ready" if ready else "endpoint not ready", extra={"endpoint": name})

    def _used(self, pod: _Pod) -> None:
        self._num_routed += 1
        pod.state.routed_at = self._num_routed

    def _note_beginning(self, pod: _Pod, beginning: str, at_ms: int, *, is_told: bool) -> None:
        was_told = pod.beginnings.pop(beginning, False)
        pod.beginnings[beginning] = was_told or is_told
        pod.state.beginnings += is_told and not was_told
        pods = self._knowing.setdefault(beginning, {})
        name = pod.state.endpoint.name
        pods[name] = max(at_ms, pods.get(name, 0))
        while len(pod.beginnings) > min(_BEGINNINGS_MAX, _ALL_BEGINNINGS_MAX // len(self._pods)):
            self._forget_beginning(pod, next(iter(pod.beginnings)))

    def _forget_placed(self, pod: _Pod) -> None:
        self._num_placed -= pod.state.placed
        pod.state.placed = pod.beginnings_end = 0
        for beginning in list(pod.beginnings):
            self._forget_beginning(pod, beginning)

    def _forget_beginning(self, pod: _Pod, beginning: str) -> None:
        pod.state.beginnings -= pod.beginnings.pop(beginning)
        pods = self._knowing[beginning]
        del pods[pod.state.endpoint.name]
        if not pods:
            del self._knowing[beginning]

    def _pod_of(self, endpoint: Endpoint) -> _Pod:
        """Return the pod as it is known, if what is listed is still the same one; else one to be asked first."""
        pod = self._pods.get(endpoint.name) or self._gone.pop(endpoint.name, None)
        if pod is None or pod.state.endpoint.url != endpoint.url:
            # Requests to what had this name before end where they began.
            gauge = self._metrics.requests_in_flight.labels(endpoint.name)
            pod = _Pod(endpoint, gauge, PodTenants(self._clock_s))
            self._metrics.endpoint_ready.labels(endpoint.name).set(0)
        pod.state.endpoint = endpoint
        return pod

    def _forget_if_gone(self, pod: _Pod) -> None:
        name = pod.state.endpoint.name
        if self._gone.get(name) is pod and not pod.state.in_flight:
            del self._gone[name]
            self._forget_metrics(name)

    def _forget_metrics(self, name: str) -> None:
        for gauge in (
            self._metrics.endpoint_ready,
            self._metrics.requests_in_flight,
            self._metrics.endpoint_clock_skew,
        ):
            with suppress(KeyError):
                gauge.remove(name)
        with suppress(KeyError):
            self._metrics.unreachable_deletes.remove(name)
        for state in _LOAD_STATES:
            with suppress(KeyError):
                self._metrics.endpoint_load.remove(name, state)
