"""ContextCacheManager over a real Valkey: what it checks, when lives and leases end, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from context_manager.limits import TtlBounds
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.clock import ManualClock
from contextcache.errors import (
    ContextBusy,
    ContextCacheError,
    ContextExpired,
    ContextNotFound,
    InvalidRequest,
    LeaseLost,
    TtlOutOfRange,
)
from contextcache.model import (
    HeldCacheRef,
    NewSession,
    Segment,
    SegmentKind,
    SessionPage,
    SessionState,
    TurnCommit,
    Usage,
)
from contextcache.names import NUM_SHARDS, new_cache_ref
from contextcache.terms import Terms
from tests.kit.session_store import BlockingConnection

PROMPT = Segment(SegmentKind.PROMPT, (1, 2), text="hello")
ANSWER = Segment(SegmentKind.ANSWER, (3,), text=" you")
NEW = NewSession("demo", "ctx_1", "smol", ttl_s=600)
FIRST = TurnCommit("demo", "ctx_1", "create", 0, 0, (PROMPT, ANSWER), new_cache_ref(), "pod-1")
TURN = replace(FIRST, lease_id="turn", expected_generation=1, keep_segments=2, segments=(PROMPT,))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def manager(clock: ManualClock, registry: CollectorRegistry) -> ContextCacheManager:
    return ContextCacheManager(
        BlockingConnection(), clock=clock, metrics=ManagerMetrics(registry), ttl_bounds=TtlBounds(60, 7 * 24 * 3600)
    )


async def create(manager: ContextCacheManager, new: NewSession = NEW) -> None:
    await manager.reserve(new, lease_id="create", lease_ttl_ms=30_000)
    await manager.register_session_cache(replace(FIRST, session_id=new.session_id))


async def test_a_conversation_from_create_to_delete(manager: ContextCacheManager) -> None:
    await create(manager)
    begun = await manager.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=30_000)
    committed = await manager.commit_turn(TURN)
    removed = await manager.unregister_session_cache("demo", "ctx_1")

    assert (begun.session.state, begun.transcript()) == (SessionState.BUSY, (PROMPT, ANSWER))
    assert (committed.generation, committed.num_turns, committed.num_tokens) == (2, 2, 5)
    assert removed == committed
    with pytest.raises(ContextNotFound):
        await manager.locate("demo", "ctx_1")


async def test_a_life_ends_by_the_clock_alone(manager: ContextCacheManager, clock: ManualClock) -> None:
    await create(manager)
    clock.advance(s=599.999)
    assert (await manager.locate("demo", "ctx_1")).state is SessionState.READY
    clock.advance(ms=1)

    with pytest.raises(ContextExpired):
        await manager.get_session_metadata("demo", "ctx_1")
    clock.advance(s=3600)
    with pytest.raises(ContextNotFound):
        await manager.get_session_metadata("demo", "ctx_1")


async def test_a_lease_ends_by_the_clock_alone(manager: ContextCacheManager, clock: ManualClock) -> None:
    await create(manager)
    await manager.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=10_000)
    clock.advance(ms=7_500)

    with pytest.raises(ContextBusy) as refused:
        await manager.begin_turn("demo", "ctx_1", lease_id="other", lease_ttl_ms=10_000)
    assert refused.value.retry_after_s == 3
    await manager.renew_lease("demo", "ctx_1", lease_id="turn", lease_ttl_ms=10_000)
    clock.advance(ms=10_000)
    with pytest.raises(LeaseLost):
        await manager.renew_lease("demo", "ctx_1", lease_id="turn", lease_ttl_ms=10_000)
    await manager.begin_turn("demo", "ctx_1", lease_id="other", lease_ttl_ms=10_000)


@pytest.mark.parametrize("ttl_s", [60, 7 * 24 * 3600])
async def test_a_ttl_at_either_bound_is_granted(manager: ContextCacheManager, ttl_s: int) -> None:
    session = await manager.reserve(replace(NEW, ttl_s=ttl_s), lease_id="create", lease_ttl_ms=1000)

    assert session.expires_at_ms - session.created_at_ms == ttl_s * 1000


@pytest.mark.parametrize("ttl_s", [-1, 0, 59, 7 * 24 * 3600 + 1, 10**12])
async def test_a_ttl_outside_the_bounds_is_refused_and_nothing_is_stored(
    manager: ContextCacheManager, ttl_s: int
) -> None:
    with pytest.raises(TtlOutOfRange) as refused:
        await manager.reserve(replace(NEW, ttl_s=ttl_s), lease_id="create", lease_ttl_ms=1000)
    assert refused.value.param == "ttl"
    assert await manager.list_sessions("demo", limit=10) == SessionPage((), has_more=False, last_id="")
    await create(manager)
    with pytest.raises(TtlOutOfRange):
        await manager.touch("demo", "ctx_1", Terms(ttl_s=ttl_s))
    assert (await manager.locate("demo", "ctx_1")).ttl_s == 600


@pytest.mark.parametrize(
    ("new", "param"),
    [
        (replace(NEW, tenant="a:b"), "tenant"),
        (replace(NEW, tenant=""), "tenant"),
        (replace(NEW, tenant="{s1}"), "tenant"),
        (replace(NEW, session_id="ctx:1"), "session_id"),
        (replace(NEW, session_id="ctx_1\n"), "session_id"),
        (replace(NEW, session_id="x" * 129), "session_id"),
        (replace(NEW, model_id="x" * 257), "model"),
        (replace(NEW, metadata={str(number): "" for number in range(17)}), "metadata"),
        (replace(NEW, metadata={"k" * 65: ""}), "metadata"),
        (replace(NEW, metadata={"": ""}), "metadata"),
        (replace(NEW, metadata={"k": "v" * 513}), "metadata"),
    ],
)
async def test_a_malformed_session_is_refused(manager: ContextCacheManager, new: NewSession, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await manager.reserve(new, lease_id="create", lease_ttl_ms=1000)

    assert refused.value.param == param


@pytest.mark.parametrize(
    ("commit", "param"),
    [
        (replace(TURN, tenant="*"), "tenant"),
        (replace(TURN, lease_id=""), "lease_id"),
        (replace(TURN, lease_id="x" * 129), "lease_id"),
        (replace(TURN, lease_id="a\nb"), "lease_id"),
        (replace(TURN, expected_generation=-1), "expected_generation"),
        (replace(TURN, keep_segments=-1), "keep_segments"),
        (replace(TURN, keep_segments=3), "keep_segments"),
        (replace(TURN, segments=(PROMPT,) * 1001), "segments"),
        (replace(TURN, cache_ref="../etc"), "cache_ref"),
        (replace(TURN, holder="p" * 257), "holder"),
        (replace(TURN, segments=(replace(PROMPT, token_ids=(-1,)),)), "token_ids"),
        (replace(TURN, segments=(replace(PROMPT, token_ids=(1 << 32,)),)), "token_ids"),
        (replace(TURN, segments=(replace(PROMPT, text="\ud800"),)), "text"),
    ],
)
async def test_a_malformed_commit_is_refused_and_changes_nothing(
    manager: ContextCacheManager, commit: TurnCommit, param: str
) -> None:
    await create(manager)
    await manager.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=30_000)

    with pytest.raises(InvalidRequest) as refused:
        await manager.commit_turn(commit)
    assert refused.value.param == param
    assert (await manager.commit_turn(TURN)).generation == 2


async def test_a_registration_is_the_first_commit(manager: ContextCacheManager) -> None:
    await create(manager)
    await manager.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=30_000)

    with pytest.raises(InvalidRequest):
        await manager.register_session_cache(TURN)


@pytest.mark.parametrize("lease_ttl_ms", [0, -1, 3_600_001])
async def test_a_lease_has_a_bounded_life(manager: ContextCacheManager, lease_ttl_ms: int) -> None:
    await create(manager)

    with pytest.raises(InvalidRequest):
        await manager.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=lease_ttl_ms)
    with pytest.raises(InvalidRequest):
        await manager.reserve(NEW, lease_id="turn", lease_ttl_ms=lease_ttl_ms)


@pytest.mark.parametrize(("limit", "after"), [(0, ""), (101, ""), (10, "a b")])
async def test_a_page_is_bounded(manager: ContextCacheManager, limit: int, after: str) -> None:
    with pytest.raises(InvalidRequest):
        await manager.list_sessions("demo", limit=limit, after=after)


async def test_every_call_checks_the_id_before_it_asks_the_store(manager: ContextCacheManager) -> None:
    bad = "ctx:1"
    calls: list[Callable[[], object]] = [
        lambda: manager.locate("demo", bad),
        lambda: manager.get_session_metadata("demo", bad),
        lambda: manager.begin_turn("demo", bad, lease_id="x", lease_ttl_ms=1),
        lambda: manager.renew_lease("demo", bad, lease_id="x", lease_ttl_ms=1),
        lambda: manager.abort_turn("demo", bad, lease_id="x"),
        lambda: manager.touch("demo", bad, Terms()),
        lambda: manager.note_holder("demo", bad, holder="pod-1"),
        lambda: manager.unregister_session_cache("demo", bad),
    ]

    for call in calls:
        with pytest.raises(InvalidRequest) as refused:
            await call()  # type: ignore[misc]  # each of them returns a coroutine
        assert refused.value.param == "session_id"


@pytest.mark.parametrize("holder", ["", "x" * 257, "pod-1\npod-2"])
async def test_an_endpoint_that_cannot_be_one_is_not_noted(manager: ContextCacheManager, holder: str) -> None:
    await create(manager)
    with pytest.raises(InvalidRequest) as refused:
        await manager.note_holder("demo", "ctx_1", holder=holder)

    assert refused.value.param == "holder"


async def test_a_sweep_buries_what_is_due_and_says_how_many(
    manager: ContextCacheManager, clock: ManualClock, registry: CollectorRegistry
) -> None:
    for number in range(250):
        await create(manager, replace(NEW, session_id=f"ctx_{number}"))
    for number in range(3):
        await manager.reserve(replace(NEW, session_id=f"dead_{number}"), lease_id="x", lease_ttl_ms=1000)
    await create(manager, replace(NEW, session_id="ctx_long", ttl_s=6000))
    clock.advance(s=600)

    assert sum([await manager.sweep(shard) for shard in range(NUM_SHARDS)]) == 253
    assert sum([await manager.sweep(shard) for shard in range(NUM_SHARDS)]) == 0
    assert registry.get_sample_value("contextcache_manager_sessions_expired_total") == 250
    assert registry.get_sample_value("contextcache_manager_sessions_abandoned_total") == 3
    sessions = (await manager.list_sessions("demo", limit=10)).sessions
    assert [session.session_id for session in sessions] == ["ctx_long"]


async def test_what_happens_is_counted(manager: ContextCacheManager, registry: CollectorRegistry) -> None:
    await create(manager)
    await manager.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=30_000)
    with pytest.raises(ContextCacheError):
        await manager.begin_turn("demo", "ctx_1", lease_id="other", lease_ttl_ms=30_000)
    await manager.abort_turn("demo", "ctx_1", lease_id="turn")

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"contextcache_manager_{name}", labels)

    assert sample("sessions_reserved_total") == 1
    assert sample("turns_committed_total") == 1
    assert sample("turns_aborted_total") == 1
    assert sample("refusals_total", operation="begin_turn", code="context_busy") == 1
    assert sample("store_duration_seconds_count", operation="begin_turn") == 2


@pytest.mark.parametrize(
    "held",
    [
        [HeldCacheRef("demo", "ctx_1", new_cache_ref())] * 501,
        [HeldCacheRef("a:b", "ctx_1", new_cache_ref())],
        [HeldCacheRef("demo", "*", new_cache_ref())],
        [HeldCacheRef("demo", "ctx_1", "../etc")],
    ],
    ids=["too many", "tenant", "session", "ref"],
)
async def test_a_question_for_kv_that_nobody_can_have_is_refused(
    manager: ContextCacheManager, held: list[HeldCacheRef]
) -> None:
    with pytest.raises(InvalidRequest):
        await manager.check_cache_refs(held)
    assert await manager.check_cache_refs(held[:0]) == ()


def test_usage_names_a_bounded_number_of_models():
    """Adapters are models, and a pod may serve thousands. Seen failing without the bound."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    for number in range(100):
        metrics.count_usage([Usage("app", {"cached_tokens": 2}, f"adapter-{number}")])
    (usage,) = (metric for metric in registry.collect() if metric.name == "contextcache_manager_usage")
    by_model = {one.labels["model"]: one.value for one in usage.samples if one.name.endswith("_total")}

    assert len(by_model) == 65
    assert (by_model["adapter-63"], by_model["other"]) == (2, 72)
