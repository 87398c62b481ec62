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
        self.saves = counter("saves", "Saves that engine ranks or pulls announced.")
        self.blocks_taken = counter("taken_blocks", "Block files received and verified.")
        self.bytes_taken = counter("taken_bytes", "Bytes of received block files.")
        self.seals = counter("seals", "Manifests made durable.")
        self.refused = counter(
            "refused_saves",
            "Saves that ended without a manifest, by error code or by the reason that an engine's rank gave "
            "(`staging_full`, `queue_full`, …). `other`: a reason that this release does not know.",
            ("code",),
        )
        self.hits = counter("served_blocks", "Blocks read, by the tier that had them.", ("tier",))
        self.misses = counter("misses", "Look-ups of a manifest that is absent, deleted or unreadable.")
        self.prefix_matches = counter(
            "prefix_matches",
            "Prefix look-ups for a prompt, by result: `some` or `none`.",
            ("found",),
        )
        self.peer_matches = counter(
            "peer_matches",
            "Prefix look-ups elsewhere, at another pod's sidecar (`peer`) or in the shared store (`object`), "
            "by result. `some`: a pull starts. `none`: no match. `silent`: no answer.",
            ("source", "found"),
        )
        self.replaced = counter(
            "replaced_contexts",
            "Manifests of kept KV removed because a longer one of the same conversation begins with it.",
        )
        self.deletes = counter("deleted_contexts", "Manifests that a delete removed.")
        self.collected = counter("collected_contexts", "Manifests removed at their expiry.")
        self.evicted = counter(
            "evicted_contexts",
            "Manifests evicted from disk to make room, least recently used first. Their next turn computes the prompt.",
        )
        self.orphaned = counter(
            "orphaned_contexts",
            "Manifests removed because no session names them: after a lost delete, a crash, or a newer generation.",
        )
        self.failed_questions = counter(
            "failed_manager_questions",
            "Calls of the context manager about stored KV that had no usable answer. The sidecar frees "
            "nothing after such a call.",
        )
        self.freed_bytes = counter("freed_bytes", "Bytes of block files removed from disk.")
        self.quarantined = counter(
            "quarantined_files", "Damaged files in quarantine: block files, manifests and anything in their place."
        )
        self.last_collect = Gauge(
            "contextcache_sidecar_last_collect_timestamp_seconds",
            "Unix time in seconds at which the last complete collector pass began. 0: none since the start.",
            registry=registry,
        )
        self.leases = counter(
            "leases", "Leases on KV, by end: ended by the engine, expired, or refused at the limit.", ("end",)
        )
        self.bad_copies = counter(
            "bad_memory_copies",
            "Blocks in memory that differed from their manifest. The sidecar dropped them and read the disk.",
        )
        self.collector_failures = counter("collector_failures", "Collector passes that failed.")
        self._count_moves(counter)
        self.store_writes = counter(
            "store_writes",
            "Contexts and kept KV written to the shared store, by outcome. `present`: already there. "
            "`deleted`, `gone`: removed meanwhile. `no_key`: no encryption key for their tenant. "
            "`unavailable`: will be retried. Others: `written`, `queue_full`, `internal_error`.",
            ("outcome",),
        )
        self.store_bytes = counter(
            "store_bytes", "Bytes of block files written to and read from the shared store.", ("operation",)
        )
        self.store_unopened = counter(
            "store_unopened_objects",
            "Objects of the shared store that could not be decrypted, because of a missing key or changed "
            "bytes. Each is a miss.",
        )
        self.store_evicted = counter(
            "store_evicted_contexts",
            "Contexts evicted from the shared store, least recently used first. Copies on pods stay.",
        )
        self.store_waiting = Gauge(
            "contextcache_sidecar_store_waiting",
            "Contexts and kept KV that wait to be written to the shared store.",
            registry=registry,
        )
        self.certificates = CertificateMetrics("contextcache_sidecar", registry)
        self._io_seconds = Histogram(
            "contextcache_sidecar_io_seconds",
            "Seconds to read, write or check one block file, by tier (`host`: memory).",
            ("operation", "tier"),
            buckets=IO_SECONDS,
            registry=registry,
        )
        self._io_bytes = counter("io_bytes", "Bytes read, written and checked, by tier.", ("operation", "tier"))
        self.lent_bytes = Gauge("contextcache_sidecar_lent_bytes", "Bytes of slots lent to engines.", registry=registry)
        self.free_inodes = Gauge(
            "contextcache_sidecar_free_inodes",
            "Files that the filesystem of the data directory can still create. `+Inf`: unknown. KV is "
            "evicted below 1 024, or below 5 % on a small filesystem.",
            registry=registry,
        )
        self.engine_start = Gauge(
            "contextcache_sidecar_engine_start",
            "1 for the outcome of vLLM's last start in an injected pod. `added`: with our arguments. Others: without "
            "them, for the reason. All 0: vLLM's process did not run our code, as with `python -S`.",
            ("outcome",),
            registry=registry,
        )
        self.lost_spans = counter("lost_spans", "Trace spans that did not reach the collector.")
        self.tenant_bytes = TenantBytes(
            "contextcache_sidecar_tenant_bytes",
            "Bytes of block files on disk by tenant, each file once. The largest `SIDECAR_TENANTS_SHOWN_MAX` "
            "tenants have a name. All others share an empty name. Limit: `SIDECAR_TENANT_LIMIT_BYTES`. "
            "Updated by each collector pass.",
            registry=registry,
        )
        self.store_tenant_bytes = TenantBytes(
            "contextcache_sidecar_store_tenant_bytes",
            "Bytes of block files in the shared store by tenant, from the last pass over it. Every pod of a "
            "release shows the same figures. Names as in the disk metric. Limit: "
            "`SIDECAR_STORE_TENANT_LIMIT_BYTES`.",
            registry=registry,
        )
        for tier in TIERS:
            self.hits.labels(tier)

    def _count_moves(self, counter: Callable[..., Counter]) -> None:
        """KV from and to other pods."""
        self.pulls = counter(
            "pulls",
            "Pulls from a peer, by outcome. Ended: `pulled`, `deadline` or an error code. Not started: "
            "`present`, `peer_not_allowed`, `no_engine`, `too_many_pulls`, `draining`.",
            ("outcome",),
        )
        self.pulled_bytes = counter("pulled_bytes", "Bytes of block files pulled from peers and verified.")
        self.pull_seconds = Histogram(
            "contextcache_sidecar_pull_seconds",
            "Duration of pulls in seconds, failed pulls included.",
            buckets=PULL_SECONDS,
            registry=self._registry,
        )
        self.handed_over = counter(
            "handed_over_contexts",
            "Contexts that an ending pod offered to a peer, by outcome. `moved`: the peer is the holder now. "
            "`refused`: by the peer. `gone`: no session names them. `failed`: by an error.",
            ("outcome",),
        )
        self.warmed = counter(
            "warmed_contexts",
            "Contexts of gone pods that this pod tried to take over at its start, by outcome. `warmed`: "
            "pulled, this pod is the holder. `present`: already here. `elsewhere`: another pod is the "
            "holder. `gone`: no session names them. `no_room`: no space. Else the error code of the pull or "
            "of the manager.",
            ("outcome",),
        )
        self.hot_lists = counter(
            "hot_lists",
            "Lists of recently used contexts in the shared store, by outcome. `written`: this pod's list. "
            "`taken`: taken over from a gone pod. `unavailable`: no store. `internal_error`: a fault.",
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
        blocks = Gauge("contextcache_sidecar_blocks", "Block files, by tier.", ("tier",), registry=self._registry)
        size = Gauge("contextcache_sidecar_bytes", "Bytes of block files, by tier.", ("tier",), registry=self._registry)
        limit = Gauge(
            "contextcache_sidecar_limit_bytes", "Limit in bytes, by tier. 0: none.", ("tier",), registry=self._registry
        )
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
