"""OpenAI's conversations and stored responses, with its own clients, through either front."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import openai
import pytest
from agents import Agent, OpenAIConversationsSession, OpenAIResponsesModel, RunConfig, Runner
from openai.types.conversations import Conversation, ConversationDeletedResource
from openai.types.responses import Response

from tests.kit.fake_vllm import FakeVllm
from tests.kit.fronts import code_of, envoy_too, only_http
from tests.kit.gateway_parts import KEY, OTHER_KEY
from tests.kit.turn_pod import MODEL, running_turn_pod

USER = {"type": "message", "role": "user", "content": "Where is Oslo?"}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "In Norway.", "annotations": []}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "59 N"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls"}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "c2", "output": "a b"}
ALL = [USER, {**CALL}, RESULT, CUSTOM, CUSTOM_RESULT, ANSWER]


@pytest.fixture
async def pods():
    """Ends the pod before the test does, where a test closes it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def pod(tmp_path, manager, pods):
    return await pods.enter_async_context(
        running_turn_pod(tmp_path, manager_port=manager.port, engine=FakeVllm(answer=lambda ids: "Hm."))
    )


@pytest.fixture
async def client(front):
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def said(pod) -> str:
    """Return the last prompt that the engine got."""
    return "".join(map(chr, pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"]))


async def listed(client, conversation, **how):
    return [item async for item in client.conversations.items.list(conversation, **how)]


def bare(item) -> dict:
    """Return an item as a client wrote it."""
    found = item.model_dump(exclude_unset=True)
    assert found.pop("id")
    return found


async def test_items_come_back_as_they_were_added_while_no_engine_runs(client, pods):
    """Seen failing: without the stored ids a call of a custom tool came back as one of a function."""
    made = await client.conversations.create(items=[USER], metadata={"topic": "cities"})
    added = await client.conversations.items.create(made.id, items=ALL[1:])
    await pods.aclose()
    found = await listed(client, made.id, order="asc", limit=2)
    newest = await client.conversations.items.list(made.id, limit=2)
    one = await client.conversations.items.retrieve(found[1].id, conversation_id=made.id)

    assert made.id.startswith("conv_")
    assert made.metadata == {"topic": "cities"}
    assert [item.id for item in found[1:]] == [item.id for item in added.data]
    assert [item.id for item in newest.data] == [item.id for item in reversed(found)][:2]
    assert newest.has_more
    assert one == found[1]
    assert [item.type for item in found] == [item["type"] for item in ALL]
    assert bare(found[0])["content"] == [{"type": "input_text", "text": "Where is Oslo?"}]
    assert [bare(found[at]) for at in (1, 2)] == [{**CALL, "status": "completed"}, {**RESULT, "status": "completed"}]
    assert [bare(found[at])[name] for at, name in ((3, "input"), (4, "output"))] == ["ls", "a b"]
    assert found[5].content[0].text == "In Norway."


async def test_a_conversation_is_read_changed_and_deleted(client, pods):
    made = await client.conversations.create()
    await pods.aclose()
    changed = await client.conversations.update(made.id, metadata={"a": "b"})
    read = await client.conversations.retrieve(made.id)
    empty = await client.conversations.items.list(made.id)
    deleted = await client.conversations.delete(made.id)

    assert changed == read == Conversation(**{**made.model_dump(), "metadata": {"a": "b"}})
    assert (empty.data, empty.has_more) == ([], False)
    assert deleted == ConversationDeletedResource(id=made.id, deleted=True, object="conversation.deleted")
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(made.id)


async def test_added_items_are_part_of_the_next_prompt_and_keep_their_ids(client, pod, pods):
    """Seen failing: the ids of added items were other ones once a turn had tokenised them."""
    made = await client.conversations.create(items=[USER, ANSWER])
    before = await listed(client, made.id, order="asc")
    answer = await client.responses.create(
        model=MODEL, conversation=made.id, input="And Rome?", instructions="Be brief."
    )
    prompt = said(pod)
    await client.conversations.items.create(made.id, items=[{"role": "user", "content": "And Bern?"}])
    await client.responses.create(model=MODEL, conversation=made.id, input="Now.")
    later = said(pod)
    await pods.aclose()
    after = await listed(client, made.id, order="asc")

    assert [piece in prompt for piece in ("Be brief.", "Where is Oslo?", "In Norway.", "And Rome?")] == [True] * 4
    assert [piece in later for piece in ("And Rome?", "Hm.", "And Bern?", "Now.")] == [True] * 4
    assert [item.id for item in after[:2]] == [item.id for item in before]
    assert after[3].id == answer.output[0].id
    assert [item.content[0].text for item in after] == [
        *("Where is Oslo?", "In Norway.", "And Rome?", "Hm.", "And Bern?", "Now.", "Hm.")
    ]


async def test_any_item_can_be_deleted_and_the_next_prompt_is_without_it(client, pod):
    """Seen failing: without ids in the rest, the items behind a deleted one had other ids."""
    made = await client.conversations.create(items=[USER])
    for text in ("One", "Two"):
        await client.responses.create(model=MODEL, conversation=made.id, input=text)
    before = await listed(client, made.id, order="asc")
    for gone in (before[1], before[-1]):
        assert (await client.conversations.items.delete(gone.id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.delete(gone.id, conversation_id=made.id)
    after = await listed(client, made.id, order="asc")
    await client.responses.create(model=MODEL, conversation=made.id, input="Three")

    assert [item.id for item in after] == [before[at].id for at in (0, 2, 3)]
    assert [piece in said(pod) for piece in ("Where is Oslo?", "One", "Two", "Three")] == [True, False, True, True]


async def test_a_stored_response_is_read_after_its_engine_is_gone(client, pods):
    how = {"model": MODEL, "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5}
    first = await client.responses.create(input="One", store=True, **how)
    second = await client.responses.create(input="Two", previous_response_id=first.id, **how)
    await pods.aclose()
    found = [await client.responses.retrieve(one.id) for one in (first, second)]
    given = [await client.responses.input_items.list(one.id, order="asc") for one in (first, second)]

    for stored, told in zip(found, (first, second), strict=True):
        assert isinstance(stored, Response)
        differing = {"usage", "session_id", "expires_at"}
        assert stored.model_dump(exclude=differing) == told.model_dump(exclude=differing)
        assert stored.output_text == "Hm."
        for name in ("input_tokens", "output_tokens", "total_tokens"):
            assert getattr(stored.usage, name) == getattr(told.usage, name)
    assert [item.content[0].text for item in given[0].data] == ["One"]
    assert [item.content[0].text for item in given[1].data] == ["One", "Hm.", "Two"]


async def test_the_last_response_can_be_deleted_and_a_continued_one_cannot(client, front):
    """Seen failing: a delete that cut nothing left the response to be read again."""
    first = await client.responses.create(model=MODEL, input="One", store=True)
    second = await client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="later items follow"):
        await client.responses.delete(first.id)
    for one in (second, first):
        await client.responses.delete(one.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="Response with id"):
                await call(one.id)

    async with front.get("/v1/context") as answer:
        assert (await answer.json())["data"] == []


async def test_the_items_of_a_conversation_outlive_its_deleted_response(client, pod):
    """Seen failing: the items of the turn went with the response."""
    made = await client.conversations.create(items=[USER])
    answer = await client.responses.create(model=MODEL, conversation=made.id, input="And Rome?")
    before = await listed(client, made.id)
    await client.responses.delete(answer.id)
    after = await listed(client, made.id)
    await client.responses.create(model=MODEL, conversation=made.id, input="Now.")

    assert after == before
    assert "And Rome?" in said(pod)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)


async def test_the_items_of_a_conversation_outlive_an_answer_that_named_it_otherwise(client, front):
    """Seen failing: a deleted answer of a chat took the added items with it, and the conversation."""
    made = await client.conversations.create(items=[USER])
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "And Rome?"}], "session_id": made.id}
    async with front.post("/v1/chat/completions", chat) as answer:
        assert answer.status == 200, await answer.text()
    before = await listed(client, made.id)
    await client.responses.delete(f"resp_2_{made.id}")

    assert await listed(client, made.id) == before


@envoy_too
async def test_another_tenant_gets_the_answer_for_what_is_not_there(client, front):
    made = await client.conversations.create(items=[USER])
    response = await client.responses.create(model=MODEL, input="One", store=True)
    (item,) = await listed(client, made.id)
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    absent = "conv_" + "0" * 32

    async def told(method, path, headers):
        data = json.dumps({"items": [USER]}) if method == "POST" else None
        async with front.request(method, path, data=data, headers=headers) as answer:
            return await code_of(answer)

    for method, rest in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/items"),
        ("POST", "/items"),
        ("DELETE", f"/items/{item.id}"),
    ):
        foreign = await told(method, f"/v1/conversations/{made.id}{rest}", other)
        assert foreign == await told(method, f"/v1/conversations/{absent}{rest}", None) == (404, "context_not_found")
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        foreign = await told(method, f"/v1/responses/{response.id}{rest}", other)
        assert foreign == await told(method, f"/v1/responses/resp_1_{absent}{rest}", None)
    assert [one.id for one in await listed(client, made.id)] == [item.id]


REFUSED = {
    "no list": {"items": 1},
    "too many": {"items": [USER] * 21},
    "an unknown type": {"items": [{"type": "nothing"}]},
    "an image": {"items": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]},
    "a reference": {"items": [{"type": "item_reference", "id": "msg_1"}]},
    "an unknown field": {"items": [USER], "item": []},
    "no items": {},
    "half a character": b'{"items": [{"role": "user", "content": "\\ud800"}]}',
}


@only_http
@pytest.mark.parametrize(("said", "left"), [({}, {"a": "b"}), ({"metadata": None}, {}), ({"metadata": {}}, {})])
async def test_a_change_that_names_no_metadata_leaves_them(client, front, said, left):
    """Found by reading: an empty change deleted all metadata."""
    made = await client.conversations.create(metadata={"a": "b"})
    async with front.post(f"/v1/conversations/{made.id}", said) as answer:
        assert (await answer.json())["metadata"] == left


@envoy_too
@pytest.mark.parametrize("what", REFUSED)
async def test_items_that_a_context_cannot_hold_are_refused(client, front, what):
    made = await client.conversations.create()
    async with front.post(f"/v1/conversations/{made.id}/items", REFUSED[what]) as answer:
        assert await code_of(answer) == (400, "invalid_request")

    assert await listed(client, made.id) == []


@only_http
@pytest.mark.parametrize("items", [False, "", 0, {}])
async def test_a_conversation_is_not_made_of_what_is_no_list(front, items):
    """Seen failing: an empty value of another type was taken for no items."""
    async with front.post("/v1/conversations", {"items": items}) as answer:
        assert await code_of(answer) == (400, "invalid_request")


async def test_the_session_of_the_agents_sdk_works_unchanged(client, pods):
    session = OpenAIConversationsSession(openai_client=client)
    many = [{"role": "user", "content": str(number)} for number in range(45)]
    await session.add_items(many)
    await pods.aclose()
    newest = await session.get_items(limit=3)
    popped = [await session.pop_item() for _ in range(2)]
    await session.add_items([{"role": "user", "content": "last"}])
    items = await session.get_items()
    name = session.session_id
    await session.clear_session()

    assert [item["content"][0]["text"] for item in newest] == ["42", "43", "44"]
    assert [item["content"][0]["text"] for item in popped] == ["44", "43"]
    assert [item["content"][0]["text"] for item in items] == [*map(str, range(43)), "last"]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(name)
    assert await session.get_items() == []


async def test_an_agent_runs_with_a_session_and_in_a_conversation(client, pod):
    agent = Agent(name="guide", instructions="Be brief.", model=OpenAIResponsesModel(MODEL, client))
    run = RunConfig(tracing_disabled=True)
    made = await client.conversations.create()
    for text in ("One", "Two"):
        found = await Runner.run(agent, text, conversation_id=made.id, run_config=run)
        assert found.final_output == "Hm."

    assert [piece in said(pod) for piece in ("Be brief.", "One", "Two")] == [True] * 3
    texts = [item.content[0].text for item in await listed(client, made.id, order="asc")]
    assert texts == ["One", "Hm.", "Two", "Hm."]


async def test_a_conversation_gets_its_model_from_its_first_turn_however_that_is_named(client, front, pod):
    made = await client.conversations.create(items=[USER])
    async with front.post(f"/v1/context/{made.id}/fork", {}) as answer:
        fork = (await answer.json())["session_id"]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "And Rome?"}]}
    for named in ({"body": chat | {"session_id": made.id}}, {"body": chat, "headers": {"X-Session-ID": fork}}):
        async with front.post("/v1/chat/completions", **named) as answer:
            assert answer.status == 200, await answer.text()
        assert "Where is Oslo?" in said(pod)

    for name in (made.id, fork):
        async with front.get(f"/v1/context/{name}") as answer:
            assert (await answer.json())["model"] == MODEL
        async with front.post("/v1/chat/completions", chat | {"session_id": name, "model": "other"}) as answer:
            assert await code_of(answer) == (400, "model_mismatch")


@envoy_too
async def test_text_cannot_follow_items_that_no_turn_has_read(client, front, pod):
    made = await client.conversations.create(items=[USER])
    body = {"model": MODEL, "prompt": "Once", "session_id": made.id}
    async with front.post("/v1/completions", body) as answer:
        assert await code_of(answer) == (400, "invalid_request")

    assert [item.content[0].text for item in await listed(client, made.id)] == ["Where is Oslo?"]
    assert pod.engine.generations() == []


@envoy_too
async def test_a_response_under_way_keeps_items_out(client, pod):
    made = await client.conversations.create(items=[USER])
    pod.engine.pause = asyncio.Event()
    stream = await client.responses.create(model=MODEL, conversation=made.id, input="And Rome?", stream=True)
    await anext(aiter(stream))
    with pytest.raises(openai.ConflictError):
        await client.conversations.items.create(made.id, items=[USER])
    pod.engine.pause.set()
    async for event in stream:
        last = event

    assert last.type == "response.completed"
    assert len(await listed(client, made.id)) == 3
