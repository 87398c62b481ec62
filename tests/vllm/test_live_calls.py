"""Thoughts and tool calls that the model itself makes, read by vLLM's own parsers: in contexts, in each dialect.

The model recites its answer. Whatever of it a parser holds back, drops or names, the context has the ids that were
sampled; and the client's own form of it, sent again without the thoughts, is known for what it is.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
import pytest

from tests.kit.caller import Caller
from tests.kit.reciting_model import THOUGHT as END
from tests.kit.reciting_model import make_reciting_model
from tests.kit.stack import KEY, MODEL
from tests.kit.tiny_stack import TinyStack

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

THOUGHT, TEXT, ARGUMENTS = "It is a lake, so it has a depth.", "Let me look.", {"lake": "Bodensee"}
PIECES = [
    "It is a lake,", " so it has a depth.", END, "Let me", " look.",
    "\n<tool_call>", '\n{"name": "depth", ', '"arguments": ', '{"lake": "Bod', 'ensee"}', "}", "\n</tool_call>",
]  # fmt: skip
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"]
SCHEMA = {"type": "object", "properties": {"lake": {"type": "string"}}}


@dataclass
class Said:
    """What a client was told, and how it would send that again: without the thoughts."""

    thought: str
    text: str
    arguments: dict[str, Any]
    call_id: str
    usage: dict[str, Any]
    again: list[dict[str, Any]] = field(default_factory=list)


class Chat:
    """OpenAI's chat."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0)
        self.name = name
        function = {"name": "depth", "description": "of a lake", "parameters": SCHEMA}
        self.fields = {"model": MODEL, "tools": [{"type": "function", "function": function}], "temperature": 0}

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def result(self, said: Said) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": said.call_id, "content": "251 m"}

    def ask(self, messages: list[dict[str, Any]], *, stream: bool) -> Said:
        ours = {"session_id": self.name, "context_create": "if_missing"}
        asked = self.client.chat.completions.create(
            messages=messages,
            max_tokens=64,
            stream=stream,
            extra_body=ours,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **self.fields,
        )
        parts = [chunk.to_dict() for chunk in asked] if stream else [asked.to_dict()]
        said = [choice["delta" if stream else "message"] for part in parts for choice in part["choices"]]
        calls = [call for one in said for call in one.get("tool_calls") or []]
        arguments = "".join(call["function"].get("arguments") or "" for call in calls)
        text = "".join(one.get("content") or "" for one in said)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        call = {"id": calls[0]["id"], "type": "function", "function": function}
        return Said(
            thought="".join(one.get("reasoning") or "" for one in said),
            text=text,
            arguments=json.loads(arguments),
            call_id=call["id"],
            usage=parts[-1]["usage"],
            again=[{"role": "assistant", "content": text, "tool_calls": [call]}],
        )


class Messages:
    """Anthropic's messages."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.client = anthropic.Anthropic(base_url=caller.url, api_key=KEY, max_retries=0)
        self.name = name
        tool = {"name": "depth", "description": "of a lake", "input_schema": SCHEMA}
        self.fields = {"model": MODEL, "tools": [tool], "max_tokens": 64}

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def result(self, said: Said) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": said.call_id, "content": "251 m"}
        return {"role": "user", "content": [block]}

    def ask(self, messages: list[dict[str, Any]], *, stream: bool) -> Said:
        ours = {"session_id": self.name, "context_create": "if_missing", "temperature": 0}
        if stream:
            with self.client.messages.stream(messages=messages, extra_body=ours, **self.fields) as events:
                deltas = [event for event in events if event.type == "message_delta"]
                told = events.get_final_message().to_dict() | {"usage": deltas[-1].usage.to_dict()}
        else:
            told = self.client.messages.create(messages=messages, extra_body=ours, **self.fields).to_dict()
        blocks = {block["type"]: block for block in told["content"]}
        usage = told["usage"]
        return Said(
            thought=blocks["thinking"]["thinking"],
            text=blocks["text"]["text"],
            arguments=blocks["tool_use"]["input"],
            call_id=blocks["tool_use"]["id"],
            usage={"completion_tokens": usage["output_tokens"], "context": usage["context"]},
            again=[{"role": "assistant", "content": [blocks["text"], blocks["tool_use"]]}],
        )


class Responses:
    """OpenAI's responses."""

    def __init__(self, caller: Caller, name: str) -> None:
        self.client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key=KEY, max_retries=0)
        self.name = name
        tool = {"type": "function", "name": "depth", "description": "of a lake", "parameters": SCHEMA, "strict": False}
        self.fields = {"model": MODEL, "tools": [tool], "max_output_tokens": 64, "temperature": 0}

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def result(self, said: Said) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": said.call_id, "output": "251 m"}

    def ask(self, items: list[dict[str, Any]], *, stream: bool) -> Said:
        where = {"extra_body": {"session_id": self.name, "context_create": "if_missing"}}
        if stream:
            with self.client.responses.stream(input=items, **self.fields, **where) as events:
                told = events.get_final_response().to_dict()
        else:
            told = self.client.responses.create(input=items, **self.fields, **where).to_dict()
        output = {item["type"]: item for item in told["output"]}
        call = output["function_call"]
        text = output["message"]["content"][0]["text"]
        usage = told["usage"]
        return Said(
            thought=output["reasoning"]["content"][0]["text"],
            text=text,
            arguments=json.loads(call["arguments"]),
            call_id=call["call_id"],
            usage={"completion_tokens": usage["output_tokens"], "context": usage["context"]},
            again=[
                {"role": "assistant", "content": text},
                {key: call[key] for key in ("type", "call_id", "name", "arguments")},
            ],
        )


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("reciting")
    make_reciting_model(directory / "model", PIECES)
    with TinyStack(directory, patient=True, engine_args=PARSERS) as stack:
        caller = Caller(stack)
        yield caller
        caller.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [Chat, Messages, Responses])
def test_what_the_model_thought_and_called_is_in_the_context_to_the_token(caller, dialect, stream):
    client = dialect(caller, f"live-{secrets.token_hex(4)}")
    asked = [client.user(f"{client.name}: how deep is it?")]
    first = client.ask(asked, stream=stream)
    stored = [caller.get(client.name)["tokens"]]
    second = client.ask([client.result(first)], stream=stream)
    stored.append(caller.get(client.name)["tokens"])
    whole = [*asked, *first.again, client.result(first), *second.again, client.result(second), client.user("Thanks.")]
    third = client.ask(whole, stream=stream)
    stored.append(caller.get(client.name)["tokens"])

    for said, held in zip((first, second, third), stored, strict=True):
        usage = said.usage
        assert (said.thought.strip(), said.text.strip(), said.arguments) == (THOUGHT, TEXT, ARGUMENTS)
        assert usage["completion_tokens"] == len(PIECES) + 1
        told = usage["context"]
        assert told["committed"]
        assert told["cached_tokens"] + told["computed_tokens"] + usage["completion_tokens"] == held
    for said, known, match in zip((second, third), stored, ("append", "extend"), strict=False):
        context = said.usage["context"]
        assert (context["match"], context["context_tokens"], context["cached_tokens"]) == (match, known, known - 1)
