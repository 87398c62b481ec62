"""Many conversations over one stack, and what happens to the stack between their turns; all from one seed.

Serial on purpose: the same seed asks the same things in the same order. What may differ between two runs is where KV
comes from, and that is what must not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Any

import httpx

from tests.kit.faults.conversation import Conversation, Request
from tests.kit.faults.conversation_events import StackEvents
from tests.kit.faults.reference import Answer, Difference, read_answer
from tests.kit.stack import KEY, OTHER_KEY, Stack

TENANTS = {"demo": KEY, "other": OTHER_KEY}
TURNS_MAX = 12
_OPEN = 4
"""Conversations that go on at one time, so that they push each other out of the engine's cache."""
_SEALED_WITHIN_S = 5.0
_RETRY_WITHIN_S = 30.0


class ConversationRun:
    """A context manager; `take_turns` may be called repeatedly."""

    def __init__(self, stack: Stack, random: Random, *, seed: object) -> None:
        self.stack = stack
        self.random = random
        self.seed = seed
        self.events = StackEvents(stack)
        self.seen = self.events.seen
        """What was counted: turns, sources, events."""
        self._open: list[tuple[Conversation, int]] = []
        """Conversations and how many turns each has left."""
        self._resources = ExitStack()

    def __enter__(self) -> ConversationRun:
        close = self._resources.callback
        self._clients: dict[tuple[str, str], httpx.Client] = {}
        for tenant, key in TENANTS.items():
            for front, url in {"envoy": self.stack.url, "http": self.stack.front_url}.items():
                client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120)
                self._clients[tenant, front] = client
                close(client.close)
        close(self.events.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def take_turns(self, turns: int, *, until_s: float | None = None) -> None:
        """Take at least `turns` more turns, fewer when `until_s` (monotonic) comes first.

        Raises Difference with the seed and the steps.
        """
        wanted = self.seen["turns"] + turns
        try:
            while self.seen["turns"] < wanted and (until_s is None or time.monotonic() < until_s):
                self._step()
        except (AssertionError, httpx.HTTPError) as exc:
            told = "\n".join(f"  {number}. {step}" for number, step in enumerate(self.events.steps, 1))
            raise Difference(f"seed {self.seed}, turn {self.seen['turns'] + 1}: {exc!r}\n{told}") from exc

    def kill_engine(self) -> None:
        """Let an engine die and start again; with two, the turns go on at the other meanwhile."""
        self.events.kill_engine(self._chance())

    def _step(self) -> None:
        if len(self._open) < _OPEN:
            self._begin()
            return
        index = self.random.randrange(len(self._open))
        conversation, left = self._open[index]
        if self.random.random() < 0.5:
            with self.events.timed("until KV was durable"):
                self._wait_sealed(conversation)
        self.events.happen(self._chance())
        self._count(*conversation.take_turn(), conversation)
        self._check_stored(conversation)
        if left > 1 and not conversation.is_long:
            self._open[index] = (conversation, left - 1)
            return
        del self._open[index]
        self._end(conversation)

    def _begin(self) -> None:
        kind = self.random.choices(("text", "chat", "ids"), weights=(4, 3, 3))[0]
        mode = "prefix" if self.random.random() < 0.15 else "session"
        conversation = self._conversation(kind, mode, self.random.choice(sorted(TENANTS)))
        named = f"named-{self.random.getrandbits(32):08x}" if self.random.random() < 0.3 else ""
        request, answer = conversation.create(session_id=named)
        self._count(request, answer, conversation)
        self._check_stranger(answer)
        if self.random.random() < 0.25:
            self._twin(conversation, request)
        self._open.append((conversation, self.random.randint(1, TURNS_MAX - 1)))

    def _twin(self, original: Conversation, request: Request) -> None:
        """Say the same in another tenant's name (under the same id, if it was given): nothing may be shared."""
        self.seen["twins"] += 1
        tenant = next(name for name in sorted(TENANTS) if name != original.tenant)
        twin = self._conversation(original.kind, original.mode, tenant)
        _, answer = twin.create(like=request)
        self._count(request, answer, twin)
        self._check_stranger(answer)
        self._end(twin)

    def _end(self, conversation: Conversation) -> None:
        """See the whole transcript once more, delete, and sometimes begin again under the same id."""
        self._count(*conversation.probe(), conversation)
        client = self._clients[conversation.tenant, "http"]
        path = f"/v1/context/{conversation.session_id}"
        self.events.note(f"delete {conversation.session_id}")
        statuses = (client.delete(path).status_code, client.get(path).status_code)
        if statuses != (200, 404):
            raise Difference(f"delete and get answered {statuses}")
        if self.random.random() < 0.3:
            self.seen["created again under the same id"] += 1
            again = self._conversation(conversation.kind, "session", conversation.tenant)
            request, answer = again.create(session_id=conversation.session_id)
            self._count(request, answer, again)
            self._check_stranger(answer)
            self._open.append((again, self.random.randint(1, 3)))

    def _chance(self) -> Random:
        return Random(self.random.getrandbits(64))

    def _conversation(self, kind: str, mode: str, tenant: str) -> Conversation:
        return Conversation(
            self._chance(),
            self._sender(tenant),
            self._cold,
            kind,
            tenant,
            mode,  # type: ignore[arg-type]
        )

    def _sender(self, tenant: str) -> Callable[[Request], Answer]:
        def send(request: Request) -> Answer:
            client = self._clients[tenant, self.random.choice(("envoy", "http"))]
            self.events.note(f"{tenant} {request.body.get('session_id', '')} {request.told}")
            with self.events.timed("turns"):
                return read_answer(self._answered(client, request))

        return send

    def _answered(self, client: httpx.Client, request: Request) -> httpx.Response:
        """Ask until it is no 503 with Retry-After, which a part that was just killed may cost."""
        deadline_s = time.monotonic() + _RETRY_WITHIN_S
        while True:
            response = client.post(request.path, json=request.body, headers=request.headers)
            if response.status_code == 200:
                return response
            if response.status_code != 503 or "retry-after" not in response.headers or time.monotonic() > deadline_s:
                raise Difference(f"{response.status_code} {response.text}")
            self.seen["503, asked again"] += 1
            self.events.note(f"503 {response.json()['error']['code']}")
            time.sleep(0.2)

    def _cold(self, prompt_ids: list[int], **asked: Any) -> Answer:
        with self.events.timed("cold answers"):
            return self.events.cold_engine.answer(prompt_ids, **asked)

    # What is looked at.

    def _count(self, request: Request, answer: Answer, conversation: Conversation) -> None:
        self.seen["turns"] += 1
        self.seen[f"turns, {conversation.kind}"] += 1
        self.seen["prompt tokens"] += len(request.prompt)
        context = answer.usage["context"]
        self.seen["prompt tokens reused"] += context["cached_tokens"]
        if request.path != "/v1/context":
            self.seen[f"source {context['source']}"] += 1
        self.events.note(f"  → {context['source']}, {context['cached_tokens']} of {len(request.prompt)} cached")

    def _check_stranger(self, answer: Answer) -> None:
        """A first prompt that this tenant has never sent finds nothing of anybody's."""
        if answer.usage["context"]["cached_tokens"]:
            raise Difference(f"a new context found {answer.usage['context']} although nobody of its tenant said it")

    def _check_stored(self, conversation: Conversation) -> None:
        """The context says of itself what was seen."""
        if self.random.random() < 0.5:
            return
        found = self._get(conversation)
        expected = (conversation.generation, len(conversation.ids))
        if (found["generation"], found["tokens"]) != expected:
            raise Difference(f"generation and tokens {found['generation'], found['tokens']}, not {expected}")

    def _wait_sealed(self, conversation: Conversation) -> None:
        """Let the KV become durable; a save that a sidecar's end has cut off never does, so not for ever."""
        deadline_s = time.monotonic() + _SEALED_WITHIN_S
        while self._get(conversation)["holder"]["state"] == "pending":
            if time.monotonic() > deadline_s:
                self.events.note_event("asked before the KV was durable")
                return
            time.sleep(0.05)

    def _get(self, conversation: Conversation) -> dict[str, Any]:
        client = self._clients[conversation.tenant, "http"]
        response = client.get(f"/v1/context/{conversation.session_id}")
        assert response.status_code == 200, response.text
        return response.json()
