"""Parts of a gateway for tests: sessions in a real Valkey, sidecars in memory, pods told how to be."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from context_manager.manager import ContextCacheManager
from contextcache.clock import ManualClock
from contextcache.errors import StoreUnavailable
from contextcache.model import Manifest, NewSession, Segment, SegmentKind, TurnCommit, plain_group
from contextcache.wire.tracing import NO_TRACER
from gateway.flows import Gateway
from gateway.metrics import Metrics
from gateway.parts import Parts
from gateway.pods.endpoints import Health, WatchedEndpoints
from gateway.pods.sidecars import Holders
from gateway.pods.state import Endpoint
from gateway.settings import GatewaySettings
from gateway.tenants.keys import hash_key
from gateway.tenants.limits import FrontLimits, TenantLimits
from tests.kit.memory_sidecar import MemorySidecar
from tests.kit.session_store import in_valkey

SECRET = b"s" * 32
KEY = "test-key-1234567890"
OTHER_KEY = "test-key-other"
OPERATOR_KEY = "test-key-operator"
LISTED_CALL = "GET /v1/responses/r1"
"""A call without a body that the operator of tests' gateways has listed."""
REF = "ref_" + "a" * 32
PREVIOUS_REF = "ref_" + "b" * 32


class Directory(ContextCacheManager):
    """The real manager over a real Valkey; `down` makes every call fail as an unreachable one does."""

    def __init__(self, clock: ManualClock):
        super().__init__(**in_valkey(clock=clock))
        self.down = False
        self.calls: list[str] = []

    async def _get(self, operation, tenant, session_id):
        self._check_up(operation)
        return await super()._get(operation, tenant, session_id)

    async def touch(self, tenant, session_id, terms):
        self._check_up("touch")
        return await super().touch(tenant, session_id, terms)

    async def reserve(self, new, **lease):
        self._check_up("reserve")
        return await super().reserve(new, **lease)

    async def fork(self, source_id, **how):
        self._check_up("fork")
        return await super().fork(source_id, **how)

    async def rewind(self, tenant, session_id, **where):
        self._check_up("rewind")
        return await super().rewind(tenant, session_id, **where)

    async def unregister_session_cache(self, tenant, session_id):
        self._check_up("unregister")
        return await super().unregister_session_cache(tenant, session_id)

    async def list_sessions(self, tenant, **page):
        self._check_up("list")
        return await super().list_sessions(tenant, **page)

    async def is_serving(self) -> bool:
        return not self.down

    async def add(
        self, session_id: str, *, tenant="demo", holder="pod-a", model="stub-model", cache_ref=REF, ttl_s=600
    ):
        """A session with one committed turn."""
        new = NewSession(tenant, session_id, model, ttl_s=ttl_s)
        await super().reserve(new, lease_id="l", lease_ttl_ms=1000)
        segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
        return await self.commit_turn(TurnCommit(tenant, session_id, "l", 0, 0, (segment,), cache_ref, holder))

    def _check_up(self, operation: str) -> None:
        self.calls.append(operation)
        if self.down:
            raise StoreUnavailable("the manager is down", retry_after_s=1)


class Pods:
    """A probe that says what it is told."""

    def __init__(self):
        self.health: dict[str, Health] = {}

    async def __call__(self, endpoint: Endpoint) -> Health:
        return self.health.get(endpoint.name, Health(healthy=True, models=frozenset({"stub-model"})))


class GatewayParts:
    """A Gateway with everything around it within reach. Pods `pod-a` and `pod-b` become ready with `probe`."""

    def __init__(self, authenticator, *, pods=("pod-a", "pod-b"), limits=None, turn_port=None, **settings):
        """`turn_port`: port of the pods' turn processes; None: the turns run in vLLM."""
        self.clock = ManualClock()
        self.refusals: Counter[str] = Counter()
        self.tenants = TenantLimits(
            clock=self.clock, on_refused=lambda limit: self.refusals.update([limit]), **(limits or {})
        )
        self.metrics = Metrics(CollectorRegistry())
        self.directory = Directory(self.clock)
        self.probe = Pods()
        self.sidecars = {name: MemorySidecar() for name in pods}
        turn_url = f"http://{{}}:{turn_port}" if turn_port else ""
        endpoints = [Endpoint(name, f"http://{name}:8001", name, turn_url=turn_url.format(name)) for name in pods]
        self.endpoints = WatchedEndpoints(
            endpoints, self.probe, metrics=self.metrics, clock_s=lambda: self.clock.now_ms() / 1000, rng=Random(0)
        )
        settings = settings_of(endpoints, **settings)
        parts = Parts(
            settings=settings,
            secret=SECRET,
            clock=self.clock,
            metrics=self.metrics,
            tracer=NO_TRACER,
            tls=None,
            keys=authenticator,
            tenants=self.tenants,
            limits=FrontLimits(settings.max_body_bytes),
            endpoints=self.endpoints,
            holders=Holders(
                self.endpoints,
                self.directory,
                self.sidecars.__getitem__,
                clock=self.clock,
                metrics=self.metrics,
                settings=settings,
            ),
            manager=self.directory,
        )
        self.gateway = Gateway(parts)

    def set(self, **settings) -> None:
        """Change settings of the gateway."""
        self.gateway = self.with_parts(settings=self.gateway.parts.settings.model_copy(update=settings))

    def with_parts(self, **changed) -> Gateway:
        """Return a gateway of the same parts, except for those that are given."""
        return Gateway(replace(self.gateway.parts, **changed))


def settings_of(endpoints, **settings) -> GatewaySettings:
    """Return a gateway's settings with a list of pods."""
    listed = [{"name": one.name, "url": one.url} for one in endpoints]
    return GatewaySettings(secret_file="secret", endpoints=listed, **settings)


def manifest_of(session_id: str, *, tenant="demo", cache_ref=REF, size_bytes=4096) -> Manifest:
    groups = (plain_group(3, 256),)
    return Manifest(cache_ref, tenant, session_id, "f" * 64, (1, 2, 3), groups, (), 1, 2_000_000_000_000, size_bytes)


def write_keys(path: Path, keys: dict[str, str]) -> None:
    """Write a key file of `{key: tenant}`; OPERATOR_KEY is an operator's."""
    entries = [{"sha256": hash_key(key), "tenant": who, "operator": key == OPERATOR_KEY} for key, who in keys.items()]
    path.write_text(json.dumps({"keys": entries}))


def as_told(body: bytes) -> dict:
    """Return what the engine makes of a body: of keys that repeat the last one, and null is as good as nothing."""
    return {key: value for key, value in json.loads(body).items() if value is not None}
