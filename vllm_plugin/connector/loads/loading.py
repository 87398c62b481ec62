"""One load: block files from the sidecar into the engine's blocks. Runs in a transfer thread, never in a step.

Whatever goes wrong, the request's id is reported, and only after this thread has stopped writing to its blocks:
from then on the engine may compute into them or give them to somebody else.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from opentelemetry.trace import Span, get_current_span

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, CorruptBlock, SidecarUnavailable
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import NO_TRACER, Tracer, fail
from kv_sidecar.client import check_head, new_checksum, parse_block_file
from vllm_plugin.connector.copies.pages import Fence, PageCopy, PagedLayers, page_bytes
from vllm_plugin.connector.metadata import LoadPlan, Piece
from vllm_plugin.connector.reporting import Reporter
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, RankLink, Terms
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import ResultBox
from vllm_plugin.crash_points import BEFORE_LOAD, BETWEEN_LOADED_BLOCKS

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 2
"""Block files that one load copies and compares at a time: two threads copy nearly twice as fast as one."""
_COPY_AHEAD = 4
"""Those, and as many that wait for their turn."""


@dataclass(slots=True)
class _Progress:
    """What has been injected so far."""

    size_bytes: int = 0
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED
    terms: Terms | None = None
    """Terms under which it is injected; None: not known yet."""
    lease_id: str = ""
    """Of slots that are not read any more, but whose lease nobody has ended."""


class LoadEnd:
    """Who says how a load has ended: the thread that carries it out, or the engine's when that thread hangs.

    A sidecar can keep a load for ever. The engine takes its blocks back then, but never while somebody writes to them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held for a few lines only."""
        self._num_writing = 0
        self.is_claimed = False
        """Whether it was said."""

    def claim(self) -> bool:
        """Return True once, for the first; False while a thread of the load's is writing. Never waits."""
        with self._lock:
            if self._num_writing or self.is_claimed:
                return False
            self.is_claimed = True
            return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the end from being claimed meanwhile. Raises SidecarUnavailable when it was."""
        with self._lock:
            if self.is_claimed:
                raise SidecarUnavailable("the load was cancelled")
            self._num_writing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_writing -= 1


@dataclass(frozen=True, slots=True)
class Load:
    """A plan with what the worker adds to it."""

    plan: LoadPlan
    fence: Fence
    deadline_ms: int
    """On the worker's monotonic clock."""
    end: LoadEnd = field(default_factory=LoadEnd)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One whole block file."""

    block_index: int
    tier: pb.Tier.ValueType
    data: memoryview
    in_slot: bool
    vouched: str
    """Checksum the manifest vouches for; empty: it vouches for none."""


class Loader:
    """Carries out loads for one rank."""

    def __init__(  # noqa: PLR0913  # what a rank's threads share, by name
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
        self._readers = ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="context-cache-reads")
        """Bounded by the loads: each has at most `_COPY_AHEAD` files here."""

    def open(self, plan: LoadPlan, fence: Fence) -> Load:
        """Give a plan its deadline; it runs from now, waiting in the queue included."""
        size_bytes = sum(self._piece_bytes(piece) for piece in plan.pieces)
        allowed_ms = self._settings.load_deadline_ms + size_bytes // self._settings.load_bytes_per_ms_min
        return Load(plan, fence, self._clock.now_ms() + allowed_ms)

    def close(self) -> None:
        """Drop what waits to be read; what is being read ends by itself."""
        self._readers.shutdown(wait=False, cancel_futures=True)

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
            span.set_attribute("contextcache.size_bytes", progress.size_bytes)
            self._succeed(load, progress)
        self._end_lease(progress)

    def _end_lease(self, progress: _Progress) -> None:
        lease_id, progress.lease_id = progress.lease_id, ""
        if lease_id:
            self._reporter.end_load(lease_id)

    def fail(self, load: Load, reason: str) -> None:
        """Hand the request back to be computed, unless its end was told or a thread is writing to its blocks.

        Never waits: the engine's thread calls it for loads that never ran, or that hang.
        """
        if not load.end.claim():
            return
        plan = load.plan
        self._counters.add("failed_loads", reason)
        fail(get_current_span(), reason)
        self._results.end_load(plan.engine_request_id, is_failed=True)
        log.warning("load failed", extra={"cache_ref": plan.cache_ref, "reason": reason})
        self._report(plan, pb.LOAD_OUTCOME_FAILED, _Progress(), reason)

    def _succeed(self, load: Load, progress: _Progress) -> None:
        if not load.end.claim():
            return
        self._counters.add("loads")
        self._counters.add("loaded_bytes", amount=progress.size_bytes)
        self._results.end_load(load.plan.engine_request_id)
        self._report(load.plan, pb.LOAD_OUTCOME_LOADED, progress, "")

    def _copy(self, load: Load, progress: _Progress) -> None:
        terms = progress.terms = self._link.terms()
        crash_point(BEFORE_LOAD)
        try:
            for pieces in self._batches(load.plan.pieces, terms.arena):
                self._copy_pieces(terms, load, progress, pieces)
        except CorruptBlock as exc:
            if terms.arena is None:
                raise
            # A copy in memory is bad, or a file on disk, and would be at every load. In frames the sidecar compares
            # the bytes: it drops the one and serves the disk's, or puts the other aside.
            log.warning("load repeated in frames", extra={"cache_ref": load.plan.cache_ref})
            self._counters.add("renewed_loads")
            self._end_lease(progress)
            progress.size_bytes, progress.tier = 0, pb.TIER_UNSPECIFIED
            try:
                self._copy_pieces(replace(terms, arena=None), load, progress, load.plan.pieces)
            except ContextCacheError:
                raise exc from None

    def _batches(self, pieces: Sequence[Piece], arena: Arena | None) -> Iterator[Sequence[Piece]]:
        """Yield all pieces at once; of a context that the arena cannot hold, as many as a quarter of it has room for.

        Each batch has a lease of its own: what was copied makes room for what comes after the next one.
        """
        sizes = [self._piece_bytes(piece) for piece in pieces]
        limit_bytes = arena.size_bytes // 4 if arena is not None and sum(sizes) > arena.size_bytes else sum(sizes)
        start, size_bytes = 0, 0
        for index, size in enumerate(sizes):
            if index > start and size_bytes + size > limit_bytes:
                yield pieces[start:index]
                start, size_bytes = index, 0
            size_bytes += size
        yield pieces[start:]

    def _copy_pieces(self, terms: Terms, load: Load, progress: _Progress, asked: Sequence[Piece]) -> None:
        """Copy pieces, in place under a lease until they are copied.

        A few files are copied and compared at once. All have ended when this returns or raises: a thread that wrote
        later would write into blocks that are somebody else's.
        """
        plan = load.plan
        pieces, lease_id = {piece.block_index: piece for piece in asked}, secrets.token_hex(16)
        request = pb.LoadBlocksRequest(
            tenant=plan.tenant,
            cache_ref=plan.cache_ref,
            fingerprint=plan.fingerprint,
            rank=self._link.facts.rank,
            block_indices=list(pieces),
            borrower="" if terms.arena is None else terms.arena.borrower,
            lease_id=lease_id,
            lease_ms=max(int(self._remaining_s(load) * 1000), 1),
        )
        copying = deque[tuple[Piece, _Arrival, Future[None]]]()
        answers = self._link.sidecar.get().load_blocks(request, self._remaining_s(load))
        try:
            for arrival in self._arrivals(answers, terms):
                self._remaining_s(load)
                piece = pieces.pop(arrival.block_index, None)
                if piece is None:
                    raise CorruptBlock("the sidecar sent a block that was not requested")
                copying.append((piece, arrival, self._readers.submit(self._inject, load, piece, arrival)))
                # What came in frames is held whole: one at a time.
                while len(copying) >= (_COPY_AHEAD if arrival.in_slot else 1):
                    self._took(load, progress, *copying.popleft())
            while copying:
                self._took(load, progress, *copying.popleft())
        finally:
            # One that was cancelled by somebody else is never said to be done.
            wait([future for _, _, future in copying if not future.cancel()])
            if len(asked) < len(plan.pieces):  # the next batch needs their room
                with suppress(ContextCacheError):
                    self._link.sidecar.get().end_load(lease_id)
            else:
                progress.lease_id = lease_id
        if pieces:
            raise CorruptBlock("the sidecar sent fewer blocks than requested")

    def _took(self, load: Load, progress: _Progress, piece: Piece, arrival: _Arrival, future: Future[None]) -> None:
        """Note a block file that was injected, once it is."""
        future.result()
        crash_point(BETWEEN_LOADED_BLOCKS)
        progress.tier = max(progress.tier, arrival.tier)
        progress.size_bytes += self._piece_bytes(piece)
        self._remaining_s(load)

    def _arrivals(self, answers: Iterator[pb.LoadBlocksResponse], terms: Terms) -> Iterator[_Arrival]:
        """Yield block files as they come, whole: in slots, or put together from frames."""
        data = bytearray()
        for answer in answers:
            arrive = partial(_Arrival, answer.block_index, answer.tier, vouched=answer.checksum)
            if answer.WhichOneof("payload") == "slot":
                yield arrive(self._slot(answer.slot, terms.arena), in_slot=True)
                continue
            data += answer.frame
            if len(data) > terms.block_size_bytes_max:
                raise CorruptBlock("the sidecar sent more bytes than a block has")
            if answer.last_frame:
                yield arrive(memoryview(data), in_slot=False)
                data = bytearray()

    @staticmethod
    def _slot(slot: pb.Slot, arena: Arena | None) -> memoryview:
        try:
            return memoryview(b"") if arena is None else arena.view(slot.offset, slot.size_bytes)
        except ValueError as exc:
            raise CorruptBlock("the sidecar named an offset outside its arena") from exc

    def _inject(self, load: Load, piece: Piece, arrival: _Arrival) -> None:
        """Copy one file's pages into the engine's blocks, and compare every byte where it has been copied from.

        In that order, so that a slot that became somebody else's before it was copied is noticed: the lease of a
        process that was stopped ends without it.
        """
        expected, group = load.plan.meta(piece, self._link.facts.rank), piece.file.group
        block = parse_block_file(arrival.data)
        check_head(block.meta, block.checksum, expected, vouched=arrival.vouched)
        if (block.pages.nbytes, block.codec) != self._layers.stored(group, piece.num_pages, piece.num_full):
            raise CorruptBlock("the block's pages have a different size or codec than this engine")
        checksum = new_checksum()
        with load.end.writing():
            pages, first = block.pages, piece.first_page
            copy = PageCopy(group, piece.block_ids, pages, piece.num_pages, first, load.fence, piece.num_full)
            self._layers.scatter(copy, copied=checksum.update)
        if checksum.hexdigest() != block.checksum:
            raise CorruptBlock("the block's checksum is wrong")

    def _piece_bytes(self, piece: Piece) -> int:
        return len(piece.block_ids) * page_bytes(self._layers.shapes[piece.file.group])

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
