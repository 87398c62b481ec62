"""Plans and matching: which engine blocks a load fills and a save reads, as plain values. Pure: no vLLM, no I/O.

Positions. An engine block holds `engine_block_tokens` tokens; a context's i-th engine block has *position* i, and
the engine keeps it in whatever block *id* it likes. A sidecar block holds `block_tokens` tokens, a multiple of the
engine's, so sidecar block j covers positions j*ratio up to (j+1)*ratio; the tail covers the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contextcache.model import Manifest


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the scheduler must know of one worker before it can promise a load."""

    fingerprint: str
    """Hex SHA-256 of `fingerprint_json`; equal on all ranks."""
    fingerprint_json: str
    rank: int
    world_size: int
    engine_block_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one block file that a plan moves."""

    block_index: int
    """Position among the context's whole blocks; their number for the tail."""
    first_page: int
    """First engine block inside the file."""
    block_ids: tuple[int, ...]
    """Engine blocks for the pages `first_page` and following."""
    token_ids: tuple[int, ...]
    """All tokens of the file, also of those pages the plan does not move."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load, made by the scheduler and carried out by every worker. Immutable: uniproc passes the object itself."""

    engine_request_id: str
    request_id: str
    """Request as named in the signed token, for the report; empty: write none."""
    tenant: str
    cache_ref: str
    fingerprint: str
    block_tokens: int
    engine_block_tokens: int
    whole_blocks: tuple[str, ...]
    """Ids of the context's whole blocks."""
    token_ids: tuple[int, ...]
    """All tokens of the manifest."""
    first_position: int
    """Position of the first engine block to fill."""
    block_ids: tuple[int, ...]
    """Engine blocks to fill, from `first_position` on."""
    device_tokens: int
    loaded_tokens: int
    asked_at_s: float
    """`time.monotonic()` of the first question about this request; one clock for all processes of a machine."""
    traceparent: str = ""
    """Span of the turn, for the load's own; empty: nobody traces it."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the block files that are needed, in order."""
        ratio = self.block_tokens // self.engine_block_tokens
        end = self.first_position + len(self.block_ids)
        for index in range(self.first_position // ratio, -(-end // ratio)):
            low, high = max(self.first_position, index * ratio), min(end, (index + 1) * ratio)
            ids = self.block_ids[low - self.first_position : high - self.first_position]
            yield Piece(index, low - index * ratio, ids, self._tokens(index))

    def _tokens(self, index: int) -> tuple[int, ...]:
        return self.token_ids[index * self.block_tokens : (index + 1) * self.block_tokens]

    def name(self, index: int) -> str:
        """Return the name the block file at `index` must carry: the block id, or the cache_ref for the tail."""
        return self.whole_blocks[index] if index < len(self.whole_blocks) else self.cache_ref


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One save, made when a request finishes. The engine keeps `block_ids` untouched until the worker lets go."""

    engine_request_id: str
    tenant: str
    session_id: str
    cache_ref: str
    expires_at_ms: int
    started_at_ms: int
    """Unix time in ms at which the engine was given the request: a deletion after it wins over this save."""
    token_ids: tuple[int, ...]
    """Tokens that have valid KV, oldest first."""
    block_ids: tuple[int, ...]
    """Engine blocks that hold them, from position 0 on."""
    fingerprint: str
    """Under which they were computed: the engine's may be another by the time they are copied out."""
    traceparent: str = ""
    """Span of the turn, for the save's own; empty: nobody traces it."""

    def piece(self, index: int, *, block_tokens: int, engine_block_tokens: int) -> Piece:
        """Return what goes into the block file at `index`; the last one is the tail when tokens are left over."""
        ratio = block_tokens // engine_block_tokens
        tokens = self.token_ids[index * block_tokens : (index + 1) * block_tokens]
        pages = -(-len(tokens) // engine_block_tokens)
        return Piece(index, 0, self.block_ids[index * ratio : index * ratio + pages], tokens)


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
    if manifest.block_tokens < 1 or manifest.block_tokens % facts.engine_block_tokens:
        return "block_size_mismatch"
    whole = len(manifest.token_ids) // manifest.block_tokens
    if whole != len(manifest.block_ids) or len(manifest.token_ids) % manifest.block_tokens != manifest.tail_tokens:
        return "manifest_malformed"
    return None


def plan_load(  # noqa: PLR0913  # the fields of the plan, by name
    manifest: Manifest,
    facts: RankFacts,
    *,
    engine_request_id: str,
    request_id: str,
    block_ids: Sequence[int],
    device_tokens: int,
    loaded_tokens: int,
    asked_at_s: float,
    traceparent: str = "",
) -> LoadPlan:
    """Return the plan that fills positions from `device_tokens` (a block edge) up to the last loaded token.

    `block_ids` are all of the request's engine blocks, from position 0. Those before the first position belong to
    the engine's prefix cache, other requests may be reading them, so they are never written.
    """
    size = facts.engine_block_tokens
    assert device_tokens % size == 0, "the engine presents a block-aligned hit"
    first, last = device_tokens // size, -(-(device_tokens + loaded_tokens) // size)
    assert len(block_ids) >= last, "the engine allocated every block the load needs"
    return LoadPlan(
        engine_request_id=engine_request_id,
        request_id=request_id,
        tenant=manifest.tenant,
        cache_ref=manifest.cache_ref,
        fingerprint=manifest.fingerprint,
        block_tokens=manifest.block_tokens,
        engine_block_tokens=size,
        whole_blocks=manifest.block_ids,
        token_ids=manifest.token_ids,
        first_position=first,
        block_ids=tuple(block_ids[first:last]),
        device_tokens=device_tokens,
        loaded_tokens=loaded_tokens,
        asked_at_s=asked_at_s,
        traceparent=traceparent,
    )
