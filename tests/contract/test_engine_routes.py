"""The turn uses documented routes and fields of vLLM, and no others. Imports nothing of vLLM's.

`engine_routes.json` has, for each version, the fields of those routes that were found in vLLM's own definitions, with
their place. A turn that begins to use another field fails here until somebody has looked that field up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from contextcache.model import SegmentKind
from tests.kit.engine_calls import known_calls
from tests.kit.fake_vllm import FakeVllm
from tests.kit.turn_bench import Pod
from vllm_plugin.turn.answer.rest import rest_fields
from vllm_plugin.turn.prompt.request import read_turn

DOCUMENTED = json.loads(Path(__file__).with_name("engine_routes.json").read_text())
PYTHON = DOCUMENTED["0.32.0"]
NESTED = ("stream_options", "kv_transfer_params")
OURS = "context_cache"
"""Our connector's order in `kv_transfer_params`: vLLM passes it on."""
KNOWN_GAPS = {
    "0.32.0": set(),
    "rust": {
        # Contexts of chats need it: docs/upstream/prompt-ids-on-chat.md.
        ("POST /v1/chat/completions", "kv_transfer_params.prompt_token_ids"),
        # Of the client's own request; without it the answer has no watermark.
        ("POST /v1/chat/completions", "watermarking"),
        # Counts that are 0 if they are absent.
        ("POST /v1/chat/completions", "usage.prompt_tokens_details.created_cache_tokens"),
        ("POST /v1/chat/completions", "usage.completion_tokens_details.reasoning_tokens"),
    },
}
TOOL = {"type": "object", "properties": {}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
MESSAGES = {
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "weather", "input_schema": TOOL}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": TOOL}},
    "stop_sequences": ["end"],
    "temperature": 1,
    "top_p": 1,
    "top_k": 1,
    "watermarking": False,
    "vllm_xargs": {"a": 1},
    "chat_template_kwargs": {"date": "today"},
}
RESPONSE = {
    "input": "Hi",
    "store": True,
    "tools": [{"type": "function", "name": "weather", "parameters": TOOL}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "max_output_tokens": 20,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "temperature": 1,
    "top_p": 1,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED = {"context_create": "if_missing"}
TURNS = {
    "ids": ("/v1/completions", {"prompt": [72, 105], "max_tokens": 9, **NAMED}),
    "completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": 9, **NAMED}),
    "chat": ("/v1/chat/completions", {**CHAT, **NAMED}),
    "messages": ("/v1/messages", {**MESSAGES, **NAMED}),
    "responses": ("/v1/responses", RESPONSE),
}


class Documented(FakeVllm):
    """Answers with the documented fields that the turn reads, and nothing else; notes the fields that it was sent."""

    def __init__(self) -> None:
        super().__init__(calls=(CALL,), reasoning="hm", finish_reason="tool_calls")
        self.sent: dict[str, set[str]] = defaultdict(set)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        route = f"POST {scope['path']}"
        paths = [tuple(path.split(".")) for path in PYTHON[route]["read"]]

        async def pruned(message: Any) -> None:
            if body := message.get("body"):
                message = {**message, "body": b"".join(_pruned_line(line, paths) for line in body.splitlines(True))}
            await send({**message, "headers": _without_length(message)} if "headers" in message else message)

        before = len(self.requests)
        await super().__call__(scope, receive, pruned)
        for _, body in self.requests[before:]:
            self.sent[route] |= body.keys()
            self.sent[route] |= {f"{key}.{name}" for key in NESTED for name in body.get(key) or () if name != OURS}


def _without_length(message: Any) -> list[Any]:
    return [(name, value) for name, value in message["headers"] if name != b"content-length"]


def _pruned_line(line: bytes, paths: list[tuple[str, ...]]) -> bytes:
    data = line.removeprefix(b"data: ")
    if not data.startswith(b"{"):
        return line
    return (
        line[: len(line) - len(data)]
        + json.dumps(_pruned(json.loads(data), paths)).encode()
        + b"\n" * (data.endswith(b"\n"))
    )


def _pruned(value: Any, paths: list[tuple[str, ...]]) -> Any:
    if isinstance(value, list):
        return [_pruned(one, paths) for one in value]
    if not isinstance(value, dict) or not paths:
        return value
    return {
        name: _pruned(one, [path[1:] for path in paths if path[0] == name and path[1:]])
        for name, one in value.items()
        if any(path[0] == name for path in paths)
    }


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path, Documented())


async def _two_turns(pod: Pod, dialect: str, *, stream: bool, name: str = "mine") -> Any:
    path, body = TURNS[dialect]
    more = {"conversation": name} if dialect == "responses" else {"session_id": name}
    for _ in range(2):
        answer = await pod.post(path, {"model": "m", "stream": stream, **body, **more}, pod.identity(name))
        assert (answer.status, answer.complete) == (200, True), answer.body
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", TURNS)
async def test_a_turn_works_with_the_documented_fields_of_an_answer_alone(pod, dialect, stream):
    answer = await _two_turns(pod, dialect, stream=stream)

    session, segments = await pod.transcript("mine")
    assert session.generation == 2
    assert (segments[-1].kind, len(segments[-1].token_ids) > 1) == (SegmentKind.ANSWER, True)
    assert b'"committed"' in answer.body
    if dialect not in ("ids", "completion"):
        assert b"weather" in answer.body
        assert b"hm" in answer.body or b'"h"' in answer.body


async def test_the_fields_that_a_turn_sends_are_the_documented_ones(pod):
    """In both directions, so that the table has no field that no turn sends."""
    for dialect in TURNS:
        for stream in (False, True):
            await _two_turns(pod, dialect, stream=stream, name=f"{dialect}-{stream}")

    for path in ("/v1/completions", "/v1/chat/completions"):
        asked = {"model": "m", "prompt": "Hi"} if path == "/v1/completions" else {"model": "m", **CHAT}
        request = read_turn(path, asked | {"stop": ["end"], "max_tokens": 9}, {})
        pod.engine.sent[f"POST {path}"] |= rest_fields(request, 1).keys()

    assert pod.engine.sent == {route: set(kinds["sent"]) for route, kinds in PYTHON.items() if route.startswith("POST")}


@pytest.mark.parametrize("version", DOCUMENTED)
def test_a_version_documents_all_of_them_but_the_known_gaps(version):
    used = {
        (route, field) for route in PYTHON if route != "source" for fields in PYTHON[route].values() for field in fields
    }
    fields = {
        (route, field)
        for route, kinds in DOCUMENTED[version].items()
        if route != "source"
        for field in (*kinds["sent"], *kinds["read"])
    }

    assert used - fields == KNOWN_GAPS[version]
    assert DOCUMENTED[version].keys() == PYTHON.keys()


def test_every_route_is_one_of_vllms_calls():
    routes = [tuple(route.split(" ")) for route in PYTHON if route != "source"]

    assert set(routes) <= set(known_calls())
