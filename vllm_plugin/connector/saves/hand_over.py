"""The second half of a save: files that are filled go to the sidecar, in turns with other saves', then the seal.

Runs in transfer threads of its own. The room of a file in the staging budget comes back when the sidecar has taken it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import Span, get_current_span
from opentelemetry.util.types import Attributes

from contextcache.errors import ContextCacheError, SaveIncomplete
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.rpc import FRAME_BYTES
from contextcache.wire.tracing import NO_TRACER, Tracer, fail
from kv_sidecar.client import BlockFileWriter
from vllm_plugin.connector.copies.pages import Fence
from vllm_plugin.connector.metadata import SavePlan
from vllm_plugin.connector.reporting import Reporter
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, RankLink, Terms
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import ResultBox, StagingBudget, TransferPool
from vllm_plugin.crash_points import AFTER_SEAL, BEFORE_HAND_OVER, BEFORE_SEAL, BETWEEN_HANDED_BLOCKS

log = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20
"""Handed over in one call: room comes back to all saves after each."""


@dataclass(slots=True, eq=False)
class Save:
    """A plan with what the worker adds to it. What changes is changed under `lock`."""

    plan: SavePlan
    fence: Fence
    deadline_ms: int
    """Until when the engine's blocks may be held, on the worker's monotonic clock; longer for more bytes."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    staged: deque[StagedFile] = field(default_factory=deque)
    """Files that wait to be handed over."""
    is_copied: bool = False
    """Whether no more of them will come."""
    is_handing: bool = False
    """Whether a thread hands over, or soon will."""
    fault: str = ""
    """Why it was given up."""
    terms: Terms | None = None
    """Terms under which its files are made; None: not known yet."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A block file with its pages filled in, not yet finished."""

    block_index: int
    writer: BlockFileWriter
    loan: Loan | None
    """The slot it lies in; None: memory of our own."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A slot of the arena that is ours to write to."""

    arena: Arena
    """Held, so that its end does not tell the sidecar that nobody writes."""
    slot_id: int
    view: memoryview


class GivenUp(Exception):  # a word, not an error
    """Ends a save."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """A short fixed phrase."""


class HandOver:
    """Takes the files of all of a rank's saves to the sidecar."""

    def __init__(  # what a rank's threads share, by name
        self,
        *,
        settings: ConnectorSettings,
        link: RankLink,
        results: ResultBox,
        reporter: Reporter,
        counters: Counters,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._tracer = tracer
        self._settings = settings
        self._link = link
        self._results = results
        self._reporter = reporter
        self._counters = counters
        self.budget = StagingBudget(settings.staging_limit_bytes)
        self._live: set[Save] = set()
        """Saves that have begun and not ended."""
        self._uploads = TransferPool("uploads", threads=settings.save_threads, queue_limit=settings.queue_limit)

    def open(self, save: Save) -> bool:
        """Begin a save; it ends sealed or given up. False: the engine's thread has given it up already."""
        self._live.add(save)
        if save.fault:
            self._live.discard(save)
        return not save.fault

    def drain(self, timeout_s: float) -> None:
        """Let what is staged be handed over and sealed, for `timeout_s` at most."""
        ends_at_s = time.monotonic() + timeout_s
        # A call that ends may begin the next one of its save.
        while self._live and (remaining_s := ends_at_s - time.monotonic()) > 0:
            self._uploads.drain(remaining_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what waits, its files too; return whether the threads have ended."""
        ended = self._uploads.close(timeout_s)
        if ended:
            for save in tuple(self._live):
                self.drop(self._take_staged(save))
        return ended

    def stage(self, save: Save, file: StagedFile) -> None:
        """Add a file that is filled. Raises GivenUp when the save is over."""
        with save.lock:
            if not save.fault:
                save.staged.append(file)
                return
        self.drop([file])
        raise GivenUp(save.fault)

    def begin(self, save: Save) -> None:
        """Queue the next call to the sidecar, unless there is one already; saves take turns."""
        with save.lock:
            if save.is_handing or save.fault:
                return
            save.is_handing = True
        if self._uploads.try_submit(lambda: self._hand_over_next(save)) is None:
            self.give_up(save, "queue_full")

    def _hand_over_next(self, save: Save) -> None:
        with self.span("connector save: hand over", save):
            fault = self.fault_of(self._hand_over, save)
        if fault is not None:
            self.give_up(save, fault)
            return
        with save.lock:
            is_over = save.is_copied and not save.staged
            save.is_handing = is_over  # nobody begins again then
            goes_on = bool(save.staged)
        if goes_on:
            self.begin(save)
        elif is_over and not save.fault:
            self._finish(save)

    def _finish(self, save: Save) -> None:
        """Seal what was handed over whole."""
        if save.plan.early:
            self._live.discard(save)
            self._counters.add("early_saves")
            self._results.end_save(save.plan.name)
            return
        sealed: list[bool] = []
        with self.span("connector save: seal", save):
            fault = self.fault_of(lambda save: sealed.append(self._seal(save)), save)
        if fault is not None:
            self.give_up(save, fault)
            return
        self._live.discard(save)
        self._counters.add("saves")
        # Last: whoever hears that a save has ended finds it counted, and its files gone.
        if sealed[0]:
            self._results.end_save(save.plan.name)

    def give_up(self, save: Save, reason: str) -> None:
        """End a save for the first reason there is. What a thread is handing over now goes with that thread."""
        with save.lock:
            if save.fault:
                return
            save.fault = reason
        self.drop(self._take_staged(save))
        self._live.discard(save)
        plan = save.plan
        self._results.end_save(plan.name)
        if plan.early:
            # Nobody's loss: the save itself brings what is missing.
            self._counters.add("lost_early_saves", reason)
            return
        self._counters.add("skipped_saves", reason)
        self._reporter.abandon_save(plan.tenant, plan.cache_ref, reason, started_at_ms=plan.started_at_ms)
        log.warning("save skipped", extra={"cache_ref": plan.cache_ref, "reason": reason})

    def fault_of(self, half: Callable[[Save], None], save: Save) -> str | None:
        """Run one half; return why it failed as a short fixed phrase, or None when it did not."""
        try:
            half(save)
        except GivenUp as exc:
            fault = exc.reason
        except ContextCacheError as exc:
            self._link.doubt(exc, save.terms)
            fault = exc.code
        except OSError:
            fault = "staging_error"
        except Exception:
            # The engine holds blocks until this request is reported: no fault of ours may keep them.
            log.exception("save failed unexpectedly", extra={"cache_ref": save.plan.cache_ref})
            fault = "internal_error"
        else:
            return None
        fail(get_current_span(), fault)
        return fault

    def span(self, name: str, save: Save) -> AbstractContextManager[Span]:
        """Begin the span of a step of a save."""
        plan, rank = save.plan, self._link.facts.rank
        attributes: Attributes = {"contextcache.rank": rank, "contextcache.cache_ref": plan.cache_ref}
        return self._tracer.continued(name, parent=plan.traceparent, attributes=attributes)

    def _hand_over(self, save: Save) -> None:
        """Give the sidecar the next files, and their room back."""
        rank, files = self._link.facts.rank, self._take_staged(save, size_bytes_max=_BATCH_BYTES)
        is_taken = False
        try:
            crash_point(BEFORE_HAND_OVER)
            if not files:
                return
            requests = _requests(save, files, rank)
            taken = self._link.sidecar.get().save_blocks(requests, self._settings.save_deadline_ms / 1000)
            if taken.num_blocks != len(files):
                raise SaveIncomplete("the sidecar refused a block")
            is_taken = True
        finally:
            self.drop(files, is_taken=is_taken)

    def _seal(self, save: Save) -> bool:
        crash_point(BEFORE_SEAL)
        deadline_s = self._settings.save_deadline_ms / 1000
        is_sealed = self._link.sidecar.get().seal(save.plan.cache_ref, self._link.facts.rank, deadline_s)
        crash_point(AFTER_SEAL)
        return is_sealed

    def _take_staged(self, save: Save, *, size_bytes_max: int = 1 << 62) -> list[StagedFile]:
        """Take files that wait, in order: one, and as many more as stay below `size_bytes_max` together."""
        taken: list[StagedFile] = []
        with save.lock:
            while save.staged and (not taken or size_bytes_max >= save.staged[0].writer.size_bytes):
                taken.append(save.staged.popleft())
                size_bytes_max -= taken[-1].writer.size_bytes
        return taken

    def drop(self, files: Sequence[StagedFile], *, is_taken: bool = False) -> None:
        """Give the room of files back. `is_taken`: their slots are the sidecar's by now."""
        for file in files:
            file.writer.end()
            self.budget.give_back(file.writer.size_bytes)
        if not is_taken:
            self.give_back([file.loan for file in files if file.loan is not None])

    def remind(self, arena: Arena) -> None:
        """Tell again which slots the sidecar has back, if it was not heard: it says that it has none."""
        self._reporter.return_slots(arena, ())

    def give_back(self, loans: Sequence[Loan]) -> None:
        """Tell that nobody writes to these slots any more. Those that the sidecar took meanwhile it passes over."""
        if loans:
            self._reporter.return_slots(loans[0].arena, [loan.slot_id for loan in loans])


def _requests(save: Save, files: Sequence[StagedFile], rank: int) -> Iterator[pb.SaveBlocksRequest]:
    """Finish each file when it is its turn: the sidecar takes the one before meanwhile."""
    for file in files:
        data = file.writer.finish()
        request = partial(pb.SaveBlocksRequest, cache_ref=save.plan.cache_ref, rank=rank, block_index=file.block_index)
        if file.loan is not None:
            yield request(slot_id=file.loan.slot_id, last_frame=True)
        else:
            for start in range(0, len(data), FRAME_BYTES):
                frame = bytes(data[start : start + FRAME_BYTES])
                yield request(frame=frame, last_frame=start + FRAME_BYTES >= len(data))
        crash_point(BETWEEN_HANDED_BLOCKS)
