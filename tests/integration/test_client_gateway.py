"""The Python client against a real gateway, manager and pod (a toy engine): its documented life, sync and async."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from contextcache.client import (
    AsyncContextCache,
    BrokenStream,
    ClientError,
    ContextCache,
    Finished,
    TextDelta,
    errors,
)
from contextcache.client.retries import Retries
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.turn_pod import MODEL, running_turn_pod


@pytest.fixture
def toy():
    return FakeVllm(answer=lambda ids: f" {len(ids)}")


@pytest.fixture
async def url(tmp_path, manager, toy):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=toy) as pod:
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
        async with running_gateway(settings, num_ready=1) as gateway:
            yield gateway.url


def life_of_a_context(url):
    """Go through all that a context can do; return what was seen."""
    with ContextCache(url, KEY) as client:
        with client.contexts.create(MODEL, "Hello", ttl=60, metadata={"user": "anna"}, delete_at_end=True) as context:
            first = context.reply
            second = context.ask(" more")
            with context.chat_stream([{"role": "user", "content": "and more"}]) as stream:
                events = list(stream)
            info = context.refresh()
            changed = context.update(ttl=120, ttl_policy="sliding")
            branch = context.fork(generation=2)
            rewound = context.rewind(1)
            listed = [one.session_id for one in client.contexts.list()]
            named = client.contexts.get(branch.session_id)
            branch.delete()
        try:
            client.contexts.get(context.session_id)
        except errors.ContextNotFound as exc:
            gone = exc
    return first, second, events, info, changed, branch, rewound, listed, named, gone


async def test_all_that_a_context_can_do(url):
    found = await asyncio.to_thread(life_of_a_context, url)
    first, second, events, info, changed, branch, rewound, listed, named, gone = found

    assert (first.generation, second.generation, info.generation) == (1, 2, 3)
    assert second.usage.context.context_tokens > first.usage.context.context_tokens
    assert isinstance(events[-1], Finished)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == events[-1].reply.text
    assert events[-1].reply.generation == 3
    assert (info.metadata, info.turns, info.model) == ({"user": "anna"}, 3, MODEL)
    assert (changed.ttl, changed.ttl_policy) == (120, "sliding")
    assert branch.info.tokens < info.tokens
    assert (rewound.generation, rewound.tokens < info.tokens) == (4, True)
    assert listed == [branch.session_id, info.session_id]
    assert named.model == MODEL
    assert (gone.status, gone.said_code, bool(gone.request_id)) == (404, "context_not_found", True)


async def test_the_async_client_lives_the_same_life(url):
    async with AsyncContextCache(url, KEY) as client:
        contexts = await asyncio.gather(*(client.contexts.create(MODEL, f"Hello {number}") for number in range(5)))
        replies = await asyncio.gather(*(context.ask(" more") for context in contexts))
        async with contexts[0].ask_stream(" still more") as stream:
            whole = await stream.reply()
        listed = [info.session_id async for info in client.contexts.list()]
        await asyncio.gather(*(context.delete() for context in contexts))

        with pytest.raises(errors.ContextNotFound):
            await contexts[0].refresh()

    assert {reply.generation for reply in replies} == {2}
    assert whole.generation == 3
    assert set(listed) == {context.session_id for context in contexts}


@pytest.fixture
def proxy_of():
    """Give a transport that loses the answers of chosen requests after the server has made them."""

    @asynccontextmanager
    async def losing(lost, url):
        class Losing(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request):
                answer = await super().handle_async_request(request)
                await answer.aread()
                if lost:
                    lost.pop()
                    raise httpx.ReadError("lost")
                return answer

        async with AsyncContextCache(url, KEY, http=httpx.AsyncClient(transport=Losing(), timeout=60)) as client:
            yield client

    return losing


async def test_a_turn_whose_answer_was_lost_happens_once_and_its_answer_comes_again(url, toy, proxy_of):
    lost = []
    async with proxy_of(lost, url) as client:
        lost.append(1)
        context = await client.contexts.create(MODEL, "Hello")
        lost.append(1)
        reply = await context.ask(" more")
        info = await context.refresh()

    assert (context.reply is reply, reply.replayed, info.turns) == (True, True, 2)
    assert len(toy.generations()) == 2


async def test_a_stream_that_breaks_off_says_so_and_the_turn_did_not_happen(url, toy):
    async with AsyncContextCache(url, KEY, retries=Retries(times=0)) as client:
        context = await client.contexts.create(MODEL, "Hello")
        toy.break_off_after = 1

        with pytest.raises((BrokenStream, ClientError)):
            await context.ask_stream(" more").reply()

        toy.break_off_after = None
        assert (await context.refresh()).turns == 1


@pytest.mark.thorough
async def test_two_turns_at_once_both_come_to_their_end(url):
    async with AsyncContextCache(url, KEY) as client:
        context = await client.contexts.create(MODEL, "Hello")
        replies = await asyncio.gather(context.ask(" one"), context.ask(" two"))

    assert {reply.generation for reply in replies} == {2, 3}


async def test_an_openai_client_of_a_context_goes_on_in_it(url):
    async with AsyncContextCache(url, KEY) as client:
        context = await client.contexts.create(MODEL, messages=[{"role": "user", "content": "Hello"}])
        async with context.openai() as api:
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "more"}]}
            whole = await api.chat.completions.create(**asked)
            stream = await api.chat.completions.create(**asked, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        info = await context.refresh()

    assert whole.choices[0].message.content
    assert "".join(pieces)
    assert info.turns == 3
