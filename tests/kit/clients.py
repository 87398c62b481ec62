"""Clients as they are: each holds its own conversation, resends it as it does, and knows nothing of contexts.

The SDKs are real: anthropic, openai, LangChain, litellm, LlamaIndex, pydantic-ai and Vercel's (`vercel/`). What sits on
top of an SDK and has none of its own is a recorded shape: Claude Code 2.1 over anthropic, Codex 0.60 over openai's
Responses, OpenCode 1.0 and Open WebUI 0.6 over bare HTTP. A model of 135M calls no tool, so what a client would have
called is said for it: its next request holds the call and the result, as if the model had asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.local import npm
from deploy.local.environments import made
from tests.kit.stack import MODEL

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the net for prices when it is imported
RULES = " ".join(f"Rule {number}: be brief, exact and never rude to rivers." for number in range(16))
READ_FILE = {
    "name": "read_file",
    "description": "Read a file of the workspace",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
MAX_TOKENS = 12


@dataclass(frozen=True)
class Answered:
    """What a client was told."""

    text: str
    prompt_tokens: int
    """All of the prompt."""
    cached_tokens: int
    answer_tokens: int


class Client:
    """One conversation. `ask` makes the calls of one turn, each of which is answered before the next."""

    def __init__(self, url: str, key: str, name: str, *, context: dict[str, Any] | None = None) -> None:
        """`context`: fields of each body that name one, for SDKs in processes of their own."""
        self.url, self.key = url, key
        self.context = context or {}
        self.name = name
        """Makes this conversation unlike any other."""
        self.system = f"You help {name}, a geographer. {RULES}"
        self.number = 0
        self.open()

    @property
    def streams(self) -> bool:
        """Every other turn, where the client may do either."""
        return self.number % 2 == 1

    def open(self) -> None:
        """Make the SDK's client and the empty history."""

    def ask(self, text: str) -> Iterator[Answered]:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of sockets and processes."""


class _OpenAIMessages(Client):
    """Holds a list of OpenAI's messages; the system prompt first."""

    def open(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=300)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]

    def close(self) -> None:
        self.http.close()

    def streamed(self, body: dict[str, Any], headers: dict[str, str]) -> Answered:
        body = body | {"model": MODEL, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        text, usage = "", {}
        with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    usage = event.get("usage") or usage
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        return _of_openai(text, usage)


class OpenWebUI(_OpenAIMessages):
    """A chat UI: the whole history each time, streamed, and nothing that names the conversation."""

    def ask(self, text: str) -> Iterator[Answered]:
        self.messages.append({"role": "user", "content": text})
        answered = self.streamed({"messages": self.messages, "max_tokens": MAX_TOKENS}, {})
        self.messages.append({"role": "assistant", "content": answered.text})
        yield answered


class OpenCode(_OpenAIMessages):
    """An agent: its label in a header for every provider, tools, and a call of one in each turn."""

    def ask(self, text: str) -> Iterator[Answered]:
        self.number += 1
        headers = {"x-session-affinity": self.name, "user-agent": "opencode/1.0.150"}
        body = {"tools": [{"type": "function", "function": READ_FILE}], "tool_choice": "auto", "max_tokens": MAX_TOKENS}
        self.messages.append({"role": "user", "content": text})
        yield self.streamed(body | {"messages": self.messages}, headers)
        call = {"name": READ_FILE["name"], "arguments": json.dumps({"path": f"rivers/{self.number}.md"})}
        called = {"id": f"call_{self.number}", "type": "function", "function": call}
        self.messages += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "content": _file(self.number)},
        ]
        answered = self.streamed(body | {"messages": self.messages}, headers)
        self.messages.append({"role": "assistant", "content": answered.text})
        yield answered


class Litellm(_OpenAIMessages):
    """litellm's `completion`, with its session in the metadata and a header."""

    def ask(self, text: str) -> Iterator[Answered]:
        import litellm

        self.number += 1
        self.messages.append({"role": "user", "content": text})
        answer = litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{self.url}/v1",
            api_key=self.key,
            messages=self.messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            extra_headers={"x-litellm-session-id": self.name},
            stream=self.streams,
            stream_options={"include_usage": True} if self.streams else None,
        )
        if self.streams:
            answer = litellm.stream_chunk_builder(list(answer))
        answered = _of_openai(answer.choices[0].message.content, answer.usage.model_dump())
        self.messages.append({"role": "assistant", "content": answered.text})
        yield answered


class LangChain(Client):
    """A tool loop over `ChatOpenAI` whose history is trimmed to what fits: the middle of the prompt changes."""

    KEPT_MESSAGES = 9

    def open(self) -> None:
        from langchain_core.messages import SystemMessage
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(
            model=MODEL,
            base_url=f"{self.url}/v1",
            api_key=self.key,
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream_usage=True,
            timeout=300,
        )
        self.model = model.bind_tools([{"type": "function", "function": READ_FILE}])
        self.messages: list[Any] = [SystemMessage(self.system)]

    def ask(self, text: str) -> Iterator[Answered]:
        from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

        self.number += 1
        self.messages.append(HumanMessage(text))
        yield self._call()[0]
        call = {"name": READ_FILE["name"], "args": {"path": f"{self.number}.md"}, "id": f"call_{self.number}"}
        self.messages += [AIMessage("", tool_calls=[call]), ToolMessage(_file(self.number), tool_call_id=call["id"])]
        answered, message = self._call()
        self.messages.append(message)
        yield answered

    def _call(self) -> tuple[Answered, Any]:
        from langchain_core.messages import message_chunk_to_message, trim_messages

        sent = trim_messages(
            self.messages,
            max_tokens=self.KEPT_MESSAGES,
            token_counter=len,
            strategy="last",
            start_on="human",
            include_system=True,
        )
        if not self.streams:
            message = self.model.invoke(sent)
        else:
            first, *others = self.model.stream(sent)
            message = message_chunk_to_message(sum(others, first))
        usage = message.usage_metadata
        cached = usage.get("input_token_details", {}).get("cache_read", 0)
        return Answered(message.content, usage["input_tokens"], cached, usage["output_tokens"]), message


class ClaudeCode(Client):
    """Anthropic's Messages: blocks, tools, a cache mark and a reminder that move, a bill that is never the same."""

    def open(self) -> None:
        import anthropic

        self.client = anthropic.Anthropic(
            base_url=self.url,
            api_key=self.key,
            timeout=300,
            default_headers={"x-claude-code-session-id": self.name, "user-agent": "claude-cli/2.1.37 (external, cli)"},
        )
        self.messages: list[dict[str, Any]] = []
        self.calls = 0

    def close(self) -> None:
        self.client.close()

    def ask(self, text: str) -> Iterator[Answered]:
        self.number += 1
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
        yield self._call()
        use = {"type": "tool_use", "id": f"toolu_{self.number}", "name": "Read", "input": {"path": f"{self.number}.md"}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": _file(self.number)}
        self.messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        answered = self._call()
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": answered.text}]})
        yield answered

    def _call(self) -> Answered:
        self.calls += 1
        bill = (
            f"x-anthropic-billing-header: cc_version=2.1.37.{self.calls:03x}; cc_entrypoint=cli; cch={self.calls:05x};"
        )
        mark = {"cache_control": {"type": "ephemeral"}}
        reminder = {"type": "text", "text": f"<system-reminder>\n{self.number} todos are open.\n</system-reminder>"}
        *before, last = self.messages
        marked = last | {"content": [*last["content"], reminder | mark]}
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": MAX_TOKENS,
            "extra_body": {"temperature": 0},
            "system": [{"type": "text", "text": bill}, {"type": "text", "text": self.system} | mark],
            "tools": [{"name": "Read", "description": "Reads a file", "input_schema": READ_FILE["parameters"]}],
            "messages": [*before, marked],
            "metadata": {"user_id": "user_1_account__session_2"},
        }
        if self.streams:
            with self.client.messages.stream(**body) as stream:
                message = stream.get_final_message()
        else:
            message = self.client.messages.create(**body)
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        prompt_tokens = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        text = "".join(block.text for block in message.content if block.type == "text")
        return Answered(text, prompt_tokens, cached, usage.output_tokens)


class Codex(Client):
    """OpenAI's Responses, never stored there: items, the thread's id as cache key, function calls."""

    def open(self) -> None:
        import openai

        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key,
            timeout=300,
            default_headers={"session_id": self.name, "originator": "codex_cli_rs"},
        )
        self.items: list[dict[str, Any]] = [_item("user", f"<environment_context>{self.name}</environment_context>")]

    def close(self) -> None:
        self.client.close()

    def ask(self, text: str) -> Iterator[Answered]:
        self.number += 1
        self.items.append(_item("user", text))
        yield self._call()
        call_id, arguments = f"call_{self.number}", json.dumps({"path": f"{self.number}.md"})
        self.items += [
            {"type": "function_call", "name": "read_file", "arguments": arguments, "call_id": call_id},
            {"type": "function_call_output", "call_id": call_id, "output": _file(self.number)},
        ]
        answered = self._call()
        self.items.append(_item("assistant", answered.text))
        yield answered

    def _call(self) -> Answered:
        done = self.client.responses.create(
            model=MODEL,
            instructions=self.system,
            input=self.items,
            tools=[{"type": "function", "strict": False, **READ_FILE}],
            tool_choice="auto",
            parallel_tool_calls=False,
            max_output_tokens=MAX_TOKENS,
            temperature=0,
            store=False,
            stream=self.streams,
            prompt_cache_key=self.name,
        )
        if self.streams:
            done = next(event.response for event in done if event.type in {"response.completed", "response.incomplete"})
        usage = done.usage
        return Answered(
            done.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
        )


class Child(Client):
    """An SDK in a process of its own: a line in and out a turn."""

    def command(self) -> list[Path]:
        """Return what to run, installed."""
        raise NotImplementedError

    def open(self) -> None:
        told = {"BASE_URL": f"{self.url}/v1", "API_KEY": self.key, "MODEL": MODEL, "SYSTEM": self.system}
        self.process = subprocess.Popen(
            self.command(),
            env=os.environ | told | {"CONTEXT": json.dumps(self.context)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def ask(self, text: str) -> Iterator[Answered]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(text) + "\n")
        self.process.stdin.flush()
        yield Answered(**json.loads(self.process.stdout.readline()))


class Vercel(Child):
    """Vercel's AI SDK in Node over `@ai-sdk/openai-compatible`, as `vercel/package-lock.json` has it."""

    def command(self) -> list[Path]:
        source, folder = Path(__file__).parent / "vercel", Path(".build/vercel").absolute()
        npm.installed(source, folder)
        shutil.copy(source / "chat.mjs", folder)
        return [npm.PROGRAMS / "node", folder / "chat.mjs"]


class LlamaIndex(Child):
    """LlamaIndex's `OpenAILike`, streamed and whole in turns, in an environment of its own."""

    def command(self) -> list[Path]:
        environment = made("llama-index", ["llama-index-llms-openai-like==0.8.1"], needed_bytes=1 << 30)
        return [environment / "bin" / "python", Path(__file__).parent / "llama_index_chat.py"]


class PydanticAI(Child):
    """pydantic-ai's `Agent`, streamed and whole in turns, in an environment of its own."""

    def command(self) -> list[Path]:
        environment = made("pydantic-ai", ["pydantic-ai-slim[openai]==2.68.0"], needed_bytes=1 << 30)
        return [environment / "bin" / "python", Path(__file__).parent / "pydantic_ai_chat.py"]


CLIENTS = [ClaudeCode, Codex, OpenCode, LangChain, OpenWebUI, Litellm, Vercel, LlamaIndex]
"""Those of test_clients.py."""


def _file(number: int) -> str:
    """Return what a tool read: longer than what a person says."""
    return f"# River {number}\n" + " ".join(f"It passes town {town} of {number}." for town in range(12))


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _of_openai(text: str, usage: dict[str, Any]) -> Answered:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answered(text, usage["prompt_tokens"], cached, usage["completion_tokens"])
