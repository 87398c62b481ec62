"""One save: engine blocks into block files, then over to the sidecar. Runs in transfer threads, never in a step.

Two halves, because the engine's blocks are held during the first only: ask which blocks are missing and copy those
out (a bounded time), let the blocks go, then hand the files over and seal. A save that cannot go on is skipped and
counted; the context is then computed again when it is needed.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from contextcache.clock import Clock
from contextcache.crash_points import crash_point
from contextcache.errors import ContextCacheError, SaveIncomplete, SidecarUnavailable, StorageFull
from contextcache.rpc import FRAME_BYTES
from contextcache.tracing import NO_TRACER, Attributes, Span, Tracer, continued_span, current_span
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import BlockFileWriter, BlockMeta
from vllm_plugin.connector.counters import Counters
from vllm_plugin.connector.layout import Fence, PagedLayers
from vllm_plugin.connector.metadata import Piece, SavePlan
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import LazySidecar, RankLink, Terms
from vllm_plugin.connector.transfer import ResultBox, StagingBudget, TransferPool
from vllm_plugin.crash_points import AFTER_SEAL, BEFORE_HAND_OVER, BEFORE_SEAL, BETWEEN_HANDED_BLOCKS, COPIED_OUT

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Save:
    """A plan with what the worker adds to it."""

    plan: SavePlan
    fence: Fence
    deadline_ms: int
    """When the engine's blocks must be on their way out, on the worker's monotonic clock."""
    shared: bool = False
    """Whether the files lie in shared memory, where the sidecar takes them over."""
    files: list[_StagedFile] = field(default_factory=list)
    staged_bytes: int = 0
    is_sealed: bool = False
    """Whether every rank has sealed, this one the last."""


@dataclass(frozen=True, slots=True)
class _StagedFile:
    """A block file with its pages filled in, not yet finished."""

    block_index: int
    path: Path
    writer: BlockFileWriter


class Saver:
    """Carries out saves for one rank."""

    def __init__(  # noqa: PLR0913  # what a rank's threads share, by name
        self,
        *,
        settings: ConnectorSettings,
        link: RankLink,
        patient_sidecar: LazySidecar,
        layers: PagedLayers,
        results: ResultBox,
        counters: Counters,
        clock: Clock,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`patient_sidecar` has the deadline of a whole save; `link`'s own has that of a question."""
        self._tracer = tracer
        self._settings = settings
        self._link = link
        self._patient_sidecar = patient_sidecar
        self._layers = layers
        self._results = results
        self._counters = counters
        self._clock = clock
        self.budget = StagingBudget(settings.staging_limit_bytes)
        self._staged: set[Save] = set()
        """Saves whose blocks are free and whose files wait to be handed over."""
        self._uploads = TransferPool("uploads", threads=settings.save_threads, queue_limit=settings.queue_limit)

    def open(self, plan: SavePlan, fence: Fence) -> Save:
        """Give a plan its deadline; it runs from now, waiting in the queue included."""
        return Save(plan, fence, self._clock.now_ms() + self._settings.prepare_deadline_ms)

    def run(self, save: Save) -> None:
        """Copy out what is missing, let the blocks go, and queue the rest. Raises nothing."""
        with self._span("connector save: copy out", save):
            fault = self._fault_of(self._copy_out, save)
        if fault is not None:
            self._drop_files(save)
            self.skip(save, fault)
            return
        crash_point(COPIED_OUT)
        self._results.release_blocks(save.plan.engine_request_id)
        self._staged.add(save)
        if self._uploads.try_submit(lambda: self._finish(save)) is None:
            self._drop_files(save)
            self._count_skip(save, "queue_full")

    def skip(self, save: Save, reason: str) -> None:
        """Give a save up before its blocks were copied. Never waits: the engine's thread calls it too."""
        self._count_skip(save, reason)
        self._results.release_blocks(save.plan.engine_request_id)

    def drain(self, timeout_s: float) -> None:
        """Let what is staged be handed over and sealed, for `timeout_s` at most."""
        self._uploads.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what waits, its files too; return whether the threads have ended."""
        ended = self._uploads.close(timeout_s)
        if ended:
            for save in tuple(self._staged):
                self._drop_files(save)
        return ended

    def _finish(self, save: Save) -> None:
        with self._span("connector save: hand over", save):
            fault = self._fault_of(self._hand_over, save)
        self._drop_files(save)
        if fault is not None:
            self._count_skip(save, fault)
            return
        self._counters.add("saves")
        # Last: whoever hears that a save has ended finds it counted, and its files gone.
        if save.is_sealed:
            self._results.end_save(save.plan.cache_ref)

    def _fault_of(self, half: Callable[[Save], None], save: Save) -> str | None:
        """Run one half; return why it failed as a short fixed phrase, or None when it did not."""
        try:
            half(save)
        except ContextCacheError as exc:
            if isinstance(exc, SidecarUnavailable):
                self._link.lost()
            fault = exc.code
        except OSError:
            fault = "staging_error"
        except Exception:
            # The engine holds blocks until this request is reported: no fault of ours may keep them.
            log.exception("save broke", extra={"cache_ref": save.plan.cache_ref})
            fault = "internal_error"
        else:
            return None
        current_span().fail(fault)
        return fault

    def _span(self, name: str, save: Save) -> AbstractContextManager[Span]:
        plan, rank = save.plan, self._link.facts.rank
        attributes: Attributes = {"contextcache.rank": rank, "contextcache.cache_ref": plan.cache_ref}
        return continued_span(self._tracer, name, parent=plan.traceparent, attributes=attributes)

    def _copy_out(self, save: Save) -> None:
        plan, facts = save.plan, self._link.facts
        self._remaining_s(save)
        terms = self._link.terms()
        answer = self._link.sidecar.get().prepare_save(
            tenant=plan.tenant,
            session_id=plan.session_id,
            cache_ref=plan.cache_ref,
            fingerprint=facts.fingerprint,
            rank=facts.rank,
            world_size=facts.world_size,
            token_ids=plan.token_ids,
            expires_at_ms=plan.expires_at_ms,
            started_at_ms=plan.started_at_ms,
            timeout_s=self._remaining_s(save),
        )
        self._remaining_s(save)
        save.shared = terms.shared_directory is not None
        pieces = self._wanted(plan, answer, terms)
        size_bytes = sum(self._piece_bytes(piece) for piece in pieces)
        if not self.budget.try_take(size_bytes):
            raise StorageFull("the staging limit is reached")
        save.staged_bytes = size_bytes
        directory = self._directory(terms)
        for piece in pieces:
            self._stage(save, piece, answer.block_ids, directory)

    def _wanted(self, plan: SavePlan, answer: pb.PrepareSaveResponse, terms: Terms) -> list[Piece]:
        """Return the pieces the sidecar lacks: missing whole blocks, and the tail when there is one."""
        whole, tail_tokens = divmod(len(plan.token_ids), terms.block_tokens)
        missing = sorted(answer.missing_blocks)
        in_range = not missing or (missing[0] >= 0 and missing[-1] < whole)
        if len(answer.block_ids) != whole or answer.tail_tokens != tail_tokens or not in_range:
            raise SidecarUnavailable("the sidecar speaks of other blocks than ours; its settings have changed")
        indices = [*missing, whole] if tail_tokens else missing
        size = self._link.facts.engine_block_tokens
        pieces = [plan.piece(i, block_tokens=terms.block_tokens, engine_block_tokens=size) for i in indices]
        if any(self._piece_bytes(piece) > terms.block_size_bytes_max for piece in pieces):
            raise StorageFull("a block is larger than the sidecar takes")
        return pieces

    def _piece_bytes(self, piece: Piece) -> int:
        return len(self._layers.shapes) * len(piece.block_ids) * self._layers.page_bytes

    def _stage(self, save: Save, piece: Piece, block_names: Sequence[str], directory: Path) -> None:
        """Copy one piece straight into the map of its block file."""
        plan, facts, index = save.plan, self._link.facts, piece.block_index
        whole = index < len(block_names)
        meta = BlockMeta(
            kind="block" if whole else "tail",
            name=block_names[index] if whole else plan.cache_ref,
            parent=block_names[index - 1] if index else "",
            tenant=plan.tenant,
            fingerprint=facts.fingerprint,
            rank=facts.rank,
            token_ids=piece.token_ids,
        )
        path = directory / f"{plan.cache_ref}.r{facts.rank}.{index}.{secrets.token_hex(4)}"
        writer = BlockFileWriter(
            path,
            meta,
            num_layers=len(self._layers.shapes),
            engine_blocks=len(piece.block_ids),
            page_bytes=self._layers.page_bytes,
        )
        save.files.append(_StagedFile(index, path, writer))
        self._layers.gather(piece.block_ids, writer.pages, after=save.fence)

    def _directory(self, terms: Terms) -> Path:
        if terms.shared_directory is not None:
            return terms.shared_directory / "incoming"
        return Path(self._settings.staging_directory or tempfile.gettempdir())

    def _hand_over(self, save: Save) -> None:
        plan, rank, sidecar = save.plan, self._link.facts.rank, self._patient_sidecar.get()
        crash_point(BEFORE_HAND_OVER)
        for file in save.files:
            file.writer.finish()
        if save.files:
            requests = _by_name(save, rank) if save.shared else _in_frames(save, rank)
            taken = sidecar.save_blocks(requests, self._settings.save_deadline_ms / 1000)
            if taken.num_blocks != len(save.files):
                raise SaveIncomplete("the sidecar did not take every block")
        crash_point(BEFORE_SEAL)
        save.is_sealed = sidecar.seal(plan.cache_ref, rank)
        crash_point(AFTER_SEAL)

    def _drop_files(self, save: Save) -> None:
        """Remove what the sidecar has not taken over, and give the staging bytes back. Harmless when repeated."""
        self._staged.discard(save)
        for file in save.files:
            file.writer.discard()
        save.files.clear()
        self.budget.give_back(save.staged_bytes)
        save.staged_bytes = 0

    def _remaining_s(self, save: Save) -> float:
        """Return how long the engine's blocks may still be held, in seconds. Raises SidecarUnavailable at the end."""
        remaining_ms = save.deadline_ms - self._clock.now_ms()
        if remaining_ms <= 0:
            raise SidecarUnavailable("the sidecar did not answer while the blocks could be held")
        return remaining_ms / 1000

    def _count_skip(self, save: Save, reason: str) -> None:
        self._counters.add("skipped_saves", reason)
        self._results.end_save(save.plan.cache_ref)
        log.warning("save skipped", extra={"cache_ref": save.plan.cache_ref, "reason": reason})


def _by_name(save: Save, rank: int) -> Iterator[pb.SaveBlocksRequest]:
    for file in save.files:
        yield pb.SaveBlocksRequest(
            cache_ref=save.plan.cache_ref,
            rank=rank,
            block_index=file.block_index,
            shared_name=file.path.name,
            last_frame=True,
        )
        crash_point(BETWEEN_HANDED_BLOCKS)


def _in_frames(save: Save, rank: int) -> Iterator[pb.SaveBlocksRequest]:
    for file in save.files:
        remaining = file.writer.size_bytes
        with file.path.open("rb") as source:
            while remaining:
                frame = source.read(min(FRAME_BYTES, remaining))
                remaining -= len(frame)
                yield pb.SaveBlocksRequest(
                    cache_ref=save.plan.cache_ref,
                    rank=rank,
                    block_index=file.block_index,
                    frame=frame,
                    last_frame=remaining == 0,
                )
        crash_point(BETWEEN_HANDED_BLOCKS)
