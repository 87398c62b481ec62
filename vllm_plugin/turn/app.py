"""Composition: the only place that picks the turn story's adapters."""

from __future__ import annotations

from collections.abc import Callable

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.identity import Standby
from contextcache.process.settings import read_secret
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import tracer_of
from kv_sidecar.client import KVSidecarClient
from vllm_plugin.turn.engine import ASGIApp
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.sidecar_kv import SidecarKV
from vllm_plugin.turn.story import TurnStory

TRANSCRIPT_BYTES_MAX = 128 << 20
"""Of one turn process: at some 8 bytes a token the transcripts of 16 million tokens, more than a host has
memory for the KV of (2 TiB with an 8B model). A transcript that does not fit costs its next turn one whole reading."""


def compose_turns(
    settings: TurnSettings, metrics: TurnMetrics, tls: WatchedTls | None, standbys: Callable[[Standby], ASGIApp]
) -> TurnStory:
    """Return the story with real adapters. `standbys` returns the application of another pod's engine.

    Nothing is connected before the first turn. Raises OSError or ValueError when the secret cannot serve.
    """
    secret, clock = read_secret(settings.secret_file), SystemClock()
    timeout_s = settings.rpc_deadline_ms / 1000
    manager = ContextManagerClient(
        settings.manager,
        timeout_s=timeout_s,
        tls=tls,
        transcript_bytes_max=TRANSCRIPT_BYTES_MAX,
        on_begun=metrics.count_transcript,
    )
    metrics.transcript_memory.set_function(lambda: manager.transcript_bytes)
    tracer = tracer_of(settings, part="turn", on_lost=metrics.process.lost_spans.inc)
    if not settings.lmcache_url:
        quotas = KVSidecarClient(settings.sidecar, timeout_s=timeout_s, tls=tls)
        kv = SidecarKV(quotas, secret=secret, report_deadline_ms=settings.report_deadline_ms)
        return TurnStory(settings, manager, kv, clock, metrics, standbys, tracer, quotas)

    # Its modules need httpx and gRPC's health service, which a pod with a sidecar may lack.
    from integrations.lmcache.api import LMCacheApi
    from integrations.lmcache.door import LMCacheDoor

    api = LMCacheApi(
        server_url=settings.lmcache_url,
        coordinator_url=settings.lmcache_coordinator_url,
        model_name=settings.lmcache_model,
        world_size=settings.lmcache_world_size,
        timeout_s=timeout_s,
    )
    lmcache = LMCacheDoor(api, secret=secret, clock=clock, address=settings.lmcache_listen, tls=tls)
    return TurnStory(settings, manager, lmcache, clock, metrics, standbys, tracer)
