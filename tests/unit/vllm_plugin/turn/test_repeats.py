"""Requests that come again under an Idempotency-Key, over the real manager and a toy engine."""

import asyncio
import secrets

import pytest

from contextcache.errors import ContextQuotaExceeded, LeaseLost, StoreUnavailable
from contextcache.model import KeptAnswer, Repeatable, SessionState
from vllm_plugin.turn.answer import repeats
from vllm_plugin.turn.answer.repeats import Recording, give_again


def named(key: str, **more: str):
    pairs = {"idempotency-key": key, **more}
    return [(name.encode(), value.encode()) for name, value in pairs.items()]


async def create(pod, key="k", path="/v1/context", **body):
    return await pod.post(path, {"model": "m", "prompt": "Hello", **body}, pod.identity(), headers=named(key))


async def ask(pod, session_id, key="k", **body):
    return await pod.ask(session_id, headers=named(key), **({"prompt": " more"} | body))


def is_again(answer, first):
    """Return whether an answer is the first one's to the byte, and says that it is given again."""
    told = {name: value for name, value in answer.headers.items() if name != "content-length"}
    before = {name: value for name, value in first.headers.items() if name != "content-length"}
    return (answer.status, answer.body, told) == (first.status, first.body, before | {"idempotent-replayed": "true"})


def code(answer):
    return answer.status, answer.json["error"]["code"]


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"ttl_policy": "sliding", "stream": True}, {"max_tokens": 0}])
async def test_a_create_that_comes_again_is_answered_again_and_is_one_context(pod, how):
    """Seen to fail without the record: two contexts."""
    first = await create(pod, **how)
    pod.clock.advance(s=100)
    again = await create(pod, **how)

    assert is_again(again, first)
    assert len(pod.engine.generations()) == 1
    assert len((await pod.manager.list_sessions("demo", limit=10)).sessions) == 1


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("policy", ["fixed", "sliding"])
async def test_a_turn_that_comes_again_is_one_turn(pod, how, policy):
    session_id = (await pod.create(prompt="Hello", ttl_policy=policy)).json["session_id"]
    first = await ask(pod, session_id, **how)
    pod.clock.advance(s=50)
    again = await ask(pod, session_id, **how)
    other = await ask(pod, session_id, key="another", **how)
    session, segments = await pod.transcript(session_id)

    assert is_again(again, first)
    assert "idempotent-replayed" not in other.headers
    assert session.generation == 3
    assert [segment.text for segment in segments] == ["Hello", "!", " more", "!", " more", "!"]


async def test_a_chat_turn_with_tools_comes_again_to_the_byte(pod, engine):
    engine.calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    hi = [{"role": "user", "content": "Hi \U0001f642"}]
    session_id = (await pod.create(messages=hi)).json["session_id"]
    more = [{"role": "tool", "tool_call_id": "c1", "content": "1"}]
    first = await pod.chat(session_id, messages=more, headers=named("k"))
    again = await pod.chat(session_id, messages=more, headers=named("k"))

    assert is_again(again, first)


async def test_another_request_under_the_key_is_refused_and_runs_nothing(pod):
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    await ask(pod, session_id)
    num_asked = len(pod.engine.generations())
    others = [
        await ask(pod, session_id, prompt=" other"),
        await ask(pod, session_id, stream=True),
        await pod.ask(session_id, prompt=" more", headers=named("k", **{"x-usage-format": "openai"})),
        await pod.ask(session_id, prompt=" more", headers=named("k", **{"if-match": "2"})),
        await pod.chat(session_id, messages=[{"role": "user", "content": "x"}], headers=named("k")),
        await create(pod, prompt=" more", session_id=session_id),
    ]

    assert {code(answer) for answer in others} == {(422, "idempotency_key_reused")}
    assert len(pod.engine.generations()) == num_asked
    assert (await pod.transcript(session_id))[0].generation == 2


async def test_one_that_is_still_running_is_told_to_wait(pod, engine):
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    engine.pause = asyncio.Event()
    running = asyncio.create_task(ask(pod, session_id, stream=True))
    creating = asyncio.create_task(create(pod, key="c", stream=True))
    while len(engine.generations()) < 3:
        await asyncio.sleep(0)
    early = [await ask(pod, session_id, stream=True), await create(pod, key="c", stream=True)]
    engine.pause.set()
    first = [await running, await creating]
    late = [await ask(pod, session_id, stream=True), await create(pod, key="c", stream=True)]

    assert [code(answer) for answer in early] == [(409, "context_busy")] * 2
    assert all(answer.headers["retry-after"] for answer in early)
    assert all(map(is_again, late, first))


async def test_of_many_at_once_one_runs(pod):
    creates = await asyncio.gather(*(create(pod) for _ in range(8)))
    session_id = next(answer for answer in creates if answer.status == 200).json["session_id"]
    turns = await asyncio.gather(*(ask(pod, session_id, key="t") for _ in range(8)))

    for answers in (creates, turns):
        assert {answer.body for answer in answers if answer.status == 200} == {
            next(answer.body for answer in answers if answer.status == 200)
        }
        assert {code(answer) for answer in answers if answer.status != 200} <= {(409, "context_busy")}
    assert (await pod.transcript(session_id))[0].generation == 2
    assert len(pod.engine.generations()) == 2


async def test_what_failed_runs_again(pod, engine):
    engine.break_off_after = 1
    broken = await create(pod, stream=True)
    engine.break_off_after = None
    created = await create(pod, stream=True)
    refused = await create(pod, key="r", prompt="")
    session_id = created.events[-1]["session_id"]

    assert not broken.complete
    assert "idempotent-replayed" not in created.headers
    assert code(refused) == (400, "invalid_request")
    assert (await pod.transcript(session_id))[0].generation == 1


async def test_a_commit_that_was_refused_is_not_answered_again(pod):
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    pod.manager.fault = ("commit_turn", LeaseLost("lost"))
    first = await ask(pod, session_id)
    pod.manager.fault = None
    again = await ask(pod, session_id)

    assert not first.json["usage"]["context"]["committed"]
    assert again.json["usage"]["context"]["committed"]
    assert "idempotent-replayed" not in again.headers


async def test_a_commit_whose_answer_was_lost_is_answered_as_if_it_was_not(pod, monkeypatch):
    """Nobody knew whether it was committed, until the record tells."""
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    commit_turn = pod.manager.commit_turn

    async def lost(commit):
        await commit_turn(commit)
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(pod.manager, "commit_turn", lost)
    first = await ask(pod, session_id)
    monkeypatch.undo()
    again = await ask(pod, session_id)
    session, segments = await pod.transcript(session_id)

    assert first.json["usage"]["context"]["reason"] == "store_unavailable"
    assert again.json["usage"]["context"]["committed"]
    assert again.json["choices"] == first.json["choices"]
    assert (session.generation, len(segments)) == (2, 4)


async def test_an_answer_outlives_its_context_for_a_day(pod):
    first = await create(pod, ttl=600)
    session_id = first.json["session_id"]
    turn = await ask(pod, session_id, key="t")
    await pod.manager.unregister_session_cache("demo", session_id)

    assert is_again(await create(pod, ttl=600), first)
    assert is_again(await ask(pod, session_id, key="t"), turn)
    pod.clock.advance(s=86_400)
    pod.manager._redis.age(ms=86_400_000)
    assert code(await ask(pod, session_id, key="t")) == (404, "context_not_found")
    anew = await create(pod, ttl=600)
    assert (anew.status, anew.headers["x-context-generation"]) == (200, "1")
    assert "idempotent-replayed" not in anew.headers


async def test_a_day_later_a_create_is_refused_while_its_first_context_lives(pod):
    await create(pod, ttl=7 * 24 * 3600)
    pod.clock.advance(s=86_401)
    pod.manager._redis.age(ms=86_401_000)

    assert code(await create(pod, ttl=7 * 24 * 3600)) == (409, "context_exists")


async def test_keys_are_a_tenants_own_and_a_contexts_own(pod):
    mine = await create(pod)
    theirs = await pod.post(
        "/v1/context", {"model": "m", "prompt": "Hello"}, pod.identity(tenant="other"), headers=named("k")
    )
    one, two = mine.json["session_id"], (await create(pod, session_id="two")).json["session_id"]
    turns = [await ask(pod, session_id, key="t") for session_id in (one, two)]

    assert mine.json["session_id"] != theirs.json["session_id"]
    assert [answer.json["session_id"] for answer in turns] == [one, two]
    assert not any("idempotent-replayed" in answer.headers for answer in (theirs, *turns))


async def test_a_named_create_and_one_that_a_turn_makes_come_again_too(pod):
    first = await create(pod, session_id="mine")
    made = await ask(pod, "other", context_create="if_missing")

    assert is_again(await create(pod, session_id="mine"), first)
    assert is_again(await ask(pod, "other", context_create="if_missing"), made)
    assert code(await pod.create(prompt="Hello", session_id="mine")) == (409, "context_exists")


async def test_turns_that_commit_nothing_run_again(pod):
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    for _ in range(2):
        answer = await ask(pod, session_id, context_commit=False)
        assert "idempotent-replayed" not in answer.headers
    assert len(pod.engine.generations()) == 3


@pytest.mark.parametrize("key", ["", "k" * 256, "k\u00e9", "a\tb"])
async def test_a_key_that_is_none_is_refused(pod, key):
    answer = await create(pod, key=key)

    assert (*code(answer), answer.json["error"]["param"]) == (400, "invalid_request", "Idempotency-Key")
    assert pod.engine.generations() == []


async def test_the_longest_key_and_one_in_quotes_are_keys(pod):
    for key in ("k" * 255, '"8e03978e-40d5-43dd-bc93-6894a57f9324"', " "):
        first = await create(pod, key=key)
        assert is_again(await create(pod, key=key), first)


async def test_an_answer_that_is_too_large_is_not_kept_and_its_turn_not_run_again(pod, engine, monkeypatch):
    """Seen to fail without a record for it: the turn was there twice."""
    session_id = (await pod.create(prompt="Hello")).json["session_id"]
    monkeypatch.setattr(repeats, "PACKED_BYTES_MAX", 100)
    for key, how in (("a", {}), ("b", {"stream": True})):
        engine.answer = lambda ids: secrets.token_hex(400)
        assert (await ask(pod, session_id, key=key, **how)).status == 200
        again = await ask(pod, session_id, key=key, **how)
        assert code(again) == (409, "answer_not_kept")
        assert "generation" in again.json["error"]["message"]
    assert (await pod.transcript(session_id))[0].generation == 3


async def test_a_tenant_without_bytes_left_is_told_before_anything_runs(pod, engine):
    first = await create(pod, session_id="one")
    pod.manager._bytes.bytes_max = 1
    num_asked = len(engine.generations())
    for refused in (await ask(pod, "one", key="t"), await pod.ask("one", prompt=" more"), await create(pod, key="n")):
        assert code(refused) == (429, "context_quota_exceeded")
        assert "delete contexts" in refused.json["error"]["message"]

    assert first.status == 200
    assert is_again(await create(pod, session_id="one"), first)
    assert len(engine.generations()) == num_asked


async def test_a_turn_that_ran_out_of_bytes_is_answered_and_not_committed(pod, engine):
    await create(pod, session_id="one")

    def answer(ids):
        pod.manager._bytes.bytes_max = 1
        return "late"

    engine.answer = answer
    asked = await ask(pod, "one", key="t")

    assert (asked.status, asked.json["choices"][0]["text"]) == (200, "late")
    context = asked.json["usage"]["context"]
    assert (context["committed"], context["reason"]) == (False, "context_quota_exceeded")
    assert (await pod.manager.get_session_metadata("demo", "one")).state is SessionState.READY


async def test_a_create_that_comes_again_is_answered_although_its_tenant_is_over_its_quota_by_now(pod, monkeypatch):
    """Seen to fail: 429 for a context that was there."""
    first = await create(pod)

    async def full(tenant):
        raise ContextQuotaExceeded("full")

    monkeypatch.setattr(pod.story.admission, "check_quota", full)

    assert is_again(await create(pod), first)
    assert code(await create(pod, prompt="other")) == (422, "idempotency_key_reused")
    assert code(await create(pod, key="new")) == (429, "context_quota_exceeded")


async def test_an_answer_that_a_manager_lost_in_between_is_told_to_come_again(pod, monkeypatch):
    await create(pod, session_id="one")

    async def nothing(*_, **__):
        return None

    monkeypatch.setattr(pod.manager, "find_answer", nothing)
    answer = await create(pod, session_id="one")

    assert code(answer) == (409, "idempotency_key_in_use")
    assert answer.headers["retry-after"]


async def test_what_is_kept_is_bounded_before_it_is_packed_and_after(monkeypatch):
    monkeypatch.setattr(repeats, "RAW_BYTES_MAX", 1000)
    recording = Recording()
    for _ in range(100):
        recording.add(b"x" * 100)

    assert len(recording._body) <= 1100
    assert await recording.packed([], b"end") == b""
    assert await Recording().packed([], b"x" * 1001) == b""
    assert await Recording().packed([], b"x" * 1000) != b""


@pytest.mark.parametrize("answer", [b"garbage", b"x\x9c\x03\x00\x00\x00\x00\x01"])
async def test_what_was_kept_and_is_damaged_is_told_and_not_sent(answer):
    sent = []

    async def send(message):
        sent.append(message)

    with pytest.raises(Exception, match="damaged"):
        await give_again(KeptAnswer(answer, 2, 1_700_000_000_000, "a" * 32), Repeatable("b" * 32, "a" * 32), send)
    assert sent == []
