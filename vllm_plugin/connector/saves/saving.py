"""One save: engine blocks into block files, then over to the sidecar. Runs in transfer threads, never in a step.

The engine's blocks are held while they are copied out and no longer. What fits into the staging budget is copied at
once, the blocks go, and the files are handed over and sealed after that. A context larger than the budget goes by
pieces: a file that the sidecar has taken makes room for the next. A save that cannot go on is skipped, counted, and
told to the sidecar with its reason; the context is then computed again when it is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeAlias

from contextcache.clock import Clock
from contextcache.errors import SidecarUnavailable, StorageFull
from contextcache.model import KVGroup
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import message_of
from contextcache.wire.rpc import is_late
from kv_sidecar.client import BlockFileWriter, context_files, pack_token_ids
from vllm_plugin.connector.copies.codec import NotFinite
from vllm_plugin.connector.copies.pages import Fence, PageCopy, PagedLayers, page_bytes
from vllm_plugin.connector.metadata import Piece, SavePlan
from vllm_plugin.connector.saves.hand_over import GivenUp, HandOver, Loan, Save, StagedFile
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Arena, RankLink, Terms
from vllm_plugin.connector.transfer import ResultBox
from vllm_plugin.crash_points import COPIED_OUT

HOLD_DEADLINE = "hold_deadline"
"""Why a save is given up whose bytes nobody takes in time; the sidecar keeps what it has taken for the next."""
_SLOT_WAIT_MS = 20
"""The sidecar's answer that there is no room comes after that: frames are slower by about as much."""
_COPIES_AT_ONCE = 2
"""Block files filled at a time, of all saves: two threads copy nearly twice as fast as one."""
_BATCH_FILES = 64
"""Slots asked for in one call."""

Wanted: TypeAlias = tuple[Piece, BlockFileWriter]
"""What the sidecar lacks, and the file that it will be."""


class Saver:
    """Carries out saves for one rank."""

    def __init__(
        self,
        *,
        settings: ConnectorSettings,
        link: RankLink,
        hand_over: HandOver,
        layers: PagedLayers,
        results: ResultBox,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._link = link
        self.hand_over = hand_over
        self._layers = layers
        self._results = results
        self._clock = clock
        self._copiers = ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="context-cache-copies")

    def close(self) -> None:
        """End the threads, when what they copy is copied."""
        self._copiers.shutdown(wait=False)

    def open(self, plan: SavePlan, fence: Fence) -> Save:
        """Give a plan its deadline; it runs from now, waiting in the queue included."""
        held = zip(plan.block_ids, self._layers.shapes, strict=True)
        size_bytes = sum(len(ids) * page_bytes(shapes) for ids, shapes in held)
        allowed_ms = self._settings.prepare_deadline_ms + size_bytes // self._settings.save_bytes_per_ms_min
        return Save(plan, fence, self._clock.now_ms() + allowed_ms)

    def run(self, save: Save) -> None:
        """Copy out what is missing, let the blocks go, and have the rest handed over. Raises nothing."""
        if not self.hand_over.open(save):
            self._release_blocks(save)
            return
        with self.hand_over.span("connector save: copy out", save):
            fault = self.hand_over.fault_of(self._copy_out, save)
        if fault is None:
            crash_point(COPIED_OUT)
        self._release_blocks(save)
        if fault is not None:
            self.hand_over.give_up(save, fault)
            return
        with save.lock:
            save.is_copied = not save.fault
        self.hand_over.begin(save)

    def skip(self, save: Save, reason: str) -> None:
        """Give a save up before its blocks were copied. Never waits: the engine's thread calls it too."""
        self.hand_over.give_up(save, reason)
        self._release_blocks(save)

    def overtake(self, save: Save) -> None:
        """Tell that a save's blocks are not its own any more: what is not copied is not. Never waits."""
        with save.lock:
            is_copied = save.is_copied
        if not is_copied:
            self.hand_over.give_up(save, "overtaken")

    def _release_blocks(self, save: Save) -> None:
        if save.plan.holds_blocks:
            self._results.release_blocks(save.plan.engine_request_id)

    def _copy_out(self, save: Save) -> None:
        facts = self._link.facts
        self._remaining_s(save)
        terms = save.terms = self._link.terms()
        plan = save.plan.whole_files(file_tokens_min=terms.block_tokens) if save.plan.early else save.plan
        if not plan.token_ids:
            return
        groups = plan.kept(file_tokens_min=terms.block_tokens)
        request = pb.PrepareSaveRequest(
            tenant=plan.tenant,
            session_id=plan.session_id,
            cache_ref=plan.cache_ref,
            fingerprint=plan.fingerprint,
            rank=facts.rank,
            world_size=facts.world_size,
            token_ids=pack_token_ids(plan.token_ids),
            expires_at_ms=plan.expires_at_ms,
            started_at_ms=plan.started_at_ms,
            groups=[message_of(pb.KVGroup, group) for group in groups],
            early=bool(plan.early),
        )
        timeout_s = min(self._remaining_s(save), self._settings.prepare_deadline_ms / 1000)
        answer = self._link.sidecar.get().prepare_save(request, timeout_s)
        wanted = deque(self._wanted(plan, groups, answer, terms))
        arena = terms.arena
        while wanted:
            self._fill_some(save, arena, wanted)
            self._remaining_s(save)

    def _fill_some(self, save: Save, arena: Arena | None, wanted: deque[Wanted]) -> None:
        """Copy out the next pieces that there is room for, and take them off `wanted`.

        Where the arena has none now (loads have pinned it, an engine that stands still was lent it) they are copied
        into memory of our own, and go in frames: the engine's blocks are not held for others.
        """
        batch = self._with_room(save, wanted)
        loans: deque[Loan | None] = deque()
        filling: list[Future[None]] = []
        try:
            loans.extend(() if arena is None else self._borrow(save, arena, batch))
            loans = loans or deque([None] * len(batch))
            while loans:
                piece, writer = batch.popleft()
                file = StagedFile(piece.block_index, writer, loans.popleft())
                filling.append(self._copiers.submit(self._fill, save, piece, file))
        finally:
            wait(filling)  # before anybody frees the engine's blocks
            self.hand_over.give_back([loan for loan in loans if loan is not None])
            for _, writer in batch:
                self.hand_over.budget.give_back(writer.size_bytes)
            wanted.extendleft(reversed(batch))
        for filled in filling:
            filled.result()

    def _wanted(
        self, plan: SavePlan, groups: Sequence[KVGroup], answer: pb.PrepareSaveResponse, terms: Terms
    ) -> list[Wanted]:
        """Return the pieces the sidecar lacks: missing blocks, and all tails."""
        files = context_files(plan.cache_ref, plan.fingerprint, plan.tenant, plan.token_ids, groups)
        missing = sorted(answer.missing_files)
        in_range = not missing or (missing[0] >= 0 and missing[-1] < len(files))
        if answer.num_files != len(files) or not in_range:
            raise SidecarUnavailable(
                f"the sidecar expects {answer.num_files} files, the engine has {len(files)}: their versions differ"
            )
        rank = self._link.facts.rank
        wanted = []
        for index in missing:
            piece = plan.piece(index, files[index])
            pages_bytes, codec = self._layers.stored(piece.file.group, piece.num_pages, piece.num_full)
            num_digests = piece.num_pages if self._layers.makes_digests else 0
            meta = plan.meta(piece, rank)
            wanted.append((piece, BlockFileWriter(meta, pages_bytes=pages_bytes, codec=codec, num_digests=num_digests)))
        if any(file.size_bytes > terms.block_size_bytes_max for _, file in wanted):
            raise StorageFull(f"a block has more than the sidecar's limit of {terms.block_size_bytes_max} bytes")
        if any(file.size_bytes > self.hand_over.budget.limit_bytes for _, file in wanted):
            raise GivenUp("staging_full")
        return wanted

    def _with_room(self, save: Save, wanted: deque[Wanted]) -> deque[Wanted]:
        """Take as many off `wanted` as the budget has bytes for, and at least one.

        For that one others' are waited for if need be. The engine's blocks are held meanwhile: until the save's
        deadline, and no longer than the sidecar takes nothing.
        """
        budget = self.hand_over.budget
        batch: deque[Wanted] = deque()
        while wanted and len(batch) < _BATCH_FILES and budget.try_take(wanted[0][1].size_bytes):
            batch.append(wanted.popleft())
        if batch:
            return batch
        seen, at_ms = budget.num_returns, self._clock.now_ms()

        def check() -> None:
            nonlocal seen, at_ms
            now_ms = self._clock.now_ms()
            if budget.num_returns != seen:
                seen, at_ms = budget.num_returns, now_ms
            if save.fault:
                raise GivenUp(save.fault)
            if now_ms >= min(save.deadline_ms, at_ms + self._settings.prepare_deadline_ms):
                raise GivenUp(HOLD_DEADLINE)

        if save.staged:
            self.hand_over.begin(save)
        budget.take(wanted[0][1].size_bytes, check=check)
        return deque([wanted.popleft()])

    def _borrow(self, save: Save, arena: Arena, batch: Sequence[Wanted]) -> list[Loan]:
        """Get slots for the first files of a batch; none when the sidecar has no room for now."""
        request = pb.LendSlotsRequest(
            borrower=arena.borrower,
            cache_ref=save.plan.cache_ref,
            rank=self._link.facts.rank,
            block_indices=[piece.block_index for piece, _ in batch],
            sizes_bytes=[writer.size_bytes for _, writer in batch],
            timeout_ms=_SLOT_WAIT_MS,
        )
        try:
            slots = self._link.sidecar.get().lend_slots(request, self._settings.prepare_deadline_ms / 1000)
        except SidecarUnavailable as exc:
            if is_late(exc):
                self._link.lost(save.terms)
            raise
        if not slots:
            self.hand_over.remind(arena)
        if len(slots) > len(batch):
            raise SidecarUnavailable("the sidecar lent more slots than requested")
        return [Loan(arena, slot.slot_id, arena.view(slot.offset, slot.size_bytes)) for slot in slots]

    def _fill(self, save: Save, piece: Piece, file: StagedFile) -> None:
        """Copy one piece straight to where its file is made, and stage it. Its room is given back when that fails."""
        try:
            file.writer.begin(memoryview(bytearray(file.writer.size_bytes)) if file.loan is None else file.loan.view)
            pages, ids = file.writer.pages, piece.block_ids
            copy = PageCopy(piece.file.group, ids, pages, len(ids), after=save.fence, num_full=piece.num_full)
            [file.writer.digests] = self._layers.gather([copy])
        except BaseException as exc:
            self.hand_over.drop([file])
            if isinstance(exc, NotFinite):
                raise GivenUp("not_finite") from exc
            raise
        self.hand_over.stage(save, file)

    def _remaining_s(self, save: Save) -> float:
        """Return how long the engine's blocks may still be held, in seconds. Raises SidecarUnavailable at the end."""
        remaining_ms = save.deadline_ms - self._clock.now_ms()
        if remaining_ms <= 0:
            raise SidecarUnavailable("the sidecar did not answer while the engine held the blocks")
        return remaining_ms / 1000
