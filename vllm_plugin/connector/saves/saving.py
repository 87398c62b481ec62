"""Saves of one rank: engine blocks into slots of the arena, then over to the sidecar. Never in a step.

A save is one cache_ref's, and its phases are `PHASES`. Parts of it come while its request runs, each with the new
tokens alone, and the last part at the request's end. The engine's blocks are held while the last part is copied out
and no longer. A context that the arena has no room for goes by pieces: files that the sidecar has taken make room.

Every save ends once, by `Saver.end`: sealed, or for a reason that is counted and told to the sidecar. A part has files
and a deadline of its own, and one thread works on it at a time. A lost early part costs its save nothing: the last part
asks for all files that the sidecar lacks. Slots go back only when no thread writes to them.

Threads: the engine's thread starts and ends saves, and never waits; two threads fill slots; threads of `copying` copy
last parts, threads of `uploads` do everything else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

from opentelemetry.trace import get_current_span
from opentelemetry.util.types import Attributes

from contextcache.errors import ContextCacheError, SaveIncomplete, SidecarUnavailable, StorageFull
from contextcache.model import KVFile, KVGroup
from contextcache.phases import Phases
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import message_of
from contextcache.wire.rpc import is_late
from contextcache.wire.tracing import fail
from kv_sidecar.client import BlockFileWriter, context_files, file_meta, next_files, unpack_token_ids
from vllm_plugin.connector.copies.codec import NotFinite
from vllm_plugin.connector.copies.pages import Fence, PageCopy
from vllm_plugin.connector.metadata import SavePlan
from vllm_plugin.connector.settings import Bounds
from vllm_plugin.connector.sidecar_link import Arena, Terms
from vllm_plugin.connector.transfer import RankParts, TransferPool
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
    """All is copied, and the engine has its blocks back. The sidecar takes the last files."""
    ENDED = "ended"


_UNCOPIED = (SavePhase.QUEUED, SavePhase.COPYING)
PHASES = Phases(
    [
        ((SavePhase.QUEUED,), "copy", SavePhase.COPYING),
        ((SavePhase.COPYING,), "part copied", SavePhase.QUEUED),
        ((SavePhase.COPYING,), "all copied", SavePhase.COPIED),
        ((*_UNCOPIED, SavePhase.COPIED), "end", SavePhase.ENDED),
    ]
)


class SaveEnds(Exception):  # a word, not an error
    """Ends a save, or the work on a part of it, for a reason."""


@dataclass(slots=True, eq=False)
class SavedFile:
    """A block file that the sidecar lacks, and the engine blocks for it."""

    block_index: int
    group: int
    writer: BlockFileWriter
    block_ids: Sequence[int]
    num_full: int
    slot_id: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """A part of a save, until its files are handed over."""

    plan: SavePlan
    fence: Fence
    terms: Terms | None = None
    """Terms of its calls; None: not known yet. They hold the arena while a thread writes to it."""
    staged: list[SavedFile] = field(default_factory=list)
    """Files in slots that are ours. All are filled, except while `_fill` runs."""
    is_durable: bool = False
    """Whether the manifest was durable at the seal: no other rank has to seal."""


@dataclass(slots=True, eq=False)
class Save:
    """One save. Threads change the phase and the waiting part under `lock`, held for a few lines only."""

    plan: SavePlan
    """Plan of the newest part."""
    phase: SavePhase = SavePhase.QUEUED
    reason: str = ""
    """Reason of an end without a seal, a short fixed phrase."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    part: Part | None = None
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
    deadline_ms: int = _NO_DEADLINE_MS
    """Deadline for copying out, on the worker's monotonic clock."""

    def packed(self, first: int, end: int) -> bytes:
        """Return the packed tokens of a stretch."""
        return self.token_ids[_TOKEN_BYTES * first : _TOKEN_BYTES * end]

    def move(self, event: str) -> bool:
        """Change the phase, if the event is legal; call it under `lock`."""
        if not PHASES.allows(self.phase, event):
            return False
        self.phase = PHASES.after(self.phase, event)
        return True


@dataclass(eq=False, kw_only=True)
class Saver(RankParts):
    """All saves of one rank."""

    copying: TransferPool
    uploads: TransferPool
    _saves: dict[str, Save] = field(default_factory=dict)
    """Saves by cache_ref. Only the engine's thread uses it."""
    _copiers: TransferPool = field(
        default_factory=lambda: TransferPool("copies", threads=_COPIES_AT_ONCE, queue_limit=Bounds.queue_limit)
    )

    def start(self, plan: SavePlan, fence: Fence, obstacle: str = "") -> None:
        """Begin a save, or go on with it. `obstacle`: reason not to copy this part; empty: none."""
        save = self._saves.get(plan.cache_ref)
        if save is None or save.phase is SavePhase.ENDED:
            save = self._saves[plan.cache_ref] = Save(plan)
        if _TOKEN_BYTES * plan.first_token != len(save.token_ids):
            save, obstacle = Save(plan), "twice"
        # A thread that copies an earlier part may read them already: blocks first.
        save.block_ids = ((*save.block_ids[0], *plan.block_ids[0]),) if plan.early else plan.block_ids
        save.plan, save.token_ids = plan, save.token_ids + plan.token_ids
        if not plan.early:
            held = zip(plan.block_ids, self.layers.planes, strict=True)
            size_bytes = sum(len(ids) * sum(planes) for ids, planes in held)
            allowed_ms = self.settings.prepare_deadline_ms + size_bytes // self.settings.save_bytes_per_ms_min
            save.deadline_ms = self.clock.now_ms() + allowed_ms
        part = Part(plan, fence)
        if obstacle:
            self._end_part(save, part, obstacle)
            return
        with save.lock:
            save.part = part
            is_waiting = save.phase is SavePhase.QUEUED
        if is_waiting:
            self._queue(save, part)

    def overtake(self, cache_refs: Collection[str]) -> None:
        """End saves whose blocks the engine gives to others from now on, unless they are copied."""
        for cache_ref in cache_refs:
            save = self._saves.get(cache_ref)
            if save is not None and save.phase in _UNCOPIED:
                self.end(save, "overtaken")

    def overtake_all(self) -> None:
        """End all saves that are not copied."""
        self.overtake(list(self._saves))

    def end_late(self) -> None:
        """End saves whose blocks may not be held any longer, and forget those that have ended."""
        now_ms = self.clock.now_ms()
        for save in self._saves.values():
            if now_ms >= save.deadline_ms and (phase := save.phase) in _UNCOPIED:
                self.end(save, "prepare_deadline" if phase is SavePhase.QUEUED else HOLD_DEADLINE)
        self._saves = {ref: save for ref, save in self._saves.items() if save.phase is not SavePhase.ENDED}

    def end(self, save: Save, reason: str = "", *, is_durable: bool = False) -> None:
        """End a save: sealed, or for a reason. The first end counts. Never waits: the engine's thread calls it too."""
        with save.lock:
            is_held = save.plan.holds_blocks and save.phase in _UNCOPIED
            if not save.move("end"):
                return
            save.reason = reason
        plan = save.plan
        if is_held:
            self.results.release_blocks(plan.engine_request_id)
        if not reason:
            self.counters.add("saves")
        elif plan.early:
            # The request's own save brings the rest.
            self.counters.add("lost_early_saves", reason)
        else:
            self.counters.add("skipped_saves", reason)
            self.reporter.abandon_save(plan.tenant, plan.cache_ref, reason, started_at_ms=plan.started_at_ms)
            log.warning("save skipped", extra={"cache_ref": plan.cache_ref, "reason": reason})
        # Last: a save is counted, and its slots are gone, before it is said to have ended.
        if reason or is_durable:
            self.results.end_save(plan.name)

    def drain(self, ends_at_s: float) -> None:
        """Let saves end by themselves until `ends_at_s`, by `time.monotonic`."""
        # Work begins the next piece of its save before it ends: an early part the copying of the last one, and that its
        # hand-over. In this order no piece is overlooked.
        pools = (self.uploads, self.copying, self.uploads)
        while (left_s := ends_at_s - time.monotonic()) > 0 and any(pool.drain(left_s) for pool in pools):
            pass

    def close(self) -> None:
        """End the copying threads, once their copies have ended, and forget all saves."""
        self._copiers.close(0)
        self._saves.clear()

    def _submit(self, pool: TransferPool, save: Save, part: Part, work: Callable[[Save, Part], None]) -> None:
        if pool.try_submit(lambda: work(save, part), part.plan.tenant) is None:
            self._end_part(save, part, "queue_full")

    def _queue(self, save: Save, part: Part) -> None:
        self._submit(self.uploads if part.plan.early else self.copying, save, part, self._run)

    def _run(self, save: Save, part: Part) -> None:
        """Copy a part out, and have its files handed over. Raises nothing."""
        with save.lock:
            if save.part is not part or not save.move("copy"):
                return
            save.part = None
        plan = part.plan
        fault = self._fault_of(_COPY_OUT, save, part, self._copy_out)
        with save.lock:
            is_over = bool(fault) and not plan.early
            if not is_over and not save.move("part copied" if plan.early else "all copied"):
                fault = save.reason
            waiting = save.part
        if plan.early and waiting is not None:
            self._queue(save, waiting)
        if fault:
            self._end_part(save, part, fault)
            return
        if not plan.early:
            crash_point(COPIED_OUT)
        if plan.holds_blocks:
            self.results.release_blocks(plan.engine_request_id)
        self._submit(self.uploads, save, part, self._upload)

    def _upload(self, save: Save, part: Part) -> None:
        """Hand files over, and queue the next such call, so that saves take turns."""
        fault = self._fault_of(_HAND_OVER, save, part, self._hand_over)
        if part.staged and not fault:
            self._submit(self.uploads, save, part, self._upload)
        else:
            self._end_part(save, part, fault)

    def _end_part(self, save: Save, part: Part, fault: str = "") -> None:
        """End a part, and with the last one its save. An early part leaves its files to the last one."""
        self._give_back(part)
        if not part.plan.early:
            fault = fault or save.reason or self._fault_of(_SEAL, save, part, self._seal)
            self.end(save, fault, is_durable=part.is_durable)
        elif save.plan is not part.plan or save.phase is not SavePhase.ENDED:
            self.counters.add(*(("lost_early_saves", fault) if fault else ("early_saves",)))
            self.results.end_save(part.plan.name)

    def _copy_out(self, save: Save, part: Part) -> None:
        self._check_open(save)
        terms = part.terms = self.link.terms()
        if terms.arena is None:
            raise SaveEnds("no_arena")
        wanted = self._wanted(save, part.plan, terms, terms.arena)
        while wanted:
            self._check_open(save)
            if files := self._lend(save, part, terms.arena, wanted):
                self._fill(part, files)
            elif part.staged:
                self._hand_over(save, part)
            elif part.plan.early:
                raise SaveEnds("arena_full")

    def _missing(self, save: Save, plan: SavePlan, terms: Terms) -> Sequence[int]:
        """Send the new tokens; return which files of this part the sidecar lacks, and all tails."""
        # The engine may have computed no more than this part's tokens when its fence was made.
        num_tokens = plan.num_tokens
        file_tokens = plan.groups[0].kept(num_tokens, file_tokens_min=terms.block_tokens).block_tokens
        if file_tokens != save.file_tokens:  # the first part, or the sidecar has restarted with another size
            save.files, save.sent_tokens, save.file_tokens = (), 0, file_tokens
        if plan.early:
            num_tokens -= num_tokens % file_tokens
            if num_tokens <= save.sent_tokens:
                return ()
        groups = [group.kept(num_tokens, file_tokens_min=terms.block_tokens) for group in plan.groups]
        last = save.files[-1] if save.files else None
        new = save.packed(last.end_token if last is not None else 0, num_tokens)
        chain = plan.cache_ref, plan.fingerprint, plan.tenant
        if len(groups) == 1 and groups[0].kind == "full_attention":
            save.files += next_files(last, *chain, new, block_tokens=file_tokens)
        else:
            save.files = context_files(*chain, unpack_token_ids(new), groups)
        answer = self._send_tokens(save, plan, groups, num_tokens)
        save.sent_tokens = num_tokens
        missing = sorted(answer.missing_files)
        if answer.num_files != len(save.files) or (missing and not 0 <= missing[0] <= missing[-1] < len(save.files)):
            raise SidecarUnavailable(
                f"the sidecar expects {answer.num_files} files, the engine has {len(save.files)}: their versions differ"
            )
        return missing

    def _wanted(self, save: Save, plan: SavePlan, terms: Terms, arena: Arena) -> deque[SavedFile]:
        """Return the files that the sidecar lacks, without slots yet."""
        wanted, rank = deque[SavedFile](), self.link.facts.rank
        missing, firsts = self._missing(save, plan, terms), [it.first_needed(plan.num_tokens) for it in plan.groups]
        for index in missing:
            file = save.files[index]
            group = plan.groups[file.group]
            block_ids = group.blocks_of(file, save.block_ids[file.group], firsts[file.group])
            if not block_ids:
                raise SaveEnds("blocks_gone")
            token_ids = unpack_token_ids(save.packed(file.first_token, file.end_token))
            names = {"tenant": plan.tenant, "fingerprint": plan.fingerprint, "group": group.digest}
            meta = file_meta(file, rank=rank, token_ids=token_ids, **names)
            num_pages, num_full = len(block_ids), group.num_full(file)
            size_bytes, codec = self.layers.stored(file.group, num_pages, num_full)
            # The request goes on to write into a page that is not full, unless its blocks are held.
            is_still = plan.holds_blocks or num_full == num_pages
            num_digests = num_pages if self.layers.makes_digests and is_still else 0
            writer = BlockFileWriter(meta, pages_bytes=size_bytes, codec=codec, num_digests=num_digests)
            if writer.size_bytes > terms.block_size_bytes_max:
                raise StorageFull("a block has more bytes than the sidecar's limit")
            if writer.size_bytes > arena.size_bytes:
                raise SaveEnds("arena_full")
            wanted.append(SavedFile(index, file.group, writer, block_ids, num_full))
        return wanted

    def _send_tokens(
        self, save: Save, plan: SavePlan, groups: Sequence[KVGroup], num_tokens: int
    ) -> pb.ExtendSaveResponse | pb.PrepareSaveResponse:
        """Have the sidecar know the tokens that it lacks, all of them if it has no such save; return the files."""
        facts, sidecar, timeout_s = self.link.facts, self.link.sidecar, self._timeout_s(save, plan)
        sent, rank = save.sent_tokens, facts.rank
        names: dict[str, Any] = {"tenant": plan.tenant, "cache_ref": plan.cache_ref, "rank": rank, "early": plan.early}
        if sent:
            with suppress(SaveIncomplete):
                new = save.packed(sent, num_tokens)
                return sidecar.extend_save(pb.ExtendSaveRequest(**names, first_token=sent, token_ids=new), timeout_s)
        request = pb.PrepareSaveRequest(
            **names,
            session_id=plan.session_id,
            fingerprint=plan.fingerprint,
            world_size=facts.world_size,
            token_ids=save.packed(0, num_tokens),
            expires_at_ms=plan.expires_at_ms,
            started_at_ms=plan.started_at_ms,
            retain_ms=plan.retain_ms,
            pinned=plan.pinned,
            placements=plan.placements,
            groups=[message_of(pb.KVGroup, group) for group in groups],
        )
        return sidecar.prepare_save(request, timeout_s)

    def _lend(self, save: Save, part: Part, arena: Arena, wanted: deque[SavedFile]) -> list[SavedFile]:
        """Take the first files off `wanted`, in slots; none when the arena has no room for now."""
        batch = list(islice(wanted, _BATCH_FILES))
        timeout_s, waits = self._timeout_s(save, part.plan), not (part.plan.early or part.staged)
        request = pb.LendSlotsRequest(
            borrower=arena.borrower,
            cache_ref=part.plan.cache_ref,
            rank=self.link.facts.rank,
            block_indices=[each.block_index for each in batch],
            sizes_bytes=[each.writer.size_bytes for each in batch],
            timeout_ms=min(_SLOT_WAIT_MS, int(timeout_s * 500)) if waits else 0,
        )
        try:
            slots = self.link.sidecar.lend_slots(request, timeout_s)
        except SidecarUnavailable as exc:
            if is_late(exc):
                self.link.lost(part.terms)
            raise
        if not slots:
            # Tells again which slots are free: the word may have been lost.
            self.reporter.return_slots(arena, ())
        if len(slots) > len(batch):
            raise SidecarUnavailable("the sidecar lent more slots than requested")
        for slot in slots:
            file = wanted.popleft()
            file.slot_id = slot.slot_id
            part.staged.append(file)
            file.writer.begin(arena.view(slot.offset, slot.size_bytes))
        return batch[: len(slots)]

    def _fill(self, part: Part, files: Sequence[SavedFile]) -> None:
        """Copy engine blocks into slots. All threads have ended when this returns or raises."""
        # A GPU takes all files in one call.
        num_shares = _COPIES_AT_ONCE if self.layers.files_at_once == 1 else 1
        shares = [share for start in range(num_shares) if (share := files[start::num_shares])]
        self._copiers.run_all([partial(self._gather, part.fence, share) for share in shares])

    def _gather(self, fence: Fence, files: Sequence[SavedFile]) -> None:
        copies = [
            PageCopy(file.group, file.block_ids, file.writer.pages, len(file.block_ids), 0, fence, file.num_full)
            for file in files
        ]
        for file, digests in zip(files, self.layers.gather(copies), strict=True):
            if file.writer.digests:
                file.writer.digests = digests

    def _hand_over(self, save: Save, part: Part) -> None:
        """Give the sidecar the next files; none when the save has ended, sealed or not."""
        if save.phase is SavePhase.ENDED:
            self._give_back(part)
        files, size_bytes = list[SavedFile](), 0
        for file in part.staged:
            size_bytes += file.writer.size_bytes
            if files and size_bytes > _BATCH_BYTES:
                break
            files.append(file)
        if not files:
            return
        crash_point(BEFORE_HAND_OVER)
        requests = _requests(part.plan.cache_ref, self.link.facts.rank, files)
        taken = self.link.sidecar.save_blocks(requests, self._timeout_s(save, part.plan, hands_over=True))
        if taken.num_blocks != len(files):
            raise SaveIncomplete("the sidecar refused a block")
        del part.staged[: len(files)]
        for file in files:
            file.writer.end()

    def _seal(self, _save: Save, part: Part) -> None:
        crash_point(BEFORE_SEAL)
        timeout_s = self.settings.save_deadline_ms / 1000
        part.is_durable = self.link.sidecar.seal(part.plan.cache_ref, self.link.facts.rank, timeout_s)
        crash_point(AFTER_SEAL)

    def _fault_of(self, step: str, save: Save, part: Part, work: Callable[[Save, Part], None]) -> str:
        """Run a step of a part in its span; return the reason of its failure, a short fixed phrase; empty: none."""
        plan, rank = part.plan, self.link.facts.rank
        attributes: Attributes = {"contextcache.rank": rank, "contextcache.cache_ref": plan.cache_ref}
        with self.tracer.continued(step, parent=plan.traceparent, attributes=attributes):
            try:
                work(save, part)
            except SaveEnds as exc:
                fault = str(exc)
            except NotFinite:
                fault = "not_finite"
            except ContextCacheError as exc:
                self.link.doubt(exc, part.terms)
                fault = exc.code
            except Exception:
                # The engine holds blocks until this request is reported: no fault of ours may keep them.
                log.exception("save failed unexpectedly", extra={"cache_ref": plan.cache_ref})
                fault = "internal_error"
            else:
                return ""
            fail(get_current_span(), fault)
            return fault

    def _give_back(self, part: Part) -> None:
        """Let go of slots that no thread writes to any more."""
        files, part.staged = part.staged, []
        for file in files:
            file.writer.end()
        if files:
            assert part.terms is not None, "slots are lent under terms"
            assert part.terms.arena is not None, "slots are an arena's"
            self.reporter.return_slots(part.terms.arena, [file.slot_id for file in files])

    def _check_open(self, save: Save) -> None:
        if save.phase is SavePhase.ENDED:
            raise SaveEnds(save.reason)
        if self.clock.now_ms() >= save.deadline_ms:
            raise SaveEnds(HOLD_DEADLINE)

    def _timeout_s(self, save: Save, plan: SavePlan, *, hands_over: bool = False) -> float:
        """Return a call's deadline in seconds: short while blocks are held, and for questions."""
        if hands_over and not (plan.holds_blocks and save.phase in _UNCOPIED):
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
