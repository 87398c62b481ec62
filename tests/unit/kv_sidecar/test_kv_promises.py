"""Promises: accepted only if they can be kept, kept through load and kills, and bounded by tenant and in total."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contextcache.clock import ManualClock
from contextcache.errors import InvalidRequest
from contextcache.model import Promise
from contextcache.names import new_cache_ref
from kv_sidecar.catalog import ForkTerms
from kv_sidecar.format.manifest import all_keys, block_meta, num_files
from kv_sidecar.saves import RETAIN_MS_MAX, NewSave
from kv_sidecar.sealed import manifests
from tests.kit.kv_blocks import BLOCK_TOKENS, TENANT, TTL_MS, SidecarUnderTest, block_file_bytes, new_save, planned

TOKENS = 8
"""Two whole blocks, which no other context has."""
PLAN = planned(new_save(tuple(range(TOKENS)), now_ms=0), block_tokens=BLOCK_TOKENS)
CONTEXT_BYTES = sum(len(block_file_bytes(block_meta(PLAN, index, 0))) for index in range(num_files(PLAN)))
LIMIT_BYTES = 10 * CONTEXT_BYTES
"""Ten contexts. Promises may have five."""
HOUR_MS = 3_600_000


def tokens(number: int, count: int = TOKENS) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + count))


def kv_at(root: Path, clock: ManualClock, **more: object) -> SidecarUnderTest:
    return SidecarUnderTest(root, clock=clock, **{"disk_limit_bytes": LIMIT_BYTES, **more})


@pytest.fixture
def kv_settings() -> dict[str, object]:
    return {"disk_limit_bytes": LIMIT_BYTES}


async def save(
    kv: SidecarUnderTest, number: int, *, retain_ms: int = 0, pinned: bool = False, **fields: object
) -> tuple[NewSave, Promise]:
    """Save a context of its own session; return it with the promise it got at its seal."""
    given = {"session_id": f"ctx_{number}", **fields}
    new = new_save(tokens(number), now_ms=kv.clock.now_ms(), **given)  # type: ignore[arg-type]  # fields of new_save
    new = replace(new, retain_ms=retain_ms, pinned=pinned)
    await kv.send_all(new)
    assert await kv.catalog.seal(new.cache_ref, 0)
    return new, kv.catalog.manifests.get(new.cache_ref).promise


async def retain(kv: SidecarUnderTest, new: NewSave, *, retain_ms: int = HOUR_MS, pinned: bool = False) -> Promise:
    return await kv.catalog.retain(new.tenant, [new.cache_ref], retain_ms=retain_ms, pinned=pinned)


async def overload(kv: SidecarUnderTest, first: int = 500, count: int = 60) -> None:
    """Save six times the disk."""
    for number in range(first, first + count):
        await save(kv, number, tenant="other")


@pytest.mark.parametrize("way", ["with the save", "later"])
async def test_promised_kv_outlives_a_load_that_evicts_all_else(kv: SidecarUnderTest, way: str) -> None:
    """Seen failing: without `is_promised` in `may_evict` the context was gone."""
    new, promise = await save(kv, 1, retain_ms=HOUR_MS if way == "with the save" else 0)
    plain, _ = await save(kv, 2)
    if way == "later":
        promise = await retain(kv, new)
    await overload(kv)

    assert promise == Promise(kv.clock.now_ms() + HOUR_MS)
    assert await kv.has(new)
    assert await kv.load(new)
    assert not await kv.has(plain)


async def test_a_promise_survives_the_process_and_ends_at_its_time(tmp_path: Path) -> None:
    """Seen failing: without `promised_until_ms` in the manifest's file the context was evicted after the start."""
    clock = ManualClock()
    async with kv_at(tmp_path, clock) as kv:
        new, _ = await save(kv, 1, retain_ms=HOUR_MS // 2)
        later, _ = await save(kv, 2)
        await retain(kv, later, retain_ms=HOUR_MS // 2)
    async with kv_at(tmp_path, clock) as kv:
        await overload(kv)
        held = [await kv.has(new), await kv.has(later)]
        promised = kv.blocks.all_promised_bytes("promise")
        clock.advance(ms=HOUR_MS // 2)
        await overload(kv, 600)

        assert held == [True, True]
        assert promised == 2 * CONTEXT_BYTES
        assert [await kv.has(new), await kv.has(later)] == [False, False]


async def test_a_delete_ends_a_promise_and_gives_its_room_back(kv: SidecarUnderTest) -> None:
    new, _ = await save(kv, 1, retain_ms=HOUR_MS)
    removed = await kv.sidecar.delete(TENANT, "ctx_1", [])

    assert removed.freed_bytes == CONTEXT_BYTES
    assert not await kv.has(new)
    assert kv.blocks.all_promised_bytes("promise") == 0


async def test_no_tenant_takes_the_room_that_others_may_promise(kv: SidecarUnderTest) -> None:
    """Of five contexts the third would leave less than the tenant then had."""
    answers = [(await save(kv, number, retain_ms=HOUR_MS))[1].reason for number in range(3)]
    others = [(await save(kv, 10 + number, tenant=f"t{number}", retain_ms=HOUR_MS))[1].reason for number in range(3)]

    assert answers == ["", "", "tenant_share"]
    assert others == ["", "", "tenant_share"]
    assert kv.blocks.all_promised_bytes("promise") <= LIMIT_BYTES // 2
    assert kv.counted("promises_total", outcome="accepted") == 4
    assert kv.counted("promises_total", outcome="tenant_share") == 2


async def test_what_exceeds_all_room_is_denied_and_the_context_is_saved_all_the_same(tmp_path: Path) -> None:
    async with kv_at(tmp_path, ManualClock(), promised_share=0.05) as kv:
        new, promise = await save(kv, 1, retain_ms=HOUR_MS)

        assert promise == Promise(reason="no_room")
        assert (await retain(kv, new)).reason == "no_room"
        assert await kv.load(new)


async def test_a_tenant_promises_at_most_half_of_its_quota(tmp_path: Path) -> None:
    async with kv_at(tmp_path, ManualClock(), tenant_limit_bytes=3 * CONTEXT_BYTES) as kv:
        answers = [(await save(kv, number, retain_ms=HOUR_MS))[1].reason for number in range(3)]

        assert answers == ["", "tenant_share", "tenant_share"]


async def test_without_a_disk_limit_there_are_no_promises(tmp_path: Path) -> None:
    async with kv_at(tmp_path, ManualClock(), disk_limit_bytes=0) as kv:
        assert (await save(kv, 1, retain_ms=HOUR_MS))[1].reason == "no_room"


async def test_kv_that_is_not_here_or_another_tenants_is_not_promised(kv: SidecarUnderTest) -> None:
    new, _ = await save(kv, 1)
    absent = await kv.catalog.retain(TENANT, [new_cache_ref()], retain_ms=1, pinned=False)
    others = await kv.catalog.retain("other", [new.cache_ref], retain_ms=1, pinned=False)

    assert absent == others == Promise(reason="not_saved")


@pytest.mark.parametrize("retain_ms", [-1, RETAIN_MS_MAX + 1])
async def test_a_lifetime_out_of_range_is_refused(kv: SidecarUnderTest, retain_ms: int) -> None:
    new, _ = await save(kv, 1)
    with pytest.raises(InvalidRequest):
        await retain(kv, new, retain_ms=retain_ms)
    with pytest.raises(InvalidRequest):
        await save(kv, 2, retain_ms=retain_ms)


async def test_an_earlier_promise_never_shrinks(kv: SidecarUnderTest) -> None:
    new, promise = await save(kv, 1, retain_ms=HOUR_MS)

    assert await retain(kv, new, retain_ms=1000) == promise
    assert kv.catalog.is_promised(TENANT, new.cache_ref)
    assert (await retain(kv, new, retain_ms=2 * HOUR_MS)).until_ms == promise.until_ms + HOUR_MS
    assert kv.blocks.all_promised_bytes("promise") == CONTEXT_BYTES


async def test_the_next_generation_takes_a_promise_over_that_it_covers(kv: SidecarUnderTest) -> None:
    """Blocks of both count once. A shorter promise, or none, leaves the older one as it is."""
    first, _ = await save(kv, 1, retain_ms=HOUR_MS)
    longer = replace(first, cache_ref=new_cache_ref(), token_ids=tokens(1, 12), retain_ms=HOUR_MS // 2)
    await kv.send_all(longer)
    await kv.catalog.seal(longer.cache_ref, 0)
    longer_bytes = kv.catalog.manifests.get(longer.cache_ref).size_bytes
    both = kv.blocks.all_promised_bytes("promise")
    await kv.sidecar.delete(TENANT, "", [first.cache_ref], replaced=True)
    held = await kv.has(first)
    newest = replace(longer, cache_ref=new_cache_ref(), token_ids=tokens(1, 13), retain_ms=2 * HOUR_MS)
    await kv.send_all(newest)
    await kv.catalog.seal(newest.cache_ref, 0)
    await kv.sidecar.delete(TENANT, "", [first.cache_ref, longer.cache_ref], replaced=True)

    assert both == longer_bytes
    assert held
    assert [await kv.has(new) for new in (first, longer, newest)] == [False, False, True]


async def test_a_refused_commit_drops_promised_kv(kv: SidecarUnderTest) -> None:
    new, _ = await save(kv, 1, retain_ms=HOUR_MS)
    await kv.sidecar.delete(TENANT, "", [new.cache_ref])

    assert not await kv.has(new)


async def test_an_interrupted_turn_and_a_fork_have_no_promise(kv: SidecarUnderTest) -> None:
    new, _ = await save(kv, 1, retain_ms=HOUR_MS)
    fork_ref = new_cache_ref()
    terms = ForkTerms(TENANT, "ctx_fork", fork_ref, (new.cache_ref,), kv.clock.now_ms() + TTL_MS)
    fork = await kv.catalog.fork(terms)
    await kv.catalog.interrupt(TENANT, new.cache_ref)

    assert fork is not None
    assert fork.promise == Promise()
    assert not kv.catalog.is_promised(TENANT, new.cache_ref)
    assert kv.blocks.all_promised_bytes("promise") == 0


async def test_kept_kv_lives_as_long_as_its_promise_and_is_not_replaced(kv: SidecarUnderTest) -> None:
    new, promise = await save(kv, 1, session_id="kept_a", retain_ms=2 * HOUR_MS)
    longer = replace(new, cache_ref=new_cache_ref(), token_ids=tokens(1, 12), retain_ms=0)
    await kv.send_all(longer)
    await kv.catalog.seal(longer.cache_ref, 0)
    await kv.collect(ms=TTL_MS + 1000)
    held = await kv.has(new)
    await kv.collect(ms=HOUR_MS)

    assert promise.until_ms
    assert held
    assert not await kv.has(new)


async def test_the_same_plain_request_again_gets_the_promise_for_what_is_kept(kv: SidecarUnderTest) -> None:
    """Seen failing: the save is refused as a repetition, and its promise went with it."""
    new, _ = await save(kv, 1, session_id="kept_a")
    again = replace(new, cache_ref=new_cache_ref(), retain_ms=HOUR_MS)
    with pytest.raises(Exception, match="already kept"):
        await kv.catalog.prepare_save(again)
    await kv.sidecar.threads.idle()

    assert kv.catalog.is_promised(TENANT, new.cache_ref)


async def test_a_pin_stays_in_memory_and_returns_there_after_a_start(tmp_path: Path) -> None:
    """Seen failing: without the pin of a slot, its blocks were the first to leave the memory."""
    clock, limits = ManualClock(), {"memory_limit_bytes": 12 * CONTEXT_BYTES, "disk_limit_bytes": 4 * LIMIT_BYTES}
    async with kv_at(tmp_path, clock, **limits) as kv:
        pinned, promise = await save(kv, 1, retain_ms=HOUR_MS, pinned=True)
        _, too_much = await save(kv, 2, retain_ms=HOUR_MS, pinned=True)
        await overload(kv)
        tiers = await kv.load(pinned)

        assert promise.pinned
        assert too_much == Promise(promise.until_ms)  # on disk
        assert tiers == ["host", "host"]
    async with kv_at(tmp_path, clock, **limits) as kv:
        await kv.sidecar.threads.idle()
        here = set(kv.in_memory())
        await kv.collect(ms=HOUR_MS)

        assert set(all_keys(kv.plan(pinned))) <= here
        assert kv.blocks.all_promised_bytes("pin") == 0


@pytest.mark.parametrize("way", ["with the save", "later"])
async def test_a_pin_whose_blocks_leave_memory_while_it_is_written_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Seen failing: the answer said memory, and nothing brought the blocks there before the next start."""
    async with kv_at(tmp_path, ManualClock(), disk_limit_bytes=4 * LIMIT_BYTES) as kv:
        keys = all_keys(kv.plan(new_save(tokens(1), now_ms=kv.clock.now_ms())))
        write = kv.sidecar.threads.write

        async def slowly(work: object, *args: object) -> object:
            result = await write(work, *args)  # type: ignore[arg-type]  # any work
            if getattr(work, "__name__", "") in {"_put", "_rewrite"}:
                for key in keys:
                    kv.blocks.drop_copy(kv.blocks.get(key))
            return result

        monkeypatch.setattr(kv.sidecar.threads, "write", slowly)
        new, promise = await save(kv, 1, retain_ms=HOUR_MS if way == "with the save" else 0, pinned=True)
        if way == "later":
            promise = await retain(kv, new, pinned=True)

        assert promise.pinned
        assert set(keys) <= set(kv.in_memory())


async def test_a_pin_that_has_no_room_displaces_nothing_in_memory(tmp_path: Path) -> None:
    """Seen failing: the KV was read into memory before the pin was refused, in the place of other tenants' KV."""
    limits = {"memory_limit_bytes": 4 * CONTEXT_BYTES, "disk_limit_bytes": 4 * LIMIT_BYTES}
    async with kv_at(tmp_path, ManualClock(), **limits) as kv:
        new, _ = await save(kv, 1)
        await overload(kv, count=10)
        before = set(kv.in_memory())
        promise = await retain(kv, new, pinned=True)

        assert not set(all_keys(kv.plan(new))) & before
        assert promise == Promise(kv.clock.now_ms() + HOUR_MS)
        assert set(kv.in_memory()) == before


@dataclass
class Orphaned:
    """A manager that knows no session with these refs."""

    refs: set[str]

    async def orphans(self, held: list) -> list[int]:
        return [at for at, it in enumerate(held) if it.cache_ref in self.refs]

    async def close(self) -> None:
        """Nothing is open."""


async def test_an_orphan_stays_for_its_promise_while_its_session_lives_and_goes_with_the_session(
    tmp_path: Path,
) -> None:
    """Seen failing both ways: dropped with a living session, and kept for hours after a delete that was lost."""
    clock, manager = ManualClock(), Orphaned(set())
    async with kv_at(tmp_path, clock, manager=manager, orphan_after_s=300) as kv:
        old, _ = await save(kv, 1, retain_ms=HOUR_MS // 2)
        newest, _ = await save(kv, 2, session_id="ctx_1")
        manager.refs = {old.cache_ref}
        for _ in range(3):
            await kv.sidecar.collect()
            clock.advance(ms=300_000)
        held = await kv.has(old)
        manager.refs |= {newest.cache_ref}
        for _ in range(2):
            await kv.sidecar.collect()
            clock.advance(ms=300_000)

        assert held
        assert [await kv.has(new) for new in (old, newest)] == [False, False]


def end_promises_in_writes(kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the promises end while manifest files change, as a pass of the collector or a request does."""
    write = kv.sidecar.threads.write

    async def slowly(work: object, *args: object) -> object:
        result = await write(work, *args)  # type: ignore[arg-type]  # any work
        kv.clock.advance(ms=HOUR_MS)
        kv.catalog.manifests.end_promises()
        return result

    monkeypatch.setattr(kv.sidecar.threads, "write", slowly)


@pytest.mark.parametrize("change", ["touch", "retain", "lose", "delete"])
async def test_a_promise_that_ends_during_a_change_of_its_manifest_ends_once(
    kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Seen failing: its blocks had -1 references, so no delete freed them, and their bytes were promised for ever."""
    new, _ = await save(kv, 1, retain_ms=HOUR_MS)
    await kv.catalog.touch(TENANT, "ctx_1", kv.clock.now_ms() + 9 * HOUR_MS)
    with monkeypatch.context() as patches:
        end_promises_in_writes(kv, patches)
        match change:
            case "touch":
                await kv.catalog.touch(TENANT, "ctx_1", kv.clock.now_ms() + 8 * HOUR_MS)
            case "retain":
                await retain(kv, new, retain_ms=HOUR_MS + 1)
            case "lose":
                await kv.catalog.manifests.lose(lambda: [kv.catalog.manifests.get(new.cache_ref)])
            case "delete":
                await kv.sidecar.delete(TENANT, "ctx_1", [])
    await kv.collect(ms=2 * HOUR_MS)
    await kv.sidecar.delete(TENANT, "ctx_1", [])
    await kv.sidecar.collect()

    assert kv.blocks.all_promised_bytes("promise") == 0
    assert kv.blocks.usage().size_bytes == 0


async def test_a_hit_of_kept_kv_does_not_shorten_its_promise(kv: SidecarUnderTest) -> None:
    """Seen failing: the expiry that a hit gives was written after the promise, and the KV expired within it."""
    new, _ = await save(kv, 1, session_id="kept_a")
    kv.clock.advance(ms=TTL_MS // 2)
    kv.catalog.retention.use(new.cache_ref, kv.clock.now_ms() + TTL_MS)
    promise = await retain(kv, new, retain_ms=2 * HOUR_MS)
    await kv.sidecar.collect()
    await kv.collect(ms=TTL_MS)

    assert kv.clock.now_ms() < promise.until_ms
    assert await kv.has(new)


async def test_asking_again_and_again_takes_no_memory(kv: SidecarUnderTest) -> None:
    """Seen failing: the end of each promise and each touch was remembered, for a day."""
    new, _ = await save(kv, 1, retain_ms=HOUR_MS)
    for number in range(100):
        await retain(kv, new, retain_ms=HOUR_MS + number)
        await kv.catalog.touch(TENANT, "ctx_1", kv.clock.now_ms() + TTL_MS + number)

    assert len(kv.catalog.manifests._promise_ends) < 10


async def test_promises_that_end_together_end_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: 55 000 that ended in one night held up the event loop for half a second."""
    monkeypatch.setattr(manifests, "SWEPT_AT_ONCE", 1)
    async with kv_at(tmp_path, ManualClock()) as kv:
        for number in range(2):
            assert (await save(kv, number, retain_ms=HOUR_MS))[1].until_ms
        kv.clock.advance(ms=HOUR_MS)
        parts = [kv.catalog.manifests.end_promises(), kv.blocks.all_promised_bytes("promise")]
        await kv.sidecar.collect()

        assert parts == [False, CONTEXT_BYTES]
        assert kv.blocks.all_promised_bytes("promise") == 0


async def test_promised_kept_kv_is_no_room_for_its_tenant_s_contexts(tmp_path: Path) -> None:
    """Seen failing: the gateway let contexts begin that could not be saved, and each save looked at all manifests."""
    async with kv_at(tmp_path, ManualClock(), tenant_limit_bytes=4 * CONTEXT_BYTES) as kv:
        await save(kv, 1, session_id="kept_a", retain_ms=HOUR_MS)
        for number in range(2, 5):
            await save(kv, number)

        assert kv.catalog.tenant_usage(TENANT) == (4 * CONTEXT_BYTES, 4 * CONTEXT_BYTES)
        kv.clock.advance(ms=HOUR_MS - 1)
        assert kv.catalog.is_promised(TENANT, next(iter(kv.catalog.manifests)).cache_ref)
        kv.clock.advance(ms=1)
        kv.catalog.manifests.end_promises()
        assert kv.catalog.tenant_usage(TENANT) == (3 * CONTEXT_BYTES, 4 * CONTEXT_BYTES)


@dataclass
class Accepted:
    """A promise as the model remembers it."""

    new: NewSave
    until_ms: int


class Promises(RuleBasedStateMachine):
    """One sidecar of ten contexts' room, two tenants, and the promises that it has accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="promises-"))
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.saved: list[NewSave] = []
        self.accepted: dict[str, Accepted] = {}
        self.number = 0

    @initialize()
    def start(self) -> None:
        self.kv = kv_at(self.root / "pod", self.clock)
        self.runner.run(self.kv.sidecar.open())

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            self.runner.run(self.kv.sidecar.close())
        self.runner.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _note(self, new: NewSave, promise: Promise) -> None:
        if promise.until_ms:
            self.accepted[new.cache_ref] = Accepted(new, promise.until_ms)

    @rule(
        tenant=st.sampled_from([TENANT, "other"]),
        session=st.sampled_from(["ctx_a", "ctx_b"]),
        retain_ms=st.sampled_from([0, 0, 1000, HOUR_MS // 2]),
    )
    def save(self, tenant: str, session: str, retain_ms: int) -> None:
        self.number += 1
        self.clock.advance(ms=1)
        fields = {"tenant": tenant, "session_id": session, "started_at_ms": self.clock.now_ms() + 1}
        new, promise = self.runner.run(save(self.kv, self.number, retain_ms=retain_ms, **fields))
        self.saved = [*self.saved[-20:], new]
        self._note(new, promise)

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), retain_ms=st.sampled_from([1000, HOUR_MS // 4]))
    def retain(self, data: st.DataObject, retain_ms: int) -> None:
        new = data.draw(st.sampled_from(self.saved))
        self._note(new, self.runner.run(retain(self.kv, new, retain_ms=retain_ms)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def replaced(self, data: st.DataObject) -> None:
        new = data.draw(st.sampled_from(self.saved))
        self.runner.run(self.kv.sidecar.delete(new.tenant, "", [new.cache_ref], replaced=True))

    @rule(tenant=st.sampled_from([TENANT, "other"]), session=st.sampled_from(["ctx_a", "ctx_b"]))
    def delete(self, tenant: str, session: str) -> None:
        self.runner.run(self.kv.sidecar.delete(tenant, session, []))
        whose = (tenant, session)
        self.accepted = {ref: it for ref, it in self.accepted.items() if (it.new.tenant, it.new.session_id) != whose}
        self.clock.advance(ms=2)

    @rule(ms=st.sampled_from([500, 1000, HOUR_MS // 4]))
    def expire(self, ms: int) -> None:
        self.clock.advance(ms=ms)
        self.runner.run(self.kv.sidecar.collect())

    @rule()
    def restart(self) -> None:
        self.runner.run(self.kv.sidecar.close())
        self.start()

    @invariant()
    def accepted_promises_are_kept(self) -> None:
        now_ms = self.clock.now_ms()
        for it in self.accepted.values():
            if now_ms < min(it.until_ms, it.new.expires_at_ms):
                assert self.runner.run(self.kv.load(it.new))

    @invariant()
    def promised_bytes_are_counted_and_bounded(self) -> None:
        if not hasattr(self, "kv"):
            return
        manifests = self.kv.catalog.manifests
        manifests.end_promises()
        keys = {key for it in manifests if it.promise.until_ms for key in it.keys}
        found = Counter()
        for key in keys:
            block = self.kv.blocks.get(key)
            found[block.tenant] += block.stored_bytes or 0
        assert self.kv.blocks.all_promised_bytes("promise") == found.total() <= LIMIT_BYTES // 2
        assert all(self.kv.blocks.promised_bytes("promise", tenant) == size for tenant, size in found.items())


Promises.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPromises = Promises.TestCase
