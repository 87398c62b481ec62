"""Clients of a kv-sidecar: `KVSidecarClient` (asyncio) and `EngineSidecarClient` (threads), plus the block file.

vLLM and the gateway load it, so it imports only grpc, numpy, xxhash, contextcache, the block file and the arena.
Every call has a deadline; every failure is a ContextCacheError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import grpc
from opentelemetry.trace import SpanKind

from contextcache.errors import CacheRefNotFound, SidecarUnavailable
from contextcache.model import (
    CacheRef,
    ForkedKV,
    KeptGroup,
    LoadedKV,
    Manifest,
    Placement,
    Promise,
    SaveOutcome,
    SessionId,
    TenantId,
)
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2_grpc as pb_grpc
from contextcache.wire.channels import ServiceClient
from contextcache.wire.messages import value_of
from contextcache.wire.rpc import CHANNEL_OPTIONS, GRACE_S, error_from_rpc, late_call
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import child_span, trace_metadata
from kv_sidecar.format.block_file import (
    BlockFile,
    BlockFileWriter,
    BlockMeta,
    check_head,
    file_meta,
    new_checksum,
    parse_block_file,
)
from kv_sidecar.format.ids import ADAPTER_MARK, pack_token_ids, unpack_token_ids
from kv_sidecar.format.manifest import context_files, next_files, restorable_tokens, with_files
from kv_sidecar.tiers.arena import MappedArena, open_arena, populate

__all__ = [
    "ADAPTER_MARK",
    "TIER_NAMES",
    "BlockFile",
    "BlockFileWriter",
    "BlockMeta",
    "EngineSidecarClient",
    "KVSidecarClient",
    "MappedArena",
    "check_head",
    "context_files",
    "file_meta",
    "new_checksum",
    "next_files",
    "open_arena",
    "pack_token_ids",
    "parse_block_file",
    "populate",
    "restorable_tokens",
    "unpack_token_ids",
    "with_files",
]

SERVICE_NAME = "contextcache.v1.KVSidecarService"
TIER_NAMES: dict[pb.Tier.ValueType, str] = {
    pb.TIER_UNSPECIFIED: "none",
    pb.TIER_HOST: "host",
    pb.TIER_DISK: "disk",
    pb.TIER_PEER: "peer",
    pb.TIER_OBJECT: "object",
}
"""Names of the tiers in `usage.context.source`."""

PULL_OUTCOMES: dict[int, str] = {pb.PULL_OUTCOME_STARTED: "started", pb.PULL_OUTCOME_PRESENT: "present"}
"""Names of a pull's outcomes in metrics; any other is `refused`."""

Answer = TypeVar("Answer")
_Method: TypeAlias = Callable[
    [pb_grpc.KVSidecarServiceStub],
    "grpc.UnaryUnaryMultiCallable[Any, Answer] | grpc.StreamUnaryMultiCallable[Any, Answer]",
]


class KVSidecarClient(ServiceClient):
    """Client of the gateway and the turn process. Connects at the first call, in the event loop of that call."""

    def __init__(self, address: str, *, timeout_s: float = 2.0, tls: WatchedTls | None = None) -> None:
        """`address` is `host:port` or `unix:///path`; `timeout_s` bounds each call, plus its wait in the sidecar."""
        super().__init__(
            address, pb=pb, service=SERVICE_NAME, timeout_s=timeout_s, tls=tls, unavailable=SidecarUnavailable
        )

    async def wait_sealed(
        self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int, placements: Sequence[str] = ()
    ) -> SaveOutcome:
        """Return whether the manifest became durable within `timeout_ms`, and the reason if it never will.

        `placements`: carried out once it is durable.
        """
        fields = {"tenant": tenant, "cache_ref": cache_ref, "timeout_ms": timeout_ms, "placements": placements}
        answer = await self._call("WaitSealed", wait_ms=timeout_ms, **fields)
        placed = tuple([value_of(Placement, it) for it in answer.placements])
        return SaveOutcome(answer.sealed, answer.reason, value_of(Promise, answer.promise), placed)

    async def retain_context(
        self, tenant: TenantId, cache_refs: Sequence[CacheRef], *, retain_ms: int, pinned: bool
    ) -> Promise:
        """Ask for a minimum lifetime of the first sealed KV of these; return the promise or the reason against it."""
        answer = await self._call(
            "RetainContext", tenant=tenant, cache_refs=cache_refs, retain_ms=retain_ms, pinned=pinned
        )
        return value_of(Promise, answer.promise)

    async def get_manifest(self, tenant: TenantId, cache_ref: CacheRef) -> tuple[Manifest, str]:
        """Return the manifest, without its files, and the tier that would serve most of it. Raises CacheRefNotFound."""
        answer = await self._call("GetManifest", tenant=tenant, cache_ref=cache_ref)
        return value_of(Manifest, answer.manifest), TIER_NAMES.get(answer.tier, "none")

    async def touch_context(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Move the expiry of a session's manifests; return how many."""
        answer: pb.TouchContextResponse = await self._call(
            "TouchContext", tenant=tenant, session_id=session_id, expires_at_ms=expires_at_ms
        )
        return answer.num_manifests

    async def fork_context(
        self,
        tenant: TenantId,
        sources: Sequence[CacheRef],
        *,
        session_id: SessionId,
        cache_ref: CacheRef,
        expires_at_ms: int,
    ) -> ForkedKV | None:
        """Give a new context the KV of the first source that is here, or return None. Raises ContextDeleted."""
        answer = await self._call(
            "ForkContext",
            tenant=tenant,
            sources=sources,
            session_id=session_id,
            cache_ref=cache_ref,
            expires_at_ms=expires_at_ms,
        )
        return ForkedKV(answer.size_bytes, TIER_NAMES.get(answer.tier, "none")) if answer.forked else None

    async def delete_context(
        self,
        tenant: TenantId,
        *,
        session_id: SessionId = "",
        cache_refs: Sequence[CacheRef] = (),
        replaced: bool = False,
    ) -> int:
        """Delete all KV of a session, or of these refs; return the bytes freed on disk.

        `replaced`: newer generations have replaced the refs, and promised KV stays until its promise ends.
        """
        answer: pb.DeleteContextResponse = await self._call(
            "DeleteContext", tenant=tenant, session_id=session_id, cache_refs=cache_refs, replaced=replaced
        )
        return answer.freed_bytes

    async def interrupt_save(self, tenant: TenantId, cache_ref: CacheRef) -> None:
        """Have KV of a turn that ended without a commit, saved by now or later, stay for ten minutes."""
        await self._call("InterruptSave", tenant=tenant, cache_ref=cache_ref)

    async def pull_context(self, tenant: TenantId, cache_refs: Sequence[CacheRef], *, peer: str) -> str:
        """Have this sidecar fetch KV from a peer in the background; return `started`, `present` or `refused`."""
        answer = await self._call("PullContext", tenant=tenant, cache_refs=cache_refs, peer=peer)
        return PULL_OUTCOMES.get(answer.outcome, "refused")

    async def read_ahead(self, tenant: TenantId, cache_refs: Sequence[CacheRef]) -> None:
        """Bring the first sealed one of these into memory."""
        await self._call("ReadAhead", tenant=tenant, cache_refs=cache_refs)

    async def load_report(self, request_id: str, *, timeout_ms: int) -> LoadedKV | None:
        """Return the KV that the connector loaded for a request, or None without a report within `timeout_ms`."""
        try:
            answer = await self._call("GetLoadReport", wait_ms=timeout_ms, request_id=request_id, timeout_ms=timeout_ms)
        except CacheRefNotFound:
            return None
        report = answer.report
        return LoadedKV(
            failed=report.outcome == pb.LOAD_OUTCOME_FAILED,
            device_tokens=report.device_tokens,
            loaded_tokens=report.loaded_tokens,
            tier=TIER_NAMES.get(report.tier, "") if report.tier else "",
            restore_ms=report.restore_ms,
            reason=report.reason,
            compute_us_per_token=report.compute_us_per_token,
        )

    async def tenant_usage(self, tenant: TenantId) -> pb.GetTenantUsageResponse:
        """Return the bytes of a tenant here and their limit (0: none)."""
        answer: pb.GetTenantUsageResponse = await self._call("GetTenantUsage", tenant=tenant)
        return answer

    async def list_kept(self, tenant: TenantId, group: SessionId = "") -> list[KeptGroup]:
        """Return the KV of a tenant's plain requests, or of one conversation, most recently used first."""
        answer = await self._call("ListKept", tenant=tenant, group=group)
        return [value_of(KeptGroup, found) for found in answer.groups]

    async def stats(self, *, beginnings_after: int = 0) -> pb.StatsResponse:
        """Return contexts, blocks and bytes by tier, and beginnings after `beginnings_end` of a former answer."""
        answer: pb.StatsResponse = await self._call("Stats", beginnings_after=beginnings_after)
        return answer


class EngineSidecarClient:
    """For the connector's threads; safe to call from several at once.

    The first call opens the channel. If gRPC does not end a call at its deadline, the client abandons the call, and the
    next one opens a new channel. When the sidecar reads nothing, the old channel would keep the request of every later
    call too.

    The handshake and the calls of a save wait within their deadline for a sidecar that restarts. All other calls fail
    at once, also while gRPC backs off from a sidecar that is up again.
    """

    def __init__(self, address: str, *, timeout_s: float = 2.0) -> None:
        """`address` is `unix:///path` or `host:port`; `timeout_s` bounds calls that name no other deadline."""
        self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._open_line: _Line | None = None

    def handshake(self, fingerprint: str, fingerprint_json: str, rank: int, world_size: int) -> pb.HandshakeResponse:
        """Introduce one rank. Raises InvalidRequest."""
        request = pb.HandshakeRequest(
            fingerprint=fingerprint, fingerprint_json=fingerprint_json, rank=rank, world_size=world_size
        )
        return self._call(lambda stub: stub.Handshake, request, self._timeout_s, is_patient=True)

    def prepare_save(self, request: pb.PrepareSaveRequest, timeout_s: float) -> pb.PrepareSaveResponse:
        """Open a save; the answer names the files to send. Raises ContextDeleted, InvalidRequest, StorageFull."""
        return self._call(lambda stub: stub.PrepareSave, request, timeout_s, is_patient=True)

    def extend_save(self, request: pb.ExtendSaveRequest, timeout_s: float) -> pb.ExtendSaveResponse:
        """Add tokens to a save opened with `early`; the answer names the files to send.

        Raises SaveIncomplete when the save must be opened again with all tokens, ContextDeleted, InvalidRequest,
        StorageFull.
        """
        return self._call(lambda stub: stub.ExtendSave, request, timeout_s, is_patient=True)

    def lend_slots(self, request: pb.LendSlotsRequest, timeout_s: float) -> Sequence[pb.Slot]:
        """Return room in the arena for the first of the files asked for; none when there is none for now.

        Raises SaveIncomplete, ContextDeleted, SidecarUnavailable also when the arena is another by now.
        """
        return self._call(lambda stub: stub.LendSlots, request, timeout_s, is_patient=True).slots

    def return_slots(self, borrower: str, slot_ids: Sequence[int]) -> None:
        """Give back lent slots: the engine writes to them no more."""
        request = pb.ReturnSlotsRequest(borrower=borrower, slot_ids=slot_ids)
        self._call(lambda stub: stub.ReturnSlots, request, self._timeout_s)

    def save_blocks(self, requests: Iterator[pb.SaveBlocksRequest], timeout_s: float) -> pb.SaveBlocksResponse:
        """Send block files, in slots or in frames. Raises CorruptBlock, ContextDeleted, StorageFull, SaveIncomplete.

        SidecarUnavailable at once if the sidecar has gone: slots and saves end with it, so a wait brings nothing.
        """
        with child_span(f"{SERVICE_NAME}/SaveBlocks", kind=SpanKind.CLIENT):
            return self._ended(lambda stub: stub.SaveBlocks, requests, timeout_s, is_patient=False)

    def seal(self, cache_ref: CacheRef, rank: int, timeout_s: float) -> bool:
        """End this rank's save; True when the manifest is durable. Raises as `save_blocks`."""
        request = pb.SealRequest(cache_ref=cache_ref, rank=rank)
        return self._call(lambda stub: stub.Seal, request, timeout_s).sealed

    def abandon_save(self, tenant: TenantId, cache_ref: CacheRef, reason: str, *, started_at_ms: int) -> None:
        """Tell that this rank saves nothing under a name, and the reason: waiting readers then leave."""
        request = pb.AbandonSaveRequest(tenant=tenant, cache_ref=cache_ref, reason=reason, started_at_ms=started_at_ms)
        self._call(lambda stub: stub.AbandonSave, request, self._timeout_s)

    def get_manifest(
        self, tenant: TenantId, cache_ref: CacheRef, timeout_s: float
    ) -> tuple[Manifest, pb.Tier.ValueType]:
        """Return the manifest and the tier that would serve most of it.

        Raises CacheRefNotFound, CacheRefPending during its save or its pull from a peer or the shared store.
        """
        request = pb.GetManifestRequest(tenant=tenant, cache_ref=cache_ref, bring=True)
        answer = self._call(lambda stub: stub.GetManifest, request, timeout_s)
        return with_files(value_of(Manifest, answer.manifest)), answer.tier

    def resolve(self, request: pb.ResolveRequest, timeout_s: float) -> tuple[Manifest | None, pb.ResolveResponse]:
        """Return the stored KV that serves most of a prompt, None when there is none, and the answer with its reason.

        The sidecar waits inside the call for at most the longer of `wait_ms` and `pull_wait_ms`: `timeout_s` must
        exceed them.
        """
        answer = self._call(lambda stub: stub.Resolve, request, timeout_s)
        return with_files(value_of(Manifest, answer.manifest)) if answer.HasField("manifest") else None, answer

    def load_blocks(self, request: pb.LoadBlocksRequest, timeout_s: float) -> Iterator[pb.LoadBlocksResponse]:
        """Yield answers, each a block or, in slots, several (`more`); closing the iterator ends the stream.

        `end_load` ends the lease.

        Raises CacheRefNotFound, FingerprintMismatch, CorruptBlock: each is a miss.
        """
        with _mapped_errors():
            call: Any = self._line.stub.LoadBlocks(request, timeout=timeout_s, metadata=trace_metadata())
        try:
            with _mapped_errors():
                yield from call
        finally:
            call.cancel()

    def end_load(self, lease_id: str) -> None:
        """End a load's lease."""
        self._call(lambda stub: stub.EndLoad, pb.EndLoadRequest(lease_id=lease_id), self._timeout_s)

    def delete_context(self, tenant: TenantId, *, cache_refs: Sequence[CacheRef]) -> int:
        """Delete these in all tiers; return the bytes freed on disk. Later saves under their names are refused."""
        request = pb.DeleteContextRequest(tenant=tenant, cache_refs=cache_refs)
        return self._call(lambda stub: stub.DeleteContext, request, self._timeout_s).freed_bytes

    def report_load(self, report: pb.LoadReport, *, lease_id: str = "") -> None:
        """Report a request's load, for its answer's receipt, and end the load's lease."""
        self._call(
            lambda stub: stub.ReportLoad, pb.ReportLoadRequest(report=report, lease_id=lease_id), self._timeout_s
        )

    def close(self) -> None:
        """Close the connection; calls in flight fail."""
        with self._lock:
            self._is_closed = True
            line, self._open_line = self._open_line, None
        closing = None if line is None else line.close()
        if closing is not None:
            closing.join(self._timeout_s)

    @property
    def _line(self) -> _Line:
        with self._lock:
            if self._is_closed:
                raise SidecarUnavailable("the connection to the sidecar is closed")
            if self._open_line is None:
                self._open_line = _Line(self._address)
            return self._open_line

    def _call(self, method: _Method[Answer], request: Any, timeout_s: float, *, is_patient: bool = False) -> Answer:
        method_name = type(request).__name__.removesuffix("Request")
        with child_span(f"{SERVICE_NAME}/{method_name}", kind=SpanKind.CLIENT):
            return self._ended(method, request, timeout_s, is_patient=is_patient)

    def _ended(self, method: _Method[Answer], request: Any, timeout_s: float, *, is_patient: bool) -> Answer:
        """Make a call and return its answer. Raises ContextCacheError, `GRACE_S` after the deadline at the latest."""
        line = self._line
        with _mapped_errors():
            call: Any = method(line.stub).future(
                request, timeout=timeout_s, metadata=trace_metadata(), wait_for_ready=is_patient
            )
            try:
                # Asked for and not raised: gRPC raises the call itself, whose frames then refer to it. Such a cycle
                # keeps the frames of every caller, and a dead sidecar's arena mapped, until a garbage collection.
                error = call.exception(timeout=timeout_s + GRACE_S)
            except grpc.FutureTimeoutError as exc:
                call.cancel()
                self._leave(line)
                raise late_call() from exc
            if error is not None:
                raise error_from_rpc(error, unavailable=SidecarUnavailable) from error
            answer: Answer = call.result()
            return answer

    def _leave(self, line: _Line) -> None:
        """Have the next call open a new channel, unless another thread has done so."""
        with self._lock:
            if self._open_line is not line:
                return
            self._open_line = None
        line.close()


class _Line:
    """A channel and its stub."""

    def __init__(self, address: str) -> None:
        # Channels to one address share a connection otherwise, and a new one would get that which takes nothing.
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(address, options=options)
        self.stub = pb_grpc.KVSidecarServiceStub(self._channel)

    def close(self) -> threading.Thread | None:
        """Close the channel in a thread of its own, which ends when gRPC has ended the channel's calls.

        None: there is no thread to be had, and the channel stays open until the process ends.
        """
        closing = threading.Thread(target=self._channel.close, name="sidecar-line-closes", daemon=True)
        try:
            closing.start()
        except RuntimeError:
            return None
        return closing


class _mapped_errors:  # noqa: N801  # reads as a verb where it is used: with _mapped_errors()
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> Literal[False]:
        if isinstance(exc, grpc.RpcError):
            raise error_from_rpc(exc, unavailable=SidecarUnavailable) from exc
        if isinstance(exc, ValueError | grpc.FutureCancelledError):
            # grpc raises these for a call on a channel that another thread has closed.
            raise SidecarUnavailable("the connection to the sidecar is closed") from exc
        return False
