"""`ContextCacheConnector`: vLLM's calls, handed to the scheduler's or the worker's half. No decision is made here.

vLLM makes one in the scheduler and one in each worker. Loads are asynchronous, `(n, True)`, so layerwise hooks do
nothing. Saves begin in the step after a request has finished. `start_load_kv` drives them: vLLM calls it in steps
without work too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from contextcache.clock import Clock
from contextcache.process.logs import show_logs_of
from contextcache.process.settings import read_secret
from kv_sidecar.client import EngineSidecarClient, open_arena
from vllm_plugin.connector.engine_check import LayerGroup, UncarriedEngine, carried_groups, check_failure_policy
from vllm_plugin.connector.identity.adapters import AdapterWord
from vllm_plugin.connector.identity.sleeps import WeightsWord
from vllm_plugin.connector.metadata import ArenaWord, LoadPlan, RankFacts, SavePlan
from vllm_plugin.connector.scheduler_side import SchedulerSide
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, MonotonicClock
from vllm_plugin.connector.spin import sleep_soon
from vllm_plugin.connector.telemetry import ConnectorPromMetrics, ConnectorStats, hit_source
from vllm_plugin.connector.worker_side import WorkerSide


@dataclass(frozen=True, slots=True)
class ConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not followed by mypy
    """One step's plans, scheduler to workers."""

    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    fingerprint_json: str = ""
    """Fingerprint that the workers adopt before they begin; empty: unchanged."""
    overtaken: tuple[str, ...] = ()
    """Saves whose blocks this step may compute into."""
    idle_wait_s: float = 0.0
    """How long this step, which computes nothing, may wait for a load to end."""
    adapters: tuple[int, ...] = ()
    """Numbers of LoRA adapters whose digests the scheduler needs."""
    weights: int = 0
    """Number of the scheduler's question whether the weights are those before the last sleep; 0: none."""


@dataclass(frozen=True, slots=True)
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not followed by mypy
    """News of one step, sent by the workers to the scheduler. A field joins those of all ranks."""

    ended_saves: tuple[str, ...] = ()
    """cache_refs of saves that were sealed or ended without one."""
    adapters: tuple[AdapterWord, ...] = ()
    arenas: tuple[ArenaWord, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    """Facts of ranks, in their first news. vLLM's handshake has room for one connector's."""
    uncarried: tuple[tuple[str, str], ...] = ()
    """Reason and text of a rank's UncarriedEngine."""
    weights: tuple[WeightsWord, ...] = ()

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        return WorkerNews(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


class ContextCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not followed by mypy
    """Saves and loads the KV of contexts through the pod's kv-sidecar; leaves engines alone whose KV it cannot carry.

    It supports vLLM's hybrid memory: a model with several block tables needs no more memory than without us.

    `--kv-transfer-config '{"kv_connector": "ContextCacheConnector", "kv_connector_module_path":
    "vllm_plugin.connector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"sidecar": "unix:///…", "secret_file": "…"}}'`
    """

    clock: ClassVar[Clock] = MonotonicClock()
    """Clock of all deadlines; tests set their own."""
    _side: SchedulerSide | WorkerSide
    scheduler_side: SchedulerSide
    """The half in the scheduler; workers have none."""
    worker_side: WorkerSide
    """The half in a worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raise ValueError for settings that cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        show_logs_of("vllm_plugin")
        sleep_soon(str(vllm_config.device_config.device_type))
        self._settings = ConnectorSettings.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        secret = _read_secret(self._settings)
        self._ended_saves: set[str] = set()
        self._first_news = WorkerNews()
        """Facts of this rank, until they are told."""
        groups: Sequence[LayerGroup] = ()
        try:
            if role == KVConnectorRole.WORKER:
                check_failure_policy(vllm_config)
            groups = carried_groups(vllm_config, kv_cache_config)
        except UncarriedEngine as exc:
            self._first_news = WorkerNews(uncarried=((exc.reason, exc.text),))
        if role == KVConnectorRole.SCHEDULER:
            self._side = self.scheduler_side = SchedulerSide(
                vllm_config,
                self._settings,
                secret,
                self.connect_sidecar,
                clock=self.clock,
                reads_unheld=not _zeroes_early(vllm_config, kv_cache_config),
            )
            for uncarried in self._first_news.uncarried:
                self.scheduler_side.leave_alone(*uncarried)
        else:
            self._side = self.worker_side = WorkerSide(
                vllm_config,
                kv_cache_config.num_blocks,
                groups,
                self._settings,
                self.connect_sidecar,
                self.open_arena,
                clock=self.clock,
            )

    def connect_sidecar(self, timeout_s: float) -> EngineSidecarClient:
        """Return a client of the sidecar. Its first call opens the channel, in a thread of ours."""
        return EngineSidecarClient(self._settings.sidecar, timeout_s=timeout_s)

    def open_arena(self, on_gone: Callable[[], None]) -> Arena:
        """Borrow the sidecar's arena, in a thread of ours. Raises OSError."""
        return open_arena(self._settings.sidecar, on_gone)

    # Both

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing more."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003  # the interface of vLLM 0.33
        """Answer yes: stored KV outlives a sleep (identity/sleeps.py)."""
        return True

    @classmethod
    @override
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask a GPU for blocks with all their layers side by side: one copy moves a block. The CPU knows one layout."""
        settings = ConnectorSettings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return None if vllm_config.device_config.device_type == "cpu" else settings.layout or None

    @override
    def shutdown(self) -> None:
        self._side.shutdown()

    @override
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        counts = self._side.counters.take_fresh()
        return ConnectorStats(data=counts) if counts else None

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        return ConnectorStats(data=data or {})

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler

    @override
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Ignore the handshake: a MultiConnector passes each child that of the first one that has any."""

    @override
    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.begin(request)

    @override
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.match(request, num_computed_tokens)

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        loads, saves, overtaken = self.scheduler_side.take_plans(scheduler_output)
        side = self.scheduler_side
        identity, asked = side.identity.take_news(), side.adapters.take_asked()
        return ConnectorMetadata(loads, saves, identity, overtaken, side.idle_wait_s(), asked, side.take_question())

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler_side.loads_ended(connector_output.finished_recving or (), connector_output.failed_recving)
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self.scheduler_side.saves_ended(news.ended_saves)
            self.scheduler_side.adapters.learn(news.adapters)
            self.scheduler_side.learn_arenas(news.arenas)
            for uncarried in news.uncarried:
                self.scheduler_side.leave_alone(*uncarried)
            self.scheduler_side.learn_ranks(news.ranks)
            self.scheduler_side.learn_weights(news.weights)

    @override
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Tell vLLM's metrics where the tokens come from."""
        if not num_external_tokens:
            return {}
        return {hit_source(self.scheduler_side.tier_of(request)): num_external_tokens}

    @override
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.finished(request, block_ids), None

    @override
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished_all_groups`. A MultiConnector with a child without hybrid memory calls this."""
        return self.request_finished_all_groups(request, (block_ids,))

    @override
    def reset_cache(self) -> bool | None:
        """Answer `reset_prefix_cache(reset_connector=True)`: pause, sleep and weight updates call it."""
        return isinstance(self._side, WorkerSide) or self._side.reset()

    # Worker

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._first_news.uncarried:
            return
        try:
            self._first_news = WorkerNews(ranks=(self.worker_side.register_kv_caches(kv_caches),))
        except UncarriedEngine as exc:
            self._first_news = WorkerNews(uncarried=((exc.reason, exc.text),))

    def unregister_kv_caches(self) -> None:  # vLLM 0.33
        """Let go of the engine's memory before a sleep unmaps it. It is mapped at the same addresses again."""
        self.worker_side.let_go()

    def restore_kv_caches(self) -> None:  # vLLM 0.33
        """Use the engine's memory again."""
        self.worker_side.is_asleep = False

    @override
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Drop copies of blocks that this step may overwrite: vLLM calls it before the forward."""
        assert isinstance(kv_connector_metadata, ConnectorMetadata), "our scheduler half made it"
        self.worker_side.overtake(kv_connector_metadata.overtaken)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ConnectorMetadata), "our scheduler half made it"
        if metadata.fingerprint_json:
            self.worker_side.adopt(metadata.fingerprint_json)
        self.worker_side.adapters.ask(metadata.adapters)
        if metadata.weights:
            self.worker_side.compare_weights(metadata.weights)
        self.worker_side.start(metadata.loads, metadata.saves, metadata.overtaken)
        self.worker_side.wait(metadata.idle_wait_s)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    @override
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @override
    def wait_for_save(self) -> None:
        return

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self.worker_side.take_results()
        self._ended_saves |= results.ended_saves
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    @override
    def build_connector_worker_meta(self) -> WorkerNews | None:
        ended, self._ended_saves = tuple(self._ended_saves), set()
        first, self._first_news, side = self._first_news, WorkerNews(), self.worker_side
        words, arenas, weights = side.adapters.take_words(), side.take_arena_news(), side.take_weights()
        news = first.aggregate(WorkerNews(ended, words, arenas, weights=weights))
        return None if news == WorkerNews() else news


def _zeroes_early(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether reused blocks are zeroed before `handle_preemptions` is called.

    vLLM 0.32 v1/worker/gpu/model_runner.py: `execute_model` zeroes in `update_requests`, before `pre_forward`.
    """
    return bool(vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing)


def _read_secret(settings: ConnectorSettings) -> bytes:
    try:
        return read_secret(Path(settings.secret_file))
    except OSError as exc:
        raise ValueError(f"secret file {settings.secret_file} is not readable") from exc


# A MultiConnector looks the class of a child's counts up by its name.
KVConnectorFactory.register_connector(
    ContextCacheConnector.__name__, "vllm_plugin.connector", ContextCacheConnector.__name__
)
