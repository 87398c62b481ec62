"""Composition: the only place that picks the turn story's adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import prometheus_client

from context_manager.client import ContextManagerClient
from contextcache.clock import Clock, SystemClock
from contextcache.model import CacheRef, SaveOutcome, SessionId, TenantId
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import tracer_of
from kv_sidecar.client import KVSidecarClient
from vllm_plugin.turn.admission import TurnAdmission
from vllm_plugin.turn.kept import KeptRequests
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import TenantUsage
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.story import TurnStory
from vllm_plugin.turn.usage import LoadedKV

if TYPE_CHECKING:
    from vllm_plugin.turn.lmcache import LMCacheKV

TRANSCRIPT_BYTES_MAX = 128 << 20
"""Of one API server process: at some 8 bytes a token the transcripts of 16 million tokens, more than a host has
memory for the KV of (2 TiB with an 8B model). A transcript that does not fit costs its next turn one whole reading."""

_TIER_NAMES = {pb.TIER_HOST: "host", pb.TIER_DISK: "disk", pb.TIER_PEER: "peer", pb.TIER_OBJECT: "object"}


def compose_turns(settings: TurnSettings, secret: bytes) -> tuple[TurnStory, TurnAdmission, KeptRequests | None]:
    """Return the story, what guards it, and what keeps plain requests (LMCache does so itself), with real adapters.

    Nothing is connected before the first turn. Raises OSError or ValueError when the certificate files cannot serve.
    """
    timeout_s = settings.rpc_deadline_ms / 1000
    metrics = TurnMetrics(prometheus_client.REGISTRY)
    tls = metrics.certificates.open_tls(settings.tls)
    clock = SystemClock()
    manager = ContextManagerClient(
        settings.manager,
        timeout_s=timeout_s,
        tls=tls,
        transcript_bytes_max=TRANSCRIPT_BYTES_MAX,
        on_begun=metrics.count_transcript,
    )
    metrics.transcript_memory.set_function(lambda: manager.transcript_bytes)
    parts: dict[str, Any] = {"secret": secret, "clock": clock, "metrics": metrics}
    tracer = tracer_of(settings, part="turn", on_lost=metrics.lost_spans.inc)
    if settings.lmcache_url:
        lmcache = _lmcache(settings, secret, clock, tls)
        story = TurnStory(settings, manager=manager, sidecar=lmcache, by_tokens=lmcache, tracer=tracer, **parts)
        return story, TurnAdmission(settings, quotas=None, clock=clock, metrics=metrics), None
    sidecar = SidecarReports(KVSidecarClient(settings.sidecar, timeout_s=timeout_s, tls=tls))
    story = TurnStory(settings, manager=manager, sidecar=sidecar, tracer=tracer, **parts)
    admission = TurnAdmission(settings, quotas=sidecar, clock=clock, metrics=metrics)
    return story, admission, KeptRequests(settings, sidecar=sidecar, **parts)


def _lmcache(settings: TurnSettings, secret: bytes, clock: Clock, tls: WatchedTls | None) -> LMCacheKV:
    # Both bring what a pod with a sidecar need not have: httpx, and gRPC's health service.
    from vllm_plugin.turn.lmcache_api import LMCacheApi
    from vllm_plugin.turn.lmcache_door import LMCacheDoor

    api = LMCacheApi(
        server_url=settings.lmcache_url,
        coordinator_url=settings.lmcache_coordinator_url,
        model_name=settings.lmcache_model,
        world_size=settings.lmcache_world_size,
        timeout_s=settings.lmcache_deadline_ms / 1000,
    )
    return LMCacheDoor(api, secret=secret, clock=clock, address=settings.lmcache_listen, tls=tls)


class SidecarReports:
    """The sidecar's client, with load reports as plain values."""

    def __init__(self, client: KVSidecarClient) -> None:
        """Wrap a client; it is closed with us."""
        self._client = client

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int) -> SaveOutcome:
        """See ports.KVSidecar."""
        return await self._client.wait_sealed(tenant, cache_ref, timeout_ms=timeout_ms)

    async def load_report(self, request_id: str, *, timeout_ms: int) -> LoadedKV | None:
        """See ports.KVSidecar."""
        report = await self._client.load_report(request_id, timeout_ms=timeout_ms)
        if report is None:
            return None
        return LoadedKV(
            failed=report.outcome == pb.LOAD_OUTCOME_FAILED,
            device_tokens=report.device_tokens,
            loaded_tokens=report.loaded_tokens,
            tier=_TIER_NAMES.get(report.tier, ""),
            restore_ms=report.restore_ms,
            reason=report.reason,
            compute_us_per_token=report.compute_us_per_token,
        )

    async def read_ahead(self, tenant: TenantId, cache_refs: tuple[CacheRef, ...]) -> None:
        """See ports.KVSidecar."""
        await self._client.read_ahead(tenant, cache_refs)

    async def touch_context(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """See ports.KVSidecar."""
        return await self._client.touch_context(tenant, session_id, expires_at_ms)

    async def delete_context(
        self, tenant: TenantId, *, session_id: SessionId = "", cache_refs: tuple[CacheRef, ...] = ()
    ) -> int:
        """See ports.KVSidecar."""
        return await self._client.delete_context(tenant, session_id=session_id, cache_refs=cache_refs)

    async def tenant_usage(self, tenant: TenantId) -> TenantUsage:
        """See ports.TenantQuotas."""
        usage = await self._client.tenant_usage(tenant)
        return TenantUsage(usage.size_bytes, usage.limit_bytes)

    async def close(self) -> None:
        """See ports.KVSidecar."""
        await self._client.close()
