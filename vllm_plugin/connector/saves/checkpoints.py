"""A window's KV at the end of a prompt, saved while its request goes on: regenerate, and templates that drop thinking.

What a window keeps at the end of an answer serves no prompt that turns off before it. So in the step after a prompt was
computed its blocks are saved too, under a name that follows from the context's. They are not held: the engine lets go
of them as the answer grows. In the step in which it does, before anything is computed into them, the worker is told,
and what it has not copied by then is dropped. A state has no such moment: it is gone with the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contextcache.identity import KVTransfer
from contextcache.model import CacheRef
from contextcache.names import prompt_ref
from vllm_plugin.connector.engine_check import NULL_BLOCK
from vllm_plugin.connector.metadata import EngineGroup, RankFacts, SavePlan


@dataclass(slots=True)
class _Watched:
    request: Any
    transfer: KVTransfer
    block_ids: tuple[tuple[int, ...], ...] | None = None
    """What is being saved; None: not yet."""


class PromptCheckpoints:
    """Those of all running requests. All methods are called by the engine's thread and return at once."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._overtaken: list[CacheRef] = []

    def watch(self, request: Any, transfer: KVTransfer, facts: RankFacts) -> None:
        """Look after a request that is to be saved, where it is worth it."""
        if transfer.save is not None and facts.has_checkpoints:
            self._watched[request.request_id] = _Watched(request, transfer)

    def observe(self, scheduler_output: Any, facts: RankFacts | None) -> list[SavePlan]:
        """Return the saves that can begin in this step; see after those that have begun.

        vLLM before 0.32 does not show its block tables here: then there are none.
        """
        blocks = getattr(scheduler_output, "kv_connector_block_state", None)
        if not self._watched or facts is None or blocks is None:
            return []
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            self.end(request_id)
        plans = []
        for request_id, watched in list(self._watched.items()):
            if watched.request.num_computed_tokens < watched.request.num_prompt_tokens:
                continue
            tables = blocks.get_block_ids(request_id)
            if tables is None:
                # Not in this step: vLLM may have let go of its blocks all the same, in one that it then had no room in.
                if watched.block_ids is not None:
                    self.end(request_id)
                continue
            held = _of_the_prompt(facts.groups, tables, watched.request.num_prompt_tokens)
            if watched.block_ids is None and not any(NULL_BLOCK in ids for ids in held):
                watched.block_ids = held
                plans.append(_plan(watched, facts, held))
            elif watched.block_ids != held:
                self.end(request_id)
        return plans

    def end(self, request_id: str) -> None:
        """Forget a request whose blocks are nobody's, or somebody else's, from the next step on. Harmless otherwise."""
        watched = self._watched.pop(request_id, None)
        if watched is not None and watched.block_ids is not None and watched.transfer.save is not None:
            self._overtaken.append(prompt_ref(watched.transfer.save))

    def take_overtaken(self) -> tuple[CacheRef, ...]:
        """Return the saves whose blocks must not be read any more, each once."""
        overtaken, self._overtaken = tuple(self._overtaken), []
        return overtaken


def _of_the_prompt(
    groups: Sequence[EngineGroup], tables: Sequence[Sequence[int]], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(ids[group.first_needed(num_tokens) : group.num_positions(num_tokens)])
        for group, ids in zip(groups, tables, strict=True)
    )


def _plan(watched: _Watched, facts: RankFacts, block_ids: tuple[tuple[int, ...], ...]) -> SavePlan:
    request, transfer = watched.request, watched.transfer
    assert transfer.save is not None, "it is watched because it is saved"
    return SavePlan(
        engine_request_id=request.request_id,
        tenant=transfer.tenant,
        session_id=transfer.session_id,
        cache_ref=prompt_ref(transfer.save),
        expires_at_ms=transfer.expires_at_ms,
        started_at_ms=int(request.arrival_time * 1000),
        token_ids=tuple(request.all_token_ids[: request.num_prompt_tokens]),
        groups=facts.groups,
        block_ids=block_ids,
        fingerprint=facts.fingerprint,
        traceparent=transfer.traceparent,
        holds_blocks=False,
    )
