"""A kv-sidecar in memory with the calls the connector makes, and faults on demand.

Holds to the same expectations as the real one: tests/vllm/test_connector_sidecar.py runs one suite on both.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import grpc
import numpy as np
from typing_extensions import override

from contextcache.errors import (
    CacheRefNotFound,
    CacheRefPending,
    ContextDeleted,
    FingerprintMismatch,
    InvalidRequest,
    SaveIncomplete,
    SidecarUnavailable,
    StorageFull,
)
from contextcache.model import KVGroup, Manifest, plain_group
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import value_of
from kv_sidecar.client import EngineSidecarClient, parse_block_file, with_files
from kv_sidecar.format.ids import BlockKey, unpack_token_ids
from kv_sidecar.format.manifest import rank_keys
from kv_sidecar.resolve import Resolution
from kv_sidecar.tiers.memory import Memory, Place, Slot
from vllm_plugin.connector.metadata import common_prefix
from vllm_plugin.connector.sidecar_link import Arena


class FailedCall(grpc.RpcError):
    """What gRPC says of a call that failed; without anything `told` nobody answered."""

    def __init__(self, status: grpc.StatusCode, *told: tuple[str, str]) -> None:
        self._status, self._told = status, told

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._status

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what the other end told."""
        return self._told


class FakeArena(Arena):
    """A sidecar's memory, in the same process."""

    def __init__(self, memory: Memory) -> None:
        self.borrower = "engine"
        self._memory = memory
        self.size_bytes = memory.region.size_bytes
        memory.borrowers.add(self.borrower)

    @override
    def view(self, offset, size_bytes):
        if not 0 <= offset <= offset + size_bytes <= self._memory.region.size_bytes:
            raise ValueError("outside the arena")
        return self._memory.region.view[offset : offset + size_bytes]

    @override
    def generation(self, offset):
        return self._memory.region.generation(offset)


class FakeSidecar(EngineSidecarClient):
    """One instance serves all clients of an engine."""

    def __init__(self, *, block_tokens: int = 64, arena_bytes: int = 16 << 20) -> None:
        """`arena_bytes` 0: it shares no memory."""
        self.block_tokens = block_tokens
        self.memory = Memory(limit_bytes=arena_bytes)
        self.memory.open()
        self.arena = FakeArena(self.memory) if arena_bytes else None
        """What its engines see of the memory; None: nothing."""
        self.files: dict[str, bytes] = {}
        """Block files by block id or cache_ref, with a group in the end where there are several."""
        self.manifests: dict[str, Manifest] = {}
        self.reports: dict[str, pb.LoadReport] = {}
        self.leases: set[str] = set()
        """Of loads that were begun and not ended."""
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)
        """Copies in the arena, by the lease that keeps them."""
        self._memory_lock = threading.RLock()
        self.abandoned: dict[str, str] = {}
        """Why nothing was saved, by cache_ref."""
        self.handshakes: list[str] = []
        self.prepared: dict[str, Manifest] = {}
        self.asked_promises: dict[str, set[tuple[int, bool]]] = {}
        self.asked_placements: dict[str, set[tuple[str, ...]]] = {}
        """Promises (lifetime in ms, pinned) that the announcements of each save asked for."""
        self.prepare_timeouts_s: list[float] = []
        self.early: set[str] = set()
        """Open saves of which more tokens follow."""
        self.sent_token_bytes = 0
        self.early_tokens: list[int] = []
        """Of each announcement ahead of a save."""
        self.deleted: set[str] = set()
        self.pulling: set[str] = set()
        """cache_refs on their way from a peer."""
        self.limit_passed = threading.Event()
        """Set: a question has waited as long as it may."""
        self.coming_ms = 0
        """Announced when that is so; the next question waits anew."""
        self.questions: list[pb.ResolveRequest] = []
        self.served_bytes = 0
        self.down = False
        self.block_size_bytes_max = 1 << 30
        self.hang: dict[str, threading.Event] = {}
        """A call of this name waits for the event, or for its deadline."""
        self.timeout_s = 30.0
        self._arrived_lock = threading.Lock()
        self._arrived: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    @override
    def handshake(self, fingerprint, fingerprint_json, rank, world_size):
        self._arrive("handshake")
        self.handshakes.append(fingerprint)
        return pb.HandshakeResponse(
            block_tokens=self.block_tokens,
            block_size_bytes_max=self.block_size_bytes_max,
            arena=self.arena is not None,
        )

    @override
    def prepare_save(self, request, timeout_s):
        self._arrived_in_time("prepare_save", request, timeout_s)
        self.asked_promises.setdefault(request.cache_ref, set()).add((request.retain_ms, request.pinned))
        self.asked_placements.setdefault(request.cache_ref, set()).add(tuple(request.placements))
        token_ids = unpack_token_ids(request.token_ids)
        groups = tuple(value_of(KVGroup, group) for group in request.groups)
        manifest = with_files(
            Manifest(
                cache_ref=request.cache_ref,
                tenant=request.tenant,
                session_id=request.session_id,
                fingerprint=request.fingerprint,
                token_ids=token_ids,
                groups=groups or (plain_group(len(token_ids), self.block_tokens),),
                files=(),
                world_size=request.world_size,
                expires_at_ms=request.expires_at_ms,
            )
        )
        return pb.PrepareSaveResponse(
            missing_files=self._announce(manifest, early=request.early), num_files=len(manifest.files)
        )

    @override
    def extend_save(self, request, timeout_s):
        self._arrived_in_time("extend_save", request, timeout_s)
        known = self.prepared.get(request.cache_ref)
        if known is None or request.cache_ref not in self.early or request.first_token > len(known.token_ids):
            raise SaveIncomplete("no save with this cache_ref is open")
        new = unpack_token_ids(request.token_ids)
        if known.token_ids[request.first_token :] != new[: len(known.token_ids) - request.first_token]:
            raise InvalidRequest("the ranks sent different data for this cache_ref", param="cache_ref")
        token_ids = known.token_ids[: request.first_token] + new
        group = replace(known.groups[0], runs=((0, len(token_ids)),))
        manifest = with_files(replace(known, token_ids=token_ids, groups=(group,)))
        missing = self._announce(manifest, early=request.early, first_token=request.first_token)
        return pb.ExtendSaveResponse(missing_files=missing, num_files=len(manifest.files))

    def _arrived_in_time(
        self, call: str, request: pb.PrepareSaveRequest | pb.ExtendSaveRequest, timeout_s: float
    ) -> None:
        self.prepare_timeouts_s.append(timeout_s)
        self._arrive(call)
        self.sent_token_bytes += len(request.token_ids)
        if request.cache_ref in self.deleted:
            raise ContextDeleted("deleted")

    def _announce(self, manifest: Manifest, *, early: bool, first_token: int = 0) -> list[int]:
        """Open or extend a save; return the files that have to come."""
        if early:
            assert [group.kind for group in manifest.groups] == ["full_attention"]
            assert not any(file.kind == "tail" for file in manifest.files), "whole files alone go ahead"
            self.early.add(manifest.cache_ref)
            self.early_tokens.append(len(manifest.token_ids))
        else:
            self.early.discard(manifest.cache_ref)
            first_token = 0
        self.prepared[manifest.cache_ref] = manifest
        named = enumerate(zip(manifest.files, self._names(manifest), strict=True))
        return [
            index
            for index, (file, name) in named
            if file.end_token > first_token and (file.kind == "tail" or name not in self.files)
        ]

    @override
    def lend_slots(self, request, timeout_s):
        self._arrive("lend_slots")
        slots = []
        for index, size_bytes in zip(request.block_indices, request.sizes_bytes, strict=True):
            with self._memory_lock:
                lent = self.memory.lend(request.borrower, Place(request.cache_ref, request.rank, index), size_bytes)
            if lent is None:
                break
            slots.append(pb.Slot(offset=lent.slot.offset, size_bytes=size_bytes, slot_id=lent.slot_id))
        return slots

    @override
    def return_slots(self, borrower, slot_ids):
        self._arrive("return_slots")
        with self._memory_lock:
            self.memory.give_back(borrower, slot_ids)

    @override
    def save_blocks(self, requests, timeout_s):
        self._arrive("save_blocks")
        taken = pb.SaveBlocksResponse()
        for request in requests:
            for saved in request.slots:
                place = Place(request.cache_ref, request.rank, saved.block_index)
                with self._memory_lock:
                    slot = self.memory.hand_over(saved.slot_id, place)
                    data = bytes(self.memory.view(slot))
                    self.memory.free(slot)
                block = parse_block_file(data)
                block.verify()
                self.files[self._name(block.meta.key)] = data
                taken.num_blocks += 1
                taken.size_bytes += len(data)
        return taken

    @override
    def seal(self, cache_ref, rank, timeout_s):
        self._arrive("seal")
        if cache_ref in self.early:
            raise SaveIncomplete("more tokens follow")
        manifest = self.prepared.pop(cache_ref, None)
        if manifest is None or not set(self._names(manifest)) <= set(self.files):
            raise SaveIncomplete("blocks are missing")
        self.manifests[cache_ref] = manifest
        return True

    @override
    def abandon_save(self, tenant, cache_ref, reason, *, started_at_ms):
        self._arrive("abandon_save")
        self.abandoned[cache_ref] = reason

    def get_manifest(self, tenant, cache_ref, timeout_s):
        return self._found(tenant, cache_ref), pb.TIER_HOST

    def _found(self, tenant: str, cache_ref: str) -> Manifest:
        manifest = self.manifests.get(cache_ref)
        if cache_ref in self.pulling:
            raise CacheRefPending("on its way")
        if manifest is None or manifest.tenant != tenant:
            raise CacheRefNotFound("no manifest")
        return manifest

    @override
    def resolve(self, request, timeout_s):
        """Answer as kv_sidecar/resolve.py does, from what is here."""
        self._arrive("resolve")
        self.questions.append(request)
        best = Resolution(request)
        named, has_passed = list(request.cache_refs), False
        while any(self._is_pending(ref, request) for ref in named) and not (
            has_passed := self.limit_passed.wait(0.005)
        ):
            self._arrival("waiting").set()
        for ref in [*named, *self.manifests]:
            try:
                manifest = self._found(request.tenant, ref)
            except CacheRefPending as exc:
                best.reason = exc.code if best.manifest is None and ref in named else best.reason
                continue
            except CacheRefNotFound as exc:
                best.reason = exc.code if best.manifest is None and ref in named else best.reason
                best.missing += [ref] if ref in named else []
                continue
            is_worth_it = ref in named or request.tokens_min
            usable = common_prefix(np.asarray(manifest.token_ids), np.frombuffer(request.token_ids, "<u4").astype(int))
            if is_worth_it and (ref in named or usable >= best.num_usable + request.tokens_min) and best.take(manifest):
                break
        answer = pb.ResolveResponse(tier=pb.TIER_HOST, missing=best.missing)
        answer.reason = "" if best.manifest else best.reason
        if self.coming_ms and has_passed:  # also if another question has cleared the event meanwhile
            self.limit_passed.clear()
            answer.coming_ms = self.coming_ms
        return best.manifest, answer

    def _is_pending(self, ref: str, request: pb.ResolveRequest) -> bool:
        has_ended = ref in self.manifests or ref in self.deleted or ref in self.abandoned
        return ref in self.pulling or (ref in request.saving and not has_ended)

    @override
    def load_blocks(self, request, timeout_s) -> Iterator[pb.LoadBlocksResponse]:
        self._arrive("load_blocks")
        manifest = self._found(request.tenant, request.cache_ref)
        self.leases.add(request.lease_id)
        if manifest.fingerprint != request.fingerprint:
            raise FingerprintMismatch("other KV")
        names, answers, is_full = self._names(manifest), list[pb.LoadBlocksResponse](), False
        for index in self.answered_indices(request.block_indices):
            self._arrive("load_block")
            data = self.files[names[index]]
            self.served_bytes += len(data)
            if request.verify:
                parse_block_file(data).verify()
            slot = self._in_slot(request.lease_id, data if request.verify else self.slot_copy(data))
            if slot is None:
                is_full = True
                break
            tier = pb.TIER_DISK if request.verify else pb.TIER_HOST
            answers.append(pb.LoadBlocksResponse(block_index=index, tier=tier, slot=slot, checksum=self.vouched(data)))
        if answers:
            answers[0].more.extend(answers[1:])
            yield answers[0]
        if is_full:
            raise StorageFull("no room")

    @override
    def end_load(self, lease_id):
        self._arrive("end_load")
        self._end_lease(lease_id)

    def _end_lease(self, lease_id: str) -> None:
        self.leases.discard(lease_id)
        with self._memory_lock:
            for slot in self._slots.pop(lease_id, ()):
                self.memory.free(slot)

    def _in_slot(self, lease_id: str, data: bytes) -> pb.Slot | None:
        """Put a file where the engine sees it; None when there is no room."""
        with self._memory_lock:
            slot = self.memory.allocate(len(data))
            if slot is None:
                return None
            self._slots[lease_id].append(slot)
            self.memory.view(slot)[:] = data
        return pb.Slot(offset=slot.offset, size_bytes=slot.size_bytes, generation=slot.generation)

    @override
    def report_load(self, report, *, lease_id=""):
        self._arrive("report_load")
        self.reports[report.request_id] = report
        self._end_lease(lease_id)

    @override
    def close(self):
        return

    def vouched(self, data: bytes) -> str:
        """Return the checksum a manifest vouches for; tests whose manifest has seen other bytes replace this."""
        return parse_block_file(data).checksum

    def slot_copy(self, data: bytes) -> bytes:
        """Return what lies in the arena for a stored file; tests with a bad copy there replace this."""
        return data

    def answered_indices(self, asked: Sequence[int]) -> Sequence[int]:
        """Return which blocks a load is answered with; tests that want a liar replace this."""
        return asked

    def corrupt(self, cache_ref: str) -> None:
        """Flip a byte of the last block file of a context, its checksum kept."""
        name = self._names(self.manifests[cache_ref])[-1]
        data = bytearray(self.files[name])
        data[-1] ^= 0xFF
        self.files[name] = bytes(data)

    def token_ids_of(self, name: str) -> tuple[int, ...]:
        """Return the tokens in a stored file."""
        return parse_block_file(self.files[name]).meta.token_ids

    def _names(self, manifest: Manifest) -> list[str]:
        return [self._name(key) for key in rank_keys(manifest, 0)]

    def _name(self, key: BlockKey) -> str:
        """Return block id or cache_ref, and the group where there are several."""
        return key.file_name.partition(".r")[0]

    def forget(self, call: str) -> None:
        """Let `wait_for` wait for another such call."""
        self._arrival(call).clear()

    def wait_for(self, call: str) -> None:
        """Return once a thread is inside such a call."""
        assert self._arrival(call).wait(30)

    def _arrival(self, call: str) -> threading.Event:
        # Two threads that miss a key at once would each make an event.
        with self._arrived_lock:
            return self._arrived[call]

    def _arrive(self, call: str) -> None:
        self._arrival(call).set()
        if call in self.hang and not self.hang[call].wait(self.timeout_s):
            raise SidecarUnavailable("deadline_exceeded") from FailedCall(grpc.StatusCode.DEADLINE_EXCEEDED)
        if self.down:
            raise SidecarUnavailable("unavailable") from FailedCall(grpc.StatusCode.UNAVAILABLE)
