"""One sidecar, composed from its settings: the only place that chooses the parts. server.py serves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from contextcache.clock import Clock
from contextcache.errors import SidecarUnavailable
from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN, check_session_id, check_tenant, prompt_ref
from contextcache.process.reloaded import read_bounded
from kv_sidecar.accounts import LoadReports, UsageMeter
from kv_sidecar.blocks import Blocks, PromiseKind
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.events.stream import EventStream
from kv_sidecar.events.view import EventView
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.moving.borrowing import Prefixes
from kv_sidecar.moving.leaving import Leaving
from kv_sidecar.moving.peer import STREAMS_MAX, PeerSidecar, StoredPeer
from kv_sidecar.moving.pulling import ConnectPeer, EngineRanks, PeerRules, Pulls
from kv_sidecar.orphans import ManagerQuestions, Orphans
from kv_sidecar.refs import Refs
from kv_sidecar.resolve import Resolver
from kv_sidecar.retention import Removed, collect_forever
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.manifests import ManifestRecord, Manifests
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.store.collector import SharedCollector
from kv_sidecar.store.encryption import StoreKeys
from kv_sidecar.store.objects import ObjectStore
from kv_sidecar.store.stored_kv import StoredKV
from kv_sidecar.store.writer import SharedTier
from kv_sidecar.tiers.arena import SUFFIX, ArenaDoor
from kv_sidecar.tiers.data_directory import DataDirectory
from kv_sidecar.tiers.disk import Disk
from kv_sidecar.tiers.memory import Memory
from kv_sidecar.tiers.store import BLOCK_BYTES_MAX, IoThreads
from kv_sidecar.tiers.tiers import Tiers

log = logging.getLogger(__name__)

LEFTOVER_S = 600
"""Age from which unannounced, unfinished and quarantined files are removed: quarantined ones can be looked at."""
TENANTS_SHOWN_MAX = 20
"""Tenants that the metrics show by name, largest first: each is a time series."""
PROMISE_KINDS: dict[str, PromiseKind] = {"disk": "promise", "host": "pin"}
"""References of promises by tier."""
_ENGINE_START_FILE = "engine-start"
"""File beside the Unix socket, written by pod_injector/payload_start when vLLM starts."""
_ENGINE_STARTS = ("added", "kv-connector", "port", "server", "rust-frontend", "config-file")
"""Contents of that file."""


class Sidecar:
    """Stores, catalog, pulls and collector, opened by `open()` and closed by `close()`."""

    def __init__(
        self,
        settings: SidecarSettings,
        *,
        clock: Clock,
        registry: CollectorRegistry,
        directory: DataDirectory | None = None,
        connect_peer: ConnectPeer | None = None,
        manager: ManagerQuestions | None = None,
    ) -> None:
        """Compose the parts. Tests replace `directory`, to stop between two steps, and parts that need a wire.

        Raises OSError or ValueError if the certificate files or the store's keys cannot be used.
        """
        self.settings = settings
        self.metrics = SidecarMetrics(registry)
        self.threads = IoThreads(settings.io_threads)
        self.runtime = Runtime(clock, self.metrics, self.threads)
        self.tls = self.metrics.process.open_tls(settings.tls)
        self.directory = directory or DataDirectory(settings.data_dir)
        self.disk = Disk(self.directory, block_bytes_max=BLOCK_BYTES_MAX)
        self.memory = Memory(limit_bytes=settings.memory_bytes())
        self.blocks = Blocks(
            self.memory, limit_bytes=settings.disk_limit_bytes, tenant_limit_bytes=settings.tenant_limit_bytes
        )
        self.door: ArenaDoor | None = None
        """Where engines get the arena; None: they send frames."""
        self.tiers = Tiers(blocks=self.blocks, disk=self.disk, memory=self.memory, runtime=self.runtime)
        limits = settings.limits()
        refs = Refs(clock, limits)
        manifests = Manifests(self.directory, self.runtime, self.blocks, refs)
        self.catalog = ContextCatalog(self.runtime, refs, tiers=self.tiers, manifests=manifests, limits=limits)
        self.shared = self._open_shared() if settings.store_url else None
        """Tier under the disk; None: KV ends with its pod."""
        self.events = self._open_events() if settings.events_listen else None
        """Events for routers of other projects; None: they are off."""
        self._shared_collector = None if self.shared is None else SharedCollector(self.shared, self.runtime, limits)
        self.engine = EngineRanks()
        # Block files in memory, apart from those of saves: a peer that hangs must not hold up the engine.
        slots = asyncio.Semaphore(STREAMS_MAX)
        self.pulls = Pulls(
            self.catalog,
            self.runtime,
            self.engine,
            PeerRules(settings.peers),
            limits,
            connect_peer or partial(PeerSidecar, limits=limits, slots=slots, tls=self.tls),
            self.shared,
            None if self.shared is None else StoredPeer(self.shared, slots),
        )
        self.prefixes = Prefixes(self.pulls)
        self.resolver = Resolver(self.prefixes)
        self.reports = LoadReports(clock)
        self._questions = ManagerQuestions(settings.manager, tls=self.tls) if settings.manager and not manager else None
        self._manager = manager or self._questions
        self._orphans = None
        if self._manager is not None:
            after_ms = round(settings.orphan_after_s * 1000)
            self._orphans = Orphans(self._manager, self.runtime, manifests.written_at_ms, after_ms)
        self._meter = None if self._questions is None else UsageMeter(self._questions, clock)
        self._unnamed: set[CacheRef] = set()
        """KV that no session names, as the manager has said, and that a promise keeps."""
        self._passes: list[asyncio.Task[None]] = []
        self._show_room()

    def _open_shared(self) -> SharedTier:
        keys = StoreKeys(self.settings.store_keys_file) if self.settings.store_keys_file else None
        stored = StoredKV(ObjectStore(self.settings.store_url), self.catalog, keys, self.metrics)
        shared = SharedTier(stored, self.runtime, self.settings.limits())
        self.catalog.manifests.on_change = shared.learn
        self.catalog.placements.is_published = shared.takes
        self.metrics.store_waiting.set_function(lambda: shared.num_waiting)
        return shared

    def _open_events(self) -> EventStream:
        view = EventView(self.blocks, self.settings.events_tenants)
        self.catalog.manifests.on_found = view.learn
        listen, topic = self.settings.events_listen, self.settings.events_topic
        return EventStream(view, self.runtime, listen=listen, topic=topic)

    def _show_room(self) -> None:
        self.metrics.watch("host", self.blocks.memory_usage)
        self.metrics.watch("disk", self.blocks.usage)
        self.metrics.contexts.set_function(lambda: len(self.catalog.manifests))
        self.metrics.lent_bytes.set_function(lambda: self.memory.lent_bytes)
        for tier, kind in PROMISE_KINDS.items():
            self.metrics.promised_bytes.labels(tier).set_function(partial(self.blocks.all_promised_bytes, kind))
        self.metrics.free_inodes.set_function(self.blocks.free_inodes)
        if self.settings.unix_socket is not None:
            report = self.settings.unix_socket.with_name(_ENGINE_START_FILE)
            for outcome in _ENGINE_STARTS:
                self.metrics.engine_start.labels(outcome).set_function(partial(_is_content, report, outcome))

    async def open(self) -> None:
        """Open the stores and rebuild the index. Raises OSError when the data directory is taken."""
        await asyncio.to_thread(self._open_stores)
        await self.catalog.manifests.rebuild()
        if self.events is not None:
            self.events.open()
        self.threads.begin(self.catalog.restore_pins())
        if self.shared is not None:
            for record in self.catalog.manifests:
                self.shared.write_soon(record)
            self.shared.start()
        socket = self.settings.unix_socket
        if socket is not None and self.memory.region is not None:
            door = ArenaDoor(
                Path(f"{socket}{SUFFIX}"),
                self.memory.region,
                on_come=self.memory.borrowers.add,
                on_gone=self._end_borrower,
            )
            try:
                await door.open()
            except OSError:
                # The address is longer than the other one: frames are slower, and right.
                log.warning("no arena for the engine: its socket could not be opened", exc_info=True)
            else:
                self.door = door

    async def close(self) -> None:
        """End pulls, stop collecting, finish running steps and release the data directory."""
        await self.drain()
        if self.events is not None:
            await self.events.close()
        for task in self._passes:
            task.cancel()
        await asyncio.gather(*self._passes, return_exceptions=True)
        if self.shared is not None:
            await self.shared.close()
        if self._questions is not None:
            await self._questions.close()
        if self.door is not None:
            door, self.door = self.door, None
            await door.close()
        await self.threads.close()
        await asyncio.to_thread(self.memory.close)
        self.directory.close()

    async def drain(self) -> None:
        """Fetch nothing more. Idempotent."""
        self.catalog.placements.stop()
        await self.pulls.close()

    def start_collecting(self) -> None:
        """Make both passes at intervals until `close`. None waits for the other."""
        forever = partial(collect_forever, interval_s=self.settings.collect_interval_s, metrics=self.metrics)
        steps = forever(self.collect, is_timed=True), forever(self.collect_shared, is_timed=False)
        self._passes = [asyncio.create_task(step) for step in steps]

    async def collect(self) -> Removed:
        """Make one pass: remove unreachable blocks and manifests, unannounced and unfinished files and old reports.

        KV that no session names is last: the manager may be slow or away. `collect_shared` removes it from the store.
        """
        removed = await self.catalog.collect()
        before_ms = self.runtime.clock.now_ms() - LEFTOVER_S * 1000
        await self.threads.run(self.directory.remove_leftovers, before_ms)
        self.reports.forget_old()
        if self._orphans is not None:
            orphans = await self._orphans.find([it for it in self.catalog.manifests if not it.is_expendable])
            removed += await self.catalog.drop(self._unneeded(orphans))
        found = self.blocks.bytes_by_tenant()
        self.metrics.tenant_bytes.show(found, tenants_max=TENANTS_SHOWN_MAX)
        if self._meter is not None:
            in_store = None if self._shared_collector is None else self._shared_collector.take_held()
            await self._meter.look({"memory": self.blocks.memory_by_tenant(), "disk": found}, store_kib_s=in_store)
        return removed

    def _unneeded(self, orphans: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Return the orphans to remove: a promise keeps an older generation of a session that still has named KV."""
        manifests, is_promised = self.catalog.manifests, self.catalog.promises.is_promised
        self._unnamed = {ref for ref in self._unnamed if manifests.get(ref)} | {it.cache_ref for it in orphans}

        found = {(it.tenant, it.session_id) for it in orphans}
        living = {one for one in found if any(it.cache_ref not in self._unnamed for it in manifests.of_session(*one))}
        return [it for it in orphans if not is_promised(it) or (it.tenant, it.session_id) not in living]

    async def collect_shared(self) -> Removed:
        """Make the shared store's pass, if it is time. Apart from `collect`: a store may take hours."""
        if self._shared_collector is None:
            return Removed(0, 0)
        num_manifests = 0
        with suppress(SidecarUnavailable):
            orphans = None if self._manager is None else self._manager.orphans
            num_manifests = await self._shared_collector.collect(orphans)
        self.metrics.store_tenant_bytes.show(self._shared_collector.bytes_by_tenant, tenants_max=TENANTS_SHOWN_MAX)
        return Removed(num_manifests, 0)

    async def delete(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef], *, replaced: bool = False
    ) -> Removed:
        """Delete here and in the shared store; see `ContextCatalog.delete`. Both go on if the caller leaves.

        `replaced`: newer generations have replaced `cache_refs`, and promised KV stays until its promise ends. If the
        store refuses, its removal is retried: from now on the context is not found. Raises InvalidRequest.
        """
        check_tenant(tenant)
        if session_id:
            check_session_id(session_id)
        if replaced:
            cache_refs = [ref for ref in cache_refs if not self.catalog.is_promised(tenant, ref)]
        if self.shared is None:
            return await self.catalog.delete(tenant, session_id, cache_refs)
        refs = [ref for ref in cache_refs if CACHE_REF_PATTERN.fullmatch(ref)]
        refs += [prompt_ref(ref) for ref in refs]
        removal = self.shared.begin_delete(tenant, session_id, refs, is_whole=bool(session_id))
        try:
            removed = await self.catalog.delete(tenant, session_id, cache_refs)
        except BaseException:
            self.shared.delete_later(removal)
            raise
        try:
            await self.shared.end_delete(removal)
        except SidecarUnavailable as exc:
            log.warning("shared store refused a delete, will retry", extra={"reason": exc.message})
        return removed

    async def hand_over(self) -> None:
        """Have peers take over this pod's contexts for a limited time, unless a shared store has them."""
        settings, questions = self.settings, self._questions
        is_possible = settings.endpoint_name and settings.handover_s and len(self.catalog.manifests)
        if self.shared is not None or questions is None or not is_possible:
            return
        story = Leaving(
            self.catalog,
            questions,
            self.metrics,
            connect=lambda address: KVSidecarClient(address, tls=self.tls),
            fingerprint=self.engine.fingerprint,
            timeout_s=settings.handover_s,
            endpoint=settings.endpoint_name,
            address=settings.peer_address,
            peers=settings.takers,
            bytes_max=settings.limits().handover_bytes_max,
        )
        log.info("contexts handed over to peers", extra={"num_moved": await story.run()})

    async def flush(self) -> None:
        """Write missing contexts to the shared store and finish removals there, for a limited time."""
        if self.shared is not None:
            left = await self.shared.flush(self.settings.handover_s)
            log.info("contexts written to the shared store", extra={"num_left": left})

    def _end_borrower(self, borrower: str) -> None:
        self.memory.end_borrower(borrower)
        if self.door is not None:  # else the engine goes on, with the sidecar after this one
            self.threads.begin(self.catalog.seal_rest(borrower))

    def _open_stores(self) -> None:
        self.directory.on_quarantined = self.metrics.quarantined.inc
        self.directory.open()
        self.blocks.open(self.disk.sizes(), self.directory.inodes())
        self.memory.open()


def _is_content(file: Path, text: str) -> bool:
    """Return whether a small file has this content; False without the file."""
    try:
        return read_bounded(file, len(text)) == text.encode()
    except (OSError, ValueError):
        return False
