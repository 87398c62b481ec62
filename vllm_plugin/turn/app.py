"""Composition: the only place that picks the turn story's adapters."""

from __future__ import annotations

import prometheus_client

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.model import CacheRef, SaveOutcome, SessionId, TenantId
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import tracer_of
from kv_sidecar.client import KVSidecarClient
from vllm_plugin.turn.admission import TurnAdmission
from vllm_plugin.turn.kept import KeptRequests
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import TenantUsage
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.story import TurnStory
from vllm_plugin.turn.usage import LoadedKV

TRANSCRIPT_BYTES_MAX = 128 << 20
"""Of one API server process: at some 8 bytes a token the transcripts of 16 million tokens, more than a host has
memory for the KV of (2 TiB with an 8B model). A transcript that does not fit costs its next turn one whole reading."""

_TIER_NAMES = {pb.TIER_HOST: "host", pb.TIER_DISK: "disk", pb.TIER_PEER: "peer", pb.TIER_OBJECT: "object"}


def compose_turns(settings: TurnSettings, secret: bytes) -> tuple[TurnStory, TurnAdmission, KeptRequests]:
    """Return the story, what guards it, and what keeps plain requests, with real adapters.

    Nothing is connected before the first turn. Raises OSError or ValueError when the certificate files cannot serve.
    """
    timeout_s = settings.rpc_deadline_ms / 1000
    metrics = TurnMetrics(prometheus_client.REGISTRY)
    tls = metrics.certificates.open_tls(settings.tls)
    clock = SystemClock()
    sidecar = SidecarReports(KVSidecarClient(settings.sidecar, timeout_s=timeout_s, tls=tls))
    manager = ContextManagerClient(
        settings.manager,
        timeout_s=timeout_s,
        tls=tls,
        transcript_bytes_max=TRANSCRIPT_BYTES_MAX,
        on_begun=metrics.count_transcript,
    )
    metrics.transcript_memory.set_function(lambda: manager.transcript_bytes)
    story = TurnStory(
        settings,
        secret=secret,
        manager=manager,
        sidecar=sidecar,
        clock=clock,
        metrics=metrics,
        tracer=tracer_of(settings, part="turn", on_lost=metrics.lost_spans.inc),
    )
    admission = TurnAdmission(settings, quotas=sidecar, clock=clock, metrics=metrics)
    kept = KeptRequests(settings, secret=secret, sidecar=sidecar, clock=clock, metrics=metrics)
    return story, admission, kept


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
