"""The story, told through Envoy with figures: cold, create, append, replay, move, crash, restore, delete.

Before the crash and after it an agent has its turns too, that knows nothing of contexts.

Every number printed was read from an answer or a clock in this run. Text is new in every run, so that a cold
answer is cold.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, StepFailed
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS, KEEPING_KEY
from deploy.local.table import render

CONTEXT_TOKENS = 1450
AGENT_TOKENS = 600
"""Of its system prompt."""
_AGENT_ASKS = ("What was sold?", "To whom?", "What was it worth?")
SEALED_WITHIN_S = 60.0
_ANSWER_TOKENS = 16
_SEAL_POLL_S = 0.2
_HEADS = ("step", "computed", "cached", "source", "first token ms")


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One row of the table. Tokens are prompt tokens; `ttft_ms` is what the client waited for the first one back."""

    step: str
    computed_tokens: int | None = None
    cached_tokens: int | None = None
    source: str = ""
    ttft_ms: float | None = None
    restore_ms: float | None = None
    answer: str = ""

    @classmethod
    def of(cls, step: str, answer: Answer) -> StoryStep:
        """Return the row of an answer."""
        return cls(
            step,
            answer.computed_tokens,
            answer.cached_tokens,
            answer.source,
            round(answer.ttft_ms, 1),
            answer.restore_ms,
            answer.text,
        )

    def cells(self) -> list[str]:
        """Return the row as the table shows it."""
        figures = (self.computed_tokens, self.cached_tokens, self.source or None, self.ttft_ms)
        return [self.step, *("-" if figure is None else str(figure) for figure in figures)]


def run_demo(stack: Stack, *, as_json: bool) -> None:
    """Tell the story and print its table, or JSON alone on stdout. Raises StepFailed at the first untrue step."""
    stack.up()
    client = GatewayClient(stack.url, next(iter(API_KEYS)))
    seed = time.time_ns() // 1_000_000 % 1_000_000_000
    agent = Agent(GatewayClient(stack.url, KEEPING_KEY), plain_text(AGENT_TOKENS, seed=seed + 1))
    steps = short_story(client) + long_story(stack, client, plain_text(CONTEXT_TOKENS, seed=seed), agent)
    if as_json:
        print(json.dumps({"model": MODEL_NAME, "steps": [asdict(step) for step in steps]}, indent=2))
    else:
        print(render(_HEADS, [step.cells() for step in steps]))


def short_story(client: GatewayClient) -> list[StoryStep]:
    """Make three calls: create, the same prompt again, delete."""
    prompt = {"prompt": "Say this is a test"}
    with Step("create, the same prompt again, delete"):
        created = client.stream("/v1/context", _body(prompt, ttl=3600))
        again = client.stream("/v1/completions", _body(prompt, session_id=created.session_id))
        _expect(again.usage["prompt_tokens"] == 1, f"prompt_tokens is {again.usage['prompt_tokens']}, not 1")
        client.call("DELETE", f"/v1/context/{created.session_id}")
    return [StoryStep.of("create: Say this is a test", created), StoryStep.of("the same prompt again", again)]


def long_story(stack: Stack, client: GatewayClient, text: str, agent: Agent) -> list[StoryStep]:
    """Let a context of about 1 450 tokens move to another engine, where there is one, and outlive all of them.

    So does what is kept of an agent's conversation.
    """
    steps = []
    with Step("cold: the long prompt without a context"):
        steps.append(
            StoryStep.of(
                "cold: long prompt without a context", client.stream("/v1/completions", _body({"prompt": text}))
            )
        )
    with Step("create: the same prompt as a context"):
        created = client.stream("/v1/context", _body({"prompt": text}, ttl=3600))
        session_id = created.session_id
        steps.append(StoryStep.of("create: long prompt in a context", created))
    with Step("append: a question alone"):
        asked = _ask(client, session_id, " Who sold something at the market?")
        steps.append(StoryStep.of("append: a question alone", asked))
    with Step("replay: the long prompt again"):
        replay = client.stream("/v1/completions", _body({"prompt": text}, session_id=session_id))
        _expect(replay.computed_tokens == 1, f"the replay computed {replay.computed_tokens} tokens, not 1")
        steps.append(StoryStep.of("replay: the long prompt again", replay))
    wait_sealed(client, session_id)
    if len(stack.engine_urls) > 1:
        steps += move(stack, client, session_id)
        wait_sealed(client, session_id)
    steps += [agent.turn(ask) for ask in _AGENT_ASKS[:-1]]
    agent.wait_kept()
    for part in (*stack.names_of("engine"), *stack.names_of("sidecar")):
        stack.kill(part)
    stack.up()
    steps.append(StoryStep("kill -9 of engine and sidecar, then start"))
    with Step("restored: another question"):
        restored = _ask(client, session_id, " And what was counted again?")
        _expect(restored.source == "disk", f"the KV came from {restored.source}, not from disk")
        steps.append(StoryStep.of("restored: another question", restored))
    steps.append(agent.turn(_AGENT_ASKS[-1], is_restored=True))
    with Step("delete"):
        client.call("DELETE", f"/v1/context/{session_id}")
        agent.forget()
        status, _ = client.try_call("GET", f"/v1/context/{session_id}")
        _expect(status == 404, f"the deleted context answers with status {status}, not 404")
        left = size_of(stack.paths.data)
    steps.append(StoryStep(f"delete: the id answers 404, {left} bytes of KV remain"))
    return steps


class Agent:
    """A chat client as they are: it sends its whole conversation again each turn, and names no context."""

    def __init__(self, client: GatewayClient, system: str) -> None:
        self._client = client
        self._messages = [{"role": "system", "content": system}]
        self._num_tokens = 0

    def turn(self, ask: str, *, is_restored: bool = False) -> StoryStep:
        """Ask one more question. Raises StepFailed when what is kept was not found."""
        self._messages.append({"role": "user", "content": ask})
        with Step(f"agent: {ask}"):
            answer = self._client.stream("/v1/chat/completions", _body({"messages": self._messages}))
            if is_restored:
                _expect(answer.source == "disk", f"the agent's KV came from {answer.source}, not from disk")
        self._messages.append({"role": "assistant", "content": answer.text})
        self._num_tokens = answer.usage["total_tokens"]
        return StoryStep.of(f"agent without a context: {ask}", answer)

    def wait_kept(self) -> None:
        """Return when its last answer is on disk. Raises StepFailed after a minute."""
        deadline_s = time.monotonic() + SEALED_WITHIN_S
        with Step("wait until the agent's KV is on disk"):
            # The last token of an answer never has KV.
            while sum(kept["tokens"] for kept in self._kept()) < self._num_tokens - 1:
                if time.monotonic() > deadline_s:
                    raise StepFailed(f"the agent's KV is not on disk after {SEALED_WITHIN_S:.0f} s")
                time.sleep(_SEAL_POLL_S)

    def forget(self) -> None:
        """Delete what is kept."""
        for kept in self._kept():
            self._client.call("DELETE", f"/v1/context/{kept['id']}")

    def _kept(self) -> list[dict[str, Any]]:
        """Return what was used last, in a list; it is this conversation's, or there is none yet."""
        kept: list[dict[str, Any]] = self._client.call("GET", "/v1/context?kind=kept&limit=1")["data"]
        return kept


def move(stack: Stack, client: GatewayClient, session_id: str) -> list[StoryStep]:
    """Drain the engine that holds the context: the next turn runs on another, which fetches the KV meanwhile."""
    holder = stack.engine_named(str(holder_of(client, session_id).get("endpoint")))
    stack.drain(holder)
    with Step(f"moved: a question while {holder} drains"):
        moved = _ask(client, session_id, " What did it weigh?")
        _expect(moved.source == "peer", f"the KV came from {moved.source}, not from the other sidecar")
    stack.drain(holder, draining=False)
    return [StoryStep.of("moved: a question to another engine", moved)]


def wait_sealed(client: GatewayClient, session_id: str) -> None:
    """Return when the context's KV is durable. Raises StepFailed after a minute."""
    deadline_s = time.monotonic() + SEALED_WITHIN_S
    with Step("wait until the KV is on disk") as step:
        while (state := str(holder_of(client, session_id).get("state"))) != "sealed":
            if time.monotonic() > deadline_s:
                raise StepFailed(f"the KV of {session_id} is not on disk after {SEALED_WITHIN_S:.0f} s: {state}")
            step.beat(lambda: f"holder state: {state}")
            time.sleep(_SEAL_POLL_S)


def size_of(directory: Path) -> int:
    """Return the bytes of all block and tail files below the sidecars' data directories."""
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))


def holder_of(client: GatewayClient, session_id: str) -> dict[str, Any]:
    """Return what the context says of its holder: the endpoint's name, and whether the KV is durable there."""
    return client.call("GET", f"/v1/context/{session_id}").get("holder") or {}


def _ask(client: GatewayClient, session_id: str, text: str) -> Answer:
    return client.stream("/v1/completions", _body({"prompt": text}, session_id=session_id))


def _body(prompt: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, **prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0, **more}


def _expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - an assertion with words
    if not condition:
        raise StepFailed(otherwise)
