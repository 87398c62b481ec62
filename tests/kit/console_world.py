"""A gateway with its console over sample data: titled contexts, and a month of usage with two models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from context_manager.layout import DAY_MS
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.clock import ManualClock, SystemClock
from contextcache.model import NewSession, Segment, SegmentKind, TtlPolicy, TurnCommit, TurnReceipt, Usage
from tests.kit.fake_vllm import FakeVllm
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


@dataclass
class Console:
    """A running gateway, and the manager behind it."""

    url: str
    manager: RunningManager


@asynccontextmanager
async def running_console(directory: Path, *, num_contexts: int, seed: int = 1) -> AsyncIterator[Console]:
    """Serve until the block ends: `num_contexts` contexts of the first tenant, and usage of both."""
    manager, chosen = RunningManager(), Random(seed)
    await manager.start()
    try:
        await _usage_before(manager.manager, chosen)
        for number in range(num_contexts):
            await _context(manager.manager, number, chosen)
        async with running_turn_pod(directory, manager_port=manager.port, engine=FakeVllm()) as pod:
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
    return Usage("app", counts | {"completion_tokens": turns * 300, "saved_ms": cached // 9}, model)


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
    computed, saved_ms = segments[0].num_tokens, cached // 9
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
