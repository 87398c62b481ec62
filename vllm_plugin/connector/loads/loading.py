"""One load: block files from slots of the arena into the engine's blocks. Runs in a transfer thread, never in a step.

Every load ends once: the engine hears its request's id, well or badly, and only when no thread writes to its blocks.
From then on the engine may compute into them or give them to another request. States of a load: `PHASES`.

A file is copied first and compared behind its copy, by digests of the blocks where they landed or by the checksum of
the slot's bytes. The slot's generation is compared too: a process that was stopped loses its lease, and with it the
slot. Where something differs the load runs once more, and the sidecar compares every byte before it names a slot.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from opentelemetry.trace import get_current_span

from contextcache.errors import ContextCacheError, CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.phases import Phases
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import fail
from kv_sidecar.client import check_head, parse_block_file
from vllm_plugin.connector.copies.pages import Fence, Landed, PageCopy, Proof, Spent
from vllm_plugin.connector.metadata import LoadPlan, Piece
from vllm_plugin.connector.sidecar_link import Arena, Terms
from vllm_plugin.connector.transfer import RankParts
from vllm_plugin.crash_points import BEFORE_LOAD, BETWEEN_LOADED_BLOCKS

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 2
"""Parts of loads that are copied at once: two threads copy nearly twice as fast as one."""
_ROOM_WAIT_MS = 500
"""Longest wait in the sidecar for room. Other loads hold it for some 20 ms. Without room, the request is computed."""
_PARTS_AHEAD = 4
"""Parts of one load that are copied or wait for a thread."""
_PART_BYTES = 4 << 20
"""Size from which a part is copied by itself. Handing a part to a thread costs as much as copying 500 KiB."""


class LoadPhase(Enum):
    """Phase of a load in the worker."""

    QUEUED = "queued"
    """No thread writes to the blocks."""
    WRITING = "writing"
    """`num_writing` threads write to the blocks."""
    ABANDONED = "abandoned"
    """The load has failed, and a thread still writes: the blocks go back when it stops."""
    ENDED = "ended"
    """The engine has the blocks again."""


PHASES = Phases(
    [
        ((LoadPhase.QUEUED, LoadPhase.WRITING), "a thread begins to write", LoadPhase.WRITING),
        ((LoadPhase.WRITING,), "the last thread stops", LoadPhase.QUEUED),
        ((LoadPhase.WRITING,), "fail", LoadPhase.ABANDONED),
        ((LoadPhase.ABANDONED,), "the last thread stops", LoadPhase.ENDED),
        ((LoadPhase.QUEUED,), "fail", LoadPhase.ENDED),
        ((LoadPhase.QUEUED,), "succeed", LoadPhase.ENDED),
    ]
)


@dataclass(slots=True, eq=False)
class Load:
    """A plan with the worker's state of it. The lock is held for a few lines only."""

    plan: LoadPlan
    fence: Fence
    deadline_ms: int
    """Deadline on the worker's monotonic clock."""
    phase: LoadPhase = LoadPhase.QUEUED
    num_writing: int = 0
    reason: str = ""
    """Reason of a failure, a short fixed phrase."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    lease_id: str = ""
    """Lease of slots that are copied; the report ends it."""
    size_bytes: int = 0
    """Bytes of the files that the sidecar has named."""
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED
    first_slot_s: float = 0.0
    """Wait for the sidecar's first answer."""
    spent: Spent = field(default_factory=Spent)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is copied."""
        return self.phase in (LoadPhase.ABANDONED, LoadPhase.ENDED)

    def end(self, reason: str) -> bool:
        """Succeed, or fail for a reason; return whether the blocks are the engine's by this call. Never waits."""
        event = "fail" if reason else "succeed"
        with self.lock:
            if not PHASES.allows(self.phase, event):
                return False
            self.phase, self.reason = PHASES.after(self.phase, event), reason
            return self.phase is LoadPhase.ENDED

    def begin_writing(self) -> None:
        """Keep the blocks from going back. Raises SidecarUnavailable when the load is over."""
        event = "a thread begins to write"
        with self.lock:
            if not PHASES.allows(self.phase, event):
                raise SidecarUnavailable("the load was cancelled")
            self.phase, self.num_writing = PHASES.after(self.phase, event), self.num_writing + 1

    def stop_writing(self) -> bool:
        """Return whether the blocks are the engine's by this call: it had abandoned the load."""
        with self.lock:
            self.num_writing -= 1
            if not self.num_writing:
                self.phase = PHASES.after(self.phase, "the last thread stops")
            return self.phase is LoadPhase.ENDED


class _Arrival(NamedTuple):
    """A file in a slot, and the copy it is for."""

    copy: PageCopy
    expected: Landed
    """Proof of a copy of the right bytes."""
    slot: pb.Slot


@dataclass(eq=False, kw_only=True)
class Loader(RankParts):
    """Carries out loads for one rank."""

    _copiers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="context-cache-reads")
    )
    """Bounded by the loads: each has at most `_PARTS_AHEAD` parts here."""

    def open(self, plan: LoadPlan, fence: Fence) -> Load:
        """Give a plan its deadline; it runs from now, waiting in the queue included."""
        size_bytes = sum(map(self._piece_bytes, plan.pieces))
        allowed_ms = self.settings.load_deadline_ms + size_bytes // self.settings.load_bytes_per_ms_min
        return Load(plan, fence, self.clock.now_ms() + allowed_ms)

    def close(self) -> None:
        """Drop parts that wait to be copied; a part that is being copied ends by itself."""
        self._copiers.shutdown(wait=False, cancel_futures=True)

    def run(self, load: Load) -> None:
        """Load, then report: first to the engine, then to the sidecar. Raises nothing."""
        plan = load.plan
        terms: Terms | None = None
        with self.tracer.continued("connector load", parent=plan.traceparent) as span:
            span.set_attribute("contextcache.rank", self.link.facts.rank)
            span.set_attribute("contextcache.cache_ref", plan.cache_ref)
            span.set_attribute("contextcache.loaded_tokens", plan.loaded_tokens)
            try:
                terms = self.link.terms()
                self._copy(load, terms.arena)
            except ContextCacheError as exc:
                self.link.doubt(exc, terms)
                late = self.clock.now_ms() >= load.deadline_ms
                self.fail(load, "load_deadline" if late else exc.code)
            except OSError:
                self.fail(load, "read_error")
            except Exception:
                # The engine waits for this id for ever: no fault of ours may keep it.
                log.exception("load failed unexpectedly", extra={"cache_ref": plan.cache_ref})
                self.fail(load, "internal_error")
            else:
                if load.end(""):
                    self._tell(load)
            self._end_lease(load)

    def fail(self, load: Load, reason: str) -> None:
        """Hand the request back to be computed: now, or when the last thread stops writing to its blocks.

        Never waits: the engine's thread calls it for loads that never ran, or that hang.
        """
        if load.end(reason):
            self._tell(load)

    def _tell(self, load: Load) -> None:
        """Tell the engine, then the sidecar, of a load that has ended. Never waits."""
        plan, span, facts = load.plan, get_current_span(), self.link.facts
        report = pb.LoadReport(
            request_id=plan.request_id,
            outcome=pb.LOAD_OUTCOME_FAILED if load.reason else pb.LOAD_OUTCOME_LOADED,
            device_tokens=plan.device_tokens,
            reason=load.reason,
            rank=facts.rank,
            world_size=facts.world_size,
            compute_us_per_token=plan.compute_us_per_token,
        )
        lease_id = ""
        if load.reason:
            self.counters.add("failed_loads", load.reason)
            fail(span, load.reason)
            log.warning("load failed", extra={"cache_ref": plan.cache_ref, "reason": load.reason})
        else:
            spent = load.spent
            steps = {"submit": spent.submit_s, "gil": spent.gil_s, "copy": spent.copy_s, "verify": spent.verify_s}
            for name, seconds in (steps | {"first_slot": load.first_slot_s}).items():
                span.set_attribute(f"contextcache.{name}_ms", round(seconds * 1000, 3))
            span.set_attribute("contextcache.size_bytes", load.size_bytes)
            self.counters.add("loads")
            self.counters.add("loaded_bytes", amount=load.size_bytes)
            report.loaded_tokens, report.tier, report.size_bytes = plan.loaded_tokens, load.tier, load.size_bytes
            if plan.request_id:
                lease_id, load.lease_id = load.lease_id, ""
        self.results.end_load(plan.engine_request_id, is_failed=bool(load.reason))
        if plan.request_id:
            report.restore_ms = (time.monotonic() - plan.asked_at_s) * 1000
            self.reporter.send(report, lease_id=lease_id)

    def _end_lease(self, load: Load) -> None:
        lease_id, load.lease_id = load.lease_id, ""
        if lease_id:
            self.reporter.end_load(lease_id)

    def _copy(self, load: Load, arena: Arena | None) -> None:
        if arena is None:
            raise StorageFull("the sidecar has no arena")
        crash_point(BEFORE_LOAD)
        try:
            self._copy_all(arena, load, verify=False)
        except CorruptBlock as exc:
            # A copy in memory is bad, or a file on disk, and would be at every load: the sidecar drops or quarantines
            # it when it compares.
            log.warning("load repeated after a comparison", extra={"cache_ref": load.plan.cache_ref})
            self.counters.add("renewed_loads")
            self._end_lease(load)
            load.size_bytes, load.tier = 0, pb.TIER_UNSPECIFIED
            try:
                self._copy_all(arena, load, verify=True)
            except ContextCacheError:
                raise exc from None

    def _copy_all(self, arena: Arena, load: Load, *, verify: bool) -> None:
        """Copy all pieces. Where the arena has no room for the rest, copied pieces make room. Raises StorageFull.

        A context that the arena cannot hold is asked for in parts of a quarter of the arena, each under its own lease.
        The slots of a part then make room for the part after the next one.
        """
        left: Sequence[Piece] = load.plan.pieces
        size_bytes = sum(map(self._piece_bytes, left))
        limit_bytes = arena.size_bytes // 4 if size_bytes > arena.size_bytes else size_bytes
        while left:
            sizes = accumulate(map(self._piece_bytes, left))
            asked = left[: max(1, sum(size <= limit_bytes for size in sizes))]
            missing = self._copy_pieces(arena, load, asked, verify=verify)
            if len(missing) == len(asked):
                raise StorageFull("the arena has no room for a block that is on disk")
            left = [*missing, *left[len(asked) :]]

    def _copy_pieces(self, arena: Arena, load: Load, asked: Sequence[Piece], *, verify: bool) -> Sequence[Piece]:
        """Copy pieces under one lease; return those that the arena has no room for.

        Each answer names the slots that are at hand: all of them when they are in memory. All copies have ended when
        this returns or raises: a thread that wrote later would write into blocks that are another request's.
        """
        plan = load.plan
        pieces, lease_id = {piece.block_index: piece for piece in asked}, secrets.token_hex(16)
        request = pb.LoadBlocksRequest(
            tenant=plan.tenant,
            cache_ref=plan.cache_ref,
            fingerprint=plan.fingerprint,
            rank=self.link.facts.rank,
            block_indices=list(pieces),
            borrower=arena.borrower,
            lease_id=lease_id,
            lease_ms=max(int(self._remaining_s(load) * 1000), 1),
            verify=verify,
            room_wait_ms=min(_ROOM_WAIT_MS, int(self._remaining_s(load) * 500)),
        )
        copying = deque[Future[None]]()
        try:
            for part in self._parts(arena, load, pieces, request):
                copying.append(self._copiers.submit(self._write, arena, load, part))
                if len(copying) == _PARTS_AHEAD:
                    self._took(load, copying.popleft())
            while copying:
                self._took(load, copying.popleft())
        finally:
            # A future that another thread cancelled never ends.
            wait([future for future in copying if not future.cancel()])
            load.lease_id = lease_id
        if pieces or len(asked) < len(plan.pieces):  # the next call needs their room
            load.lease_id = ""
            with suppress(ContextCacheError):
                self.link.sidecar.end_load(lease_id)
        return list(pieces.values())

    def _took(self, load: Load, future: Future[None]) -> None:
        """Wait for a part that is copied."""
        future.result()
        crash_point(BETWEEN_LOADED_BLOCKS)
        self._remaining_s(load)

    def _parts(
        self, arena: Arena, load: Load, pieces: dict[int, Piece], request: pb.LoadBlocksRequest
    ) -> Iterator[Sequence[_Arrival]]:
        """Yield files that are copied together, as the sidecar names them; take their pieces from `pieces`.

        Ends early where the arena has no room for the next file. Raises CorruptBlock.
        """
        asked_s = time.perf_counter()
        try:
            for answer in self.link.sidecar.load_blocks(request, self._remaining_s(load)):
                load.first_slot_s = load.first_slot_s or time.perf_counter() - asked_s
                self._remaining_s(load)
                part, part_bytes = list[_Arrival](), 0
                for file in (answer, *answer.more):
                    part.append(self._arrival(arena, load, pieces, file))
                    part_bytes += part[-1].copy.pages.nbytes
                    if part_bytes >= _PART_BYTES and len(part) >= self.layers.files_at_once:
                        yield part
                        part, part_bytes = [], 0
                if part:
                    yield part
        except StorageFull:
            return
        if pieces:
            raise CorruptBlock("the sidecar named fewer blocks than requested")

    def _arrival(self, arena: Arena, load: Load, pieces: dict[int, Piece], answer: pb.LoadBlocksResponse) -> _Arrival:
        """Compare a file's head with the plan. Raises CorruptBlock."""
        if answer.WhichOneof("payload") != "slot":
            raise SidecarUnavailable("the sidecar knows no such borrower of its arena")
        piece = pieces.pop(answer.block_index, None)
        if piece is None:
            raise CorruptBlock("the sidecar named a block that was not requested")
        try:
            data = arena.view(answer.slot.offset, answer.slot.size_bytes)
        except ValueError as exc:
            raise CorruptBlock("the sidecar named an offset outside its arena") from exc
        block, group = parse_block_file(data), piece.file.group
        expected = load.plan.meta(piece, self.link.facts.rank)
        check_head(block.meta, block.checksum, expected, vouched=answer.checksum)
        if (block.pages.nbytes, block.codec) != self.layers.stored(group, piece.num_pages, piece.num_full):
            raise CorruptBlock("the block's pages have a different size or codec than this engine")
        is_digested = self.layers.makes_digests and len(block.digests) == piece.num_pages
        proof: Proof = "digests" if is_digested else "checksum"
        first, ids = piece.first_page, piece.block_ids
        copy = PageCopy(group, ids, block.pages, piece.num_pages, first, load.fence, piece.num_full, proof)
        landed = Landed(digests=block.digests[first : first + len(ids)]) if is_digested else Landed(block.checksum)
        load.size_bytes += self._piece_bytes(piece)
        load.tier = max(load.tier, answer.tier)
        return _Arrival(copy, landed, answer.slot)

    def _write(self, arena: Arena, load: Load, part: Sequence[_Arrival]) -> None:
        """Copy files' pages into the engine's blocks, then compare. Raises CorruptBlock.

        In that order, so that a slot that was lent to another writer before it was copied is noticed.
        """
        load.begin_writing()
        try:
            landed = self.layers.scatter([arrival.copy for arrival in part], load.spent)
        finally:
            if load.stop_writing():
                self._tell(load)
        for (_, expected, slot), proof in zip(part, landed, strict=True):
            if proof != expected:
                raise CorruptBlock("the block's digest or checksum is wrong")
            if arena.generation(slot.offset) != slot.generation:
                raise CorruptBlock("the slot was lent to another writer")

    def _piece_bytes(self, piece: Piece) -> int:
        return len(piece.block_ids) * sum(self.layers.planes[piece.file.group])

    def _remaining_s(self, load: Load) -> float:
        remaining_ms = load.deadline_ms - self.clock.now_ms()
        if remaining_ms <= 0:
            raise SidecarUnavailable("the load reached its deadline")
        return remaining_ms / 1000
