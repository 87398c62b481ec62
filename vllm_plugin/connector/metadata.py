"""Plans and matching: which engine blocks a load fills and a save reads, as plain values. Pure: no vLLM, no I/O.

Positions. An engine's layers come in *groups*, each with a block table of its own. An engine block of a group holds
`block_tokens` tokens; a context's i-th one has *position* i, and the engine keeps it in a block *id* of its choice.
A group keeps the positions that the next token can see: all, those of a window, or the one with its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contextcache.model import KVFile, KVGroup, KVKind, Manifest
from kv_sidecar.client import ADAPTER_MARK, BlockMeta, file_meta


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Layers that share a block table, as plans see them."""

    kind: KVKind
    block_tokens: int
    """Tokens in one engine block."""
    window: int = 0
    """Tokens that a token sees, itself included; 0: all before it."""
    digest: str = ""
    """See KVGroup."""

    def first_needed(self, num_tokens: int) -> int:
        """Return the first position that the token after `num_tokens` others can see."""
        if self.kind == "state":
            return (num_tokens - 1) // self.block_tokens
        return max(0, num_tokens - self.window + 1) // self.block_tokens if self.window else 0

    def num_positions(self, num_tokens: int) -> int:
        """Return how many positions `num_tokens` tokens have."""
        return -(-num_tokens // self.block_tokens)

    def blocks_of(self, file: KVFile, block_ids: Sequence[int], first: int) -> Sequence[int]:
        """Return the engine blocks of a file; none when one is missing. `block_ids` begin at position `first`."""
        start, end = file.first_token // self.block_tokens - first, -(-file.end_token // self.block_tokens) - first
        return block_ids[start:end] if start >= 0 and end <= len(block_ids) else ()

    def num_full(self, file: KVFile) -> int:
        """Return how many of a file's pages, from its first on, have a token of the file in every slot."""
        if self.kind == "state" or file.first_token % self.block_tokens:
            return 0
        return (file.end_token - file.first_token) // self.block_tokens

    def kept(self, num_tokens: int, *, file_tokens_min: int) -> KVGroup:
        """Return the saved part of a context that ends here; whole files hold `file_tokens_min` tokens or some more."""
        first = num_tokens - 1 if self.kind == "state" else self.first_needed(num_tokens) * self.block_tokens
        size = file_tokens_min if self.kind == "state" else -(-file_tokens_min // self.block_tokens) * self.block_tokens
        return KVGroup(self.kind, size, ((first, num_tokens),), self.window, self.digest)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts of one worker that the scheduler needs before it can promise a load."""

    fingerprint: str
    """Hex SHA-256 of `fingerprint_json`; equal on all ranks."""
    fingerprint_json: str
    rank: int
    world_size: int
    groups: tuple[EngineGroup, ...]

    @property
    def has_checkpoints(self) -> bool:
        """Whether windows are saved at the end of a prompt too (saves/running.py)."""
        return any(group.window for group in self.groups) and not any(group.kind == "state" for group in self.groups)


class ArenaWord(NamedTuple):
    """Word of a rank on the sidecar's memory; without it, no load and no save of the rank succeeds."""

    rank: int
    lacks_arena: bool


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that requests are computed with."""

    adapter_id: int
    """vLLM's number for it."""
    name: str
    digest: str
    """Hex digest of its weights in the engine's memory (identity/adapters.py)."""

    def key(self, fingerprint: str) -> str:
        """Return the fingerprint of KV that an engine with this one computes with the adapter."""
        return f"{fingerprint}{ADAPTER_MARK}{self.digest}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one block file that a plan moves."""

    block_index: int
    """Position of the file among the context's."""
    file: KVFile
    token_ids: tuple[int, ...]
    """All tokens of the file, also of those pages the plan does not move."""
    num_pages: int
    """Engine blocks in the file."""
    first_page: int
    """First of them that moves."""
    block_ids: tuple[int, ...]
    """Engine blocks for the pages `first_page` and following."""
    num_full: int
    """The first so many of all pages have a token of the file in every slot."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load, made by the scheduler and carried out by every worker. Immutable: uniproc passes the object itself."""

    engine_request_id: str
    request_id: str
    """Request as named in the signed token, for the report; empty: write none."""
    tenant: str
    cache_ref: str
    fingerprint: str
    digests: tuple[str, ...]
    """Digests of the groups, in order."""
    pieces: tuple[Piece, ...]
    """The block files that are needed, in order."""
    device_tokens: int
    loaded_tokens: int
    asked_at_s: float
    """`time.monotonic()` of the first question about this request; one clock for all processes of a machine."""
    traceparent: str = ""
    """Span of the turn, for the load's own; empty: the turn is not traced."""
    adapter: Adapter | None = None
    """Adapter of the KV; the fingerprint has it too."""
    compute_us_per_token: float = 0.0
    """Time to compute a token, for the report; 0: unknown."""

    def meta(self, piece: Piece, rank: int) -> BlockMeta:
        """Return what a file must say of itself."""
        return file_meta(
            piece.file,
            group=self.digests[piece.file.group],
            tenant=self.tenant,
            fingerprint=self.fingerprint,
            rank=rank,
            token_ids=piece.token_ids,
        )


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A part of a save: the new tokens of a request that runs, or the last part, when it has finished."""

    engine_request_id: str
    tenant: str
    session_id: str
    cache_ref: str
    expires_at_ms: int
    started_at_ms: int
    """Unix time in ms at which the engine was given the request: a deletion after it wins over this save."""
    first_token: int
    """Position of the first of `token_ids`: earlier plans brought the tokens before it."""
    token_ids: bytes
    """Tokens that have valid KV, oldest first, as little-endian u32."""
    groups: tuple[EngineGroup, ...]
    block_ids: tuple[tuple[int, ...], ...]
    """Engine blocks of each group: of an early part those of its tokens, else all from the first needed position on."""
    fingerprint: str
    """Fingerprint of the engine that computed them: it may have another by the time they are copied out."""
    traceparent: str = ""
    """Span of the turn, for the save's own; empty: the turn is not traced."""
    holds_blocks: bool = True
    """Whether the engine keeps the blocks until the worker lets go; else it tells when it reuses them."""
    adapter: Adapter | None = None
    """Adapter that they were computed with; the fingerprint has it too."""
    early: bool = False
    """Whether more parts follow: whole files are sent ahead of the last part."""
    retain_ms: int = 0
    pinned: bool = False
    """Promise that the KV is to get at its seal, as in KVTransfer."""
    placements: tuple[str, ...] = ()
    """Placements of kept KV after its seal, as in KVTransfer."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this part and of all earlier ones."""
        return self.first_token + len(self.token_ids) // 4

    @property
    def name(self) -> str:
        """Name of this part between worker and scheduler; the last part has the save's name."""
        return f"{self.cache_ref}@{self.first_token}" if self.early else self.cache_ref


def common_prefix(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Return how many leading token ids are equal."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def refusal(manifest: Manifest, facts: RankFacts) -> str | None:
    """Return why this engine cannot use a manifest, as a short fixed phrase, or None when it can."""
    if manifest.fingerprint != facts.fingerprint:
        return "fingerprint_mismatch"
    if manifest.world_size != facts.world_size:
        return "world_size_mismatch"
    if [_layout(group) for group in manifest.groups] != [_layout(group) for group in facts.groups]:
        return "layout_mismatch"
    pairs = zip(manifest.groups, facts.groups, strict=True)
    if any(saved.block_tokens % group.block_tokens for saved, group in pairs if group.kind != "state"):
        return "block_size_mismatch"
    return None


def _layout(group: KVGroup | EngineGroup) -> tuple[KVKind, int, str]:
    return group.kind, group.window, group.digest


def load_pieces(
    manifest: Manifest,
    facts: RankFacts,
    block_ids: Sequence[Sequence[int]],
    device_tokens: int,
    loaded_tokens: int,
) -> tuple[Piece, ...]:
    """Return the files of a load that makes the token after `device_tokens + loaded_tokens` computable.

    `block_ids` are all of the request's engine blocks of each group, from position 0. Blocks before `device_tokens` (a
    block edge) belong to the engine's prefix cache, other requests may be reading them, so they are never written.
    """
    num_tokens = device_tokens + loaded_tokens
    pieces = []
    for index, file in enumerate(manifest.files):
        group, ids = facts.groups[file.group], block_ids[file.group]
        size = group.block_tokens
        assert group.kind == "state" or device_tokens % size == 0, "the engine presents a block-aligned hit"
        held = 0 if group.kind == "state" else device_tokens // size
        first, last = file.first_token // size, group.num_positions(file.end_token)
        low = max(first, held, group.first_needed(num_tokens))
        high = min(last, group.num_positions(num_tokens))
        if low >= high:
            continue
        assert len(ids) >= high, "the engine allocated every block the load needs"
        tokens = manifest.token_ids[file.first_token : file.end_token]
        ids_moved = tuple(ids[low:high])
        pieces.append(Piece(index, file, tokens, last - first, low - first, ids_moved, group.num_full(file)))
    return tuple(pieces)
