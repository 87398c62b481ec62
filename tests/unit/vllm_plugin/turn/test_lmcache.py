"""Turns whose KV LMCache keeps: what it is told, what is taken back, and that none of its faults is a client's."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from pydantic import ValidationError

from contextcache.clock import SystemClock
from contextcache.errors import CacheRefNotFound, SidecarUnavailable
from contextcache.identity import KVTransfer, context_salt
from integrations.lmcache.api import LMCacheApi, SaltedTokens
from integrations.lmcache.door import LMCacheDoor
from integrations.lmcache.instead_of_sidecar import UNTOLD, LMCacheKV
from kv_sidecar.client import KVSidecarClient
from tests.kit.fake_vllm import FakeVllm, encode
from tests.kit.lmcache_fake import COORDINATOR, SERVER, SIZE_BYTES, FakeLMCache
from tests.kit.turn_bench import SECRET, Pod
from vllm_plugin.turn.settings import TurnSettings

PROMPT = "x" * 600
"""Two chunks, and a tail: a token is a letter."""


@pytest.fixture
def fake():
    return FakeLMCache()


@pytest.fixture
async def api(fake):
    api = LMCacheApi(
        server_url=SERVER,
        coordinator_url=COORDINATOR,
        model_name="m",
        world_size=1,
        timeout_s=30,
        transport=fake.transport(),
    )
    yield api
    await api.close()


@pytest.fixture
async def pod(tmp_path, fake, api):
    pod = Pod(tmp_path, FakeVllm(), lmcache=lambda clock: LMCacheKV(api, secret=SECRET, clock=clock))
    pod.engine.answer = saved(pod, fake)
    yield pod
    await pod.story.close()


def saved(pod, fake):
    """Return an answer, for which the engine saves the prompt as LMCache's connector does."""

    def answer(ids):
        fake.store(pod.engine.generations()[-1]["cache_salt"], ids)
        return "!"

    return answer


def salt_of(session_id: str) -> str:
    return context_salt("demo", session_id, SECRET)


def salts(fake):
    return {salt for salt, _ in fake.stored}


async def test_a_context_has_one_salt_at_every_turn_and_another_context_another(pod):
    create = (await pod.create(prompt=PROMPT)).json
    await pod.ask(create["session_id"], prompt="y")
    await pod.create(prompt=PROMPT)

    first, turn, other = [body["cache_salt"] for body in pod.engine.generations()]
    assert first == turn == salt_of(create["session_id"])
    assert other != first


async def test_the_engine_gets_no_order_that_only_our_connector_reads(pod):
    await pod.create(prompt=PROMPT)

    params = pod.engine.generations()[0]["kv_transfer_params"]
    assert params == {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}


async def test_a_create_says_that_nobody_knows_when_its_kv_is_durable(pod):
    create = await pod.create(prompt=PROMPT)

    assert create.json["usage"]["context"]["reason"] == UNTOLD


@pytest.mark.parametrize(
    ("told", "loaded", "source"),
    [
        ({"cached_token_stats": {"num_vllm_cached_tokens": 0, "num_lmcache_extra_cached_tokens": 512}}, 512, "host"),
        ({"num_lmcache_extra_cached_tokens": 512}, 512, "host"),
        ({"num_lmcache_extra_cached_tokens": 0}, 0, "device"),
        ({"num_lmcache_extra_cached_tokens": "many"}, None, "device"),
        ({}, None, "device"),
    ],
)
async def test_the_receipt_says_what_the_engine_says_was_loaded(pod, told, loaded, source):
    report = await pod.lmcache.loaded("r", told, is_whole=True)
    assert (None if report is None else report.loaded_tokens) == loaded

    async def reported(*_, **__):
        return report

    create = (await pod.create(prompt=PROMPT)).json
    pod.engine.cached_tokens, pod.lmcache.loaded = 512, reported
    answer = await pod.ask(create["session_id"], prompt="y")
    assert answer.json["usage"]["context"]["source"] == source
    assert answer.json["usage"]["context"]["restore_ms"] is None
    assert "restore" not in answer.headers["server-timing"]


async def test_a_commit_pins_the_whole_context_once(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json
    await pod.ask(create["session_id"], prompt="y" * 300)

    assert len(fake.pins) == 3
    assert set(fake.pins.values()) == {1}


async def test_the_first_turn_here_of_a_context_from_elsewhere_is_prefetched(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json
    assert ("POST", "/cache/prefetches") not in fake.calls
    pod.story._served.clear()

    await pod.ask(create["session_id"], prompt="y")

    assert fake.calls.count(("POST", "/cache/prefetches")) == 1


async def test_a_delete_takes_the_pins_and_all_that_was_ever_saved_and_says_how_much(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json
    other = (await pod.create(prompt=PROMPT)).json
    # A resend that leaves the transcript: what it was before lies there as well.
    await pod.ask(create["session_id"], prompt="x" * 300 + "z" * 300, context_mode="replay")
    assert len([1 for salt, _ in fake.stored if salt == salt_of(create["session_id"])]) == 3

    freed_bytes = await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    assert salts(fake) == {salt_of(other["session_id"])}
    assert {salt for salt, _ in fake.pins} == {salt_of(other["session_id"])}
    assert freed_bytes == 2 * SIZE_BYTES


async def test_two_deletes_at_once_both_end_well_and_take_nothing_of_who_comes_after(pod, fake):
    """Seen failing: a KeyError, told as an unknown fault."""
    session_id = (await pod.create(prompt=PROMPT)).json["session_id"]
    await asyncio.gather(*(pod.lmcache.delete_context("demo", session_id=session_id) for _ in range(2)))

    assert salts(fake) == set()
    assert pod.lmcache._num_tokens == 0


async def test_a_delete_for_another_tenant_finds_nothing(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json

    assert await pod.lmcache.touch_context("other", create["session_id"], 1) == 0
    assert await pod.lmcache.delete_context("other", session_id=create["session_id"]) == 0
    assert salts(fake) == {salt_of(create["session_id"])}


async def test_a_process_that_knows_no_tokens_deletes_what_is_listed(pod, fake, api):
    create = (await pod.create(prompt=PROMPT)).json
    kept = (await pod.create(prompt=PROMPT)).json
    younger = LMCacheKV(api, secret=SECRET, clock=pod.clock)

    freed_bytes = await younger.delete_context("demo", session_id=create["session_id"])

    assert salts(fake) == {salt_of(kept["session_id"])}
    assert freed_bytes == 2 * SIZE_BYTES, "seen failing: 0"


async def test_a_process_that_has_seen_only_the_last_turns_deletes_the_rest_too(pod, fake, api):
    create = (await pod.create(prompt=PROMPT)).json
    pod.lmcache._held.clear()
    await pod.ask(create["session_id"], prompt="w" * 600, context_mode="replay")

    await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    assert fake.stored == set()


async def test_what_is_locked_is_tried_again_and_then_said(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json
    fake.locked |= fake.stored

    with pytest.raises(SidecarUnavailable, match="locked"):
        await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    fake.locked.clear()
    pod.clock.advance(s=61)
    await pod.lmcache.expire()
    assert fake.stored == set()


@pytest.mark.parametrize("call", ["instances", "size_bytes", "delete"])
async def test_a_delete_that_its_caller_cancelled_is_finished_by_the_sweep(pod, fake, api, call):
    """Seen failing: the KV stayed until the context's own expiry."""
    create = (await pod.create(prompt=PROMPT)).json
    asked, answered = asyncio.Event(), getattr(api, call)

    async def silent(*_):
        asked.set()
        await asyncio.Event().wait()

    setattr(api, call, silent)
    deleting = asyncio.create_task(pod.lmcache.delete_context("demo", session_id=create["session_id"]))
    await asked.wait()
    deleting.cancel()
    await asyncio.wait([deleting])
    assert deleting.cancelled()

    setattr(api, call, answered)
    pod.clock.advance(s=61)
    await pod.lmcache.expire()
    assert fake.stored == set()
    assert not fake.pins


async def test_a_delete_that_found_no_coordinator_is_finished_by_the_sweep(pod, fake):
    """Seen failing: the KV stayed until the context's own expiry."""
    create = (await pod.create(prompt=PROMPT)).json
    fake.failing = [500]

    with pytest.raises(SidecarUnavailable):
        await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    pod.clock.advance(s=61)
    await pod.lmcache.expire()
    assert fake.stored == set()


async def test_a_delete_that_always_fails_is_tried_some_times_and_given_up(pod, fake):
    """Seen failing: an attempt a minute without end."""
    create = (await pod.create(prompt=PROMPT)).json
    fake.failing = [500] * 100
    with pytest.raises(SidecarUnavailable):
        await pod.lmcache.delete_context("demo", session_id=create["session_id"])
    num_calls = []

    for _ in range(20):
        pod.clock.advance(s=3 * 3600)
        await pod.lmcache.expire()
        num_calls.append(len(fake.calls))

    assert num_calls[0] < num_calls[5]
    assert num_calls[10] == num_calls[-1]
    assert pod.lmcache._num_tokens == 0


async def test_the_pauses_between_attempts_of_a_delete_grow(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json
    fake.failing, minutes = [500] * 100, []
    with pytest.raises(SidecarUnavailable):
        await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    for minute in range(1, 33):
        num_calls = len(fake.calls)
        pod.clock.advance(s=60)
        await pod.lmcache.expire()
        if len(fake.calls) > num_calls:
            minutes.append(minute)

    assert minutes == [1, 3, 7, 15, 31]


async def test_a_client_that_asks_often_does_not_use_up_the_attempts_of_the_sweep(pod, fake):
    """Seen failing: after eight requests within a moment, the sweep gave the KV up without an attempt."""
    create = (await pod.create(prompt=PROMPT)).json
    fake.failing = [500] * 100
    for _ in range(10):
        with pytest.raises(SidecarUnavailable):
            await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    fake.failing = []
    pod.clock.advance(s=61)
    await pod.lmcache.expire()
    assert fake.stored == set()


@pytest.mark.parametrize("event", ["touch", "turn"])
async def test_a_touch_or_a_turn_after_a_failed_delete_does_not_end_its_attempts(pod, fake, event):
    """Seen failing: the KV stayed until the context's new expiry."""
    create = (await pod.create(prompt=PROMPT)).json
    session, _ = await pod.transcript(create["session_id"])
    fake.failing = [500]
    with pytest.raises(SidecarUnavailable):
        await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    if event == "touch":
        await pod.lmcache.touch_context("demo", create["session_id"], session.expires_at_ms)
    else:
        order = KVTransfer("demo", session.session_id, "r", (), "ref", session.expires_at_ms)
        pod.lmcache.order(session, order, encode(PROMPT))
    pod.clock.advance(s=61)
    await pod.lmcache.expire()

    assert fake.stored == set()


async def test_a_delete_of_an_earlier_process_that_failed_is_tried_again(pod, fake, api):
    """Seen failing: KV of an earlier process stayed when the coordinator was away for a moment."""
    create = (await pod.create(prompt=PROMPT)).json
    younger = LMCacheKV(api, secret=SECRET, clock=pod.clock)
    fake.failing = [500]
    with pytest.raises(SidecarUnavailable):
        await younger.delete_context("demo", session_id=create["session_id"])

    pod.clock.advance(s=61)
    await younger.expire()

    assert fake.stored == set()


async def test_pins_of_a_process_that_is_gone_do_not_keep_a_deleted_context(pod, fake, api):
    create = (await pod.create(prompt=PROMPT)).json
    await api.pin(SaltedTokens(salt_of(create["session_id"]), encode(PROMPT)))

    await pod.lmcache.delete_context("demo", session_id=create["session_id"])

    assert fake.stored == set()
    assert not fake.pins


async def test_a_create_that_is_aborted_leaves_nothing(pod, fake):
    pod.manager.fault = ("register_session_cache", CacheRefNotFound("refused, for a test"))

    answer = await pod.create(prompt=PROMPT)

    assert answer.json["usage"]["context"]["committed"] is False
    assert fake.stored == set()


async def test_a_turn_that_is_not_committed_leaves_the_context_its_kv(pod, fake):
    create = (await pod.create(prompt=PROMPT)).json
    pod.manager.fault = ("commit_turn", CacheRefNotFound("refused, for a test"))

    await pod.ask(create["session_id"], prompt="y")

    assert len(fake.stored) == 2
    assert ("POST", "/cache/delete") not in fake.calls


async def test_what_ends_by_its_time_is_deleted_then_and_not_before(pod, fake):
    create = (await pod.create(prompt=PROMPT, ttl=60)).json
    assert await pod.lmcache.touch_context("demo", create["session_id"], pod.clock.now_ms() + 90_000) == 1

    pod.clock.advance(s=89)
    await pod.lmcache.expire()
    assert len(fake.stored) == 2
    pod.clock.advance(s=1)
    await pod.lmcache.expire()

    assert fake.stored == set()
    assert not fake.pins
    assert await pod.lmcache.touch_context("demo", create["session_id"], 0) == 0


async def test_a_context_deleted_while_it_is_pinned_has_no_pin_left(pod, fake, api):
    create = (await pod.create(prompt=PROMPT)).json
    session, _ = await pod.transcript(create["session_id"])
    grown = encode(PROMPT + "y" * 300)
    order = KVTransfer("demo", session.session_id, "r", (), "ref", session.expires_at_ms)
    pod.lmcache.order(session, order, grown)
    pin = api.pin

    async def pin_late(kv):
        await pod.lmcache.delete_context("demo", session_id=create["session_id"])
        await pin(kv)

    api.pin = pin_late
    await pod.lmcache.committed(session, session, [grown])

    assert not fake.pins


async def test_turns_go_on_while_lmcache_is_away(pod, fake):
    fake.failing = [500] * 50

    create = await pod.create(prompt=PROMPT)
    answer = await pod.ask(create.json["session_id"], prompt="y")

    assert (create.status, answer.status) == (200, 200)
    assert answer.json["usage"]["context"]["committed"]


async def test_a_call_is_tried_again_when_a_server_is_away_for_a_moment(api, fake):
    fake.failing = [503, 502]

    assert len(await api.instances()) == 1
    assert len(fake.calls) == 3


async def test_a_pin_is_never_tried_twice(api, fake):
    fake.failing = [503]

    with pytest.raises(SidecarUnavailable, match="503"):
        await api.pin(SaltedTokens("s", encode(PROMPT)))

    assert len(fake.calls) == 1


async def test_a_server_that_does_not_answer_is_given_up_in_time():
    async def silent(scope, receive, send):
        await asyncio.get_running_loop().create_future()

    transport = httpx.ASGITransport(silent)
    parts = {"server_url": SERVER, "coordinator_url": COORDINATOR, "model_name": "m", "world_size": 1}
    api = LMCacheApi(**parts, timeout_s=0.05, transport=transport)

    with pytest.raises(SidecarUnavailable, match="before the deadline"):
        await api.instances()
    await api.close()


async def test_an_answer_of_another_shape_is_an_error_of_ours(api, fake):
    fake._answer = lambda *_: (200, ["no object"])

    with pytest.raises(SidecarUnavailable, match="answer is not valid"):
        await api.instances()


async def test_a_gateway_deletes_through_the_turns_own_process(pod, fake, api):
    create = (await pod.create(prompt=PROMPT)).json
    door = LMCacheDoor(api, secret=SECRET, clock=SystemClock(), address="127.0.0.1:0", tls=None)
    await door.start()
    gateway = KVSidecarClient(f"127.0.0.1:{door.port}", timeout_s=30)
    try:
        with pytest.raises(CacheRefNotFound):
            await gateway.get_manifest("demo", "ref")
        assert (await gateway.wait_sealed("demo", "ref", timeout_ms=0)).reason == UNTOLD
        assert await gateway.touch_context("demo", create["session_id"], 1) == 0
        terms = {"session_id": "ctx_2", "cache_ref": "r", "expires_at_ms": 1}
        assert not await gateway.fork_context("demo", ["ref"], **terms)
        assert await gateway.pull_context("demo", ["ref"], peer="elsewhere:1") == "refused"
        assert await gateway.list_kept("demo") == []
        assert (await gateway.stats()).num_contexts == 0
        await gateway.delete_context("demo", session_id=create["session_id"])
    finally:
        await gateway.close()
        await door.close()

    assert fake.stored == set()


async def test_of_two_processes_of_a_pod_one_answers_the_gateway(api):
    first = LMCacheDoor(api, secret=SECRET, clock=SystemClock(), address="127.0.0.1:0", tls=None)
    await first.start()
    second = LMCacheDoor(api, secret=SECRET, clock=SystemClock(), address=f"127.0.0.1:{first.port}", tls=None)
    await second.start()

    assert second.port == 0
    await first.close()
    await second.close()


@pytest.mark.parametrize("lacks", ["lmcache_coordinator_url", "lmcache_model", "lmcache_listen"])
def test_no_process_starts_that_could_not_delete_what_it_saves(tmp_path, lacks):
    whole = {"lmcache_coordinator_url": COORDINATOR, "lmcache_model": "m", "lmcache_listen": "127.0.0.1:0"}
    whole |= {"lmcache_url": SERVER, "secret_file": tmp_path / "secret", "lmcache_world_size": 2}
    TurnSettings(**whole)

    with pytest.raises(ValidationError, match="TURN_LMCACHE_URL needs"):
        TurnSettings(**whole | {lacks: ""})
