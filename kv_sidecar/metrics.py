"""All metrics of the sidecar process, in a registry that is passed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.process.metrics import CertificateMetrics
from kv_sidecar.quota import TenantBytes
from kv_sidecar.tiers.store import TierUsage

TIERS = ("host", "disk")
IO_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
PULL_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class SidecarMetrics:
    """Counters the parts count in; label values are fixed words."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"contextcache_sidecar_{name}", text, labels, registry=registry)

        self._registry = registry
        self.saves = counter("saves", "Saves announced by engine ranks, or for a pull.")
        self.blocks_taken = counter("taken_blocks", "Block files taken in and verified.")
        self.bytes_taken = counter("taken_bytes", "Bytes of those files.")
        self.seals = counter("seals", "Manifests made durable.")
        self.refused = counter(
            "refused_saves",
            "Saves that ended without a manifest, by code of the error, or by the reason an engine's rank gave "
            "(`staging_full`, `queue_full`, …; words this release does not know: `other`).",
            ("code",),
        )
        self.hits = counter("served_blocks", "Blocks handed out, by tier they were found in.", ("tier",))
        self.misses = counter("misses", "Questions for a manifest that is not there, not any more, or not readable.")
        self.prefix_matches = counter(
            "prefix_matches",
            "Questions for whatever begins like a prompt, by whether `some` was named or `none`.",
            ("found",),
        )
        self.peer_matches = counter(
            "peer_matches",
            "The same question to another pod's sidecar (`peer`), or to the shared store of a conversation that is not "
            "known here (`object`): `some` is fetched from there, `none`, or it was `silent`.",
            ("source", "found"),
        )
        self.replaced = counter(
            "replaced_contexts",
            "Manifests of kept KV removed because a longer one of the same conversation begins with it.",
        )
        self.deletes = counter("deleted_contexts", "Manifests removed because somebody asked.")
        self.collected = counter("collected_contexts", "Manifests removed because their time was over.")
        self.evicted = counter(
            "evicted_contexts",
            "Manifests removed to make room on disk, used longest ago first: their next turn computes.",
        )
        self.orphaned = counter(
            "orphaned_contexts",
            "Manifests removed because no session names them any more: a delete that did not arrive, a crash, a "
            "session that moved on.",
        )
        self.failed_questions = counter(
            "failed_manager_questions",
            "Questions which KV is still named that had no usable answer; nothing is freed for them.",
        )
        self.freed_bytes = counter("freed_bytes", "Bytes of block files removed from disk.")
        self.quarantined = counter(
            "quarantined_files", "Block files, manifests and anything in their place that was put aside as damaged."
        )
        self.last_collect = Gauge(
            "contextcache_sidecar_last_collect_timestamp_seconds",
            "Unix time at which the last whole pass of the collector began; 0: none since the start.",
            registry=registry,
        )
        self.leases = counter(
            "leases", "Leases on KV by how they went: ended by the engine, expired, refused for their number.", ("end",)
        )
        self.bad_copies = counter(
            "bad_memory_copies",
            "Blocks in the memory tier that were not what the manifest vouches for; dropped, and read from disk.",
        )
        self.collector_failures = counter("collector_failures", "Collector passes that broke off.")
        self._count_moves(counter)
        self.store_writes = counter(
            "store_writes",
            "Contexts, and what is kept, written to the shared store, by how that ended (`written`, `present` before, "
            "`deleted` or `gone` meanwhile, `no_key` for their tenant, `queue_full`, `unavailable`: tried again, "
            "`internal_error`).",
            ("outcome",),
        )
        self.store_bytes = counter(
            "store_bytes", "Bytes of block files written to the shared store and read from there.", ("operation",)
        )
        self.store_unopened = counter(
            "store_unopened_objects",
            "Objects of the shared store that did not open (a key that is not here, or changed bytes): misses.",
        )
        self.store_evicted = counter(
            "store_evicted_contexts",
            "Contexts that left the shared store to make room there, used longest ago first; they stay where they are.",
        )
        self.store_waiting = Gauge(
            "contextcache_sidecar_store_waiting",
            "Contexts, and what is kept, not yet written to the shared store.",
            registry=registry,
        )
        self.certificates = CertificateMetrics("contextcache_sidecar", registry)
        self._io_seconds = Histogram(
            "contextcache_sidecar_io_seconds",
            "Time of one block file's read, write or check, by tier (`host`: memory).",
            ("operation", "tier"),
            buckets=IO_SECONDS,
            registry=registry,
        )
        self._io_bytes = counter("io_bytes", "Bytes read, written and checked, by tier.", ("operation", "tier"))
        self.lent_bytes = Gauge(
            "contextcache_sidecar_lent_bytes", "Bytes of slots that engines may be writing to.", registry=registry
        )
        self.free_inodes = Gauge(
            "contextcache_sidecar_free_inodes",
            "Files that the filesystem of the data directory still takes; `+Inf` where it does not say. KV is evicted "
            "below 1 024, or below 5 % of all on a small filesystem.",
            registry=registry,
        )
        self.lost_spans = counter("lost_spans", "Spans of traces that did not reach the collector.")
        self.tenant_bytes = TenantBytes(
            "contextcache_sidecar_tenant_bytes",
            "Bytes of block files on disk by tenant, each file once: the `SIDECAR_TENANTS_SHOWN_MAX` largest by name, "
            "all others under an empty one. `SIDECAR_TENANT_LIMIT_BYTES` is held against it; shown anew in each pass "
            "of the collector.",
            registry=registry,
        )
        self.store_tenant_bytes = TenantBytes(
            "contextcache_sidecar_store_tenant_bytes",
            "Bytes of block files in the shared store by tenant, as the last pass over it counted them: each pod of a "
            "release shows the same. Named as those on disk; `SIDECAR_STORE_TENANT_LIMIT_BYTES` is held against it.",
            registry=registry,
        )
        for tier in TIERS:
            self.hits.labels(tier)

    def _count_moves(self, counter: Callable[..., Counter]) -> None:
        """KV from and to other pods."""
        self.pulls = counter(
            "pulls",
            "Requests to pull from a peer, by how they ended (`pulled`, `deadline`, an error code) or why not "
            "(`present`, `peer_not_allowed`, `no_engine`, `too_many_pulls`, `draining`).",
            ("outcome",),
        )
        self.pulled_bytes = counter("pulled_bytes", "Bytes of block files fetched from peers and verified.")
        self.pull_seconds = Histogram(
            "contextcache_sidecar_pull_seconds",
            "How long pulls took, those that failed too.",
            buckets=PULL_SECONDS,
            registry=self._registry,
        )
        self.handed_over = counter(
            "handed_over_contexts",
            "Contexts that a pod that ends gave to a peer, by how that ended (`moved`: the peer is the holder now; "
            "`refused` by the peer, `gone`: no session names them, `failed`).",
            ("outcome",),
        )
        self.warmed = counter(
            "warmed_contexts",
            "Contexts of pods that are gone which this one, at its start, set out to take over, by how that ended "
            "(`warmed`: the KV came and this pod is their holder; `present`: it was here; `elsewhere`: another pod has "
            "it by now; `gone`: no session names them; `no_room`; else why the pull or the manager's answer failed).",
            ("outcome",),
        )
        self.hot_lists = counter(
            "hot_lists",
            "Lists of the contexts used last, in the shared store: `written` of this pod's, `taken` over from one that "
            "is gone; `unavailable` store, `internal_error`.",
            ("outcome",),
        )

    @contextmanager
    def io(self, operation: Literal["read", "write", "check"], tier: str) -> Iterator[Callable[[int], None]]:
        """Time the enclosed work on one block file; tell what is yielded how many bytes it was. For threads too."""
        began_s = time.perf_counter()
        yield self._io_bytes.labels(operation, tier).inc
        self._io_seconds.labels(operation, tier).observe(time.perf_counter() - began_s)

    def watch(self, usage: dict[str, Callable[[], TierUsage]], num_contexts: Callable[[], int]) -> None:
        """Show how full each tier is, and how many contexts there are, whenever somebody looks."""
        blocks = Gauge("contextcache_sidecar_blocks", "Block files by tier.", ("tier",), registry=self._registry)
        size = Gauge("contextcache_sidecar_bytes", "Bytes of block files by tier.", ("tier",), registry=self._registry)
        limit = Gauge("contextcache_sidecar_limit_bytes", "Limit by tier; 0: none.", ("tier",), registry=self._registry)
        contexts = Gauge("contextcache_sidecar_contexts", "Sealed manifests.", registry=self._registry)
        contexts.set_function(num_contexts)
        for tier, of_tier in usage.items():
            blocks.labels(tier).set_function(partial(_num_blocks, of_tier))
            size.labels(tier).set_function(partial(_size_bytes, of_tier))
            limit.labels(tier).set_function(partial(_limit_bytes, of_tier))


def _num_blocks(usage: Callable[[], TierUsage]) -> float:
    return usage().num_blocks


def _size_bytes(usage: Callable[[], TierUsage]) -> float:
    return usage().size_bytes


def _limit_bytes(usage: Callable[[], TierUsage]) -> float:
    return usage().limit_bytes
