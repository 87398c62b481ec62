"""The simulation: events in order of time; every choice of a pod is made by the gateway's own routing and reports.

Each of some gateways has the real WatchedEndpoints, which probe the made-up pods each second, and the real Holders,
which ask theirs every five. Between two, it knows what it sent itself. What is not the gateway's is made up: what a
turn waits for is KV that comes, one GPU that computes prompts one after the other, and a place in the batch.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from benchmarks.simulate.kv import KV
from benchmarks.simulate.pods import Pod, Request
from benchmarks.simulate.rates import BYTES_PER_TOKEN, Rates
from benchmarks.simulate.seen import Seen
from benchmarks.simulate.traffic import CONTINUED, KINDS, TOKENS_MAX, Contexts
from contextcache.errors import EndpointsSaturated, NoReadyEndpoint
from gateway.metrics import Metrics
from gateway.pods.endpoints import Health, WatchedEndpoints
from gateway.pods.roster import Candidates
from gateway.pods.routing import Choice, RouteQuery
from gateway.pods.sidecars import Holders
from gateway.pods.state import Endpoint, EndpointState, Readiness
from gateway.settings import EndpointSettings, GatewaySettings

MODEL = "8b"
PROBE_S, STATS_S = 1.0, 5.0
RETRY_S = 2.0
TRIES_MAX = 3
ZONES = 3
NOTICED_S = 5.0
"""After which pods that are gone are no longer listed."""
TIMED = 16
"""One of so many choices is timed."""


class World:
    """Pods, gateways and contexts, and what is to happen."""

    def __init__(  # one place is told everything, by name
        self,
        rates: Rates,
        *,
        num_pods: int,
        num_contexts: int,
        requests_per_pod_s: float,
        num_gateways: int = 2,
        has_store: bool = True,
        seed: int = 0,
    ) -> None:
        self.rates = rates
        self.has_store = has_store
        self.now_s = 0.0
        self.seen = Seen()
        self.rng = Random(seed)
        self.pods = [Pod(f"pod-{number:04}", rates, self) for number in range(num_pods)]
        self._by_name = {pod.name: number for number, pod in enumerate(self.pods)}
        self._listed = {pod.name: endpoint_of(pod.name) for pod in self.pods}
        self.contexts = Contexts(num_contexts, num_pods, seed)
        self._lay_out()
        self._kv = KV(rates, self.pods, self._by_name, self.contexts, has_store=has_store)
        self._bursts_per_s = requests_per_pod_s * num_pods / turns_a_burst()
        self._loop = asyncio.new_event_loop()
        self._gateways = [self._gateway() for _ in range(num_gateways)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._num_choices = 0
        self.choice_s = array("f")
        """CPU seconds of some choices."""
        self.every(PROBE_S, self._probe)
        self.every(STATS_S, self._ask)
        self._probe()
        self._ask()
        self.at(0.0, self._burst)

    def now_ms(self) -> int:
        """Return the simulated time, as any clock does."""
        return int(1000 * self.now_s)

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._events, (when_s, next(self._numbers), what))

    def every(self, interval_s: float, what: Callable[[], None]) -> None:
        """Have something happen again and again."""

        def again() -> None:
            what()
            self.at(self.now_s + interval_s, again)

        self.at(self.now_s + interval_s, again)

    def run(self, until_s: float) -> Seen:
        """Go on until then; return what was seen."""
        self.seen = Seen()
        for pod in self.pods:
            pod.served = pod.created = 0
            pod.busy_s = dict.fromkeys(pod.busy_s, 0.0)
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(events)
            what()
        self.now_s = until_s
        return self.seen

    def close(self) -> None:
        """Let go of the event loop."""
        self._loop.close()

    def list_pods(self, change: Callable[[Endpoint], Endpoint | None]) -> None:
        """Change what the gateways see of the pods; None: no longer listed."""
        changed = {name: change(endpoint) for name, endpoint in self._listed.items()}
        self._listed = {name: endpoint for name, endpoint in changed.items() if endpoint is not None}
        for endpoints, _ in self._gateways:
            endpoints.follow(list(self._listed.values()))

    def lose_zone(self) -> None:
        """Lose a third of the pods, with their disks; after a while they are no longer listed."""
        gone = {pod.name for number, pod in enumerate(self.pods) if number % ZONES == 0}
        for pod in self.pods:
            if pod.name in gone:
                self._send_again(pod.go(with_disk=True))
        self.at(self.now_s + NOTICED_S, lambda: self.list_pods(lambda one: None if one.name in gone else one))

    def restart(self, pods: list[Pod], drain_s: float, down_s: float) -> None:
        """Drain pods, stop them, and start them again, with their disks and nothing in memory."""
        names = {pod.name for pod in pods}
        self.list_pods(lambda one: replace(one, draining=True) if one.name in names else one)

        def stop() -> None:
            for pod in pods:
                self._send_again(pod.go(with_disk=False))
            self.list_pods(lambda one: None if one.name in names else one)

        def start() -> None:
            for pod in pods:
                pod.is_up = True
                self._listed[pod.name] = endpoint_of(pod.name)
            self.list_pods(lambda one: one)

        self.at(self.now_s + drain_s, stop)
        self.at(self.now_s + drain_s + down_s, start)

    def _lay_out(self) -> None:
        """Put KV on the disks: kept conversations where the ring has them, the others evenly, as bounded shares do."""
        ring = Candidates([EndpointState(one, Readiness.READY, frozenset(), 0, 0) for one in self._listed.values()])
        contexts = self.contexts
        for number, kind in enumerate(contexts.kind):
            if not KINDS[kind].is_session:
                contexts.holder[number] = self._by_name[ring.near(_group(number), 1)[0].endpoint.name]
            self.pods[contexts.holder[number]].disk.touch(number, contexts.own_tokens(number))

    def _gateway(self) -> tuple[WatchedEndpoints, Holders]:
        metrics = Metrics(CollectorRegistry())
        pods = list(self._listed.values())
        settings = GatewaySettings(
            secret_file=Path(), endpoints=[EndpointSettings(name=one.name, url=one.url) for one in pods]
        )
        endpoints = WatchedEndpoints(pods, self._health, metrics=metrics, clock_s=lambda: self.now_s, rng=self.rng)
        return endpoints, Holders(
            endpoints, None, lambda name: self.pods[self._by_name[name]], clock=self, metrics=metrics, settings=settings
        )

    async def _health(self, endpoint: Endpoint) -> Health:
        pod = self.pods[self._by_name[endpoint.name]]
        if not pod.is_up:
            return Health(healthy=False)
        return Health(healthy=True, models=frozenset({MODEL}), load=pod.load())

    def _probe(self) -> None:
        for endpoints, _ in self._gateways:
            self._loop.run_until_complete(endpoints.probe_all())

    def _ask(self) -> None:
        for _, sidecars in self._gateways:
            self._loop.run_until_complete(sidecars.ask_all())

    def _burst(self) -> None:
        if self.rng.random() < CONTINUED:
            number = self.contexts.taken_up(self.rng)
            self._ask_for(number, is_new=False)
        else:
            self._ask_for(self.contexts.add(self.rng), is_new=True)
        self.at(self.now_s + self.rng.expovariate(self._bursts_per_s), self._burst)

    def _send_again(self, lost: list[Request]) -> None:
        for request in lost:
            self.seen.lost += 1
            self.contexts.is_busy[request.context] = 0
            is_new = self.contexts.holder[request.context] < 0
            number = request.context
            self.at(self.now_s + RETRY_S, lambda number=number, is_new=is_new: self._ask_for(number, is_new=is_new))

    def _ask_for(self, number: int, *, is_new: bool, tries: int = 0) -> None:
        """Send one turn of a context."""
        contexts = self.contexts
        if contexts.is_busy[number]:
            return
        kind = KINDS[contexts.kind[number]]
        new = int(self.rng.expovariate(1 / (kind.first_tokens if is_new else kind.new_tokens))) + 1
        num_tokens = contexts.tokens[number] + new
        query, beginning = self._query(number, num_tokens, is_new=is_new)
        endpoints, _ = self.rng.choice(self._gateways)
        try:
            choice = self._choose(endpoints, query)
        except (NoReadyEndpoint, EndpointsSaturated):
            self.seen.refused += 1
            self.at(self.now_s + RETRY_S, lambda: self._ask_for(number, is_new=is_new))
            return
        pod = self.pods[self._by_name[choice.endpoint.name]]
        if not pod.is_up:
            endpoints.mark_unreachable(pod.name)
            if tries < TRIES_MAX:
                self._ask_for(number, is_new=is_new, tries=tries + 1)
            else:
                self.at(self.now_s + RETRY_S, lambda: self._ask_for(number, is_new=is_new))
            return
        endpoints.note_routed(pod.name)
        pod.beginnings.note(beginning)
        self._count(number, choice, pod, num_tokens, is_new=is_new)
        ready_s, computed = self._kv.bring(self.seen, self.now_s, number, pod, choice, is_new=is_new)
        self.seen.computed += computed + new
        contexts.is_busy[number] = 1
        answer = int(self.rng.expovariate(1 / kind.answer_tokens)) + 1
        pod.waiting.append(Request(number, self.now_s, ready_s, num_tokens, computed + new, answer, pod.life))
        self._admit(pod)

    def _query(self, number: int, num_tokens: int, *, is_new: bool) -> tuple[RouteQuery, str]:
        contexts = self.contexts
        kind = KINDS[contexts.kind[number]]
        if not kind.is_session:
            group = _group(number)
            return RouteQuery(MODEL, "", group, is_conversation=True, stays=True, num_tokens=num_tokens), group
        if is_new:
            beginning = f"{kind.name}-{contexts.prefix[number]}"
            return RouteQuery(MODEL, "", beginning, stays=True, num_tokens=num_tokens), beginning
        return RouteQuery(MODEL, self.pods[contexts.holder[number]].name, num_tokens=contexts.tokens[number]), ""

    def _choose(self, endpoints: WatchedEndpoints, query: RouteQuery) -> Choice:
        """Do what Gateway does for each request; time some."""
        self._num_choices += 1
        began_s = time.process_time() if self._num_choices % TIMED == 0 else 0.0
        choice = endpoints.choose(query)
        endpoints.note_placed(choice.endpoint.name, query.affinity, at_ms=self.now_ms(), is_new=choice.is_placed)
        if began_s:
            self.choice_s.append(time.process_time() - began_s)
        return choice

    def _count(self, number: int, choice: Choice, pod: Pod, num_tokens: int, *, is_new: bool) -> None:
        seen = self.seen
        seen.reasons[choice.reason.value] += 1
        seen.tokens += num_tokens
        seen.sessions += KINDS[self.contexts.kind[number]].is_session
        pod.served += 1
        if is_new:
            seen.creates += 1
            pod.created += 1
            return
        seen.turns += 1
        seen.stayed += self.pods[self.contexts.holder[number]] is pod

    def _admit(self, pod: Pod) -> None:
        for request in pod.admit():
            self.at(max(self.now_s, request.ready_s), lambda request=request: self._compute(pod, request))

    def _compute(self, pod: Pod, request: Request) -> None:
        if request.life != pod.life:
            return
        first_s, done_s = pod.compute(request, self.now_s)
        self.seen.first_token_s.append(first_s - request.came_s)
        self.at(done_s, lambda: self._done(pod, request))

    def _done(self, pod: Pod, request: Request) -> None:
        if request.life != pod.life:
            return
        contexts, number = self.contexts, request.context
        kind = KINDS[contexts.kind[number]]
        pod.end(request)
        contexts.is_busy[number] = 0
        before = contexts.tokens[number]
        contexts.tokens[number] = min(TOKENS_MAX, request.num_tokens + request.answer_tokens)
        contexts.holder[number] = self._by_name[pod.name]
        self._save(pod, number, request, contexts.tokens[number] - before)
        self._admit(pod)
        if contexts.tokens[number] < TOKENS_MAX and self.rng.random() < kind.goes_on:
            pause_s = self.rng.expovariate(1 / kind.pause_s)
            self.at(self.now_s + pause_s, lambda: self._ask_for(number, is_new=False))

    def _save(self, pod: Pod, number: int, request: Request, grown: int) -> None:
        """Write what was computed to the pod's disk, and behind that what is new to the store; or nothing, if late."""
        contexts, rates = self.contexts, self.rates
        is_saved = pod.waits_s("seal", self.now_s) < rates.save_wait_s
        pod.keep(number, contexts.own_tokens(number), is_saved=is_saved)
        self.seen.not_saved += not is_saved
        if not is_saved:
            return
        written_bytes = (request.computed + request.answer_tokens) * BYTES_PER_TOKEN
        sealed_s = pod.take("seal", self.now_s, written_bytes / rates.sealed_bytes_per_s)
        self.seen.moved_bytes["written"] += written_bytes
        if self.has_store and KINDS[contexts.kind[number]].is_session:
            grown_bytes = max(0, grown) * BYTES_PER_TOKEN
            self.seen.moved_bytes["to the store"] += grown_bytes
            contexts.in_store[number] = contexts.tokens[number]
            contexts.in_store_at[number] = sealed_s + grown_bytes / rates.wire_bytes_per_s


def _group(number: int) -> str:
    return f"kept_{number}"


def endpoint_of(name: str) -> Endpoint:
    """Return how a pod is listed; its sidecar goes by its name."""
    return Endpoint(name, f"http://{name}:8000", name)


def turns_a_burst() -> float:
    """Return how many turns a burst has on average."""
    return sum(kind.share / (1 - kind.goes_on) for kind in KINDS)


def quiet() -> None:
    """Say nothing of pods that come and go."""
    logging.getLogger("gateway").setLevel(logging.ERROR)
