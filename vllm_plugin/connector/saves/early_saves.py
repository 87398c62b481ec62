"""Whole files of a request that is to be saved, shipped while it runs: at its end only the rest is left.

Full attention only: a window's blocks go, and a state's change, while a request runs (checkpoints.py has their ends of
prompts). Blocks that are full are not written to again; they are read without being held, so in the step in which the
engine may give them to somebody else the worker is told, and what it has not copied by then is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contextcache.identity import KVTransfer
from vllm_plugin.connector.metadata import RankFacts, SavePlan

_LEAST_TOKENS = 512
"""Two block files: fewer are not worth a question."""
_GROWTH = 8
"""A plan has all tokens so far, so the next one waits for an eighth more."""
_MOST_TOKENS = 1024
"""And for no more than that: the sidecar waits two minutes for what comes next."""


@dataclass(slots=True)
class _Watched:
    request: Any
    transfer: KVTransfer
    shipped_tokens: int = 0
    shipping: SavePlan | None = None
    """Under way on some rank: one at a time."""
    num_plans: int = 0


class EarlySaves:
    """Those of all running requests. All methods are called by the engine's thread and return at once."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._overtaken: list[str] = []

    def watch(self, request: Any, transfer: KVTransfer, facts: RankFacts) -> None:
        """Look after a request that is to be saved, where it can be."""
        if transfer.save is not None and [group.kind for group in facts.groups] == ["full_attention"]:
            self._watched[request.request_id] = _Watched(request, transfer)

    def observe(
        self, scheduler_output: Any, facts: RankFacts | None, is_loading: Callable[[str], bool]
    ) -> list[SavePlan]:
        """Return the saves that can begin in this step.

        vLLM before 0.32 does not show its block tables here: then there are none.
        """
        blocks = getattr(scheduler_output, "kv_connector_block_state", None)
        if not self._watched or facts is None or blocks is None:
            return []
        preempted = getattr(scheduler_output, "preempted_req_ids", None) or ()
        for request_id in preempted:
            if (watched := self._watched.get(request_id)) is not None:
                self._overtake(watched)
        plans = []
        for request_id, watched in self._watched.items():
            if request_id in preempted:
                continue
            num_tokens = _full_tokens(watched.request, facts)
            growth = min(watched.shipped_tokens // _GROWTH, _MOST_TOKENS)
            wanted = watched.shipped_tokens + max(_LEAST_TOKENS, growth)
            if watched.shipping is not None or num_tokens < wanted or is_loading(request_id):
                continue
            tables = blocks.get_block_ids(request_id)
            if tables is None:
                continue
            watched.num_plans += 1
            watched.shipping = _plan(watched, facts, tuple(tables[0]), num_tokens)
            plans.append(watched.shipping)
        return plans

    def ended(self, name: str) -> None:
        """Take the worker's word that it has done what it could."""
        for watched in self._watched.values():
            if watched.shipping is not None and watched.shipping.name == name:
                watched.shipped_tokens, watched.shipping = len(watched.shipping.token_ids), None

    def end(self, request_id: str) -> None:
        """Forget a request whose blocks are nobody's, or somebody else's, from the next step on. Harmless otherwise."""
        if (watched := self._watched.pop(request_id, None)) is not None:
            self._overtake(watched)

    def take_overtaken(self) -> tuple[str, ...]:
        """Return the saves whose blocks must not be read any more, each once, by family."""
        overtaken, self._overtaken = tuple(self._overtaken), []
        return overtaken

    def _overtake(self, watched: _Watched) -> None:
        # That one rank has done with the last one says nothing of the others.
        if watched.num_plans and watched.transfer.save is not None:
            self._overtaken.append(f"{watched.transfer.save}:early")
        watched.shipping = None


def _full_tokens(request: Any, facts: RankFacts) -> int:
    """Return the tokens in blocks that are full: those computed, and known not to be thrown away again."""
    size = facts.groups[0].block_tokens
    return int(min(request.num_computed_tokens, request.num_tokens - 1)) // size * size


def _plan(watched: _Watched, facts: RankFacts, block_ids: tuple[int, ...], num_tokens: int) -> SavePlan:
    request, transfer = watched.request, watched.transfer
    assert transfer.save is not None, "it is watched because it is saved"
    return SavePlan(
        engine_request_id=request.request_id,
        tenant=transfer.tenant,
        session_id=transfer.session_id,
        cache_ref=transfer.save,
        expires_at_ms=transfer.expires_at_ms,
        started_at_ms=int(request.arrival_time * 1000),
        token_ids=tuple(request.all_token_ids[:num_tokens]),
        groups=facts.groups,
        block_ids=(block_ids[: num_tokens // facts.groups[0].block_tokens],),
        fingerprint=facts.fingerprint,
        traceparent=transfer.traceparent,
        holds_blocks=False,
        early=watched.num_plans,
    )
