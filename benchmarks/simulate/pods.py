"""A pod that is made up: an engine with a batch and a queue, and the tiers of its sidecar."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from benchmarks.simulate.rates import BYTES_PER_TOKEN, Rates
from contextcache.clock import Clock
from contextcache.v1 import kv_sidecar_pb2 as pb
from gateway.pods.state import EngineLoad
from kv_sidecar.recent import Beginnings

FINGERPRINT = "llama-3-8b"


class Tier:
    """KV by name, in tokens; what was used longest ago goes first."""

    __slots__ = ("held", "limit", "num_tokens")

    def __init__(self, limit_bytes: float) -> None:
        self.limit = int(limit_bytes / BYTES_PER_TOKEN)
        self.num_tokens = 0
        self.held: dict[int, int] = {}

    def touch(self, name: int, num_tokens: int) -> None:
        """Hold so many tokens of it, as what was used last."""
        held = self.held
        self.num_tokens += num_tokens - held.pop(name, 0)
        held[name] = num_tokens
        while self.num_tokens > self.limit and len(held) > 1:
            self.num_tokens -= held.pop(next(iter(held)))

    def clear(self) -> None:
        """Forget everything."""
        self.held.clear()
        self.num_tokens = 0


@dataclass(slots=True)
class Request:
    """One that a pod has."""

    context: int
    came_s: float
    ready_s: float
    """When its KV is there."""
    num_tokens: int
    computed: int
    answer_tokens: int
    life: int
    """Of the pod: what it had when it went is lost."""


class Pod:
    """One engine and its sidecar."""

    def __init__(self, name: str, rates: Rates, clock: Clock) -> None:
        self.name = name
        self.rates = rates
        self.device, self.host, self.disk = map(Tier, (rates.device_bytes, rates.host_bytes, rates.disk_bytes))
        self.is_up = True
        self.life = 0
        self._clock = clock
        self.beginnings = Beginnings(clock)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.batch_tokens = 0
        self.served = 0
        self.created = 0
        self.busy_s = dict.fromkeys(("compute", "disk", "fetch", "seal", "batch"), 0.0)
        self._free_s = dict.fromkeys(("compute", "disk", "fetch", "seal"), 0.0)

    def take(self, what: str, now_s: float, takes_s: float) -> float:
        """Use something that does one thing at a time; return when it is done."""
        done_s = max(now_s, self._free_s[what]) + takes_s
        self._free_s[what] = done_s
        self.busy_s[what] += takes_s
        return done_s

    def waits_s(self, what: str, now_s: float) -> float:
        """Return how long something is busy with what came before."""
        return max(0.0, self._free_s[what] - now_s)

    def admit(self) -> list[Request]:
        """Take requests from the queue into the batch as long as there is room; KV on its way takes room too."""
        rates, admitted = self.rates, []
        while self.waiting and len(self.running) < rates.batch_max:
            request = self.waiting[0]
            if self.running and self.batch_tokens + request.num_tokens > rates.batch_tokens:
                break
            admitted.append(self.waiting.popleft())
            self.running[request.context] = request
            self.batch_tokens += request.num_tokens
        return admitted

    def compute(self, request: Request, now_s: float) -> tuple[float, float]:
        """Compute a prompt, after those that came before; return when its first token comes, and its last."""
        rates = self.rates
        first_s = self.take("compute", now_s, request.computed / rates.computed_tokens_per_s)
        step_s = rates.step_s + rates.step_beside_s * len(self.running)
        done_s = first_s + request.answer_tokens * step_s
        self.busy_s["batch"] += (done_s - now_s) / rates.batch_max
        return first_s, done_s

    def end(self, request: Request) -> None:
        """Let a request go."""
        del self.running[request.context]
        self.batch_tokens -= request.num_tokens

    def keep(self, name: int, num_tokens: int, *, is_saved: bool = True) -> None:
        """Hold KV in all tiers, or in the engine alone."""
        for tier in (self.device, self.host, self.disk) if is_saved else (self.device,):
            tier.touch(name, num_tokens)

    def tier_of(self, name: int) -> tuple[str, int]:
        """Return the fastest tier that has some KV, and how many tokens of it; "" where none has."""
        for what, tier in (("device", self.device), ("host", self.host), ("disk", self.disk)):
            if name in tier.held:
                return what, tier.held[name]
        return "", 0

    def go(self, *, with_disk: bool) -> list[Request]:
        """Go down, with what is in memory; return the requests that are lost."""
        lost = [*self.running.values(), *self.waiting]
        self.is_up, self.batch_tokens = False, 0
        self.life += 1
        self.running.clear()
        self.waiting.clear()
        self._free_s = dict.fromkeys(self._free_s, 0.0)
        self.beginnings = Beginnings(self._clock)
        for tier in (self.device, self.host, *([self.disk] if with_disk else ())):
            tier.clear()
        return lost

    def load(self) -> EngineLoad:
        """Return what its metrics say."""
        return EngineLoad(len(self.running), len(self.waiting), min(1.0, self.batch_tokens / self.rates.batch_tokens))

    async def stats(self, *, beginnings_after: int = 0) -> pb.StatsResponse:
        """Answer as its sidecar."""
        beginnings, end = self.beginnings.since(beginnings_after)
        tiers = [
            pb.TierStats(tier=number, size_bytes=tier.num_tokens, limit_bytes=tier.limit)
            for number, tier in ((pb.TIER_HOST, self.host), (pb.TIER_DISK, self.disk))
        ]
        return pb.StatsResponse(
            tiers=tiers,
            fingerprints=[FINGERPRINT],
            beginnings=beginnings,
            beginnings_age_ms=beginnings.values(),
            beginnings_end=end,
        )

    async def close(self) -> None:
        """Close nothing."""
