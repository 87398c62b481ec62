"""One pod as the gateway knows it: its addresses, its load, and the seconds that a request costs there. Pure.

A pod's load is its engine's report at the last probe. This gateway corrects it by the requests that it placed there
since, and by those that it saw end. Requests of other gateways show at the next probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

from contextcache.model import ModelId
from gateway.shares import PodTenants

SETTLED_PROBES = 3
"""Healthy probes of a new pod before it is ready. Envoy resolves DNS once a second, and sends requests for a pod that
it does not know yet to any pod."""
REQUEST_S = 8.0
"""Seconds that a request holds its place in an engine's batch: some hundred tokens of answer."""
BESIDE_S = 0.02
"""Seconds that each request in a batch costs the next one: its share of steps that also compute its prompt."""
MOVE_S = 0.1
"""Seconds that a move costs before the first byte travels: one question to a sidecar, and the answer."""
MOVED_TOKENS_PER_S = 8000.0
"""Tokens of KV per second that are pulled or recomputed: 1 GB/s for an 8B model, and the prefill rate of one GPU."""
DISK_TOKENS_PER_S = 12_000.0
"""Tokens of KV per second that are read from disk instead of memory (bench_transfer: 1.7 GB/s)."""
MOVE_GAIN = 1.5
"""Factor by which a move must save more than it costs: it also stores a second copy, and the queue that the gateway
sees is up to a second old."""
_ROOM_SHARE = 0.8
"""Share of a tier's limit from which a new context displaces other KV, with a probability that grows to 1."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Queue lengths and KV usage from which pods get fewer requests."""

    saturated_waiting: int = 32
    """Requests in a pod's queue from which turns leave their holder as soon as a move costs no more than waiting."""
    saturated_kv_usage: float = 0.98
    """Share of KV blocks in use from which a pod with a queue counts as saturated too."""
    shed_waiting: int = 256
    """Requests in every pod's queue from which the gateway refuses new ones; 0: never."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One vLLM pod."""

    name: str
    """Name under which sessions remember the pod as their holder."""
    url: str
    """Root of vLLM's HTTP API, without a trailing slash."""
    sidecar: str = ""
    """gRPC address of its kv-sidecar; empty: it has none."""
    draining: bool = False
    """True: the pod finishes its requests and gets no new ones while another pod is ready."""
    turn_url: str = ""
    """Root of its turn process, without a trailing slash. Empty, and then equal to `url`: the pod has one address."""

    address: str = field(init=False, compare=False)
    """`host:port` of vLLM's HTTP API, a name of the pod in proxies."""
    turn_address: str = field(init=False, compare=False)
    """`host:port` of the turn process, a name of the pod in proxies."""

    def __post_init__(self) -> None:
        """Parse both addresses once: every request needs one."""
        object.__setattr__(self, "turn_url", self.turn_url or self.url)
        object.__setattr__(self, "address", _address_of(self.url))
        object.__setattr__(self, "turn_address", _address_of(self.turn_url))

    @property
    def has_turn_process(self) -> bool:
        """Whether the turn runs in a process of its own, at another address than vLLM's."""
        return self.turn_url != self.url


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Metrics of vLLM at the last probe; zeros if the page lacks them."""

    running: int = 0
    """Requests being computed (`vllm:num_requests_running`)."""
    waiting: int = 0
    """Requests in the engine's queue (`vllm:num_requests_waiting`)."""
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1 (`vllm:kv_cache_usage_perc`)."""
    deferred: int = 0
    """Requests in `waiting` that wait for their KV or an adapter and not for room
    (`vllm:num_requests_waiting_by_reason`)."""


class Readiness(Enum):
    """States of a pod; the transitions are drawn in `endpoints.py`."""

    NEW = "new"
    READY = "ready"
    OUT = "out"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class EndpointState:
    """State of a pod now. WatchedEndpoints changes it in place: every request reads some of them."""

    endpoint: Endpoint
    readiness: Readiness = Readiness.NEW
    models: frozenset[ModelId] = frozenset()
    """Served model names; empty if the pod does not list them."""
    in_flight: int = 0
    """Requests that this gateway is carrying to the pod."""
    routed_at: int = 0
    """Number, among all requests of this gateway, of the last one to this pod; 0: none yet. Among equals the lowest
    wins, so that idle pods take turns."""
    load: EngineLoad = EngineLoad()
    since_probe: int = 0
    """Requests that this gateway sent since `load` was read, minus those that it saw end."""
    fingerprint: str = ""
    """Fingerprint of the engine's KV in the sidecar's last answer; empty: unknown."""
    tiers: Mapping[str, float] = field(default_factory=dict)
    """Used share of the limit of each of the sidecar's tiers; empty: there is no sidecar, or it does not answer."""
    clock_skew_s: float | None = None
    """The pod's clock minus this machine's, in whole seconds; None: unknown."""
    tenants: PodTenants = field(default_factory=PodTenants)
    """Requests in flight of each tenant."""
    runs_turns: bool = True
    """False: requests of contexts are refused there."""
    limits_tenants: bool = False
    """True: the turn process limits tenants' requests or bytes in flight, and must see each request."""
    placed: int = 0
    """New contexts that this gateway placed there lately: later requests follow them."""
    probes_to_ready: int = SETTLED_PROBES
    """Healthy probes that a NEW pod still needs."""
    silent_probes: int = 0
    probes_without_load: int = 0
    heard: dict[str, None] = field(default_factory=dict)
    """Beginnings of prompts that the pod has served, in the order of their last request."""
    beginnings_end: int = 0
    """Position in the sidecar's list of beginnings up to which it was read; 0: from the start."""

    @property
    def ready(self) -> bool:
        """Whether the pod takes requests."""
        return self.readiness is Readiness.READY

    def num_requests(self) -> int:
        """Return the requests at the pod now, at least those that this gateway is carrying."""
        return max(self.load.running + self.load.waiting + self.since_probe, self.in_flight)

    def num_waiting(self) -> int:
        """Return the requests in the pod's queue now.

        With a queue at the probe, each later request joins it and each end lets one in. Without one, later requests
        wait if they find no free KV blocks, each as large as the running ones.
        """
        load = self.load
        if load.waiting:
            return max(0, load.waiting + self.since_probe)
        if self.since_probe <= 0 or not load.running or not load.kv_usage:
            return 0
        room = load.running * (1 - load.kv_usage) / load.kv_usage
        return max(0, self.since_probe - int(room))

    def is_saturated(self, limits: LoadLimits) -> bool:
        """Return whether requests go elsewhere if another pod is as good."""
        if not self.load.waiting:
            return False
        waiting = self.num_waiting()
        return waiting >= limits.saturated_waiting or (waiting > 0 and self.load.kv_usage >= limits.saturated_kv_usage)

    def is_full(self, limits: LoadLimits) -> bool:
        """Return whether the pod gets no more requests while another pod has room."""
        return bool(limits.shed_waiting and self.load.waiting and self.num_waiting() >= limits.shed_waiting)

    def queue_s(self) -> float:
        """Return the seconds that a new request waits for its place in the batch; each end frees one."""
        waiting = self.num_waiting()
        return waiting * REQUEST_S / max(1, self.load.running) if waiting else 0.0

    def busy_s(self) -> float:
        """Return the seconds that the pod's other requests cost a new one, in the queue and in the batch."""
        return self.queue_s() + self.num_requests() * BESIDE_S

    def room_s(self, num_tokens: int) -> float:
        """Return the later cost of keeping `num_tokens` tokens' KV: a tier near its limit displaces other KV.

        KV displaced from memory is read from disk again, KV displaced from disk is recomputed.
        """
        beyond_memory, beyond_disk = (max(0.0, self.tiers.get(name, 0.0) - _ROOM_SHARE) for name in ("host", "disk"))
        lost_s = beyond_memory / DISK_TOKENS_PER_S + beyond_disk / MOVED_TOKENS_PER_S
        return num_tokens * lost_s / (1 - _ROOM_SHARE)


def _address_of(url: str) -> str:
    found = urlsplit(url)
    port = 443 if found.scheme == "https" else 80
    return found.netloc if found.port else f"{found.netloc}:{port}"


def move_s(num_tokens: int) -> float:
    """Return the seconds until `num_tokens` tokens' KV is on a pod that lacks it."""
    return MOVE_S + num_tokens / MOVED_TOKENS_PER_S
