"""Saves of one rank: engine blocks into slots of the arena, then over to the sidecar. Never in a step.

A save is one cache_ref's, and its phases are `PHASES`. Parts of it come while its request runs, each with the new
tokens alone, and the last part at the request's end. The engine's blocks are held while the last part is copied out
and no longer. A context that the arena has no room for goes by pieces: files that the sidecar has taken make room.

Every save ends once, by `Saver.end`: sealed, or for a reason that is counted and told to the sidecar. Slots go back
only when no thread writes to them. Threads: the engine's thread starts and ends saves, and never waits; two threads
fill slots; threads of `copying` work on saves that hold blocks, threads of `uploads` on everything else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from opentelemetry.trace import get_current_span
from opentelemetry.util.types import Attributes

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, SaveIncomplete, SidecarUnavailable, StorageFull
from contextcache.model import KVFile
from contextcache.phases import Phases
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import message_of
from contextcache.wire.rpc import is_late
from contextcache.wire.tracing import Tracer, fail
from kv_sidecar.client import BlockFileWriter, context_files, file_meta, next_files, unpack_token_ids
from vllm_plugin.connector.copies.codec import NotFinite
from vllm_plugin.connector.copies.pages import Fence, PageCopy, PagedLayers, page_bytes
from vllm_plugin.connector.metadata import SavePlan
from vllm_plugin.connector.reporting import Reporter
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, RankLink, Terms
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import ResultBox, TransferPool
from vllm_plugin.crash_points import AFTER_SEAL, BEFORE_HAND_OVER, BEFORE_SEAL, BETWEEN_HANDED_BLOCKS, COPIED_OUT

log = logging.getLogger(__name__)

HOLD_DEADLINE = "hold_deadline"
"""Reason of a save that the sidecar did not take in time. The sidecar keeps the files so far for the next save."""
_COPIES_AT_ONCE = 2
"""Copies at once, of all saves: two threads copy nearly twice as fast as one."""
_BATCH_FILES = 64
"""Slots asked for in one call."""
_BATCH_BYTES = 64 << 20
_MESSAGE_FILES, _MESSAGE_BYTES = 16, 16 << 20
"""Bytes handed over in one call. Saves take turns after each."""
_SLOT_WAIT_MS = 1_000
"""Wait for room in one call, as long as the sidecar allows."""
_TOKEN_BYTES = 4
_COPY_OUT, _HAND_OVER, _SEAL = "connector save: copy out", "connector save: hand over", "connector save: seal"
_NO_DEADLINE_MS = 1 << 62


class SavePhase(Enum):
    """Phase of a save in the worker."""

    QUEUED = "queued"
    """A part waits for a thread, or for its request to go on."""
    COPYING = "copying"
    """A thread copies a part out of the engine."""
    COPIED = "copied"
    """All is copied, and the engine has its blocks back."""
    HANDING = "handing"
    """The sidecar takes the last files."""
    SEALING = "sealing"
    ENDED = "ended"


_OPEN = tuple(phase for phase in SavePhase if phase is not SavePhase.ENDED)
_UNCOPIED = (SavePhase.QUEUED, SavePhase.COPYING)
PHASES = Phases(
    [
        ((SavePhase.QUEUED,), "copy", SavePhase.COPYING),
        ((SavePhase.COPYING,), "part copied", SavePhase.QUEUED),
        ((SavePhase.COPYING,), "all copied", SavePhase.COPIED),
        ((SavePhase.COPIED,), "hand over", SavePhase.HANDING),
        ((SavePhase.HANDING,), "seal", SavePhase.SEALING),
        (_OPEN, "end", SavePhase.ENDED),
    ]
)


class SaveEnds(Exception):  # a word, not an error
    """Ends a save, or the work on a part of it, for a reason."""


@dataclass(slots=True, eq=False)
class SavedFile:
    """A block file that the sidecar lacks, and the engine blocks for it."""

    block_index: int
    file: KVFile
    writer: BlockFileWriter
    block_ids: Sequence[int]
    num_full: int
    slot_id: int = 0
    arena: Arena | None = None
    """Arena with the slot that is ours to write to. Held, so that its end does not tell that no thread writes."""


@dataclass(slots=True, eq=False)
class Save:
    """One save. Threads change the phase, the files and the part under `lock`, held for a few lines only."""

    plan: SavePlan
    """Plan of the newest part."""
    phase: SavePhase = SavePhase.QUEUED
    reason: str = ""
    """Reason of an end without a seal, a short fixed phrase."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    part: tuple[SavePlan, Fence] | None = None
    """Part that waits for a thread; a newer one takes its place, because tokens and blocks are kept here."""
    token_ids: bytes = b""
    """Packed tokens of all parts."""
    block_ids: tuple[tuple[int, ...], ...] = ((),)
    """Engine blocks of each group, from the first position that is needed on."""
    files: tuple[KVFile, ...] = ()
    file_tokens: int = 0
    """Tokens in one whole file of `files`."""
    sent_tokens: int = 0
    """Tokens that the sidecar has."""
    staged: deque[SavedFile] = field(default_factory=deque)
    """Filled files that wait to be handed over."""
    num_handing: int = 0
    """Files that threads are handing over."""
    deadline_ms: int = _NO_DEADLINE_MS
    """Deadline for copying out, on the worker's monotonic clock."""
    terms: Terms | None = None
    """Terms of the calls; None: not known yet."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return len(self.token_ids) // _TOKEN_BYTES

    def packed(self, first: int, end: int) -> bytes:
        """Return the packed tokens of a stretch."""
        return self.token_ids[_TOKEN_BYTES * first : _TOKEN_BYTES * end]

    def move(self, event: str) -> bool:
        """Change the phase, if the event is legal; call it under `lock`."""
        if not PHASES.allows(self.phase, event):
            return False
        self.phase = PHASES.after(self.phase, event)
        return True


@dataclass(eq=False)
class Saver:
    """All saves of one rank."""

    settings: ConnectorSettings
    link: RankLink
    layers: PagedLayers
    results: ResultBox
    reporter: Reporter
    counters: Counters
    clock: Clock
    tracer: Tracer
    copying: TransferPool
    uploads: TransferPool
    _saves: dict[str, Save] = field(default_factory=dict)
    """Saves by cache_ref. Only the engine's thread uses it."""
    _copiers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="context-cache-copies")
    )

    def start(self, plan: SavePlan, fence: Fence, obstacle: str = "") -> None:
        """Begin a save, or go on with it. `obstacle`: reason not to copy this part; empty: none."""
        save = self._saves.get(plan.cache_ref)
        if save is None or save.phase is SavePhase.ENDED:
            save = self._saves[plan.cache_ref] = Save(plan)
        if plan.first_token != save.num_tokens:
            save, obstacle = Save(plan), "twice"
        # A thread that copies an earlier part may read them already: blocks first.
        save.block_ids = ((*save.block_ids[0], *plan.block_ids[0]),) if plan.early else plan.block_ids
        save.plan, save.token_ids = plan, save.token_ids + plan.token_ids
        if not plan.early:
            save.deadline_ms = self.clock.now_ms() + self._allowed_ms(plan)
        if obstacle:
            self._lose(save, plan, obstacle)
            return
        with save.lock:
            save.part = plan, fence
            is_waiting = save.phase is SavePhase.QUEUED
        if is_waiting:
            self._queue(save, plan)

    def overtake(self, cache_refs: Collection[str]) -> None:
        """End saves whose blocks the engine gives to others from now on, unless they are copied."""
        for cache_ref in cache_refs:
            save = self._saves.get(cache_ref)
            if save is not None and save.phase in _UNCOPIED:
                self.end(save, "overtaken")

    def end_late(self) -> None:
        """End saves whose blocks may not be held any longer, and forget those that have ended."""
        if not self._saves:
            return
        now_ms = self.clock.now_ms()
        for save in self._saves.values():
            if now_ms >= save.deadline_ms and (phase := save.phase) in _UNCOPIED:
                self.end(save, "prepare_deadline" if phase is SavePhase.QUEUED else HOLD_DEADLINE)
        self._saves = {ref: save for ref, save in self._saves.items() if save.phase is not SavePhase.ENDED}

    def end(self, save: Save, reason: str = "") -> None:
        """End a save: sealed, or for a reason. The first end counts. Never waits: the engine's thread calls it too."""
        with save.lock:
            is_held = save.plan.holds_blocks and save.phase in _UNCOPIED
            if not save.move("end"):
                return
            # An ended save must not keep the memory of a sidecar that has gone.
            save.reason, save.terms = reason, None
            staged, save.staged = list(save.staged), deque()
        plan = save.plan
        self._give_back(staged)
        if is_held:
            self.results.release_blocks(plan.engine_request_id)
        if not reason:
            self.counters.add("saves")
            return
        self.results.end_save(plan.name)
        if plan.early:
            # The request's own save brings the rest.
            self.counters.add("lost_early_saves", reason)
            return
        self.counters.add("skipped_saves", reason)
        self.reporter.abandon_save(plan.tenant, plan.cache_ref, reason, started_at_ms=plan.started_at_ms)
        log.warning("save skipped", extra={"cache_ref": plan.cache_ref, "reason": reason})

    def drain(self, ends_at_s: float) -> None:
        """Let saves end by themselves until `ends_at_s`, by `time.monotonic`."""
        for pool in (self.copying, self.uploads):
            # A piece of work that ends may begin the next one of its save.
            while pool.has_work and (remaining_s := ends_at_s - time.monotonic()) > 0:
                pool.drain(remaining_s)

    def close(self) -> None:
        """End the copying threads, once their copies have ended, and forget all saves."""
        self._copiers.shutdown(wait=False)
        self._saves.clear()

    def _allowed_ms(self, plan: SavePlan) -> int:
        held = zip(plan.block_ids, self.layers.shapes, strict=True)
        size_bytes = sum(len(ids) * page_bytes(shapes) for ids, shapes in held)
        return self.settings.prepare_deadline_ms + size_bytes // self.settings.save_bytes_per_ms_min

    def _queue(self, save: Save, plan: SavePlan) -> None:
        pool = self.uploads if plan.early else self.copying
        if pool.try_submit(lambda: self._run(save)) is None:
            self._lose(save, plan, "queue_full")

    def _lose(self, save: Save, plan: SavePlan, reason: str) -> None:
        """End a save whose last part cannot be copied. An early part leaves its files to the last one."""
        if not plan.early:
            self.end(save, reason)
            return
        self.counters.add("lost_early_saves", reason)
        self.results.end_save(plan.name)

    def _run(self, save: Save) -> None:
        """Copy one part out, and have its files handed over. Raises nothing."""
        with save.lock:
            if save.part is None or not save.move("copy"):
                return
            (plan, fence), save.part = save.part, None
        fault = self._fault_of(_COPY_OUT, save, lambda: self._copy_out(save, plan, fence))
        if fault and not plan.early:
            self.end(save, fault)
            return
        if not plan.early:
            crash_point(COPIED_OUT)
        with save.lock:
            if not save.move("part copied" if plan.early else "all copied"):
                return  # it has ended meanwhile, and is counted
            waiting = save.part
        if plan.early:
            self.counters.add(*(("lost_early_saves", fault) if fault else ("early_saves",)))
        if plan.holds_blocks:
            self.results.release_blocks(plan.engine_request_id)
        if waiting is not None:
            self._queue(save, waiting[0])
        self._upload(save)

    def _copy_out(self, save: Save, plan: SavePlan, fence: Fence) -> None:
        self._check_open(save)
        terms = save.terms = self.link.terms()
        if terms.arena is None:
            raise SaveEnds("no_arena")
        wanted = deque(self._missing(save, plan, terms))
        if any(each.writer.size_bytes > terms.block_size_bytes_max for each in wanted):
            raise StorageFull(f"a block has more than the sidecar's limit of {terms.block_size_bytes_max} bytes")
        if any(each.writer.size_bytes > terms.arena.size_bytes for each in wanted):
            raise SaveEnds("arena_full")
        while wanted:
            self._check_open(save)
            files = self._lend(save, terms.arena, wanted, waits=not (plan.early or save.staged))
            if files:
                self._fill_all(save, files, fence)
            elif save.staged:
                self._hand_over(save)
            elif plan.early:
                raise SaveEnds("arena_full")

    def _missing(self, save: Save, plan: SavePlan, terms: Terms) -> Iterator[SavedFile]:
        """Send the new tokens; yield the files of this part that the sidecar lacks, and all tails."""
        # The engine may have computed no more than this part's tokens when its fence was made.
        num_tokens = plan.num_tokens
        file_tokens = plan.groups[0].kept(num_tokens, file_tokens_min=terms.block_tokens).block_tokens
        if file_tokens != save.file_tokens:  # the first part, or the sidecar has restarted with another size
            save.files, save.sent_tokens, save.file_tokens = (), 0, file_tokens
        if plan.early:
            num_tokens -= num_tokens % file_tokens
            if num_tokens <= save.sent_tokens:
                return
        groups = [group.kept(num_tokens, file_tokens_min=terms.block_tokens) for group in plan.groups]
        last = save.files[-1] if save.files else None
        new = unpack_token_ids(save.packed(last.end_token if last is not None else 0, num_tokens))
        names = plan.cache_ref, plan.fingerprint, plan.tenant
        if len(groups) == 1 and groups[0].kind == "full_attention":
            save.files += next_files(last, *names, new, block_tokens=save.file_tokens)
        else:
            save.files = context_files(*names, new, groups)
        answer = self._send_tokens(save, plan, [message_of(pb.KVGroup, group) for group in groups], num_tokens)
        missing = sorted(answer.missing_files)
        if answer.num_files != len(save.files) or (missing and not 0 <= missing[0] <= missing[-1] < len(save.files)):
            raise SidecarUnavailable(
                f"the sidecar expects {answer.num_files} files, the engine has {len(save.files)}: their versions differ"
            )
        for index in missing:
            file = save.files[index]
            group, num_pages = plan.groups[file.group], plan.groups[file.group].num_pages(file)
            first = 0 if plan.early else group.first_needed(num_tokens)
            block_ids = group.blocks_of(file, save.block_ids[file.group], first)
            if len(block_ids) != num_pages:
                raise SaveEnds("blocks_gone")
            meta = file_meta(
                file,
                group=group.digest,
                tenant=plan.tenant,
                fingerprint=plan.fingerprint,
                rank=self.link.facts.rank,
                token_ids=unpack_token_ids(save.packed(file.first_token, file.end_token)),
            )
            size_bytes, codec = self.layers.stored(file.group, num_pages, group.num_full(file))
            # The request goes on to write into a page that is not full, unless its blocks are held.
            is_still = plan.holds_blocks or group.num_full(file) == num_pages
            num_digests = num_pages if self.layers.makes_digests and is_still else 0
            writer = BlockFileWriter(meta, pages_bytes=size_bytes, codec=codec, num_digests=num_digests)
            yield SavedFile(index, file, writer, block_ids, group.num_full(file))

    def _send_tokens(
        self, save: Save, plan: SavePlan, groups: Sequence[pb.KVGroup], num_tokens: int
    ) -> pb.ExtendSaveResponse | pb.PrepareSaveResponse:
        """Have the sidecar know the tokens that it lacks, all of them if it has no such save; return the files."""
        facts, sidecar, timeout_s = self.link.facts, self.link.sidecar.get(), self._timeout_s(save)
        request = pb.PrepareSaveRequest(
            tenant=plan.tenant,
            session_id=plan.session_id,
            cache_ref=plan.cache_ref,
            fingerprint=plan.fingerprint,
            rank=facts.rank,
            world_size=facts.world_size,
            expires_at_ms=plan.expires_at_ms,
            started_at_ms=plan.started_at_ms,
            groups=groups,
            early=plan.early,
        )
        more = pb.ExtendSaveRequest(
            tenant=plan.tenant,
            cache_ref=plan.cache_ref,
            rank=facts.rank,
            first_token=save.sent_tokens,
            token_ids=save.packed(save.sent_tokens, num_tokens),
            early=plan.early,
        )
        answer: pb.PrepareSaveResponse | pb.ExtendSaveResponse | None
        try:
            answer = sidecar.extend_save(more, timeout_s) if save.sent_tokens else None
        except SaveIncomplete:
            answer = None
        if answer is None:
            request.token_ids = save.packed(0, num_tokens)
            answer = sidecar.prepare_save(request, timeout_s)
        save.sent_tokens = num_tokens
        return answer

    def _lend(self, save: Save, arena: Arena, wanted: deque[SavedFile], *, waits: bool) -> list[SavedFile]:
        """Take the first files off `wanted`, in slots; none when the arena has no room for now."""
        batch = list(islice(wanted, _BATCH_FILES))
        timeout_s = self._timeout_s(save)
        request = pb.LendSlotsRequest(
            borrower=arena.borrower,
            cache_ref=save.plan.cache_ref,
            rank=self.link.facts.rank,
            block_indices=[each.block_index for each in batch],
            sizes_bytes=[each.writer.size_bytes for each in batch],
            timeout_ms=min(_SLOT_WAIT_MS, int(timeout_s * 500)) if waits else 0,
        )
        try:
            slots = self.link.sidecar.get().lend_slots(request, timeout_s)
        except SidecarUnavailable as exc:
            if is_late(exc):
                self.link.lost(save.terms)
            raise
        if not slots:
            # Tells again which slots are free: the word may have been lost.
            self.reporter.return_slots(arena, ())
        if len(slots) > len(batch):
            raise SidecarUnavailable("the sidecar lent more slots than requested")
        for slot, file in zip(slots, batch, strict=False):
            file.slot_id, file.arena = slot.slot_id, arena
            file.writer.begin(arena.view(slot.offset, slot.size_bytes))
            wanted.popleft()
        return batch[: len(slots)]

    def _fill_all(self, save: Save, files: Sequence[SavedFile], fence: Fence) -> None:
        """Copy engine blocks into slots. All threads have ended when this returns or raises."""
        # A GPU takes all files in one call.
        num_shares = _COPIES_AT_ONCE if self.layers.files_at_once == 1 else 1
        shares = [share for start in range(num_shares) if (share := files[start::num_shares])]
        filling: list[Future[None]] = []
        try:
            filling.extend(self._copiers.submit(self._fill, save, share, fence) for share in shares)
        finally:
            wait(filling)
            self._give_back([file for share in shares[len(filling) :] for file in share])
        for filled in filling:
            filled.result()

    def _fill(self, save: Save, files: Sequence[SavedFile], fence: Fence) -> None:
        """Copy files' pages, and stage them. Their slots go back when that fails, or when the save has ended."""
        try:
            copies = [
                PageCopy(
                    file.file.group, file.block_ids, file.writer.pages, len(file.block_ids), 0, fence, file.num_full
                )
                for file in files
            ]
            for file, digests in zip(files, self.layers.gather(copies), strict=True):
                if file.writer.digests:
                    file.writer.digests = digests
            with save.lock:
                if save.phase is SavePhase.ENDED:
                    raise SaveEnds(save.reason)  # noqa: TRY301  # the slots go back as for any other fault
                save.staged.extend(files)
        except BaseException as exc:
            self._give_back(files)
            if isinstance(exc, NotFinite):
                raise SaveEnds("not_finite") from exc
            raise

    def _upload(self, save: Save) -> None:
        """Queue the next call that hands files over; saves take turns."""
        if self.uploads.try_submit(lambda: self._upload_next(save)) is None:
            self._lose(save, save.plan, "queue_full")

    def _upload_next(self, save: Save) -> None:
        with save.lock:
            save.move("hand over")
        fault = self._fault_of(_HAND_OVER, save, lambda: self._hand_over(save))
        with save.lock:
            is_running, goes_on = save.phase in _UNCOPIED, bool(save.staged)
            is_last = not (fault or goes_on or save.num_handing) and save.move("seal")
            if save.phase is SavePhase.QUEUED and not goes_on:
                save.terms = None  # until the next part, which may be minutes away
        if fault and is_running:
            self.counters.add("lost_early_saves", fault)
        elif fault:
            self.end(save, fault)
        if goes_on:
            self._upload(save)
        elif is_running and save.plan.early:
            self.results.end_save(save.plan.name)
        elif is_last:
            self._seal(save)

    def _hand_over(self, save: Save) -> None:
        """Give the sidecar the next files."""
        files, size_bytes = list[SavedFile](), 0
        with save.lock:
            while save.staged and (not files or size_bytes + save.staged[0].writer.size_bytes <= _BATCH_BYTES):
                files.append(save.staged.popleft())
                size_bytes += files[-1].writer.size_bytes
            save.num_handing += len(files)
        is_taken = False
        try:
            crash_point(BEFORE_HAND_OVER)
            if files:
                requests = _requests(save.plan.cache_ref, self.link.facts.rank, files)
                taken = self.link.sidecar.get().save_blocks(requests, self._timeout_s(save, hands_over=True))
                if taken.num_blocks != len(files):
                    raise SaveIncomplete("the sidecar refused a block")
            is_taken = True
        finally:
            self._give_back(files, is_taken=is_taken)
            with save.lock:
                save.num_handing -= len(files)

    def _seal(self, save: Save) -> None:
        sealed: list[bool] = []

        def seal() -> None:
            crash_point(BEFORE_SEAL)
            timeout_s = self.settings.save_deadline_ms / 1000
            sealed.append(self.link.sidecar.get().seal(save.plan.cache_ref, self.link.facts.rank, timeout_s))
            crash_point(AFTER_SEAL)

        fault = self._fault_of(_SEAL, save, seal)
        self.end(save, fault)
        # Last: a save is counted, and its slots are gone, before it is said to have ended.
        if not fault and sealed[0]:
            self.results.end_save(save.plan.name)

    def _fault_of(self, step: str, save: Save, work: Callable[[], None]) -> str:
        """Run a step of a save in its span; return the reason of its failure, a short fixed phrase; empty: none."""
        plan, rank = save.plan, self.link.facts.rank
        attributes: Attributes = {"contextcache.rank": rank, "contextcache.cache_ref": plan.cache_ref}
        with self.tracer.continued(step, parent=plan.traceparent, attributes=attributes):
            try:
                work()
            except SaveEnds as exc:
                fault = str(exc)
            except ContextCacheError as exc:
                self.link.doubt(exc, save.terms)
                fault = exc.code
            except Exception:
                # The engine holds blocks until this request is reported: no fault of ours may keep them.
                log.exception("save failed unexpectedly", extra={"cache_ref": plan.cache_ref})
                fault = "internal_error"
            else:
                return ""
            fail(get_current_span(), fault)
            return fault

    def _give_back(self, files: Sequence[SavedFile], *, is_taken: bool = False) -> None:
        """Let go of slots that no thread writes to any more. `is_taken`: they are the sidecar's by now."""
        for file in files:
            file.writer.end()
        for arena in () if is_taken else {file.arena for file in files if file.arena is not None}:
            self.reporter.return_slots(arena, [file.slot_id for file in files if file.arena is arena])

    def _check_open(self, save: Save) -> None:
        if save.phase is SavePhase.ENDED:
            raise SaveEnds(save.reason)
        if self.clock.now_ms() >= save.deadline_ms:
            raise SaveEnds(HOLD_DEADLINE)

    def _timeout_s(self, save: Save, *, hands_over: bool = False) -> float:
        """Return a call's deadline in seconds: short while blocks are held, and for questions."""
        if hands_over and not (save.plan.holds_blocks and save.phase in _UNCOPIED):
            return self.settings.save_deadline_ms / 1000
        remaining_ms = save.deadline_ms - self.clock.now_ms()
        return max(min(remaining_ms, self.settings.prepare_deadline_ms), 1) / 1000


def _requests(cache_ref: str, rank: int, files: Sequence[SavedFile]) -> Iterator[pb.SaveBlocksRequest]:
    """Finish some files at a time, the first one alone: the sidecar takes those before meanwhile."""
    waiting, num_files = deque(files), 1
    while waiting:
        request, size_bytes = pb.SaveBlocksRequest(cache_ref=cache_ref, rank=rank), 0
        while waiting and size_bytes < _MESSAGE_BYTES and len(request.slots) < num_files:
            file = waiting.popleft()
            file.writer.finish()
            size_bytes += file.writer.size_bytes
            request.slots.add(block_index=file.block_index, slot_id=file.slot_id)
        num_files = _MESSAGE_FILES
        yield request
        crash_point(BETWEEN_HANDED_BLOCKS)
