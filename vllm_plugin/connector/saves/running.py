"""Saves of requests that still run: whole files ahead of their end, and a window's KV at the end of their prompt.

A model with full attention alone sends full blocks ahead, so that at a request's end only the rest is left. A model
with windows drops their blocks as the answer grows: what it keeps at the end serves no prompt that turns off before.
So in the step after a prompt was computed its blocks are saved too, under a name that follows from the context's. A
state has no such moment: it is gone with the next token.

The worker reads these blocks without holding them. In the step in which the engine may give them to another request,
before anything is computed into them, the worker is told, and drops the blocks that it has not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contextcache.identity import KVTransfer
from contextcache.model import CacheRef
from contextcache.names import prompt_ref
from kv_sidecar.client import pack_token_ids
from vllm_plugin.connector.engine_check import NULL_BLOCK
from vllm_plugin.connector.metadata import EngineGroup, RankFacts, SavePlan

_EARLY_TOKENS_MIN = 512
"""Tokens that one step sends ahead: fewer than two block files are not worth a question."""
_EARLY_SHARE = 8
"""While a prompt is computed, a part adds at least this share to the parts before it, because each part is a call.
131 072 tokens go in 24 parts, at 2 048 a step. All that is left of a prompt goes in the step after it."""

BlockIds = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Watched:
    request: Any
    transfer: KVTransfer
    cache_ref: CacheRef
    """Name of the save."""
    planned_tokens: int = 0
    """Tokens that plans have brought to the workers."""
    in_flight: str = ""
    """Name of the plan that a rank works on; empty: none, the next one may begin."""
    checkpoint: BlockIds = ()
    """Blocks of a prompt's end that are being saved."""


class RunningSaves:
    """Plans for all running requests. All methods are called by the engine's thread and return at once."""

    def __init__(self, *, sends_ahead: bool) -> None:
        """`sends_ahead`: whether full blocks are sent while a request runs."""
        self._sends_ahead = sends_ahead
        self._watched: dict[str, _Watched] = {}
        self._overtaken: list[CacheRef] = []

    def watch(self, request: Any, transfer: KVTransfer, facts: RankFacts) -> None:
        """Observe a request that is to be saved, if its model has something to save before its end."""
        if transfer.save is None:
            return
        if facts.has_checkpoints:
            self._watched[request.request_id] = _Watched(request, transfer, prompt_ref(transfer.save))
        elif self._sends_ahead and [group.kind for group in facts.groups] == ["full_attention"]:
            self._watched[request.request_id] = _Watched(request, transfer, transfer.save)

    def observe(self, scheduler_output: Any, facts: RankFacts | None, counts: Callable[[str], bool]) -> list[SavePlan]:
        """Return the saves that can begin in this step; end those whose blocks the engine may reuse in it.

        `counts`: whether a request's blocks hold the KV of its computed tokens.
        """
        blocks = scheduler_output.kv_connector_block_state
        if not self._watched or facts is None or blocks is None:
            return []
        for request_id in scheduler_output.preempted_req_ids or ():
            if (watched := self._watched.get(request_id)) is not None:
                self._overtake(watched)
        plans = []
        for request_id, watched in list(self._watched.items()):
            if not counts(request_id):
                continue
            tables = blocks.get_block_ids(request_id)
            if facts.has_checkpoints:
                plan = self._checkpoint(request_id, watched, tables, facts)
            else:
                plan = self._early(watched, tables, facts)
            if plan is not None:
                plans.append(plan)
        return plans

    def ended(self, name: str) -> None:
        """Take the workers' word that a plan is carried out, well or badly."""
        for watched in self._watched.values():
            if watched.in_flight == name:
                watched.in_flight = ""

    def planned_tokens(self, request_id: str) -> int:
        """Return how many first tokens of a request's save the workers have."""
        watched = self._watched.get(request_id)
        return 0 if watched is None or watched.checkpoint else watched.planned_tokens

    def end(self, request_id: str, *, is_held: bool = False) -> None:
        """Forget a request whose blocks go to others from the next step on. Harmless otherwise.

        `is_held`: the engine holds the blocks for the request's save, which goes on from the plans so far.
        """
        watched = self._watched.pop(request_id, None)
        if watched is not None and (watched.checkpoint or not is_held):
            self._overtake(watched)

    def take_overtaken(self) -> tuple[CacheRef, ...]:
        """Return the saves whose blocks must not be read any more, each once."""
        overtaken, self._overtaken = tuple(self._overtaken), []
        return overtaken

    def _overtake(self, watched: _Watched) -> None:
        # One rank's word that it is done says nothing of the others.
        if watched.planned_tokens:
            self._overtaken.append(watched.cache_ref)
        watched.planned_tokens, watched.in_flight = 0, ""

    def _early(self, watched: _Watched, tables: Sequence[Sequence[int]] | None, facts: RankFacts) -> SavePlan | None:
        request, size = watched.request, facts.groups[0].block_tokens
        # Blocks that are full, of tokens that are computed and that vLLM does not throw away again.
        num_tokens = int(min(request.num_computed_tokens, request.num_tokens - 1)) // size * size
        first = watched.planned_tokens
        is_prompt = request.num_computed_tokens < request.num_prompt_tokens
        least = max(_EARLY_TOKENS_MIN, first // _EARLY_SHARE if is_prompt else 0)
        if tables is None or watched.in_flight or num_tokens < first + least:
            return None
        return _next_plan(watched, facts, (tuple(tables[0][first // size : num_tokens // size]),), num_tokens)

    def _checkpoint(
        self, request_id: str, watched: _Watched, tables: Sequence[Sequence[int]] | None, facts: RankFacts
    ) -> SavePlan | None:
        num_tokens = watched.request.num_prompt_tokens
        if watched.request.num_computed_tokens < num_tokens:
            return None
        # Without tables, vLLM may have taken a request's blocks in a step in which it then had no room for it.
        held = () if tables is None else kept_blocks(facts.groups, tables, num_tokens)
        if not watched.checkpoint and held and not any(NULL_BLOCK in ids for ids in held):
            watched.checkpoint = held
            return _next_plan(watched, facts, held, num_tokens)
        if watched.checkpoint and watched.checkpoint != held:
            self.end(request_id)
        return None


def _next_plan(watched: _Watched, facts: RankFacts, block_ids: BlockIds, num_tokens: int) -> SavePlan:
    tokens = slice(watched.planned_tokens, num_tokens)
    plan = save_plan(watched.request, watched.transfer, facts, block_ids, cache_ref=watched.cache_ref, tokens=tokens)
    plan = replace(plan, holds_blocks=False, early=not watched.checkpoint)
    watched.planned_tokens, watched.in_flight = num_tokens, plan.name
    return plan


def save_plan(
    request: Any, transfer: KVTransfer, facts: RankFacts, block_ids: BlockIds, *, cache_ref: CacheRef, tokens: slice
) -> SavePlan:
    """Return the plan of a request's save, or of a part of it: of these tokens, in these blocks."""
    return SavePlan(
        engine_request_id=request.request_id,
        tenant=transfer.tenant,
        session_id=transfer.session_id,
        cache_ref=cache_ref,
        expires_at_ms=transfer.expires_at_ms,
        started_at_ms=started_at_ms(request),
        first_token=tokens.start,
        token_ids=pack_token_ids(request.all_token_ids[tokens]),
        groups=facts.groups,
        block_ids=block_ids,
        fingerprint=facts.fingerprint,
        traceparent=transfer.traceparent,
        retain_ms=transfer.retain_ms if cache_ref == transfer.save else 0,
        pinned=transfer.pinned,
        placements=transfer.placements if cache_ref == transfer.save else (),
    )


def started_at_ms(request: Any) -> int:
    """Return when the engine was given a request, Unix time in ms."""
    return int(request.arrival_time * 1000)


def kept_blocks(groups: Sequence[EngineGroup], tables: Sequence[Sequence[int]], num_tokens: int) -> BlockIds:
    """Return the engine blocks of each group that the token after `num_tokens` needs: vLLM keeps no others."""
    return tuple(
        tuple(ids[group.first_needed(num_tokens) : group.num_positions(num_tokens)])
        for group, ids in zip(groups, tables, strict=True)
    )
