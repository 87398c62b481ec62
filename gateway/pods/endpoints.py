"""The pods that settings, a file or Kubernetes list: their readiness, models, load and placed contexts.

Probes and polls run in the background: no request waits for them. A pod has one of four states:

                 3 healthy          unhealthy, refused,
                  probes            or 3 silent probes
    listed ─▶ NEW ──────▶ READY ──────────────────────▶ OUT
               │            │ ◀──────────────────────── │
               │            │       1 healthy probe     │
               └────────────┴────────────┬──────────────┘
                                         ▼ not listed
                                        GONE ─▶ forgotten after its last request; NEW if listed again

| state | requests | exceptions |
| --- | --- | --- |
| NEW | none | 1 healthy probe is enough if no pod was ready when the round began |
| READY | yes | the last ready pod may be silent for 30 probes: a busy pod is better than none |
| OUT | none | a refused connection puts a pod there at once, without a probe |
| GONE | those that this gateway still carries | |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from random import Random

from contextcache.errors import NoReadyEndpoint
from contextcache.identity import Standby
from contextcache.model import ModelId
from gateway.metrics import Metrics
from gateway.pods.roster import RETRY_AFTER_S, Roster
from gateway.pods.routing import Choice, ChoiceReason, RouteQuery, choose_endpoint, standby_for
from gateway.pods.state import SETTLED_PROBES, Endpoint, EndpointState, EngineLoad, LoadLimits, Readiness
from gateway.shares import PodTenants

log = logging.getLogger(__name__)

_LOAD_STATES = ("running", "waiting")
_SILENT_PROBES_MAX = 3
"""Probes in a row without an answer that take a pod out, or after which its last load no longer counts."""
_LAST_POD_PATIENCE = 10
"""Factor on `_SILENT_PROBES_MAX` for the last ready pod."""
_MODEL_PROBES = 600
"""Rounds, some ten minutes, for which a model without a pod is expected back."""
_BEGINNINGS_MAX = 4096
"""Beginnings remembered of a pod: as many as its sidecar reports."""
_ALL_BEGINNINGS_MAX = 1 << 19
"""Beginnings remembered of all pods, some 500 bytes each. From 128 pods on each pod has an equal share."""
_PLACED_WINDOW = 128
"""New contexts per pod, on average, after which all counts are halved: enough to even out chance."""


@dataclass(frozen=True, slots=True)
class Health:
    """Result of one probe."""

    healthy: bool
    certain: bool = True
    """False: no answer in time, as of a busy pod; True: the pod answered, or refused the connection."""
    models: frozenset[ModelId] = frozenset()
    load: EngineLoad | None = field(default_factory=EngineLoad)
    """Zeros if the pod has no such metrics; None: the page did not arrive in time."""
    tenants: Mapping[str, int] | None = None
    """Requests in flight of the tenants with most of them, by tag; None: the pod does not report them."""
    runs_turns: bool = True
    """False: the pod is a vLLM alone, which would answer a turn without its context."""
    limits_tenants: bool = False
    """See EndpointState."""
    clock_skew_s: float | None = field(default=None, compare=False)
    """The pod's clock minus this machine's; None: unknown."""


Probe = Callable[[Endpoint], Awaitable[Health]]
"""Probes one pod within a deadline of its own. Never raises for a fault of the pod."""
Source = Callable[[], Sequence[Endpoint] | None]
"""Returns all pods if the list has changed since the last call, else None."""


@dataclass(eq=False)
class WatchedEndpoints:
    """The listed pods. `run` probes them; its owner cancels it."""

    endpoints: InitVar[Sequence[Endpoint]]
    probe: Probe
    _: KW_ONLY
    metrics: Metrics
    interval_s: float = 1.0
    source: Source | None = None
    """Tells of a changed list."""
    clock_s: Callable[[], float] = time.monotonic
    limits: LoadLimits = field(default_factory=LoadLimits)
    rng: Random = field(default_factory=Random)
    """Breaks ties between pods: tests give a seeded one."""

    def __post_init__(self, endpoints: Sequence[Endpoint]) -> None:
        """List the first pods."""
        self._choices = {reason: self.metrics.choices.labels(reason.value) for reason in ChoiceReason}
        self.looked = asyncio.Event()
        """Set when `run` has probed every pod once."""
        self._pods: dict[str, EndpointState] = {}
        """By name, GONE pods too."""
        self._roster: Roster | None = None
        self._knowing: dict[str, dict[str, int]] = {}
        """Roster.knowing, by beginning."""
        self._models_seen: dict[ModelId, int] = {}
        """Last round in which a pod served the model."""
        self._num_routed = self._num_placed = self._num_rounds = 0
        self.follow(endpoints)

    def choose(self, query: RouteQuery, *, is_made: bool = True, is_turn: bool = False) -> Choice:
        """Return the pod for a request. Raises NoReadyEndpoint, EndpointsSaturated, TooManyInFlight.

        Not `is_made`: the caller only asks whether there is one, and the choice is not counted. `is_turn`: the request
        has a context, which a vLLM alone would ignore.
        """
        choice = choose_endpoint(self.roster(), query, limits=self.limits, rng=self.rng)
        if is_turn:
            pod = self._named(choice.endpoint.name)
            if pod is not None and not pod.runs_turns:
                raise NoReadyEndpoint("the pod runs no turns and would ignore the context", retry_after_s=RETRY_AFTER_S)
        if is_made:
            self._choices[choice.reason].inc()
        return choice

    def standby(self, query: RouteQuery, chosen: Endpoint) -> Standby | None:
        """Return the pod that continues the answer of `chosen` if its engine fails; None: no pod can."""
        return standby_for(self.roster(), query, chosen, rng=self.rng, limits=self.limits)

    def roster(self) -> Roster:
        """Return all listed pods; the same object until a pod comes, goes, or changes readiness or models."""
        if self._roster is None:
            self._roster = Roster(self._listed(), self._knowing, frozenset(self._models_seen))
        return self._roster

    def states(self) -> Sequence[EndpointState]:
        """Return all listed pods, ready or not."""
        return self.roster().states

    def endpoint(self, name: str) -> Endpoint | None:
        """Return the listed pod of this name, ready or not."""
        pod = self._named(name)
        return None if pod is None else pod.endpoint

    def num_reported(self, tenant: str) -> int:
        """Return a tenant's requests that pods report and that this gateway does not carry itself. O(pods).

        Pods report the requests that pass their turn processes. These are all requests while a limit is set: see
        `Gateway._is_direct`.
        """
        return sum(pod.tenants.reported(tenant) for pod in self.states())

    def takes_direct(self, name: str) -> bool:
        """Return whether a pod's engine may get a request past the turn process, which then does not count it.

        False for a full pod, whose tenants have shares, and for a pod that limits tenants itself.
        """
        pod = self._named(name)
        return pod is not None and not pod.limits_tenants and pod.tenants.has_room()

    def note_routed(self, name: str, tenant: str | None = None, *, is_direct: bool = False) -> None:
        """Count one request to a pod through Envoy, which does not report its end.

        `tenant`: its tag; None: the engine computes nothing for the request. `is_direct`: it goes
        to vLLM itself, so the turn process reports it never.
        """
        pod = self._named(name)
        if pod is not None:
            self._note_use(pod)
            if tenant is not None:
                pod.tenants.routed(tenant, is_direct=is_direct)

    @contextmanager
    def carrying(self, name: str, tenant: str | None = None, *, is_direct: bool = False) -> Iterator[None]:
        """Count one request as in flight to a pod during a `with` block; for the arguments see note_routed.

        A pod that leaves the list and returns keeps its count.
        """
        pod = self._pods.get(name)
        if pod is None:
            # The pod left after it was chosen. The connection will fail.
            yield
            return
        counted = nullcontext() if tenant is None else pod.tenants.carried(tenant, is_direct=is_direct)
        self._note_use(pod)
        pod.in_flight += 1
        try:
            with self.metrics.requests_in_flight.labels(name).track_inprogress(), counted:
                yield
        finally:
            pod.in_flight -= 1
            pod.since_probe -= 1
            self._forget_if_gone(pod)

    def note_placed(self, name: str, beginning: str, *, at_ms: int, is_new: bool) -> Callable[[], None]:
        """Remember a request just sent to a pod, ahead of its reports; return a function that takes it back.

        `beginning`: of its prompt, empty if unknown; `is_new`: it leaves KV on this pod that was not there.
        """
        pod = self._named(name)
        if pod is None:
            return lambda: None
        before_ms = self._knowing.get(beginning, {}).get(name)
        if beginning:
            self._note_beginning(pod, beginning, at_ms)
        if is_new:
            self._add_placed(pod)

        def take_back() -> None:
            if self._named(name) is not pod:
                return
            if self._knowing.get(beginning, {}).get(name) == at_ms:
                if before_ms is None:
                    self._forget_beginning(pod, beginning)
                else:
                    self._knowing[beginning][name] = before_ms
            if is_new and pod.placed:
                pod.placed -= 1
                self._num_placed -= 1

        return take_back

    def mark_unreachable(self, name: str, *, certain: bool = True) -> None:
        """Take a pod OUT that refused a connection, at its turn process or at vLLM: it needs both.

        Not `certain`: it did not accept one in time. The last ready pod then stays READY.
        """
        pod = self._named(name)
        if pod is not None and (certain or not self._is_last(pod)):
            self._take_out(pod)

    def note_sidecar(self, name: str, *, fingerprint: str, tiers: Mapping[str, float]) -> None:
        """Remember a sidecar's answer. An empty fingerprint keeps the last one: the engine still has it."""
        pod = self._named(name)
        if pod is not None:
            pod.fingerprint = fingerprint or pod.fingerprint
            pod.tiers = tiers

    def note_beginnings(self, name: str, asked_at_ms: Mapping[str, int], end: int) -> None:
        """Remember beginnings that a pod has served, with the time of the last request, the newest last."""
        pod = self._named(name)
        if pod is not None:
            pod.beginnings_end = end
            for beginning, at_ms in asked_at_ms.items():
                self._note_beginning(pod, beginning, at_ms)

    def follow(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the list of pods. A pod at another URL is another pod."""
        assert len({endpoint.name for endpoint in endpoints}) == len(endpoints), "endpoint names must differ"
        before, self._roster = dict(self._pods), None
        for endpoint in endpoints:
            pod = before.pop(endpoint.name, None)
            if pod is None or (pod.endpoint.url, pod.endpoint.turn_url) != (endpoint.url, endpoint.turn_url):
                self._add(endpoint, pod)
            else:
                pod.endpoint = endpoint
                if pod.readiness is Readiness.GONE:
                    pod.readiness, pod.probes_to_ready = Readiness.NEW, SETTLED_PROBES
        for pod in before.values():
            if pod.readiness is not Readiness.GONE:
                log.info("endpoint gone", extra={"endpoint": pod.endpoint.name})
                self._forget_placed(pod)
                self._set(pod, Readiness.GONE)
                self._forget_if_gone(pod)

    async def run(self) -> None:
        """Follow the source and probe all pods, every `interval_s`, until cancelled."""
        # The loop must survive: without it no pod would become ready again.
        await repeat(self._round, self.interval_s, "probe round failed", self.metrics)

    async def _round(self) -> None:
        try:
            changed = self.source() if self.source is not None else None
            if changed is not None:
                self.follow(changed)
            await self.probe_all()
        finally:
            self.looked.set()

    async def probe_all(self) -> None:
        """Probe every pod once, concurrently. A failed probe does not affect the others."""
        self._num_rounds += 1
        for model in [model for model, seen in self._models_seen.items() if self._num_rounds - seen >= _MODEL_PROBES]:
            del self._models_seen[model]
            self._roster = None
        had_ready = any(pod.ready for pod in self._pods.values())
        probes = [self._probe_one(pod, had_ready=had_ready) for pod in self._listed()]
        for fault in await asyncio.gather(*probes, return_exceptions=True):
            if fault is not None:
                raise fault

    async def _probe_one(self, pod: EndpointState, *, had_ready: bool) -> None:
        health = await self.probe(pod.endpoint)
        if self._named(pod.endpoint.name) is not pod:
            return  # another pod has the name by now
        if health.healthy:
            pod.silent_probes = 0
            self._note_health(pod, health)
            if pod.readiness is Readiness.NEW:
                pod.probes_to_ready -= 1
                if had_ready and pod.probes_to_ready > 0:
                    return
            self._set(pod, Readiness.READY)
        elif health.certain:
            self._take_out(pod)
        else:
            pod.silent_probes += 1
            if pod.silent_probes >= _SILENT_PROBES_MAX * (_LAST_POD_PATIENCE if self._is_last(pod) else 1):
                self._take_out(pod)

    def _note_health(self, pod: EndpointState, health: Health) -> None:
        name = pod.endpoint.name
        pod.clock_skew_s, pod.limits_tenants = health.clock_skew_s, health.limits_tenants
        pod.runs_turns = health.runs_turns
        if health.clock_skew_s is not None:
            self.metrics.endpoint_clock_skew.labels(name).set(health.clock_skew_s)
        self._models_seen.update(dict.fromkeys(health.models, self._num_rounds))
        if pod.models != health.models:
            pod.models, self._roster = health.models, None
        pod.probes_without_load = 0 if health.load is not None else pod.probes_without_load + 1
        if health.load is None and pod.probes_without_load < _SILENT_PROBES_MAX:
            return  # the last load still counts
        load = health.load or EngineLoad()
        pod.load, pod.since_probe = load, 0
        pod.tenants.probed(running=load.running, waiting=load.waiting, deferred=load.deferred, tenants=health.tenants)
        for state, value in zip(_LOAD_STATES, (load.running, load.waiting), strict=True):
            self.metrics.endpoint_load.labels(name, state).set(value)

    def _take_out(self, pod: EndpointState) -> None:
        if pod.ready:
            self._set(pod, Readiness.OUT)

    def _set(self, pod: EndpointState, readiness: Readiness) -> None:
        was_ready, pod.readiness = pod.ready, readiness
        if pod.ready != was_ready:
            self._roster = None
            self.metrics.endpoint_ready.labels(pod.endpoint.name).set(int(pod.ready))
            log.info("endpoint ready" if pod.ready else "endpoint not ready", extra={"endpoint": pod.endpoint.name})

    def _is_last(self, pod: EndpointState) -> bool:
        return not any(other.ready for other in self._pods.values() if other is not pod)

    def _listed(self) -> list[EndpointState]:
        return [pod for pod in self._pods.values() if pod.readiness is not Readiness.GONE]

    def _named(self, name: str) -> EndpointState | None:
        """Return the listed pod of this name."""
        pod = self._pods.get(name)
        return None if pod is None or pod.readiness is Readiness.GONE else pod

    def _add(self, endpoint: Endpoint, before: EndpointState | None) -> None:
        """List a new pod, in place of another one of its name: requests to that one end at its old address."""
        if before is not None:
            self._forget_placed(before)
        self._pods[endpoint.name] = EndpointState(endpoint, tenants=PodTenants(self.clock_s))
        self.metrics.endpoint_ready.labels(endpoint.name).set(0)

    def _note_use(self, pod: EndpointState) -> None:
        self._num_routed += 1
        pod.routed_at = self._num_routed
        pod.since_probe += 1

    def _add_placed(self, pod: EndpointState) -> None:
        pod.placed += 1
        self._num_placed += 1
        if self._num_placed >= _PLACED_WINDOW * len(self._pods):
            for other in self._pods.values():
                other.placed //= 2
            self._num_placed = sum(other.placed for other in self._pods.values())

    def _note_beginning(self, pod: EndpointState, beginning: str, at_ms: int) -> None:
        pod.heard.pop(beginning, None)
        pod.heard[beginning] = None
        asked = self._knowing.setdefault(beginning, {})
        asked[pod.endpoint.name] = max(at_ms, asked.get(pod.endpoint.name, 0))
        while len(pod.heard) > min(_BEGINNINGS_MAX, _ALL_BEGINNINGS_MAX // len(self._pods)):
            self._forget_beginning(pod, next(iter(pod.heard)))

    def _forget_placed(self, pod: EndpointState) -> None:
        self._num_placed -= pod.placed
        pod.placed = pod.beginnings_end = 0
        for beginning in list(pod.heard):
            self._forget_beginning(pod, beginning)

    def _forget_beginning(self, pod: EndpointState, beginning: str) -> None:
        del pod.heard[beginning]
        asked = self._knowing[beginning]
        del asked[pod.endpoint.name]
        if not asked:
            del self._knowing[beginning]

    def _forget_if_gone(self, pod: EndpointState) -> None:
        name = pod.endpoint.name
        if pod.readiness is not Readiness.GONE or pod.in_flight or self._pods.get(name) is not pod:
            return
        del self._pods[name]
        found = self.metrics
        of_pod = (found.endpoint_ready, found.requests_in_flight, found.endpoint_clock_skew, found.unreachable_deletes)
        by_state = [(found.endpoint_load, (name, state)) for state in _LOAD_STATES]
        for metric, labels in [*((metric, (name,)) for metric in of_pod), *by_state]:
            with suppress(KeyError):
                metric.remove(*labels)


async def repeat(step: Callable[[], Awaitable[None]], interval_s: float, failure: str, metrics: Metrics) -> None:
    """Run `step` every `interval_s` until cancelled. Faults are logged as `failure` and counted."""
    while True:
        try:
            await step()
        except Exception:
            metrics.probe_failures.inc()
            log.exception(failure)
        await asyncio.sleep(interval_s)
