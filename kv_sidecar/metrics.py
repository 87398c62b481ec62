"""All metrics of the sidecar process, as a table. Label values are fixed words; a scrape's cost stays bounded."""

from __future__ import annotations

import time
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from contextcache.model import TenantId
from contextcache.process.metrics import ProcessMetrics
from kv_sidecar.blocks import TierUsage

TIERS = ("host", "disk")
IO_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
PULL_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


_OTHERS = ""
"""Label of all tenants that are not shown by name; no tenant has this one."""


class TenantBytes(Collector):
    """A gauge whose labels come and go together. The collector's pass writes it, a scrape reads it."""

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._shown: dict[TenantId, int] = {}
        registry.register(self)

    def show(self, found: Mapping[TenantId, int], *, tenants_max: int) -> None:
        """Show the `tenants_max` largest by name and the rest together; 0: all together."""
        largest = Counted(found).most_common(tenants_max) if tenants_max else []
        shown = dict(largest)
        rest = sum(found.values()) - sum(shown.values())
        if rest or len(found) > len(shown):
            shown[_OTHERS] = rest
        self._shown = shown

    @override
    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauge as it was last shown."""
        family = GaugeMetricFamily(self._name, self._text, labels=("tenant",))
        for tenant, size_bytes in self._shown.items():
            family.add_metric((tenant,), size_bytes)
        yield family


class SidecarMetrics:
    """Counters, gauges and histograms of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._io: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self.process = ProcessMetrics("contextcache_sidecar", registry)
        self._add_contexts()
        self._add_moves()
        self._add_store()
        self._add_tiers()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"contextcache_sidecar_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"contextcache_sidecar_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"contextcache_sidecar_{name}", text, labels, buckets=buckets, registry=self._registry)

    def _add_contexts(self) -> None:
        self.saves = self._counter("saves", "Saves that engine ranks or pulls announced.")
        self.blocks_taken = self._counter("taken_blocks", "Block files received and verified.")
        self.bytes_taken = self._counter("taken_bytes", "Bytes of received block files.")
        self.seals = self._counter("seals", "Manifests made durable.")
        self.refused = self._counter(
            "refused_saves",
            "Saves that ended without a manifest, by error code or by the reason that an engine's rank gave "
            "(`arena_full`, `queue_full`, …). `other`: a reason after the 64th.",
            "code",
        )
        self.hits = self._counter("served_blocks", "Blocks read, by the tier that had them.", "tier")
        self.misses = self._counter("misses", "Look-ups of a manifest that is absent, deleted or unreadable.")
        self.prefix_matches = self._counter(
            "prefix_matches", "Prefix look-ups for a prompt, by result: `some` or `none`.", "found"
        )
        self.peer_matches = self._counter(
            "peer_matches",
            "Prefix look-ups elsewhere, at another pod's sidecar (`peer`) or in the shared store (`object`), "
            "by result. `some`: a pull starts. `none`: no match. `silent`: no answer.",
            "source",
            "found",
        )
        self.replaced = self._counter(
            "replaced_contexts", "Manifests of kept KV that a longer one of the same conversation replaced."
        )
        self.deletes = self._counter("deleted_contexts", "Manifests that a delete removed.")
        self.collected = self._counter("collected_contexts", "Manifests removed at their expiry.")
        self.evicted = self._counter(
            "evicted_contexts",
            "Manifests evicted from disk to make room, least recently used first. Their next turn computes the prompt.",
        )
        self.promises = self._counter(
            "promises",
            "Decisions on minimum lifetimes of KV. `accepted`, or the reason for a denial: `no_room` (the share of the "
            "tier is used up), `tenant_share` (the tenant's part is), `not_saved`.",
            "outcome",
        )
        self.placements = self._counter(
            "placements",
            "Prefetches, demotions and shares of KV. `accepted`, or the reason for less.",
            "placement",
            "outcome",
        )
        self.orphaned = self._counter(
            "orphaned_contexts",
            "Manifests removed because no session names them: after a lost delete, a crash, or a newer generation.",
        )
        self.failed_questions = self._counter(
            "failed_manager_questions",
            "Calls of the context manager about stored KV that had no usable answer. The sidecar frees "
            "nothing after such a call.",
        )
        self.freed_bytes = self._counter("freed_bytes", "Bytes of block files removed from disk.")
        self.quarantined = self._counter(
            "quarantined_files", "Damaged files in quarantine: block files, manifests and anything in their place."
        )
        self.last_collect = self._gauge(
            "last_collect_timestamp_seconds",
            "Unix time in seconds at which the last complete collector pass began. 0: none since the start.",
        )
        self.leases = self._counter(
            "leases", "Leases on KV, by end: ended by the engine, expired, or refused at the limit.", "end"
        )
        self.bad_copies = self._counter(
            "bad_memory_copies",
            "Blocks in memory that differed from their manifest. The sidecar dropped them and read the disk.",
        )
        self.collector_failures = self._counter("collector_failures", "Collector passes that failed.")

    def _add_moves(self) -> None:
        self.pulls = self._counter(
            "pulls",
            "Pulls from a peer, by outcome. Ended: `pulled`, `deadline` or an error code. Not started: "
            "`present`, `peer_not_allowed`, `no_engine`, `too_many_pulls`, `draining`.",
            "outcome",
        )
        self.pulled_bytes = self._counter("pulled_bytes", "Bytes of block files pulled from peers and verified.")
        self.pull_seconds = self._histogram(
            "pull_seconds", "Duration of pulls in seconds, failed pulls included.", buckets=PULL_SECONDS
        )
        self.handed_over = self._counter(
            "handed_over_contexts",
            "Contexts that an ending pod offered to a peer, by outcome. `moved`: the peer is the holder now. "
            "`refused`: by the peer. `gone`: no session names them. `failed`: by an error.",
            "outcome",
        )

    def _add_store(self) -> None:
        self.store_writes = self._counter(
            "store_writes",
            "Contexts and kept KV written to the shared store, by outcome. `present`: already there. "
            "`deleted`, `gone`: removed meanwhile. `no_key`: no encryption key for their tenant. "
            "`unavailable`: will be retried. Others: `written`, `queue_full`, `internal_error`.",
            "outcome",
        )
        self.store_bytes = self._counter(
            "store_bytes", "Bytes of block files written to and read from the shared store.", "operation"
        )
        self.store_unopened = self._counter(
            "store_unopened_objects",
            "Objects of the shared store that could not be decrypted, because of a missing key or changed "
            "bytes. Each is a miss.",
        )
        self.store_evicted = self._counter(
            "store_evicted_contexts",
            "Contexts evicted from the shared store, least recently used first. Copies on pods stay.",
        )
        self.store_waiting = self._gauge(
            "store_waiting", "Contexts and kept KV that wait to be written to the shared store."
        )

        self.events = self._counter(
            "events",
            "KV events published, by their type in vLLM: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`.",
            "type",
        )
        self.replays = self._counter(
            "event_replays",
            "Replays for subscribers of KV events. `batches`: the last batches again. `snapshot`: everything stored.",
            "kind",
        )

    def _add_tiers(self) -> None:
        self.io_seconds = self._histogram(
            "io_seconds",
            "Seconds to read, write or check one block file, by tier (`host`: memory).",
            "operation",
            "tier",
            buckets=IO_SECONDS,
        )
        self.io_bytes = self._counter("io_bytes", "Bytes read, written and checked, by tier.", "operation", "tier")
        self.blocks = self._gauge("blocks", "Block files, by tier.", "tier")
        self.size_bytes = self._gauge("bytes", "Bytes of block files, by tier.", "tier")
        self.limit_bytes = self._gauge("limit_bytes", "Limit in bytes, by tier. 0: none.", "tier")
        self.promised_bytes = self._gauge(
            "promised_bytes", "Bytes that nothing evicts before a promised time, by tier.", "tier"
        )
        self.contexts = self._gauge("contexts", "Sealed manifests.")
        self.lent_bytes = self._gauge("lent_bytes", "Bytes of slots lent to engines.")
        self.free_inodes = self._gauge(
            "free_inodes",
            "Files that the filesystem of the data directory can still create. `+Inf`: unknown. KV is "
            "evicted below 1 024, or below 5 % on a small filesystem.",
        )
        self.engine_start = self._gauge(
            "engine_start",
            "1 for the outcome of vLLM's last start in an injected pod. `added`: with our arguments. Others: without "
            "them, for the reason. All 0: vLLM's process did not run our code, as with `python -S`.",
            "outcome",
        )
        self.tenant_bytes = TenantBytes(
            "contextcache_sidecar_tenant_bytes",
            "Bytes of block files on disk by tenant, each file once. The 20 largest tenants have a name. All others "
            "share an empty name. Limit: `SIDECAR_TENANT_LIMIT_BYTES`. Updated by each collector pass.",
            registry=self._registry,
        )
        self.store_tenant_bytes = TenantBytes(
            "contextcache_sidecar_store_tenant_bytes",
            "Bytes of block files in the shared store by tenant, from the last pass over it. Every pod of a release "
            "shows the same figures. Names as in the disk metric. Limit: `SIDECAR_STORE_TENANT_LIMIT_BYTES`.",
            registry=self._registry,
        )
        for tier in TIERS:
            self.hits.labels(tier)

    def io(self, operation: Literal["read", "write", "check"], tier: str, size_bytes: int, began_s: float) -> None:
        """Count work on one block file that began at `began_s`, by `time.perf_counter`. Thread-safe."""
        took_s = time.perf_counter() - began_s
        counted = self._io.get((operation, tier))
        if counted is None:
            counted = self.io_bytes.labels(operation, tier), self.io_seconds.labels(operation, tier)
            self._io[operation, tier] = counted
        counted[0].inc(size_bytes)
        counted[1].observe(took_s)

    def watch(self, tier: str, usage: Callable[[], TierUsage]) -> None:
        """Show the usage of a tier at each scrape."""
        self.blocks.labels(tier).set_function(lambda: usage().num_blocks)
        self.size_bytes.labels(tier).set_function(lambda: usage().size_bytes)
        self.limit_bytes.labels(tier).set_function(lambda: usage().limit_bytes)
