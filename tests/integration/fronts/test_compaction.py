"""Compaction of contexts and of OpenAI's responses, with OpenAI's own client, through either front."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import openai
import pytest
from openai.types.responses import CompactedResponse

from contextcache.clock import SystemClock
from contextcache.errors import ContextQuotaExceeded
from contextcache.identity import verify_kv_transfer
from tests.kit.fake_vllm import FakeVllm
from tests.kit.fronts import code_of, envoy_too, only_http
from tests.kit.gateway_parts import KEY, OTHER_KEY, SECRET
from tests.kit.gateway_server import RunningManager
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
"""OpenAI's client has no type of its own for a user's message in an output."""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is Oslo? " + "It is a city. " * 40},
]
SUMMARY = "Oslo lies in Norway."
DAY_S, TOMBSTONE_S = 24 * 3600, 3600


def answer(ids):
    return SUMMARY if "Summarise" in "".join(map(chr, ids)) else "Hm."


class MovedClock(SystemClock):
    """A clock that runs `moved_s` seconds before the system's."""

    moved_s = 0

    def now_ms(self):
        return super().now_ms() + 1000 * self.moved_s


@pytest.fixture
def clock():
    return MovedClock()


@pytest.fixture
async def manager(clock):
    manager = RunningManager(clock=clock)
    await manager.start()
    yield manager
    await manager.stop()


@pytest.fixture
async def pod(tmp_path, manager):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=FakeVllm(answer=answer)) as pod:
        yield pod


@pytest.fixture
async def front(open_front, pod, manager):
    async with open_front({"pod-a": pod}, manager_port=manager.port) as front:
        yield front


@pytest.fixture
async def client(front):
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def sent(front, path, body, *, status=200, key=KEY, repeat_key=None):
    headers = {"authorization": f"Bearer {key}"} | ({"idempotency-key": repeat_key} if repeat_key else {})
    async with front.post(path, body, headers=headers) as answer:
        assert answer.status == status, await answer.read()
        return await answer.json()


async def contexts(front):
    async with front.get("/v1/context") as answer:
        return (await answer.json())["data"]


def turns(pod):
    """Return the bodies of the engine's requests that are turns, with their prompts and orders."""
    bodies = [body for body in pod.engine.generations() if "kv_transfer_params" in body]
    orders = [verify_kv_transfer(body["kv_transfer_params"]["context_cache"], SECRET) for body in bodies]
    prompts = [body["kv_transfer_params"].get("prompt_token_ids") or body["prompt"] for body in bodies]
    return [("".join(map(chr, ids)), order) for ids, order in zip(prompts, orders, strict=True)]


async def test_a_context_is_compacted_by_the_model_and_stays_as_it_is(front, pod):
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old", "ttl": 900})
    made = await sent(
        front, "/v1/context/old/compact", {"session_id": "new", "instructions": "In English."}, status=201
    )
    async with front.get("/v1/context/old") as answer:
        old = await answer.json()
    said = {"model": MODEL, "session_id": "new", "messages": [{"role": "user", "content": "And Rome?"}]}
    await sent(front, "/v1/chat/completions", said)

    first, summary, created, turn = turns(pod)
    assert (made["session_id"], made["parent"], made["ttl"], made["generation"]) == ("new", "old", 900, 1)
    assert old["generation"] == 1
    assert summary[0].startswith(first[0])
    assert "In English." in summary[0]
    assert summary[1].save is None
    assert "It is a city." not in created[0]
    assert created[0].startswith("<system>Be brief.")
    assert SUMMARY in created[0]
    assert created[1].load == (first[1].save,)
    assert turn[0].startswith(created[0].removesuffix("<assistant>"))
    assert turn[1].load == (created[1].save,)


@envoy_too
@pytest.mark.parametrize("given", [{"messages": [{"role": "user", "content": "Oslo."}]}, {"prompt": "Oslo."}])
async def test_a_client_gives_its_own_compacted_conversation(front, pod, given):
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old"})
    made = await sent(front, "/v1/context/old/compact", {**given, "metadata": {"a": "b"}}, status=201)

    (_, created) = turns(pod)
    assert "Oslo." in created[0]
    assert (made["parent"], made["metadata"]) == ("old", {"a": "b"})


@only_http
async def test_the_prompt_is_computed_in_pieces_while_the_engine_keeps_them(front, pod):
    """Seen failing: without the pieces, the engine got one request for the whole prompt."""
    text = "".join(chr(97 + at % 26) for at in range(900))
    await sent(front, "/v1/context", {"model": MODEL, "prompt": "x", "session_id": "old"})
    sizes = []
    for cached in (900, 0):
        pod.engine.requests.clear()
        pod.engine.cached_tokens = cached
        await sent(front, "/v1/context/old/compact", {"prompt": text}, status=201)
        sizes.append([len(body["prompt"]) for body in pod.engine.generations()])
        assert {body["cache_salt"] for body in pod.engine.generations()} == {pod.engine.generations()[-1]["cache_salt"]}

    assert sizes == [[256, 512, 768, 900], [256, 512, 900]]


@only_http
async def test_tokens_that_the_pieces_computed_are_not_saved(front, pod):
    """Seen failing: a compaction saved 768 of 900 tokens, because the engine had them from its pieces."""
    known = []

    def keep(ids):
        pod.engine.cached_tokens = max((len(one) for one in known if ids[: len(one)] == one), default=0)
        known.append(ids)
        return "x"

    await sent(front, "/v1/context", {"model": MODEL, "prompt": "x", "session_id": "old"})
    pod.engine.answer = keep
    texts = ["a" * 900, "b" * 256 + "c" * 644]
    known.append([ord("b")] * 256)
    made = [await sent(front, "/v1/context/old/compact", {"prompt": text}, status=201) for text in texts]

    assert [(one["computed_tokens"], one["cached_tokens"]) for one in made] == [(900, 0), (644, 256)]


@only_http
async def test_the_pieces_of_a_prompt_that_is_too_long_are_not_computed(front, pod):
    """Seen failing: the engine computed 32 pieces up to its window, and then the client got the error."""
    await sent(front, "/v1/context", {"model": MODEL, "prompt": "x", "session_id": "old"})
    pod.engine.requests.clear()
    told = await sent(front, "/v1/context/old/compact", {"prompt": "x" * 10_000}, status=400)

    assert told["error"]["code"] == "context_length_exceeded"
    assert not pod.engine.generations()


@pytest.mark.parametrize("stored", [True, False])
async def test_openais_client_compacts_and_continues_from_the_output(front, client, pod, stored):
    """Seen failing: an item that named a generation was not found once a turn had rewritten that."""
    more = {"instructions": "Be brief.", "tools": [{"type": "function", "name": "find", "parameters": {}}]}
    asks = [{"role": "user", "content": text} for text in ("Where is Oslo?", "Where is Rome?")]
    if stored:
        first = await client.responses.create(model=MODEL, input=asks[0]["content"], store=True, **more)
        last = await client.responses.create(
            model=MODEL, input=asks[1]["content"], previous_response_id=first.id, **more
        )
        compacted = await client.responses.compact(
            model=MODEL, previous_response_id=last.id, extra_body={"tools": more["tools"]}
        )
    else:
        given = [asks[0], {"role": "assistant", "content": "Hm."}, asks[1]]
        compacted = await client.responses.compact(
            model=MODEL, input=given, instructions=more["instructions"], extra_body={"tools": more["tools"]}
        )
    assert isinstance(compacted, CompactedResponse)
    created = turns(pod)[-1]
    new = {"role": "user", "content": "And Paris?"}
    answers = [
        await client.responses.create(model=MODEL, input=[*compacted.output, new], **more, **how)
        for how in ({}, {"store": False}, {})
    ]
    later = turns(pod)[-3:]

    *users, item = compacted.output
    assert [(one.role, one.content[0].text) for one in users] == [("user", one["content"]) for one in asks]
    assert item.type == "compaction"
    assert compacted.usage.total_tokens > compacted.usage.output_tokens == len(SUMMARY) + 1
    assert SUMMARY in created[0]
    for prompt, order in later:
        assert prompt.startswith(created[0].removesuffix("<assistant>"))
        assert prompt.count(SUMMARY) == prompt.count("Oslo?") == 1
        assert order.load
    assert later[0][1].load == (created[1].save,)
    known = [one.usage.model_extra["context"]["context_tokens"] for one in answers]
    assert known[0] == len(created[0]) - 10
    assert known[0] < known[1] == known[2]
    assert [one["parent"] is not None for one in await contexts(front)] == ([True, False] if stored else [False])


@only_http
async def test_messages_before_the_compaction_item_count_as_the_client_sends_them(client, pod):
    """Seen failing: as an append to the compacted context, the edited message came beside the first one."""
    compacted = await client.responses.compact(model=MODEL, input="Where is Oslo?")
    edited = [{"role": "user", "content": "Where is Bergen?"}, compacted.output[-1], {"role": "user", "content": "?"}]
    await client.responses.create(model=MODEL, input=edited)
    await client.responses.create(model=MODEL, input=edited[1:])

    edited, pruned = [prompt for prompt, _ in turns(pod)[-2:]]
    assert "Bergen" in edited
    assert "Oslo?" not in edited
    assert SUMMARY in pruned
    assert "Bergen" not in pruned


async def test_a_compaction_of_another_tenant_or_a_deleted_one_is_not_found(front, client):
    """Seen failing: with an idempotency key the pod looks for the context, and told of a `session_id`."""
    compacted = await client.responses.compact(model=MODEL, input="Where is Oslo?")
    item = compacted.output[-1].model_dump(exclude_unset=True)
    body = {"model": MODEL, "input": [item, {"role": "user", "content": "?"}]}
    errors = [await sent(front, "/v1/responses", body, status=404, key=OTHER_KEY)]
    async with front.delete(f"/v1/context/{compacted.id.removeprefix('resp_1_')}") as answer:
        assert answer.status == 200
    errors.append(await sent(front, "/v1/responses", body, status=404))
    errors.append(await sent(front, "/v1/responses", body, status=404, repeat_key="once"))
    body["input"][0] = {**item, "encrypted_content": "other"}
    errors.append(await sent(front, "/v1/responses", body, status=404))

    for error in errors:
        told = error["error"]
        assert (told["code"], told["param"]) == ("context_not_found", "input")
        assert "compaction" in told["message"]


async def test_a_compaction_item_expires_a_day_after_its_last_use(front, client, clock, pod):
    """Each response then gets a 410 that names `input`, and an hour later a 404. The engine gets no prompt.

    Seen failing with 404 for both, and with the error of `session_id`.
    """
    used, unused = [await client.responses.compact(model=MODEL, input="Where is Oslo?") for _ in range(2)]

    async def refused(compacted, status, code, fate):
        item = compacted.output[-1].model_dump(exclude_unset=True)
        body = {"model": MODEL, "input": [item, {"role": "user", "content": "?"}]}
        for path, more, repeat_key in (
            ("/v1/responses", {}, None),
            ("/v1/responses", {"store": False, "stream": True}, None),
            ("/v1/responses", {}, f"once-{status}"),
            ("/v1/responses/compact", {}, None),
        ):
            told = (await sent(front, path, body | more, status=status, repeat_key=repeat_key))["error"]
            assert (told["code"], told["param"]) == (code, "input")
            assert told["message"] == f"The compaction item in `input` is {fate}: send the conversation without it."

    new = {"role": "user", "content": "And Rome?"}
    for moved_s in (DAY_S - 60, 120):
        clock.moved_s += moved_s
        await client.responses.create(model=MODEL, input=[*used.output, new], store=False)
    pod.engine.requests.clear()
    await refused(unused, 410, "context_expired", "expired")
    clock.moved_s += DAY_S
    await refused(used, 410, "context_expired", "expired")
    await refused(unused, 404, "context_not_found", "not found")
    clock.moved_s += TOMBSTONE_S
    await refused(used, 404, "context_not_found", "not found")

    assert pod.engine.generations() == []


@only_http
async def test_a_compaction_beside_another_response_is_refused(client):
    """Seen failing: without the check, the engine got the item as an empty message."""
    compacted = await client.responses.compact(model=MODEL, input="Where is Oslo?")
    other = await client.responses.create(model=MODEL, input="Hello.", store=True)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(
            model=MODEL, previous_response_id=other.id, input=[compacted.output[-1], {"role": "user", "content": "?"}]
        )
    assert caught.value.body["param"] == "input"


@only_http
async def test_a_new_context_takes_no_compaction(front, client):
    """Seen failing: the new conversation began with an empty message instead of the summary."""
    compacted = await client.responses.compact(model=MODEL, input="Where is Oslo?")
    item = compacted.output[-1].model_dump(exclude_unset=True)
    body = {"model": MODEL, "input": [item, {"role": "user", "content": "?"}], "conversation": "new"}
    told = await sent(front, "/v1/responses", body, status=400)

    assert "compaction item" in told["error"]["message"]
    assert told["error"]["param"] == "input"
    assert len(await contexts(front)) == 1


@only_http
@pytest.mark.parametrize("extra", [7, None, "cmp_1_old"])
async def test_a_chat_message_may_have_a_field_of_the_name_compaction(front, pod, extra):
    """Seen failing: 502 for a value that is no string, because the field marked compaction items."""
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old"})
    new = {"role": "user", "content": "And Rome?", "compaction": extra}
    await sent(front, "/v1/chat/completions", {"model": MODEL, "session_id": "old", "messages": [new]})

    assert "And Rome?" in turns(pod)[-1][0]


@only_http
@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/context/none/compact", {}, 404, "context_not_found"),
        ("/v1/context/text/compact", {}, 400, "invalid_request"),
        ("/v1/context/chat/compact", {"max_tokens": 0}, 400, "invalid_request"),
        ("/v1/context/chat/compact", {"prompt": "x", "max_tokens": 5}, 400, "invalid_request"),
        ("/v1/context/chat/compact", {"ttl": 1}, 400, "ttl_out_of_range"),
        ("/v1/context/chat/compact", {"session_id": "text"}, 409, "context_exists"),
        ("/v1/context/chat/compact", {"instruction": "x"}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": MODEL}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": MODEL, "input": [{"type": "nothing"}]}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": MODEL, "input": 7}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": MODEL, "input": ""}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": MODEL, "previous_response_id": 7}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": MODEL, "input": "x", "max_output_tokens": 0}, 400, "invalid_request"),
        ("/v1/responses/compact", {"model": "none", "input": "x"}, 404, "model_not_found"),
        (
            "/v1/responses/compact",
            {"model": MODEL, "previous_response_id": "resp_1_none"},
            400,
            "previous_response_not_found",
        ),
    ],
)
async def test_what_cannot_be_compacted_gets_a_typed_error(front, pod, path, body, status, code):
    pod.engine.model = MODEL
    await sent(front, "/v1/context", {"model": MODEL, "prompt": "x", "session_id": "text"})
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "chat"})
    async with front.post(path, body) as answer:
        assert await code_of(answer) == (status, code)


@only_http
@pytest.mark.parametrize("stored", [True, False])
async def test_system_and_developer_messages_stay(client, pod, stored):
    """Seen failing: the compacted conversation lacked them, so the model no longer followed them."""
    head = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Speak French."}]
    given = {"input": [*head, {"role": "user", "content": "Where is Oslo?"}]}
    if stored:
        given = {"previous_response_id": (await client.responses.create(model=MODEL, store=True, **given)).id}
    output = (await client.responses.compact(model=MODEL, **given)).output

    assert [one.role for one in output[:-1]] == ["system", "developer", "user"]
    assert turns(pod)[-1][0].startswith("<system>Be brief.\x03\n<developer>Speak French.\x03\n<user>Where is Oslo?")


@only_http
async def test_earlier_summaries_are_not_repeated_as_messages_of_the_user(client):
    """Seen failing: each compaction of a stored response kept all summaries before it."""
    output = (await client.responses.compact(model=MODEL, input="Where is Oslo?")).output
    for ask in ("Where is Rome?", "Where is Paris?"):
        last = await client.responses.create(model=MODEL, input=[*output, {"role": "user", "content": ask}])
        output = (await client.responses.compact(model=MODEL, previous_response_id=last.id)).output

    *users, _ = output
    assert [one.content[0].text for one in users] == ["Where is Oslo?", "Where is Rome?", "Where is Paris?"]


@only_http
async def test_a_tenants_concurrent_reads_of_transcripts_are_limited(front, manager, pod, monkeypatch):
    """Seen failing: compactions read any number of transcripts, and held them while the model wrote summaries."""
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old"})
    may_read, read, begin = asyncio.Event(), [], manager.manager.begin_turn

    async def slow(*arguments, **options):
        read.append(1)
        await may_read.wait()
        return await begin(*arguments, **options)

    monkeypatch.setattr(manager.manager, "begin_turn", slow)
    running = [asyncio.create_task(sent(front, "/v1/context/old/compact", {}, status=201)) for _ in range(4)]
    await until(lambda: len(read) == 4, what="four transcripts are read")
    refused = await sent(front, "/v1/context/old/compact", {}, status=429)
    may_read.set()
    await asyncio.gather(*running, return_exceptions=True)

    assert refused["error"]["code"] == "too_many_in_flight"


@only_http
@pytest.mark.parametrize("more", [{"ttl": "x"}, {"session_id": "a/b"}, {"metadata": 7}])
async def test_wrong_terms_are_refused_before_the_model_writes_a_summary(front, pod, more):
    """Seen failing: the client paid for the summary and then got the error."""
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old"})
    pod.engine.requests.clear()
    await sent(front, "/v1/context/old/compact", more, status=400)

    assert not pod.engine.generations()


@only_http
async def test_a_tenant_without_room_is_told_its_quota(front, manager, pod, monkeypatch):
    """Seen failing: 503 with `Retry-After`, so clients paid for summary after summary."""
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old"})
    refusal = ContextQuotaExceeded("over the limit of bytes")
    monkeypatch.setattr(manager.manager, "commit_turn", AsyncMock(side_effect=refusal))
    for path, body in (
        ("/v1/context/old/compact", {}),
        ("/v1/responses/compact", {"model": MODEL, "input": "x" * 100}),
    ):
        told = await sent(front, path, body, status=429)
        assert told["error"]["code"] == "context_quota_exceeded"

    assert [one["session_id"] for one in await contexts(front)] == ["old"]


@only_http
async def test_a_model_without_a_summary_makes_no_context(front, pod):
    await sent(front, "/v1/context", {"model": MODEL, "messages": CHAT, "session_id": "old"})
    pod.engine.answer = lambda ids: " "
    await sent(front, "/v1/context/old/compact", {}, status=502)

    assert [one["session_id"] for one in await contexts(front)] == ["old"]
