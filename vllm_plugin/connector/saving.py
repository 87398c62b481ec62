"""One save: engine blocks into block files, then over to the sidecar. Runs in transfer threads, never in a step.

The engine's blocks are held while they are copied out and no longer. What fits into the staging budget is copied at
once, the blocks go, and the files are handed over and sealed after that. A context larger than the budget goes by
pieces: a file that the sidecar has taken makes room for the next. A save that cannot go on is skipped, counted, and
told to the sidecar with its reason; the context is then computed again when it is needed.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from contextcache.clock import Clock
from contextcache.errors import SidecarUnavailable, StorageFull
from contextcache.model import KVGroup
from contextcache.process.crash_points import crash_point
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import BlockFileWriter, context_files
from vllm_plugin.connector.hand_over import GivenUp, HandOver, Save, StagedFile
from vllm_plugin.connector.layout import Fence, PagedLayers, page_bytes
from vllm_plugin.connector.metadata import Piece, SavePlan
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import RankLink, Terms
from vllm_plugin.connector.transfer import ResultBox
from vllm_plugin.crash_points import COPIED_OUT


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

    def open(self, plan: SavePlan, fence: Fence) -> Save:
        """Give a plan its deadline; it runs from now, waiting in the queue included."""
        held = zip(plan.block_ids, self._layers.shapes, strict=True)
        size_bytes = sum(len(ids) * page_bytes(shapes) for ids, shapes in held)
        allowed_ms = self._settings.prepare_deadline_ms + size_bytes // self._settings.save_bytes_per_ms_min
        return Save(plan, fence, self._clock.now_ms() + allowed_ms)

    def run(self, save: Save) -> None:
        """Copy out what is missing, let the blocks go, and have the rest handed over. Raises nothing."""
        self.hand_over.open(save)
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
        plan, facts = save.plan, self._link.facts
        self._remaining_s(save)
        terms = self._link.terms()
        groups = plan.kept(file_tokens_min=terms.block_tokens)
        answer = self._link.sidecar.get().prepare_save(
            tenant=plan.tenant,
            session_id=plan.session_id,
            cache_ref=plan.cache_ref,
            fingerprint=plan.fingerprint,
            rank=facts.rank,
            world_size=facts.world_size,
            token_ids=plan.token_ids,
            expires_at_ms=plan.expires_at_ms,
            started_at_ms=plan.started_at_ms,
            groups=groups,
            timeout_s=min(self._remaining_s(save), self._settings.prepare_deadline_ms / 1000),
        )
        self._remaining_s(save)
        save.shared = terms.shared_directory is not None
        directory = self._directory(terms)
        for piece in self._wanted(plan, groups, answer, terms):
            self._make_room(save, piece)
            self.hand_over.stage(save, self._filled(save, piece, directory))

    def _wanted(
        self, plan: SavePlan, groups: Sequence[KVGroup], answer: pb.PrepareSaveResponse, terms: Terms
    ) -> list[Piece]:
        """Return the pieces the sidecar lacks: missing blocks, and all tails."""
        files = context_files(plan.cache_ref, plan.fingerprint, plan.tenant, plan.token_ids, groups)
        missing = sorted(answer.missing_files)
        in_range = not missing or (missing[0] >= 0 and missing[-1] < len(files))
        if answer.num_files != len(files) or not in_range:
            raise SidecarUnavailable("the sidecar speaks of other files than ours; its release is another")
        pieces = [plan.piece(index, files[index]) for index in missing]
        if any(self._piece_bytes(piece) > terms.block_size_bytes_max for piece in pieces):
            raise StorageFull("a block is larger than the sidecar takes")
        if any(self._piece_bytes(piece) > self.hand_over.budget.limit_bytes for piece in pieces):
            raise GivenUp("staging_full")
        return pieces

    def _make_room(self, save: Save, piece: Piece) -> None:
        """Take a piece's bytes of the budget, when the sidecar has taken others' if need be.

        The engine's blocks are held meanwhile: until the save's deadline, and no longer than the sidecar takes nothing.
        """
        size_bytes, budget = self._piece_bytes(piece), self.hand_over.budget
        if budget.try_take(size_bytes):
            return
        seen, at_ms = budget.num_returns, self._clock.now_ms()

        def check() -> None:
            nonlocal seen, at_ms
            now_ms = self._clock.now_ms()
            if budget.num_returns != seen:
                seen, at_ms = budget.num_returns, now_ms
            if save.fault:
                raise GivenUp(save.fault)
            if now_ms >= min(save.deadline_ms, at_ms + self._settings.prepare_deadline_ms):
                raise GivenUp("hold_deadline")

        if save.staged:
            self.hand_over.begin(save)
        budget.take(size_bytes, check=check)

    def _piece_bytes(self, piece: Piece) -> int:
        return len(piece.block_ids) * page_bytes(self._layers.shapes[piece.file.group])

    def _filled(self, save: Save, piece: Piece, directory: Path) -> StagedFile:
        """Copy one piece straight into the map of its block file. Its room is given back when that fails."""
        plan, rank, index = save.plan, self._link.facts.rank, piece.block_index
        path = directory / f"{plan.cache_ref}.r{rank}.{index}.{secrets.token_hex(4)}"
        size_bytes = self._piece_bytes(piece)
        try:
            writer = BlockFileWriter(path, plan.meta(piece, rank), pages_bytes=size_bytes)
        except BaseException:
            self.hand_over.budget.give_back(size_bytes)
            raise
        file = StagedFile(index, path, writer, size_bytes)
        try:
            self._layers.gather(piece.file.group, piece.block_ids, writer.pages, after=save.fence)
        except BaseException:
            self.hand_over.drop([file])
            raise
        return file

    def _directory(self, terms: Terms) -> Path:
        if terms.shared_directory is not None:
            return terms.shared_directory / "incoming"
        return Path(self._settings.staging_directory or tempfile.gettempdir())

    def _remaining_s(self, save: Save) -> float:
        """Return how long the engine's blocks may still be held, in seconds. Raises SidecarUnavailable at the end."""
        remaining_ms = save.deadline_ms - self._clock.now_ms()
        if remaining_ms <= 0:
            raise SidecarUnavailable("the sidecar did not answer while the blocks could be held")
        return remaining_ms / 1000
