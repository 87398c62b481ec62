"""gRPC service of one sidecar: a message becomes a call, its result a message. Decides nothing.

Many methods of the service are methods of the catalog, by `contextcache.wire.servers.answering`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any, TypeAlias

import grpc.aio
from typing_extensions import override

from contextcache.errors import InvalidRequest
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2_grpc as pb_grpc
from contextcache.wire.messages import message_of, value_of
from contextcache.wire.rpc import FRAME_BYTES
from contextcache.wire.servers import GrpcServer, answering, plain_server
from contextcache.wire.tracing import NO_TRACER, Tracer
from kv_sidecar.catalog import ForkTerms
from kv_sidecar.client import SERVICE_NAME, TIER_NAMES
from kv_sidecar.format.ids import check_fingerprint
from kv_sidecar.format.manifest import check_rank
from kv_sidecar.moving.peer import STREAMS_MAX, FrameAssembly
from kv_sidecar.moving.pulling import Wanted
from kv_sidecar.retention import LeaseTerms
from kv_sidecar.sealed.prefixes import PrefixQuestion
from kv_sidecar.sidecar import Sidecar
from kv_sidecar.tiers.memory import Place
from kv_sidecar.tiers.store import BLOCK_BYTES_MAX
from kv_sidecar.tiers.tiers import FetchedBlock

log = logging.getLogger(__name__)

CALLS_MAX = 256
"""Calls served at once; gRPC refuses further ones. Engine ranks, gateways and peers each make a few."""
MAX_WAIT_SEALED_MS = 30_000
MAX_WAIT_REPORT_MS = 1_000
MAX_WAIT_SLOT_MS = 1_000
MAX_LENT_AT_ONCE = 4_096
SAVED_SLOTS_MAX = 64
TIERS = {name: number for number, name in TIER_NAMES.items()}

_METHODS = {
    "PrepareSave": "prepare_save",
    "ExtendSave": "extend_save",
    "Seal": "seal",
    "AbandonSave": "give_up_save",
    "InterruptSave": "interrupt",
    "EndLoad": "end_load",
    "RetainContext": "retain",
    "TouchContext": "touch",
}
"""Methods of the service, and those of the catalog that answer them."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class KVSidecarServicer(pb_grpc.KVSidecarServiceServicer):
    """Serves one Sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._catalog = sidecar.catalog
        self._frame_slots = asyncio.Semaphore(STREAMS_MAX)
        for name, method in _METHODS.items():
            setattr(self, name, answering(self._catalog, method, pb, name))

    @override
    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeResponse:
        settings = self._sidecar.settings
        check_fingerprint(request.fingerprint, request.fingerprint_json)
        check_rank(request.rank, request.world_size)
        self._sidecar.engine.introduce(request.rank, request.world_size, request.fingerprint, request.fingerprint_json)
        return pb.HandshakeResponse(
            block_tokens=settings.block_tokens,
            block_size_bytes_max=BLOCK_BYTES_MAX,
            arena=self._sidecar.door is not None,
        )

    @override
    async def SaveBlocks(
        self, request_iterator: AsyncIterator[pb.SaveBlocksRequest], context: Context
    ) -> pb.SaveBlocksResponse:
        taken = pb.SaveBlocksResponse()
        with closing(FrameAssembly(self._frame_slots, limit_bytes=BLOCK_BYTES_MAX)) as frames:
            async for request in request_iterator:
                files = [(slot.block_index, slot.slot_id) for slot in request.slots]
                if request.WhichOneof("payload") == "slot_id":
                    files.append((request.block_index, request.slot_id))
                if len(files) > SAVED_SLOTS_MAX:
                    raise InvalidRequest(f"at most {SAVED_SLOTS_MAX} slots fit a message", param="slots")
                if files:
                    taken.size_bytes += await self._catalog.take_slots(request.cache_ref, request.rank, files)
                    taken.num_blocks += len(files)
                    continue
                place = (request.cache_ref, request.rank, request.block_index)
                data = await frames.add(place, request.frame, last=request.last_frame)
                if data is not None:
                    taken.size_bytes += await self._catalog.take_block(*place, data)
                    taken.num_blocks += 1
                    frames.close()
            frames.check_finished()
        return taken

    @override
    async def LendSlots(self, request: pb.LendSlotsRequest, context: Context) -> pb.LendSlotsResponse:
        sizes_bytes, limit_bytes = request.sizes_bytes, BLOCK_BYTES_MAX
        if len(sizes_bytes) != len(request.block_indices) or not 0 < len(sizes_bytes) <= MAX_LENT_AT_ONCE:
            raise InvalidRequest(
                f"sizes_bytes must have one entry per block_indices entry, 1 to {MAX_LENT_AT_ONCE} of them",
                param="sizes_bytes",
            )
        if min(sizes_bytes) < 1 or max(sizes_bytes) > limit_bytes:
            raise InvalidRequest(f"a block file must have 1 to {limit_bytes} bytes", param="sizes_bytes")
        places = [Place(request.cache_ref, request.rank, index) for index in request.block_indices]
        timeout_s = min(max(request.timeout_ms, 0), MAX_WAIT_SLOT_MS) / 1000
        wanted = list(zip(places, sizes_bytes, strict=True))
        lent = await self._catalog.lend(request.borrower, wanted, timeout_s=timeout_s)
        slots = [pb.Slot(offset=it.slot.offset, size_bytes=it.slot.size_bytes, slot_id=it.slot_id) for it in lent]
        return pb.LendSlotsResponse(slots=slots)

    @override
    async def ReturnSlots(self, request: pb.ReturnSlotsRequest, context: Context) -> pb.ReturnSlotsResponse:
        self._sidecar.memory.give_back(request.borrower, request.slot_ids)
        return pb.ReturnSlotsResponse()

    @override
    async def WaitSealed(self, request: pb.WaitSealedRequest, context: Context) -> pb.WaitSealedResponse:
        timeout_ms = min(request.timeout_ms, MAX_WAIT_SEALED_MS)
        record = await self._catalog.wait_sealed(request.tenant, request.cache_ref, timeout_s=timeout_ms / 1000)
        if record is None:
            return pb.WaitSealedResponse(reason=self._catalog.refs.get(request.tenant, request.cache_ref).failure)
        placements = await self._catalog.placements.carry_out(record, request.placements)
        return message_of(pb.WaitSealedResponse, record, sealed=True, placements=placements)

    @override
    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:
        manifest = await self._sidecar.resolver.manifest(request.tenant, request.cache_ref, bring=request.bring)
        return pb.GetManifestResponse(
            manifest=message_of(pb.Manifest, manifest), tier=TIERS[self._catalog.tier_of(manifest)]
        )

    @override
    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> pb.ResolveResponse:
        found = await self._sidecar.resolver.answer(request)
        if found.manifest is None:
            return pb.ResolveResponse(reason=found.reason, missing=found.missing, coming_ms=found.coming_ms)
        return pb.ResolveResponse(
            manifest=message_of(pb.Manifest, found.manifest),
            tier=TIERS[self._catalog.tier_of(found.manifest)],
            num_tokens=found.num_shared,
            missing=found.missing,
            coming_ms=found.coming_ms,
        )

    @override
    async def MatchPrefix(self, request: pb.MatchPrefixRequest, context: Context) -> pb.MatchPrefixResponse:
        found = await self._catalog.match_prefix(value_of(PrefixQuestion, request))
        matches = [
            pb.PrefixMatch(cache_ref=one.cache_ref, num_tokens=one.num_tokens, whole=one.is_whole) for one in found
        ]
        return pb.MatchPrefixResponse(matches=matches)

    @override
    async def LoadBlocks(self, request: pb.LoadBlocksRequest, context: Context) -> AsyncIterator[pb.LoadBlocksResponse]:
        manifest = await self._catalog.open(request.tenant, request.cache_ref, again=True)
        room_wait_ms = min(max(request.room_wait_ms, 0), MAX_WAIT_SLOT_MS)
        blocks = self._catalog.load(
            manifest,
            request.fingerprint,
            request.rank,
            request.block_indices,
            in_slots=request.borrower in self._sidecar.memory.borrowers,
            lease=LeaseTerms(request.lease_id, request.lease_ms, room_wait_ms) if request.lease_id else None,
            verify=request.verify,
        )
        try:
            async for together in blocks:
                if together[0].slot is None:
                    for frame in (frame for block in together for frame in _frames(block)):
                        yield frame
                    continue
                first, *more = map(_in_slot, together)
                first.more.extend(more)
                yield first
        finally:
            await blocks.aclose()

    @override
    async def ForkContext(self, request: pb.ForkContextRequest, context: Context) -> pb.ForkContextResponse:
        record = await self._catalog.fork(value_of(ForkTerms, request))
        if record is None:
            return pb.ForkContextResponse()
        return message_of(pb.ForkContextResponse, record, forked=True, tier=TIERS[self._catalog.tier_of(record)])

    @override
    async def DeleteContext(self, request: pb.DeleteContextRequest, context: Context) -> pb.DeleteContextResponse:
        refs = tuple(request.cache_refs)
        removed = await self._sidecar.delete(request.tenant, request.session_id, refs, replaced=request.replaced)
        return message_of(pb.DeleteContextResponse, removed)

    @override
    async def ReportLoad(self, request: pb.ReportLoadRequest, context: Context) -> pb.ReportLoadResponse:
        try:
            self._sidecar.reports.put(request.report)
        finally:
            if request.lease_id:
                await self._catalog.end_load(request.lease_id)
        return pb.ReportLoadResponse()

    @override
    async def GetLoadReport(self, request: pb.GetLoadReportRequest, context: Context) -> pb.GetLoadReportResponse:
        timeout_ms = min(request.timeout_ms, MAX_WAIT_REPORT_MS)
        report = await self._sidecar.reports.get(request.request_id, timeout_s=timeout_ms / 1000)
        return pb.GetLoadReportResponse(report=report)

    @override
    async def ReadAhead(self, request: pb.ReadAheadRequest, context: Context) -> pb.ReadAheadResponse:
        self._sidecar.resolver.bring(request.tenant, request.cache_refs)
        await self._catalog.read_ahead(request.tenant, request.cache_refs)
        return pb.ReadAheadResponse()

    @override
    async def PullContext(self, request: pb.PullContextRequest, context: Context) -> pb.PullContextResponse:
        reply = self._sidecar.pulls.start(Wanted(request.tenant, tuple(request.cache_refs), request.peer))
        return pb.PullContextResponse(
            outcome=pb.PullOutcome.Value(f"PULL_OUTCOME_{reply.outcome.upper()}"), reason=reply.reason
        )

    @override
    async def GetTenantUsage(self, request: pb.GetTenantUsageRequest, context: Context) -> pb.GetTenantUsageResponse:
        size_bytes, limit_bytes = self._catalog.tenant_usage(request.tenant)
        return pb.GetTenantUsageResponse(size_bytes=size_bytes, limit_bytes=limit_bytes)

    @override
    async def ListKept(self, request: pb.ListKeptRequest, context: Context) -> pb.ListKeptResponse:
        groups = self._catalog.retention.groups(request.tenant, request.group)
        return message_of(pb.ListKeptResponse, groups=groups)

    @override
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        beginnings, end = self._sidecar.resolver.beginnings.since(request.beginnings_after)
        usage = {"host": self._sidecar.blocks.memory_usage(), "disk": self._sidecar.blocks.usage()}
        tiers = [message_of(pb.TierStats, found, tier=TIERS[tier]) for tier, found in usage.items()]
        return pb.StatsResponse(
            num_contexts=len(self._catalog.manifests),
            tiers=tiers,
            num_quarantined=self._sidecar.directory.num_quarantined,
            fingerprints=self._sidecar.engine.fingerprints,
            num_pulls=self._sidecar.pulls.num_pulls,
            beginnings=beginnings,
            beginnings_age_ms=beginnings.values(),
            beginnings_end=end,
            endpoint=self._sidecar.settings.endpoint_name,
            draining=self._sidecar.pulls.is_draining,
        )


def serve(sidecar: Sidecar, addresses: list[str], *, tracer: Tracer = NO_TRACER) -> GrpcServer:
    """Return a server for `sidecar`, bound and not yet started. Raises OSError when an address is taken."""
    on_ended = sidecar.metrics.process.count_request
    server = plain_server(tls=sidecar.tls, max_concurrent_rpcs=CALLS_MAX, tracer=tracer, on_ended=on_ended)
    servicer: Any = KVSidecarServicer  # abstract for mypy, which does not see the methods of _METHODS
    pb_grpc.add_KVSidecarServiceServicer_to_server(servicer(sidecar), server)
    return GrpcServer(server, service_name=SERVICE_NAME, addresses=addresses, tls=sidecar.tls)


def _in_slot(block: FetchedBlock) -> pb.LoadBlocksResponse:
    assert block.slot is not None, "asked for by who sees it"
    slot = pb.Slot(offset=block.slot.offset, size_bytes=block.slot.size_bytes, generation=block.slot.generation)
    return pb.LoadBlocksResponse(
        block_index=block.block_index, tier=TIERS[block.tier], slot=slot, last_frame=True, checksum=block.vouched
    )


def _frames(block: FetchedBlock) -> Iterator[pb.LoadBlocksResponse]:
    tier, view = TIERS[block.tier], memoryview(block.data)
    for start in range(0, len(view), FRAME_BYTES):
        yield pb.LoadBlocksResponse(
            block_index=block.block_index,
            tier=tier,
            frame=bytes(view[start : start + FRAME_BYTES]),
            last_frame=start + FRAME_BYTES >= len(view),
            checksum=block.vouched,
        )
