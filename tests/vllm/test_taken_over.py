"""Answers whose engine is killed, and the next one too: each is the same as without a kill, or ends with its reason.

Two real engines. All streams run at once. The links to the engines stall after as many events, so each answer breaks at
the same place. SmolLM2, greedy, float32.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.kit.stack import KEEPING_KEY, KEY, MODEL, Stack
from tests.kit.until import until
from tests.kit.vllm_answers import LOGPROB_TOLERANCE

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
EVENTS = 24
"""Events of each part before its engine is killed."""
TOKENS = 96
STOP_TOKENS = (18, 34)
"""First and last token of a stop string across the first break. The engine holds less back than there is before it."""
STOP = "the text of these tokens"
_STREAM_S = 300.0
_TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Case:
    """A streamed turn."""

    path: str
    fields: dict[str, Any] = field(default_factory=dict)
    num_breaks: int = 2
    """Engines that are killed under it, if it has no `reason`."""
    reason: str = ""
    """Name of the state with which it cannot go on; empty: it does."""
    is_kept: bool = False
    """A request without a context, whose KV is kept."""


CASES = {
    "completion": Case(COMPLETIONS),
    "log-probabilities": Case(COMPLETIONS, {"logprobs": 2}),
    "ids": Case(COMPLETIONS, {"return_token_ids": True}),
    "stop string": Case(COMPLETIONS, {"stop": [STOP]}, num_breaks=1),
    "stop string and log-probabilities": Case(COMPLETIONS, {"stop": [STOP], "logprobs": 1}, num_breaks=1),
    "stop string, kept": Case(COMPLETIONS, {"stop": [STOP], "include_stop_str_in_output": True}, num_breaks=1),
    "stop string that is not said": Case(COMPLETIONS, {"stop": ["zzzzz"]}),
    "repetition penalty": Case(COMPLETIONS, {"repetition_penalty": 1.2}),
    "presence penalty": Case(COMPLETIONS, {"presence_penalty": 0.5}, reason="penalty"),
    "frequency penalty": Case(CHAT, {"frequency_penalty": 0.5}, reason="penalty"),
    "seed": Case(COMPLETIONS, {"seed": 1, "temperature": 0.7}, reason="seed"),
    "bad words": Case(COMPLETIONS, {"bad_words": ["zzz"]}, reason="bad_words"),
    "min_tokens": Case(COMPLETIONS, {"stop": ["zzzzz"], "min_tokens": 90}, reason="min_tokens"),
    "chat": Case(CHAT),
    "chat with log-probabilities": Case(CHAT, {"logprobs": True, "top_logprobs": 2}),
    "chat with a stop string": Case(CHAT, {"stop": [STOP]}, num_breaks=1),
    "chat with tools": Case(CHAT, {"tools": [_TOOL]}),
    "chat that must call": Case(
        CHAT, {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "depth"}}}, reason="grammar"
    ),
    "chat in JSON": Case(CHAT, {"response_format": {"type": "json_object"}}, reason="grammar"),
    "messages": Case(MESSAGES),
    "messages with a stop sequence": Case(MESSAGES, {"stop_sequences": [STOP]}, num_breaks=1),
    "responses": Case(RESPONSES),
    "kept completion": Case(COMPLETIONS, is_kept=True),
    "kept chat": Case(CHAT, is_kept=True),
    "kept message": Case(MESSAGES, reason="unread", is_kept=True),
    "opted out": Case(COMPLETIONS, reason="opted_out"),
    "kept, opted out": Case(CHAT, reason="opted_out", is_kept=True),
    "client that leaves": Case(COMPLETIONS),
}
LEAVES = "client that leaves"


@dataclass
class Seen:
    """A stream, as its client has it."""

    events: list[dict[str, Any]] = field(default_factory=list)
    num_comments: int = 0
    is_whole: bool = False
    failure: str = ""
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """The client is told that its answer pauses."""

    def take(self, line: str) -> None:
        """Read a line of the stream."""
        if line.startswith(":"):
            self.num_comments += 1
            self.heard.set()
        elif line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            event = {} if data == "[DONE]" else json.loads(data)
            self.is_whole |= data == "[DONE]" or event.get("type") in ("message_stop", "response.incomplete")
            self.events.append(event)

    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    def text(self) -> str:
        told = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in self.choices()]
        for event in self.events:
            delta = event.get("delta")
            told.append(delta if isinstance(delta, str) else (delta or {}).get("text") or "")
        return "".join(told)

    def content(self) -> dict[str, Any]:
        """Return the answer without its text and numbers."""
        choices = self.choices()
        ends = [choice for choice in choices if choice.get("finish_reason")]
        return {
            "ends": [(end["finish_reason"], end.get("stop_reason")) for end in ends],
            "stops": [event["delta"] for event in self.events if event.get("type") == "message_delta"],
            "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
            "roles": sum("role" in choice.get("delta", {}) for choice in choices),
            "calls": [choice["delta"]["tool_calls"] for choice in choices if choice.get("delta", {}).get("tool_calls")],
            "tokens": [token for token, _, _ in self.log_probabilities()],
            "offsets": [offset for _, _, offset in self.log_probabilities()],
        }

    def log_probabilities(self) -> list[tuple[str, float, int]]:
        """Return token, log-probability and offset of each token."""
        found = []
        for told in filter(None, (choice.get("logprobs") for choice in self.choices())):
            if "content" in told:
                found += [(one["token"], one["logprob"], 0) for one in told["content"]]
            else:
                found += zip(told["tokens"], told["token_logprobs"], told["text_offset"], strict=True)
        return found

    def usage(self) -> dict[str, Any]:
        told = [event.get("usage") or (event.get("response") or {}).get("usage") for event in self.events]
        return next(usage for usage in reversed(told) if usage)


@dataclass
class World:
    """What was seen."""

    stack: Stack
    session_ids: dict[str, str] = field(default_factory=dict)
    before: dict[str, Seen] = field(default_factory=dict)
    after: dict[str, Seen] = field(default_factory=dict)

    def ask(self, name: str) -> httpx.Response:
        """Ask for the next turn."""
        case = CASES[name]
        body = _body(Case(case.path), "") | {"session_id": self.session_ids[name], "max_tokens": 2, "stream": False}
        body.pop("stream_options", None)
        return httpx.post(self.stack.url + case.path, json=body, headers=_HEADERS, timeout=_STREAM_S)

    def get(self, name: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.stack.url}/v1/context/{self.session_ids[name]}", headers=_HEADERS)
        return dict(answer.raise_for_status().json())


_HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with Stack(
        tmp_path_factory.mktemp("taken-over"),
        engines=2,
        patient=True,
        proxied=["turn-engine", "gateway-engine-1"],
        engine_args=tools,
        env={"TURN_RESUME_TIMEOUT_S": "280"},
        connector={"early_saves": "on"},
    ) as stack:
        world = World(stack)
        asyncio.run(_watch(world))
        yield world


async def _watch(world: World) -> None:
    stack = world.stack
    stack.drain("engine-1")
    async with httpx.AsyncClient(
        base_url=stack.url, headers=_HEADERS, timeout=_STREAM_S, limits=httpx.Limits(max_connections=None)
    ) as http:
        for name, case in CASES.items():
            if not case.is_kept:
                world.session_ids[name] = await _create(http, case)
        asked = Asking(http, world.session_ids)
        plain = {path: await asked.stream(CASES[name], name) for path, name in _LOG_PROBABILITIES.items()}
        asked.stops = {path: _stop_string(seen) for path, seen in plain.items()}
        asked.stops[MESSAGES] = asked.stops[CHAT]
        whole = await asyncio.gather(*(asked.stream(case, name) for name, case in CASES.items()))
        world.before = dict(zip(CASES, whole, strict=True))

        stack.drain("engine-1", draining=False)
        first, second = stack.links.proxies["turn-engine"], stack.links.proxies["gateway-engine-1"]
        first.stall_after(EVENTS)
        world.after = {name: Seen() for name in CASES}
        reading = {
            name: asyncio.create_task(asked.stream(case, name, world.after[name], commit=True))
            for name, case in CASES.items()
        }
        await until(lambda: first.num_stalled == len(CASES), what="all streams are in their middle", deadline_s=120)
        second.stall_after(EVENTS)
        stack.kill("engine")
        first.reset()
        first.heal()
        num_again = sum(case.num_breaks == 2 and not case.reason for case in CASES.values())
        await until(lambda: second.num_stalled == num_again, what="the next engine answers them", deadline_s=120)
        stack.kill("engine-1")
        second.reset()
        second.heal()
        starting = asyncio.create_task(asyncio.to_thread(stack.start, "engine"))
        await asyncio.wait_for(world.after[LEAVES].heard.wait(), 60)
        reading[LEAVES].cancel()
        await asyncio.wait_for(asyncio.gather(*reading.values(), return_exceptions=True), _STREAM_S)
        await starting


@dataclass
class Asking:
    """Asks for the streams."""

    http: httpx.AsyncClient
    session_ids: dict[str, str]
    stops: dict[str, str] = field(default_factory=dict)
    """Stop string across the first break, by path."""

    async def stream(self, case: Case, name: str, seen: Seen | None = None, *, commit: bool = False) -> Seen:
        """Read a stream to its end, or to where it breaks."""
        seen = seen or Seen()
        body = _body(case, self.stops.get(case.path, "")) | {"context_commit": commit}
        headers = {"x-context-resume": "off"} if case.reason == "opted_out" else {}
        if case.is_kept:
            for ours in ("context_commit", "context_mode"):
                del body[ours]
            headers |= {"authorization": f"Bearer {KEEPING_KEY}"}
        else:
            body |= {"session_id": self.session_ids[name]}
        try:
            async with self.http.stream("POST", case.path, json=body, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    seen.take(line)
        except httpx.HTTPError as exc:
            seen.failure = repr(exc)
        return seen


_LOG_PROBABILITIES = {COMPLETIONS: "log-probabilities", CHAT: "chat with log-probabilities"}


async def _create(http: httpx.AsyncClient, case: Case) -> str:
    said = "Tell me about the sea."
    first: dict[str, Any] = {"prompt": said} if case.path == COMPLETIONS else {}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 4, "messages": [{"role": "user", "content": said}]} | first
    if first:
        del body["messages"]
    return str((await http.post("/v1/context", json=body)).raise_for_status().json()["session_id"])


def _stop_string(seen: Seen) -> str:
    """Return the text of the tokens across the first break."""
    begin, end = (len("".join(one[0] for one in seen.log_probabilities()[:at])) for at in STOP_TOKENS)
    text = seen.text()
    assert text.find(text[begin:end]) == begin, "it is said once before its place"
    return text[begin:end]


def _body(case: Case, stop: str) -> dict[str, Any]:
    asked = "\nOnce upon a time there was a lighthouse keeper" if case.path == COMPLETIONS else "Tell me a long story."
    body = {"model": MODEL, "temperature": 0, "stream": True, "context_mode": "append"}
    body["max_output_tokens" if case.path == RESPONSES else "max_tokens"] = TOKENS
    if case.path in (COMPLETIONS, CHAT):
        body |= {"stream_options": {"include_usage": True}}
    if case.path == COMPLETIONS:
        body |= {"prompt": asked}
    elif case.path == RESPONSES:
        body |= {"input": asked}
    else:
        body |= {"messages": [{"role": "user", "content": asked}]}
    more = {name: [stop] if value == [STOP] else value for name, value in case.fields.items()}
    return body | more


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.reason and name != LEAVES])
def test_an_answer_is_the_same_although_its_engines_were_killed(world: World, name: str) -> None:
    case, before, after = CASES[name], world.before[name], world.after[name]

    assert after.is_whole, after.failure
    assert after.text() == before.text()
    assert after.content() == before.content()
    numbers = [one[1] for one in after.log_probabilities()]
    assert numbers == pytest.approx([one[1] for one in before.log_probabilities()], abs=LOGPROB_TOLERANCE)
    assert _output_tokens(after) == _output_tokens(before)
    if "total_tokens" in after.usage():
        assert after.usage()["total_tokens"] - before.usage()["total_tokens"] == 0
    if STOP in str(case.fields):
        assert _output_tokens(after) < TOKENS
    else:
        assert after.num_comments
    if case.is_kept:
        return
    resumed = after.usage()["context"]["resumed"]
    assert [(one["from"], one["to"]) for one in resumed] == [("engine-0", "engine-1"), ("engine-1", "engine-0")][
        : case.num_breaks
    ]
    if STOP in str(case.fields):
        assert STOP_TOKENS[0] < resumed[0]["at_token"] < STOP_TOKENS[1]
    # Usage adds up: to the uninterrupted answer's, and to the tokens that the context has now.
    context, context_before = after.usage()["context"], before.usage()["context"]
    prompt = [told["cached_tokens"] + told["computed_tokens"] for told in (context, context_before)]
    assert prompt[0] == prompt[1]
    assert world.get(name)["generation"] == 2


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reason])
def test_an_answer_with_a_state_of_its_engine_ends_at_the_break(world: World, name: str) -> None:
    before, after = world.before[name], world.after[name]

    assert before.is_whole, before.failure
    assert not after.is_whole
    assert before.text().startswith(after.text())
    if CASES[name].is_kept:
        return
    assert world.get(name)["generation"] == 1
    assert world.ask(name).status_code == 200


def test_each_end_is_counted_by_its_reason(world: World) -> None:
    going_on = [case for case in CASES.values() if not case.reason]
    reasons = Counter(case.reason for case in CASES.values() if case.reason)
    again = sum(case.num_breaks == 2 for case in going_on)

    found: Counter[str] = Counter()
    for turn in world.stack.names_of("turn"):
        for (metric, labels), value in world.stack.metrics(turn).items():
            if metric == "contextcache_turn_resumed_answers_total":
                found[dict(labels)["outcome"]] += round(value)

    assert found == reasons + Counter(standby=len(going_on), own=again - 1)


def test_a_client_that_leaves_in_a_pause_commits_nothing_and_frees_its_context(world: World) -> None:
    """Seen failing: the turn was counted as one whose engine failed."""
    assert world.after[LEAVES].num_comments
    assert not world.after[LEAVES].is_whole
    assert world.get(LEAVES)["generation"] == 1
    assert world.stack.counted("turn", "contextcache_turn_aborts_total", reason="client") == 1
    assert world.ask(LEAVES).status_code == 200
    assert world.get(LEAVES)["generation"] == 2


def _output_tokens(seen: Seen) -> int:
    usage = seen.usage()
    return int(usage.get("completion_tokens", usage.get("output_tokens", -1)))
