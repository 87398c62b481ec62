"""Answers with thoughts and a tool call whose connection to the engine breaks: they go on, or end with their reason.

The model recites its answer, and vLLM's own parsers read it. The link breaks after as many events, and then heals.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.kit.caller import Caller
from tests.kit.faults.proxy import Proxy
from tests.kit.reciting_model import THOUGHT, make_reciting_model
from tests.kit.stack import MODEL
from tests.kit.tiny_stack import TinyStack
from tests.kit.until import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

PIECES = [
    "It is a lake,", " so it has", " a depth.", THOUGHT, "Let me", " look", " at it.",
    "\n<tool_call>", '\n{"name": "depth", ', '"arguments": ', '{"lake": "Bod', 'ensee"}', "}", "\n</tool_call>",
]  # fmt: skip
PARSERS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1"]
TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    directory = tmp_path_factory.mktemp("reciting")
    make_reciting_model(directory / "model", PIECES)
    with TinyStack(directory, patient=True, proxied=["turn-engine"], engine_args=PARSERS) as stack:
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
        for delta in (choice["delta"] for choice in event["choices"]):
            self.thought += delta.get("reasoning") or ""
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                self.arguments += call["function"].get("arguments") or ""
        self.usage = event.get("usage") or self.usage


def ask(caller: Caller, session_id: str, *, at_event: int = 0) -> Said:
    """Ask for a turn without a commit; break the link to the engine after `at_event` events, unless that is 0."""
    link, said = caller.stack.links.proxies["turn-engine"], Said()
    if at_event:
        link.stall_after(at_event)
    body = {"model": MODEL, "session_id": session_id, "max_tokens": 64, "temperature": 0, "stream": True}
    body |= {"messages": [{"role": "user", "content": "Look."}], "tools": [TOOL], "context_commit": False}
    body |= {"stream_options": {"include_usage": True}}
    mending = threading.Thread(target=mend, args=(link,), daemon=True)
    if at_event:
        mending.start()
    try:
        with caller.http.stream("POST", "/v1/chat/completions", json=body, timeout=120) as answer:
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
