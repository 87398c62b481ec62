"""The connector in a worker process: takes plans from the step, gives results back to it, and waits for nothing.

Copying and talking is done in transfer threads (loads/loading.py, saves/saving.py). Two threads never write the same
engine block: a load owns its request's blocks until it is reported, and a request has one load at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError
from vllm_plugin.connector.copies.codec import CodedLayers
from vllm_plugin.connector.copies.layout import open_layers, prefault
from vllm_plugin.connector.copies.pages import page_orders
from vllm_plugin.connector.engine_check import NULL_BLOCK, LayerGroup
from vllm_plugin.connector.identity.adapters import CHANGED, LoadedAdapters
from vllm_plugin.connector.identity.fingerprint import canonical_json, engine_facts, engine_groups, fingerprint
from vllm_plugin.connector.identity.sleeps import Sleeps, WeightsWord
from vllm_plugin.connector.identity.weights import weights_identity
from vllm_plugin.connector.loads.loading import Load, Loader
from vllm_plugin.connector.metadata import ArenaWord, LoadPlan, RankFacts, SavePlan
from vllm_plugin.connector.saves.saving import Saver
from vllm_plugin.connector.settings import CODEC_NONE, WEIGHTS_UNNAMED, ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, Connect, OpenArena, RankLink
from vllm_plugin.connector.telemetry import Counters, connector_tracer
from vllm_plugin.connector.transfer import Reporter, ResultBox, Results, TransferPool

log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's half. All methods are called by the engine's thread and return at once, `shutdown` excepted."""

    def __init__(
        self,
        vllm_config: Any,
        num_blocks: int,
        groups: Sequence[LayerGroup],
        settings: ConnectorSettings,
        connect: Connect,
        open_arena: OpenArena,
        *,
        clock: Clock,
    ) -> None:
        """`num_blocks`: of the engine; `groups`: none for an engine that is left alone."""
        self._vllm_config = vllm_config
        self._num_blocks = num_blocks
        self._groups = groups
        self._settings = settings
        self._clock = clock
        self.counters = Counters()
        self.adapters = LoadedAdapters(
            vllm_config.parallel_config.rank, getattr(vllm_config, "lora_config", None) if groups else None
        )
        self._tracer = connector_tracer(settings, self.counters)
        self._results = ResultBox()
        self._sidecar = connect(settings.prepare_deadline_ms / 1000)
        self._open_arena = open_arena
        self._link = RankLink(self._sidecar, self._borrow, self._clock, self.counters)
        limit = settings.queue_limit
        self._reporter = Reporter(self._sidecar, self.counters, queue_limit=limit)
        self._load_pool = TransferPool("loads", threads=settings.load_threads, queue_limit=limit)
        self._save_pool = TransferPool("saves", threads=settings.save_threads, queue_limit=limit)
        self._upload_pool = TransferPool("uploads", threads=settings.save_threads, queue_limit=limit)
        self._loads: list[tuple[Load, Future[None]]] = []
        """Loads until their thread has ended, also those given up meanwhile."""
        self._greeting: Future[None] | None = None
        self._told_lack = False
        self.is_asleep = False
        """Whether the engine's memory is unmapped."""
        self._sleeps = Sleeps(vllm_config) if groups else None
        self._weights = SimpleQueue[WeightsWord]()
        self._stopping = threading.Event()
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self.facts: RankFacts | None = None
        """Facts of this rank; set once the KV tensors are there."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> RankFacts:
        """Learn the paged tensors, and so this rank's facts. Raises UncarriedEngine for layouts we cannot carry."""
        layers = open_layers(kv_caches, self._num_blocks, [group.layer_names for group in self._groups])
        codec: dict[str, Any] = {}
        if self._settings.codec != CODEC_NONE:
            layers = CodedLayers(layers, [group.kind for group in self._groups], self._settings.codec)
            codec = layers.facts
            self._tell_uncoded(layers.uncoded)
        groups = engine_groups(self._groups, layers.shapes)
        parallel = self._vllm_config.parallel_config
        epoch = self._settings.weights_epoch
        weights = weights_identity(self._vllm_config) or ("named" if epoch != WEIGHTS_UNNAMED else None)
        shapes = [shape for own in layers.shapes for shape in own]
        facts = engine_facts(self._vllm_config, groups, shapes, weights=weights, weights_epoch=epoch)
        spelled = canonical_json(facts | page_orders(layers) | codec)
        told = RankFacts(fingerprint(spelled), spelled, parallel.rank, parallel.world_size, groups)
        self._introduce(told)
        parts: dict[str, Any] = {
            "settings": self._settings,
            "link": self._link,
            "layers": layers,
            "results": self._results,
            "reporter": self._reporter,
            "counters": self.counters,
            "clock": self._clock,
            "tracer": self._tracer,
        }
        self._loader = Loader(**parts)
        self._saver = Saver(**parts, copying=self._save_pool, uploads=self._upload_pool)
        self._layers = layers
        self._greet()
        tensors = list(kv_caches.values())
        self._load_pool.try_submit(lambda: self._prefault(tensors))
        return told

    def _introduce(self, facts: RankFacts) -> None:
        self.facts = facts
        self._link.introduce(facts)

    def _tell_uncoded(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            self.counters.add("uncoded_groups", reason)
        if reasons:
            log.warning(
                "KV is stored without a codec", extra={"codec": self._settings.codec, "reasons": sorted(set(reasons))}
            )

    def adopt(self, fingerprint_json: str) -> None:
        """Take the fingerprint that the scheduler's half made when the weights were given up for changed."""
        assert self.facts is not None, "register_kv_caches came first"
        name = fingerprint(fingerprint_json)
        self._introduce(replace(self.facts, fingerprint=name, fingerprint_json=fingerprint_json))
        self._greet()

    def wait(self, timeout_s: float) -> None:
        """Wait for a load to end, where one is under way; 0: not at all. Only for a step that computes nothing."""
        if timeout_s and any(not (future.done() or load.is_over) for load, future in self._loads):
            self._results.wait(timeout_s)

    def start(self, loads: Sequence[LoadPlan], saves: Sequence[SavePlan], overtaken: Collection[str] = ()) -> None:
        """Queue this step's work; what cannot be queued is reported as failed or skipped at once.

        `overtaken`: saves whose blocks this step may compute into.
        """
        if not loads and not saves and not overtaken:
            return
        assert self._loader is not None, "register_kv_caches came first"
        assert self._saver is not None, "register_kv_caches came first"
        self.overtake(overtaken)
        fence = self._layers.fence()
        for load_plan in loads:
            self._start_load(self._loader, self._loader.open(load_plan, fence))
        for save_plan in saves:
            obstacle = "" if self._link.is_worth_trying() else "sidecar_unavailable"
            if self.is_asleep:
                obstacle = "asleep"
            if save_plan.adapter is not None and not self.adapters.holds(save_plan.adapter):
                obstacle = CHANGED
            self._saver.start(save_plan, fence, obstacle)

    def overtake(self, overtaken: Collection[str]) -> None:
        """Drop saves whose blocks are not their own from the next step on, as far as they are not copied."""
        if self._saver is not None:
            self._saver.overtake(overtaken)

    def _start_load(self, loader: Loader, load: Load) -> None:
        obstacle = ""
        if not self._link.is_worth_trying():
            obstacle = "sidecar_unavailable"
        elif self.is_asleep:
            obstacle = "asleep"
        elif self._num_hanging() >= self._settings.load_threads:
            # Nothing would carry it out before its deadline.
            obstacle = "disk_hangs"
        elif any(NULL_BLOCK in piece.block_ids for piece in load.plan.pieces):
            obstacle = "null_block"
        elif load.plan.adapter is not None and not self.adapters.is_loaded(load.plan.adapter):
            obstacle = CHANGED
        elif (future := self._load_pool.try_submit(lambda: loader.run(load), load.plan.tenant)) is None:
            obstacle = "queue_full"
        else:
            self._loads.append((load, future))
        if obstacle:
            loader.fail(load, obstacle)

    def take_results(self) -> Results:
        """Return what has ended since the last call; gives up what has waited in a queue past its deadline."""
        self._give_up_late()
        if self._saver is not None:
            self._saver.end_late()
        self._greet()
        return self._results.take()

    def take_arena_news(self) -> tuple[ArenaWord, ...]:
        """Return whether this rank has the sidecar's memory, where that has changed since the last call."""
        lacks_arena = self._link.lacks_arena
        if lacks_arena == self._told_lack:
            return ()
        self._told_lack = lacks_arena
        return (ArenaWord(self._link.facts.rank, lacks_arena),)

    def compare_weights(self, number: int) -> None:
        """Answer the scheduler's question whether the weights are those before the last sleep, in a thread."""
        rank, sleeps = self._vllm_config.parallel_config.rank, self._sleeps

        def compare() -> None:
            self._weights.put(WeightsWord(rank, number, sleeps.take() if sleeps is not None else 0))

        if self._upload_pool.try_submit(compare) is None:
            self._weights.put(WeightsWord(rank, number, 0))

    def take_weights(self) -> tuple[WeightsWord, ...]:
        """Return the answers since the last call."""
        return tuple(self._weights.get() for _ in range(self._weights.qsize()))

    def _give_up_late(self) -> None:
        """Take blocks back from loads that are late. A thread that writes now ends first."""
        if not self._loads:
            return
        assert self._loader is not None, "it began a load"
        now_ms = self._clock.now_ms()
        for load, future in self._loads:
            if now_ms >= load.deadline_ms and not future.done():
                future.cancel()
                self._loader.fail(load, "load_deadline")
        self._loads = [entry for entry in self._loads if not entry[1].done()]

    def _num_hanging(self) -> int:
        """Return the loads that are late and over, and keep their threads until the disk lets go."""
        now_ms = self._clock.now_ms()
        return sum(load.is_over and now_ms >= load.deadline_ms and not future.done() for load, future in self._loads)

    def _greet(self) -> None:
        """Say hello to the sidecar in a thread, unless that is done, going on, or was tried a moment ago."""
        if self.facts is None or self._link.terms_now is not None or not self._link.is_worth_trying():
            return
        if self._greeting is None or self._greeting.done():
            self._greeting = self._upload_pool.try_submit(self._hello)

    def _prefault(self, tensors: Sequence[torch.Tensor]) -> None:
        prefault(tensors, stopping=self._stopping)

    def _borrow(self, on_gone: Callable[[], None]) -> Arena:
        arena = self._open_arena(on_gone)
        self._layers.reach(arena.view(0, arena.size_bytes), owner=arena)
        return arena

    def _hello(self) -> None:
        try:
            self._link.terms()
        except ContextCacheError:
            self.counters.add("failed_handshakes")

    def let_go(self) -> None:
        """End all work on the engine's memory, within the deadline of a shutdown. Saves have most of it to end well."""
        self.is_asleep = True
        if self._saver is None or self._loader is None:
            return
        deadline_s = self._settings.shutdown_deadline_ms / 1000
        ends_at_s = time.monotonic() + deadline_s
        self._saver.drain(ends_at_s - deadline_s / 4)
        self._saver.overtake_all()
        for load, _ in self._loads:
            self._loader.fail(load, "asleep")
        for pool in (self._load_pool, self._save_pool, self._upload_pool):
            pool.drain(max(ends_at_s - time.monotonic(), 0))

    def shutdown(self) -> None:
        """End the threads and channels, within the deadline.

        Saves have most of it to end by themselves: vLLM lets answers finish before it ends, and their contexts go on
        elsewhere from what was saved. Closing the channels then fails the calls in flight.
        """
        self._stopping.set()
        deadline_s = self._settings.shutdown_deadline_ms / 1000
        ends_at_s = time.monotonic() + deadline_s
        if self._saver is not None:
            self._saver.drain(ends_at_s - deadline_s / 4)
        self._sidecar.close()
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close()
        pools = (self._load_pool, self._save_pool, self._upload_pool, self._reporter, self.adapters)
        ended = [pool.close(max(ends_at_s - time.monotonic(), 0)) for pool in pools]
        if not all(ended):
            log.warning("transfer threads still running at shutdown")
        self._link.close()
        self._tracer.close()
