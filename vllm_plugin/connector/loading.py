"""One load: block files from the sidecar into the engine's blocks. Runs in a transfer thread, never in a step.

Whatever goes wrong, the request's id is reported, and only after this thread has stopped writing to its blocks:
from then on the engine may compute into them or give them to somebody else.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from opentelemetry.trace import Span, get_current_span

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, CorruptBlock, SidecarUnavailable
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import NO_TRACER, Tracer, fail
from kv_sidecar.client import BlockFile, open_block_file, parse_block_file
from vllm_plugin.connector.counters import Counters
from vllm_plugin.connector.layout import Fence, PagedLayers, page_bytes
from vllm_plugin.connector.metadata import LoadPlan, Piece
from vllm_plugin.connector.reporting import Reporter
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import RankLink, Terms
from vllm_plugin.connector.transfer import ResultBox
from vllm_plugin.crash_points import BEFORE_LOAD, BETWEEN_LOADED_BLOCKS

log = logging.getLogger(__name__)

_READS_AT_ONCE = 2
"""Block files that one load reads and compares at a time."""
_READ_AHEAD = 4
"""Those, and as many that wait for their turn."""


@dataclass(slots=True)
class _Progress:
    """What has been injected so far."""

    size_bytes: int = 0
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED


class LoadEnd:
    """Who says how a load has ended: the thread that carries it out, or the engine's when that thread hangs.

    A disk can keep a reader for ever. The engine's blocks are then taken back, but never while somebody writes to them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_claimed = False
        """Whether it was said."""

    def claim(self) -> bool:
        """Return True once, for the first; False while the load's thread is writing. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            is_first, self.is_claimed = not self.is_claimed, True
            return is_first
        finally:
            self._lock.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the end from being claimed meanwhile. Raises SidecarUnavailable when it was."""
        with self._lock:
            if self.is_claimed:
                raise SidecarUnavailable("the load was given up")
            yield


@dataclass(frozen=True, slots=True)
class Load:
    """A plan with what the worker adds to it."""

    plan: LoadPlan
    fence: Fence
    deadline_ms: int
    """On the worker's monotonic clock."""
    end: LoadEnd = field(default_factory=LoadEnd)
    lease_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Under which the sidecar keeps the blocks in place until we say that we have them."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One whole block file."""

    block_index: int
    tier: pb.Tier.ValueType
    open_file: Callable[[], BlockFile]
    """Raises FileNotFoundError when there is none under the name that came."""
    verify: bool
    """Whether the bytes are to be compared with the checksum, not only the metadata with the plan."""
    is_named: bool
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
        self._buffers = threading.local()
        self._readers = ThreadPoolExecutor(
            settings.load_threads * _READS_AT_ONCE, thread_name_prefix="context-cache-reads"
        )
        """Bounded by the loads: each has at most `_READ_AHEAD` files here."""

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
            if isinstance(exc, SidecarUnavailable):
                self._link.lost()
            late = self._clock.now_ms() >= load.deadline_ms
            self.fail(load, "load_deadline" if late else exc.code)
        except OSError:
            self.fail(load, "shared_memory_error")
        except Exception:
            # The engine waits for this id for ever: no fault of ours may keep it.
            log.exception("load broke", extra={"cache_ref": load.plan.cache_ref})
            self.fail(load, "internal_error")
        else:
            span.set_attribute("contextcache.size_bytes", progress.size_bytes)
            self._succeed(load, progress)

    def fail(self, load: Load, reason: str) -> None:
        """Hand the request back to be computed, unless its end was told or a thread is writing to its blocks.

        Never waits: the engine's thread calls it for loads that never ran, or that hang.
        """
        if not load.end.claim():
            return
        plan = load.plan
        self._counters.add("failed_loads", reason)
        fail(get_current_span(), reason)
        self._results.end_load(plan.engine_request_id, bad_block_ids=plan.block_ids)
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
        terms = self._link.terms()
        crash_point(BEFORE_LOAD)
        try:
            self._copy_by(terms, load, progress)
        finally:
            self._reporter.end_load(load.lease_id)

    def _copy_by(self, terms: Terms, load: Load, progress: _Progress) -> None:
        """Copy by name what the sidecar names, and in frames what was not there, or not right, under its name."""
        pieces = {piece.block_index: piece for piece in load.plan.pieces}
        in_frames = replace(terms, shared_directory=None, disk_directory=None)
        try:
            self._copy_pieces(terms, load, progress, pieces)
        except CorruptBlock as exc:
            if terms == in_frames:
                raise
            # A copy in shared memory is bad, or a file on disk, and would be at every load. In frames the sidecar
            # compares the bytes: it drops the one and serves the disk's, or puts the other aside.
            log.warning("load asked for again in frames", extra={"cache_ref": load.plan.cache_ref})
            progress.size_bytes, progress.tier = 0, pb.TIER_UNSPECIFIED
            pieces = {piece.block_index: piece for piece in load.plan.pieces}
            try:
                self._copy_pieces(in_frames, load, progress, pieces)
            except ContextCacheError:
                raise exc from None
        if pieces:
            self._counters.add("renewed_blocks", amount=len(pieces))
            self._copy_pieces(in_frames, load, progress, pieces)

    def _copy_pieces(self, terms: Terms, load: Load, progress: _Progress, pieces: dict[int, Piece]) -> None:
        """Copy `pieces` and take them out; those whose file is gone under the name it was given stay in.

        Files that are named are opened, read and compared by a few threads at once; into the engine's blocks one writes
        at a time. All have ended when this returns or raises: a thread that wrote later would write into blocks that
        are somebody else's.
        """
        plan = load.plan
        request = pb.LoadBlocksRequest(
            tenant=plan.tenant,
            cache_ref=plan.cache_ref,
            fingerprint=plan.fingerprint,
            rank=self._link.facts.rank,
            block_indices=list(pieces),
            shared_memory=terms.shared_directory is not None,
            disk_files=terms.disk_directory is not None,
            lease_id=load.lease_id,
            lease_ms=max(int(self._remaining_s(load) * 1000), 1),
        )
        wanted, reading = set(pieces), deque[tuple[_Arrival, Future[bool]]]()
        answers = self._link.sidecar.get().load_blocks(request, self._remaining_s(load))
        try:
            for arrival in self._arrivals(answers, terms):
                self._remaining_s(load)
                if arrival.block_index not in wanted:
                    raise CorruptBlock("the sidecar sent a block nobody asked for")
                wanted.discard(arrival.block_index)
                piece = pieces[arrival.block_index]
                reading.append((arrival, self._readers.submit(self._take, load, piece, arrival)))
                # What came in frames is held whole: one at a time.
                while len(reading) >= (_READ_AHEAD if arrival.is_named else 1):
                    self._took(load, progress, pieces, *reading.popleft())
            while reading:
                self._took(load, progress, pieces, *reading.popleft())
        finally:
            for _, future in reading:
                future.cancel()
            wait([future for _, future in reading])
        if wanted:
            raise CorruptBlock("the sidecar left blocks out")

    def _take(self, load: Load, piece: Piece, arrival: _Arrival) -> bool:
        """Inject one block file; False when there is no file under the name that came."""
        try:
            block = arrival.open_file()
        except FileNotFoundError:
            return False  # the sidecar may have it elsewhere
        self._inject(load, piece, arrival, block)
        return True

    def _took(
        self, load: Load, progress: _Progress, pieces: dict[int, Piece], arrival: _Arrival, future: Future[bool]
    ) -> None:
        """Note a block file that was injected, once it is."""
        if not future.result():
            return
        piece = pieces.pop(arrival.block_index)
        crash_point(BETWEEN_LOADED_BLOCKS)
        progress.tier = max(progress.tier, arrival.tier)
        progress.size_bytes += self._piece_bytes(piece)
        self._remaining_s(load)

    def _arrivals(self, answers: Iterator[pb.LoadBlocksResponse], terms: Terms) -> Iterator[_Arrival]:
        """Yield block files as they come, whole: named, or put together from frames."""
        data = bytearray()
        for answer in answers:
            arrive = partial(_Arrival, answer.block_index, answer.tier, vouched=answer.checksum)
            if answer.WhichOneof("payload") == "shared_name":
                verify = self._settings.verify_shared_memory
                yield arrive(partial(self._open_shared, answer.shared_name, terms), verify, is_named=True)
                continue
            if answer.WhichOneof("payload") == "disk_name":
                yield arrive(partial(self._read_disk, answer.disk_name, terms), verify=True, is_named=True)
                continue
            data += answer.frame
            if len(data) > terms.block_size_bytes_max:
                raise CorruptBlock("the sidecar sent more than a block")
            if answer.last_frame:
                yield arrive(partial(parse_block_file, data), verify=True, is_named=False)
                data = bytearray()

    def _open_shared(self, name: str, terms: Terms) -> BlockFile:
        path = Path(name)
        if terms.shared_directory is None or path.is_absolute() or ".." in path.parts:
            raise CorruptBlock("the sidecar named a file outside the shared directory")
        return open_block_file(terms.shared_directory / path)

    def _read_disk(self, name: str, terms: Terms) -> BlockFile:
        """Read a block file of the sidecar's into this thread's buffer, which the next one overwrites.

        Never mapped: a disk that fails under a map would kill the engine, a read only fails. What is no plain file is
        not waited for: a named pipe never ends.
        """
        path = Path(name)
        if terms.disk_directory is None or path.is_absolute() or ".." in path.parts:
            raise CorruptBlock("the sidecar named a file outside its data directory")
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(terms.disk_directory / path, flags)
        try:
            view = self._read_whole(descriptor, terms.block_size_bytes_max)
        finally:
            os.close(descriptor)
        return parse_block_file(view)

    def _read_whole(self, descriptor: int, size_bytes_max: int) -> memoryview:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > size_bytes_max:
            raise CorruptBlock("the sidecar named what is no file of at most a block's size")
        view, done = self._scratch(status.st_size), 0
        while done < len(view) and (count := os.readv(descriptor, [view[done:]])):
            done += count
        return view[:done]

    def _scratch(self, size_bytes: int) -> memoryview:
        buffer: bytearray | None = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers.buffer = bytearray(size_bytes)
        return memoryview(buffer)[:size_bytes]

    def _inject(self, load: Load, piece: Piece, arrival: _Arrival, block: BlockFile) -> None:
        expected, group = load.plan.meta(piece, self._link.facts.rank), piece.file.group
        if arrival.vouched and block.checksum != arrival.vouched:
            raise CorruptBlock("the block's bytes are not those the manifest vouches for")
        if arrival.verify:
            block.verify(expected)
        elif block.meta != expected:
            raise CorruptBlock("the block is not the one that belongs here")
        if block.pages.nbytes != piece.num_pages * page_bytes(self._layers.shapes[group]):
            raise CorruptBlock("the block's pages are not of this engine's size")
        with load.end.writing():
            self._layers.scatter(
                group,
                piece.block_ids,
                block.pages,
                num_pages=piece.num_pages,
                first_page=piece.first_page,
                after=load.fence,
            )
        block.close()

    def _piece_bytes(self, piece: Piece) -> int:
        return len(piece.block_ids) * page_bytes(self._layers.shapes[piece.file.group])

    def _remaining_s(self, load: Load) -> float:
        remaining_ms = load.deadline_ms - self._clock.now_ms()
        if remaining_ms <= 0:
            raise SidecarUnavailable("the load took too long")
        return remaining_ms / 1000

    def _report(self, plan: LoadPlan, outcome: pb.LoadOutcome.ValueType, progress: _Progress, reason: str) -> None:
        if not plan.request_id:
            return
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
            )
        )
