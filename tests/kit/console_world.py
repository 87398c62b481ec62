"""A gateway with its console over sample data: titled contexts, and a month of usage with two models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from context_manager.layout import DAY_MS
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.clock import ManualClock, SystemClock
from contextcache.model import NewSession, Segment, SegmentKind, TtlPolicy, TurnCommit, TurnReceipt, Usage
from tests.kit.fake_vllm import FakeVllm, decode, encode
from tests.kit.gateway_parts import REF
from tests.kit.gateway_server import RunningManager, running_gateway, settings_for
from tests.kit.turn_pod import running_turn_pod

TENANTS = ("demo", "other")
MODELS = ("llama-70b", "qwen-32b")
TITLES = (
    *("Contract review", "Weekly report", "Support: refund of an order", "Trip to Lisbon", "Release notes", ""),
    *("Unit tests for the parser", "Invoice questions", "Onboarding plan", "Log analysis", "Sales figures", ""),
)
HISTORY_DAYS = 21
QUESTIONS = ("How high did the river stand in 1912?", "And in 1920?", "Which of the two years was wetter?", "Thanks.")
ANSWERS = (
    "Five metres at the old bridge.",
    "Six metres, one more.",
    "1920: the river stood higher.",
    "You are welcome.",
)
COMPUTES_TOKENS_PER_S = 9_000
"""Rate of the engines behind the sample data. A document of 4,000 tokens takes nearly half a second."""


@dataclass
class Console:
    """A running gateway, and the manager behind it."""

    url: str
    manager: RunningManager


def _answer(ids: list[int]) -> str:
    """Return the answer to the last of QUESTIONS in a prompt."""
    asked = [number for number, question in enumerate(QUESTIONS) if question in decode(ids)]
    return ANSWERS[asked[-1]] if asked else "Yes."


def _num_shared(ids: list[int], other: list[int]) -> int:
    return next(
        (at for at, (one, two) in enumerate(zip(ids, other, strict=False)) if one != two), min(len(ids), len(other))
    )


class SimulatedVllm(FakeVllm):
    """Wait as long as an engine computes the tokens that no earlier prompt began with, and answer QUESTIONS."""

    def __init__(self) -> None:
        super().__init__(answer=_answer)
        self.seen: list[list[int]] = []

    async def _complete(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        params = request.get("kv_transfer_params") or {}
        ids = params.get("prompt_token_ids") or request.get("prompt") or []
        self.cached_tokens = max((_num_shared(ids, other) for other in self.seen), default=0)
        self.seen.append([*ids, *encode(self.answer(ids))])
        await asyncio.sleep((len(ids) - self.cached_tokens) / COMPUTES_TOKENS_PER_S)
        await super()._complete(scope, request, send)


@asynccontextmanager
async def running_console(directory: Path, *, num_contexts: int, seed: int = 1) -> AsyncIterator[Console]:
    """Serve until the block ends: `num_contexts` contexts of the first tenant, and usage of both."""
    manager, chosen = RunningManager(), Random(seed)
    await manager.start()
    try:
        await _usage_before(manager.manager, chosen)
        for number in range(num_contexts):
            await _context(manager.manager, number, chosen)
        async with running_turn_pod(directory, manager_port=manager.port, engine=SimulatedVllm()) as pod:
            settings = settings_for(directory, {"pod-a": pod}, manager_port=manager.port)
            async with running_gateway(settings, num_ready=1) as gateway:
                yield Console(gateway.url, manager)
    finally:
        await manager.stop()


async def _usage_before(manager: ContextCacheManager, chosen: Random) -> None:
    """Count usage of the days before today."""
    for days in range(HISTORY_DAYS, 0, -1):
        clock = ManualClock(SystemClock().now_ms() - days * DAY_MS)
        then = ContextCacheManager(manager._redis, clock=clock, metrics=ManagerMetrics(CollectorRegistry()))
        for tenant in TENANTS:
            usage = [_used(chosen, model, turns=chosen.randrange(50, 400)) for model in MODELS]
            await then.add_usage(tenant, f"day-{days}", [*usage, Usage("", {"disk_kib_s": 1 << 36})])


def _used(chosen: Random, model: str, *, turns: int) -> Usage:
    cached = turns * chosen.randrange(6000, 14_000)
    counts = {"turns": turns, "computed_tokens": turns * chosen.randrange(600, 2400), "cached_tokens": cached}
    return Usage(
        "app", counts | {"completion_tokens": turns * 300, "saved_ms": 1000 * cached // COMPUTES_TOKENS_PER_S}, model
    )


async def _context(manager: ContextCacheManager, number: int, chosen: Random) -> None:
    """Create a context of several turns that each reuse what was there before."""
    title, model = TITLES[number % len(TITLES)], MODELS[number % 5 == 0]
    metadata = {"user": ("anna", "ben", "chris")[number % 3]} | ({"title": title} if title else {})
    policy = TtlPolicy.SLIDING if number % 2 else TtlPolicy.FIXED
    session_id, tokens = f"ctx_{chosen.getrandbits(128):032x}", 0
    new = NewSession(
        "demo", session_id, model, ttl_s=chosen.randrange(600, 80_000), ttl_policy=policy, metadata=metadata
    )
    await manager.reserve(new, lease_id="turn 0", lease_ttl_ms=60_000)
    for turn in range(chosen.randrange(1, 9)):
        if turn:
            await manager.begin_turn("demo", session_id, lease_id=f"turn {turn}", lease_ttl_ms=60_000)
        segments = _said(chosen.randrange(80, 900))
        await manager.commit_turn(_commit(session_id, model, turn, tokens, segments))
        tokens += sum(segment.num_tokens for segment in segments)


def _said(num_tokens: int) -> tuple[Segment, ...]:
    answer = Segment(SegmentKind.ANSWER, tuple(range(40)), text="An answer")
    return Segment(SegmentKind.PROMPT, tuple(range(num_tokens)), text="A question"), answer


def _commit(session_id: str, model: str, turn: int, cached: int, segments: Sequence[Segment]) -> TurnCommit:
    computed, saved_ms = segments[0].num_tokens, 1000 * cached // COMPUTES_TOKENS_PER_S
    counts = {"contexts": int(not turn), "turns": 1, "computed_tokens": computed, "cached_tokens": cached}
    return TurnCommit(
        tenant="demo",
        session_id=session_id,
        lease_id=f"turn {turn}",
        expected_generation=turn,
        keep_segments=2 * turn,
        segments=tuple(segments),
        cache_ref=REF,
        holder="pod-a",
        usage=Usage("app", counts | {"completion_tokens": 40, "saved_ms": saved_ms}, model),
        receipt=TurnReceipt(
            generation=turn + 1,
            at_ms=SystemClock().now_ms() + turn,
            computed_tokens=computed,
            cached_tokens=cached,
            context_tokens=cached,
            completion_tokens=40,
            source="host" if cached else "none",
            match="append" if turn else "",
            restore_ms=9 if cached else None,
            first_token_ms=20 + computed // 9,
            took_ms=900,
        ),
    )
