"""Answers with thoughts and a tool call whose connection to the engine breaks: they go on, or end with their reason.

The model recites its answer, and vLLM's own parsers read it. The link breaks after as many events, and then heals.
Turns and requests whose KV is kept.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.kit.caller import Caller
from tests.kit.faults.proxy import Proxy
from tests.kit.reciting_model import THOUGHT, make_reciting_model
from tests.kit.stack import KEEPING_KEY, MODEL
from tests.kit.tiny_stack import TinyStack
from tests.kit.until import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

PIECES = [
    "It is a lake,", " so it has", " a depth.", THOUGHT, "Let me", " look", " at it.",
    "\n<tool_call>", '\n{"name": "depth", ', '"arguments": ', '{"lake": "Bod', 'ensee"}', "}", "\n</tool_call>",
]  # fmt: skip
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"]
TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object", "properties": {}}}}

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_COMMON = {"model": MODEL, "max_tokens": 64, "temperature": 0, "stream": True}
_COMMON |= {"stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**_COMMON, "messages": [{"role": "user", "content": "Look."}], "tools": [TOOL]},
    COMPLETIONS: {**_COMMON, "prompt": "Look. <think>"},
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    directory = tmp_path_factory.mktemp("reciting")
    make_reciting_model(directory / "model", PIECES)
    env = {"TURN_RESUME_TIMEOUT_S": "280"}  # a start on busy cores
    with TinyStack(directory, patient=True, proxied=["turn-engine"], engine_args=PARSERS, env=env) as stack:
        caller = Caller(stack)
        yield caller
        caller.close()


@dataclass
class Said:
    """A streamed answer, as its client has it."""

    thought: str = ""
    text: str = ""
    arguments: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False

    def take(self, event: dict[str, Any]) -> None:
        for delta in (choice.get("delta", choice) for choice in event["choices"]):
            self.thought += delta.get("reasoning") or ""
            self.text += delta.get("content") or delta.get("text") or ""
            for call in delta.get("tool_calls") or ():
                self.arguments += call["function"].get("arguments") or ""
        self.usage = event.get("usage") or self.usage


def ask(caller: Caller, session_id: str, *, at_event: int = 0) -> Said:
    """Ask for a turn without a commit; break the link to the engine after `at_event` events, unless that is 0."""
    body = BODIES[CHAT] | {"session_id": session_id, "context_commit": False}
    return read(caller, CHAT, body, at_event=at_event)


def read(caller: Caller, path: str, body: dict[str, Any], *, at_event: int) -> Said:
    """Read a stream, see `ask`."""
    link, said = caller.stack.links.proxies["turn-engine"], Said()
    if at_event:
        link.stall_after(at_event)
    mending = threading.Thread(target=mend, args=(link,), daemon=True)
    if at_event:
        mending.start()
    try:
        with caller.http.stream("POST", path, json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                said.is_whole |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    said.take(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError:
        assert at_event
    if at_event:
        mending.join()
    return said


def mend(link: Proxy) -> None:
    wait_until(lambda: link.num_stalled, what="the answer is in its middle")
    link.reset()
    link.heal()


def outcomes(caller: Caller) -> Counter[str]:
    found = caller.stack.metrics("turn").items()
    name = "contextcache_turn_resumed_answers_total"
    return Counter({dict(labels)["outcome"]: round(value) for (told, labels), value in found if told == name})


@pytest.mark.parametrize(
    ("at_event", "reason"),
    [(1, "own"), (2, "reasoning"), (4, "reasoning"), (6, "reasoning"), (11, "tool_call")],
    ids=["before the thoughts", "in the thoughts", "at their end", "in the text", "in the call"],
)
def test_an_answer_with_thoughts_and_a_call_goes_on_or_ends_with_its_reason(
    caller: Caller, at_event: int, reason: str
) -> None:
    """Seen failing: without the two checks of parsers' states, all four ended with `text`."""
    session_id = caller.create(prompt=f"{at_event}", max_tokens=1)["session_id"]
    whole, told = ask(caller, session_id), outcomes(caller)

    said = ask(caller, session_id, at_event=at_event)

    assert outcomes(caller) - told == {reason: 1}
    assert whole.is_whole
    assert said.is_whole == (reason == "own")
    for part, of in ((said.thought, whole.thought), (said.text, whole.text), (said.arguments, whole.arguments)):
        assert of.startswith(part)
    if said.is_whole:
        assert (said.thought, said.text, said.arguments) == (whole.thought, whole.text, whole.arguments)
        assert said.usage["completion_tokens"] == whole.usage["completion_tokens"] == len(PIECES) + 1
    # The context is free, and as it was.
    assert ask(caller, session_id).arguments == whole.arguments


@pytest.fixture(scope="module")
def keeper(caller: Caller) -> Iterator[Caller]:
    keeper = Caller(caller.stack, KEEPING_KEY)
    yield keeper
    keeper.close()


@pytest.mark.parametrize(
    ("path", "at_event", "reason"),
    [
        (COMPLETIONS, 1, "own"),
        (COMPLETIONS, 6, "own"),
        (COMPLETIONS, 12, "own"),
        (CHAT, 1, "own"),
        (CHAT, 4, "reasoning"),
    ],
)
def test_an_answer_whose_kv_is_kept_goes_on_or_ends_with_its_reason(
    keeper: Caller, path: str, at_event: int, reason: str
) -> None:
    whole, told = read(keeper, path, BODIES[path], at_event=0), outcomes(keeper)

    said = read(keeper, path, BODIES[path], at_event=at_event)

    assert outcomes(keeper) - told == {reason: 1}
    assert whole.is_whole
    assert said.is_whole == (reason == "own")
    if said.is_whole:
        assert (said.thought, said.text, said.arguments) == (whole.thought, whole.text, whole.arguments)
        assert said.usage["completion_tokens"] == whole.usage["completion_tokens"] == len(PIECES) + 1
        assert said.usage["prompt_tokens"] == whole.usage["prompt_tokens"]


def test_requests_of_a_drained_engine_wait_for_it(caller: Caller, keeper: Caller) -> None:
    """The last test of this file: it restarts the engine."""
    session_id = caller.create(prompt="0", max_tokens=1)["session_id"]
    whole, kept = ask(caller, session_id), read(keeper, COMPLETIONS, BODIES[COMPLETIONS], at_event=0)
    with ThreadPoolExecutor() as threads:
        os.kill(caller.stack.pid("engine"), signal.SIGTERM)
        turn = threads.submit(ask, caller, session_id)
        plain = threads.submit(read, keeper, COMPLETIONS, BODIES[COMPLETIONS], at_event=0)
        caller.stack.wait_gone("engine")
        caller.stack.start("engine")

        assert (turn.result().arguments, turn.result().is_whole) == (whole.arguments, True)
        assert (plain.result().text, plain.result().is_whole) == (kept.text, True)
