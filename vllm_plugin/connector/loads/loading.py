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
from typing import NamedTuple

from opentelemetry.trace import Span, get_current_span

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.phases import Phases
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import NO_TRACER, Tracer, fail
from kv_sidecar.client import BlockFile, check_head, parse_block_file
from vllm_plugin.connector.copies.pages import Fence, PageCopy, PagedLayers, Spent
from vllm_plugin.connector.metadata import LoadPlan, Piece
from vllm_plugin.connector.reporting import Reporter
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, RankLink, Terms
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import ResultBox
from vllm_plugin.crash_points import BEFORE_LOAD, BETWEEN_LOADED_BLOCKS

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 2
"""Parts of loads that are copied at once: two threads copy nearly twice as fast as one."""
_ROOM_WAIT_MS = 500
"""Longest wait in the sidecar for room. Other loads hold it for some 20 ms. Without room, the request is computed."""
_PARTS_AHEAD = 4
"""Parts of one load that are copied or wait for a thread."""


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


@dataclass(slots=True)
class _Progress:
    """State of a load's copies."""

    size_bytes: int = 0
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED
    terms: Terms | None = None
    """Terms of the link under which it is copied; None: not known yet."""
    lease_id: str = ""
    """Lease of slots that are copied; the report ends it."""
    is_full: bool = False
    """Whether the arena had no room for the rest of the last call's files."""
    first_slot_s: float = 0.0
    """Wait for the sidecar's first answer."""
    spent: Spent = field(default_factory=Spent)


class _Arrival(NamedTuple):
    """A file in a slot, and the copy it is for."""

    piece: Piece
    answer: pb.LoadBlocksResponse
    block: BlockFile
    copy: PageCopy


class Loader:
    """Carries out loads for one rank."""

    def __init__(  # noqa: PLR0913  # parts that a rank's threads share, by name
        self,
        *,
        settings: ConnectorSettings,
        link: RankLink,
        layers: PagedLayers,
        results: ResultBox,
        reporter: Reporter,
        counters: Counters,
        clock: Clock,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._tracer = tracer
        self._settings = settings
        self._link = link
        self._layers = layers
        self._results = results
        self._reporter = reporter
        self._counters = counters
        self._clock = clock
        self._copiers = ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="context-cache-reads")
        """Bounded by the loads: each has at most `_PARTS_AHEAD` parts here."""

    def open(self, plan: LoadPlan, fence: Fence) -> Load:
        """Give a plan its deadline; it runs from now, waiting in the queue included."""
        size_bytes = sum(self._piece_bytes(piece) for piece in plan.pieces)
        allowed_ms = self._settings.load_deadline_ms + size_bytes // self._settings.load_bytes_per_ms_min
        return Load(plan, fence, self._clock.now_ms() + allowed_ms)

    def close(self) -> None:
        """Drop parts that wait to be copied; a part that is being copied ends by itself."""
        self._copiers.shutdown(wait=False, cancel_futures=True)

    def run(self, load: Load) -> None:
        """Load, then report: first to the engine, then to the sidecar. Raises nothing."""
        plan = load.plan
        with self._tracer.continued("connector load", parent=plan.traceparent) as span:
            span.set_attribute("contextcache.rank", self._link.facts.rank)
            span.set_attribute("contextcache.cache_ref", plan.cache_ref)
            span.set_attribute("contextcache.loaded_tokens", plan.loaded_tokens)
            self._run(load, span)

    def _run(self, load: Load, span: Span) -> None:
        progress = _Progress()
        try:
            self._copy(load, progress)
        except ContextCacheError as exc:
            self._link.doubt(exc, progress.terms)
            late = self._clock.now_ms() >= load.deadline_ms
            self.fail(load, "load_deadline" if late else exc.code)
        except OSError:
            self.fail(load, "read_error")
        except Exception:
            # The engine waits for this id for ever: no fault of ours may keep it.
            log.exception("load failed unexpectedly", extra={"cache_ref": load.plan.cache_ref})
            self.fail(load, "internal_error")
        else:
            self._succeed(load, progress, span)
        self._end_lease(progress)

    def _end_lease(self, progress: _Progress) -> None:
        lease_id, progress.lease_id = progress.lease_id, ""
        if lease_id:
            self._reporter.end_load(lease_id)

    def fail(self, load: Load, reason: str) -> None:
        """Hand the request back to be computed: now, or when the last thread stops writing to its blocks.

        Never waits: the engine's thread calls it for loads that never ran, or that hang.
        """
        if load.end(reason):
            self._tell_failed(load)

    def _tell_failed(self, load: Load) -> None:
        plan = load.plan
        self._counters.add("failed_loads", load.reason)
        fail(get_current_span(), load.reason)
        self._results.end_load(plan.engine_request_id, is_failed=True)
        log.warning("load failed", extra={"cache_ref": plan.cache_ref, "reason": load.reason})
        self._report(plan, pb.LOAD_OUTCOME_FAILED, _Progress(), load.reason)

    def _succeed(self, load: Load, progress: _Progress, span: Span) -> None:
        if not load.end(""):
            return
        spent = progress.spent
        steps = {"submit": spent.submit_s, "gil": spent.gil_s, "copy": spent.copy_s, "verify": spent.verify_s}
        for name, seconds in (steps | {"first_slot": progress.first_slot_s}).items():
            span.set_attribute(f"contextcache.{name}_ms", round(seconds * 1000, 3))
        span.set_attribute("contextcache.size_bytes", progress.size_bytes)
        self._counters.add("loads")
        self._counters.add("loaded_bytes", amount=progress.size_bytes)
        self._results.end_load(load.plan.engine_request_id)
        self._report(load.plan, pb.LOAD_OUTCOME_LOADED, progress, "")

    def _copy(self, load: Load, progress: _Progress) -> None:
        progress.terms = self._link.terms()
        arena = progress.terms.arena
        if arena is None:
            raise StorageFull("the sidecar has no arena")
        crash_point(BEFORE_LOAD)
        try:
            self._copy_all(arena, load, progress, verify=False)
        except CorruptBlock as exc:
            # A copy in memory is bad, or a file on disk, and would be at every load: the sidecar drops or quarantines
            # it when it compares.
            log.warning("load repeated after a comparison", extra={"cache_ref": load.plan.cache_ref})
            self._counters.add("renewed_loads")
            self._end_lease(progress)
            progress.size_bytes, progress.tier = 0, pb.TIER_UNSPECIFIED
            try:
                self._copy_all(arena, load, progress, verify=True)
            except ContextCacheError:
                raise exc from None

    def _copy_all(self, arena: Arena, load: Load, progress: _Progress, *, verify: bool) -> None:
        """Copy all pieces. Where the arena has no room for the rest, copied pieces make room. Raises StorageFull."""
        for batch in self._batches(load.plan.pieces, arena):
            asked = batch
            while asked:
                left = self._copy_pieces(arena, load, progress, asked, verify=verify)
                if len(left) == len(asked):
                    raise StorageFull("the arena has no room for a block that is on disk")
                asked = left

    def _batches(self, pieces: Sequence[Piece], arena: Arena) -> Iterator[Sequence[Piece]]:
        """Yield all pieces at once; of a context that the arena cannot hold, as many as a quarter of it has room for.

        Each batch has a lease of its own, so that its slots make room for the batch after the next one.
        """
        sizes = [self._piece_bytes(piece) for piece in pieces]
        limit_bytes = arena.size_bytes // 4 if sum(sizes) > arena.size_bytes else sum(sizes)
        start, size_bytes = 0, 0
        for index, size in enumerate(sizes):
            if index > start and size_bytes + size > limit_bytes:
                yield pieces[start:index]
                start, size_bytes = index, 0
            size_bytes += size
        yield pieces[start:]

    def _copy_pieces(
        self, arena: Arena, load: Load, progress: _Progress, asked: Sequence[Piece], *, verify: bool
    ) -> Sequence[Piece]:
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
            rank=self._link.facts.rank,
            block_indices=list(pieces),
            borrower=arena.borrower,
            lease_id=lease_id,
            lease_ms=max(int(self._remaining_s(load) * 1000), 1),
            verify=verify,
            room_wait_ms=min(_ROOM_WAIT_MS, int(self._remaining_s(load) * 500)),
        )
        copying = deque[tuple[Future[None], Sequence[_Arrival]]]()
        progress.is_full = False
        try:
            for files in self._answers(request, load, progress):
                arrivals = [self._arrival(arena, load, pieces, file) for file in files]
                for start in range(0, len(arrivals), self._layers.files_at_once):
                    part = arrivals[start : start + self._layers.files_at_once]
                    copying.append((self._copiers.submit(self._write, arena, load, part, progress.spent), part))
                    while len(copying) >= _PARTS_AHEAD:
                        self._took(load, progress, *copying.popleft())
            while copying:
                self._took(load, progress, *copying.popleft())
        finally:
            # A future that another thread cancelled never ends.
            wait([future for future, _ in copying if not future.cancel()])
            if progress.is_full or len(asked) < len(plan.pieces):  # the next call needs their room
                with suppress(ContextCacheError):
                    self._link.sidecar.get().end_load(lease_id)
            else:
                progress.lease_id = lease_id
        if pieces and not progress.is_full:
            raise CorruptBlock("the sidecar named fewer blocks than requested")
        return list(pieces.values())

    def _answers(
        self, request: pb.LoadBlocksRequest, load: Load, progress: _Progress
    ) -> Iterator[Sequence[pb.LoadBlocksResponse]]:
        """Yield files that are named together; end early, with a note, where the arena has no room for the next."""
        asked_s, is_first = time.perf_counter(), True
        try:
            for answer in self._link.sidecar.get().load_blocks(request, self._remaining_s(load)):
                if is_first:
                    progress.first_slot_s, is_first = progress.first_slot_s + time.perf_counter() - asked_s, False
                self._remaining_s(load)
                yield answer, *answer.more
        except StorageFull:
            progress.is_full = True

    def _took(self, load: Load, progress: _Progress, future: Future[None], part: Sequence[_Arrival]) -> None:
        """Note files that are copied, once they are."""
        future.result()
        crash_point(BETWEEN_LOADED_BLOCKS)
        progress.tier = max(progress.tier, *(arrival.answer.tier for arrival in part))
        progress.size_bytes += sum(self._piece_bytes(arrival.piece) for arrival in part)
        self._remaining_s(load)

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
        expected = load.plan.meta(piece, self._link.facts.rank)
        check_head(block.meta, block.checksum, expected, vouched=answer.checksum)
        if (block.pages.nbytes, block.codec) != self._layers.stored(group, piece.num_pages, piece.num_full):
            raise CorruptBlock("the block's pages have a different size or codec than this engine")
        is_digested = self._layers.makes_digests and len(block.digests) == piece.num_pages
        copy = PageCopy(
            group,
            piece.block_ids,
            block.pages,
            piece.num_pages,
            piece.first_page,
            load.fence,
            piece.num_full,
            "digests" if is_digested else "checksum",
        )
        return _Arrival(piece, answer, block, copy)

    def _write(self, arena: Arena, load: Load, part: Sequence[_Arrival], spent: Spent) -> None:
        """Copy files' pages into the engine's blocks, then compare. Raises CorruptBlock.

        In that order, so that a slot that was lent to another writer before it was copied is noticed.
        """
        load.begin_writing()
        try:
            landed = self._layers.scatter([arrival.copy for arrival in part], spent)
        finally:
            if load.stop_writing():
                self._tell_failed(load)
        for (_, answer, block, copy), proof in zip(part, landed, strict=True):
            moved = slice(copy.first_page, copy.first_page + len(copy.block_ids))
            found = proof.digests if copy.proof == "digests" else proof.checksum
            expected = block.digests[moved] if copy.proof == "digests" else block.checksum
            if found != expected:
                raise CorruptBlock("the block's digest or checksum is wrong")
            if arena.generation(answer.slot.offset) != answer.slot.generation:
                raise CorruptBlock("the slot was lent to another writer")

    def _piece_bytes(self, piece: Piece) -> int:
        return len(piece.block_ids) * sum(self._layers.planes[piece.file.group])

    def _remaining_s(self, load: Load) -> float:
        remaining_ms = load.deadline_ms - self._clock.now_ms()
        if remaining_ms <= 0:
            raise SidecarUnavailable("the load reached its deadline")
        return remaining_ms / 1000

    def _report(self, plan: LoadPlan, outcome: pb.LoadOutcome.ValueType, progress: _Progress, reason: str) -> None:
        if not plan.request_id:
            return
        lease_id, progress.lease_id = progress.lease_id, ""
        self._reporter.send(
            pb.LoadReport(
                request_id=plan.request_id,
                outcome=outcome,
                device_tokens=plan.device_tokens,
                loaded_tokens=plan.loaded_tokens if outcome == pb.LOAD_OUTCOME_LOADED else 0,
                tier=progress.tier,
                restore_ms=(time.monotonic() - plan.asked_at_s) * 1000,
                size_bytes=progress.size_bytes,
                reason=reason,
                rank=self._link.facts.rank,
                world_size=self._link.facts.world_size,
                compute_us_per_token=plan.compute_us_per_token,
            ),
            lease_id=lease_id,
        )
