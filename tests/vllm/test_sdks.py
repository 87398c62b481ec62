"""Conversations of the official SDKs after `kill -9` of engine and sidecar: read, continued warm, compared, deleted.

Each story is a generator. It stores its conversation and yields when the KV is on disk. Engine and sidecar are killed
and started, and the story goes on. One loss serves all stories of a front. Greedy and in float32: the continuation from
disk says the words that the model said before the loss.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIConversationsSession, OpenAIResponsesModel, RunConfig, Runner

from tests.kit.caller import Caller
from tests.kit.kept_kv import kept_manifests, kill_and_start
from tests.kit.stack import KEEPING_KEY, KEY, MODEL, Stack
from tests.kit.until import wait_until
from tests.vllm.conftest import both_fronts

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

NEXT = "Which of them is the largest?"
NOT_KEPT = {"x-context-keep": "off"}
MARK = {"type": "ephemeral", "ttl": "1h"}
MAX_TOKENS = 8
LEAST = 200
"""Tokens of each system prompt."""
CAPITALS = [f"What is the capital of {country}?" for country in ("France", "Italy", "Spain")]
"""Questions that the model answers in a sentence: the Agents SDK raises for an answer that reaches its limit."""
RUN = RunConfig(tracing_disabled=True)
Story = Iterator[None]


@dataclass
class Place:
    """One front of the stack."""

    front: str
    caller: Caller

    def openai(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.caller.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = KEY) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.caller.url, api_key=key, max_retries=0)

    def agents(self, key: str = KEY) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.caller.url}/v1", api_key=key, max_retries=0)

    def kept(self) -> dict[str, int]:
        """Return the tokens of kept KV by its reference."""
        return {manifest.cache_ref: len(manifest.token_ids) for manifest in kept_manifests(self.caller.stack)}

    def wait_kept(self, earlier: dict[str, int], num_tokens: int) -> None:
        """Wait until these tokens are kept and were not `earlier`. The last token of an answer has no KV."""

        def new() -> list[int]:
            return [tokens for reference, tokens in self.kept().items() if reference not in earlier]

        wait_until(new, what=f"{num_tokens - 1} tokens are kept", is_so=lambda found: num_tokens - 1 in found)


def rules(place: Place, name: str) -> str:
    """Return a system prompt of more than LEAST tokens. No other story has it, and each run has the same."""
    return f"{name} {place.front} " + " ".join(f"Rule {number}: be brief and exact." for number in range(24))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def check_restored(usage: Any, earlier: Any) -> None:
    """Check that the KV of the earlier prompt came from disk."""
    assert usage.input_tokens_details.cached_tokens >= earlier.input_tokens > LEAST
    assert usage.model_extra["context"]["source"] == "disk"


def check_gone(error: type[Exception], *calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(error):
            call()


def a_conversation(place: Place) -> Story:
    with place.openai() as client:
        items, responses = client.conversations.items, client.responses
        begun = [user("My name is Ada."), assistant("Hello Ada.")]
        talk = client.conversations.create(items=begun, metadata={"topic": "names"})
        fields = {"model": MODEL, "temperature": 0, "max_output_tokens": MAX_TOKENS}
        ask = partial(responses.create, conversation=talk.id, instructions=rules(place, "conversation"), **fields)
        first = ask(input="Name a river.")
        items.create(talk.id, items=[user("Name a lake.")])
        before = ask(input=NEXT, store=False)
        held = list(items.list(talk.id, order="asc"))
        place.caller.wait_sealed(talk.id)
        yield

        assert client.conversations.retrieve(talk.id) == talk
        assert list(items.list(talk.id, order="asc")) == held
        assert [item.content[0].text for item in held][:3] == ["My name is Ada.", "Hello Ada.", "Name a river."]
        assert responses.retrieve(first.id).output == first.output
        after = ask(input=NEXT)
        assert after.output_text == before.output_text
        check_restored(after.usage, first.usage)
        items.delete(held[0].id, conversation_id=talk.id)
        assert [item.id for item in items.list(talk.id, order="asc")][: len(held) - 1] == [one.id for one in held[1:]]
        client.conversations.delete(talk.id)
        check_gone(
            openai.NotFoundError,
            lambda: client.conversations.retrieve(talk.id),
            lambda: items.list(talk.id),
            lambda: items.retrieve(held[1].id, conversation_id=talk.id),
            lambda: responses.retrieve(first.id),
        )


def stored_responses(place: Place) -> Story:
    with place.openai() as client:
        responses, system = client.responses, rules(place, "responses")

        def ask(text: str, *, compared: Any = None, **more: Any) -> Any:
            options = {"comparison_response_id": compared.id} if compared else openai.omit
            fields = {"model": MODEL, "instructions": system, "temperature": 0, "max_output_tokens": MAX_TOKENS}
            return responses.create(input=text, prompt_cache_options=options, **fields | more)

        first = ask("Name a river.", store=True)
        second = ask("Name a lake.", previous_response_id=first.id, compared=first)
        assert second.prompt_cache_diagnostics.type == "cache_hit"
        before = ask(NEXT, previous_response_id=second.id, store=False)
        given = list(responses.input_items.list(second.id, order="asc"))
        place.caller.wait_sealed(second.session_id)
        yield

        for one in (first, second):
            assert responses.retrieve(one.id).output == one.output
        assert list(responses.input_items.list(second.id, order="asc")) == given
        third = ask(NEXT, previous_response_id=second.id, compared=second)
        assert third.output_text == before.output_text
        assert third.prompt_cache_diagnostics.type == "cache_hit"
        check_restored(third.usage, second.usage)
        changed = ask("?", previous_response_id=third.id, compared=second, store=False, instructions="No.")
        assert changed.prompt_cache_diagnostics.type == "cache_miss"
        assert changed.prompt_cache_diagnostics.reason == "input_changed"
        for one in (third, second, first):
            responses.delete(one.id)
            check_gone(
                openai.NotFoundError,
                lambda one=one: responses.retrieve(one.id),
                lambda one=one: responses.input_items.list(one.id),
                lambda one=one: responses.delete(one.id),
            )
        check_gone(openai.BadRequestError, lambda: ask("?", previous_response_id=second.id))
        lost = ask("?", store=True, compared=second)
        assert lost.prompt_cache_diagnostics.type == "comparison_response_not_found"
        responses.delete(lost.id)


def messages_of_a_context(place: Place) -> Story:
    name = f"talk-{secrets.token_hex(4)}"
    with place.anthropic() as client:
        system = [{"type": "text", "text": rules(place, "messages"), "cache_control": MARK}]

        def ask(text: str, *, compared: str | None = None, name: str = name, commits: bool = True, **more: Any) -> Any:
            fields = {"session_id": name, "context_create": "if_missing", "context_commit": commits, "temperature": 0}
            mode = {"context_mode": "replay"} if "system" in more else {}
            return client.messages.create(
                model=MODEL,
                max_tokens=MAX_TOKENS,
                messages=[user(text)],
                diagnostics={"previous_message_id": compared},
                extra_body=fields | mode,
                **more,
            )

        first = ask("Name a river.", system=system)
        assert first.diagnostics is None
        before = ask(NEXT, commits=False)
        place.caller.wait_sealed(name)
        yield

        after = ask(NEXT, compared=first.id)
        assert after.diagnostics is None
        assert after.content[0].text == before.content[0].text
        assert after.usage.model_extra["context"]["source"] == "disk"
        assert after.usage.cache_read_input_tokens >= whole(first.usage) > LEAST
        changed = ask("?", compared=after.id, commits=False, system="Be verbose.")
        assert changed.diagnostics.cache_miss_reason.type == "system_changed"
        client.delete(f"/v1/context/{name}", cast_to=object)
        check_gone(anthropic.NotFoundError, lambda: client.get(f"/v1/context/{name}", cast_to=object))
        lost = ask("?", compared=after.id, name=f"{name}-2")
        assert lost.diagnostics.cache_miss_reason.type == "previous_message_not_found"
        client.delete(f"/v1/context/{name}-2", cast_to=object)


def kept_messages(place: Place) -> Story:
    """The turn process knows the earlier request: it is not the engine's process."""
    with place.anthropic(KEEPING_KEY) as client:
        system = [{"type": "text", "text": rules(place, "kept"), "cache_control": MARK}]
        said = [user("Name a river.")]

        def ask(*, compared: str | None = None, **more: Any) -> Any:
            return client.messages.create(
                model=MODEL,
                max_tokens=MAX_TOKENS,
                system=system,
                messages=said,
                diagnostics={"previous_message_id": compared},
                extra_body={"temperature": 0},
                **more,
            )

        def listed() -> Any:
            return client.get("/v1/context", cast_to=object, options={"params": {"kind": "kept"}})["data"]

        earlier = place.kept()
        first = ask()
        said += [assistant(first.content[0].text), user("Name a lake.")]
        second = ask(compared=first.id)
        assert second.diagnostics is None
        said += [assistant(second.content[0].text), user(NEXT)]
        cold = ask(extra_headers=NOT_KEPT)
        place.wait_kept(earlier, whole(second.usage) + second.usage.output_tokens)
        yield

        after = ask(compared=second.id)
        assert after.content[0].text == cold.content[0].text
        assert after.usage.cache_read_input_tokens >= whole(second.usage) > LEAST
        assert after.diagnostics is None
        num_tokens = whole(after.usage) + after.usage.output_tokens
        newest = wait_until(lambda: listed()[0], what="it is kept", is_so=lambda one: one["tokens"] == num_tokens - 1)
        client.delete(f"/v1/context/{newest['id']}", cast_to=object)
        check_gone(anthropic.NotFoundError, lambda: client.get(f"/v1/context/{newest['id']}", cast_to=object))


def whole(usage: Any) -> int:
    """Return the tokens of a message's prompt."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def guide(client: openai.AsyncOpenAI, instructions: str, **more: Any) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=64, **more)
    return Agent("guide", instructions=instructions, model=OpenAIResponsesModel(MODEL, client), model_settings=settings)


def an_agent_with_a_session(place: Place) -> Story:
    with asyncio.Runner() as loop:
        client, earlier, system = place.agents(KEEPING_KEY), place.kept(), rules(place, "session")
        session = OpenAIConversationsSession(openai_client=client)
        agent = guide(client, system)
        loop.run(Runner.run(agent, CAPITALS[0], session=session, run_config=RUN))
        second = loop.run(Runner.run(agent, CAPITALS[1], session=session, run_config=RUN)).context_wrapper.usage
        held = loop.run(session.get_items())
        cold = guide(client, system, extra_headers=NOT_KEPT)
        before = loop.run(Runner.run(cold, [*held, user(CAPITALS[2])], run_config=RUN))
        place.wait_kept(earlier, second.total_tokens)
        yield

        assert loop.run(session.get_items()) == held
        assert len(held) == 4
        after = loop.run(Runner.run(agent, CAPITALS[2], session=session, run_config=RUN))
        assert after.final_output == before.final_output
        assert after.context_wrapper.usage.input_tokens_details.cached_tokens >= second.input_tokens > LEAST
        popped = loop.run(session.pop_item())
        assert popped["content"][0]["text"] == after.final_output
        name = session.session_id
        loop.run(session.clear_session())
        check_gone(openai.NotFoundError, lambda: loop.run(client.conversations.retrieve(name)))
        loop.run(client.close())


def an_agent_in_a_conversation(place: Place) -> Story:
    with asyncio.Runner() as loop:
        client, system = place.agents(), rules(place, "agent")
        talk = loop.run(client.conversations.create())
        run = partial(Runner.run, guide(client, system), conversation_id=talk.id, run_config=RUN)
        first = loop.run(run(CAPITALS[0])).context_wrapper.usage
        place.caller.wait_sealed(talk.id)
        yield

        after = loop.run(run(CAPITALS[2]))
        assert after.context_wrapper.usage.input_tokens_details.cached_tokens >= first.input_tokens > LEAST
        session = OpenAIConversationsSession(conversation_id=talk.id, openai_client=client)
        assert loop.run(session.get_items())[-1]["content"][0]["text"] == after.final_output
        loop.run(session.clear_session())
        check_gone(openai.NotFoundError, lambda: loop.run(client.conversations.retrieve(talk.id)))
        loop.run(client.close())


STORIES = [
    a_conversation,
    stored_responses,
    messages_of_a_context,
    kept_messages,
    an_agent_with_a_session,
    an_agent_in_a_conversation,
]


@both_fronts
def test_each_sdk_reads_continues_compares_and_deletes_after_engine_and_sidecar_were_killed(
    stack: Stack, client: Caller, keeper: Caller
) -> None:
    """The marks of the stories are promises: the new sidecar holds as many bytes as the old one did.

    Seen failing without the kill, because the KV came from the device.
    """
    place = Place(client.front, client)
    with ExitStack() as running:
        stories = [running.enter_context(closing(story(place))) for story in STORIES]
        for story in stories:
            next(story)
        promised_bytes = promised(stack)
        kill_and_start(stack)
        assert promised(stack) == promised_bytes > 0
        for story in stories:
            assert next(story, "ended") == "ended"


def promised(stack: Stack) -> float:
    return stack.counted("sidecar", "contextcache_sidecar_promised_bytes", tier="disk")
