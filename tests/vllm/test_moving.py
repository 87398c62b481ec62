"""Contexts that move: two engines, each with its sidecar, and turns that land where the KV is not.

Whatever happens to the holder, the next turn gives the cold answer; what it cost is in the receipt.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from kv_sidecar.client import KVSidecarClient
from tests.kit.caller import Caller
from tests.kit.stack import MODEL
from tests.kit.until import wait_until
from tests.kit.vllm_answers import LOGPROB_TOLERANCE, ids_of_length, logprobs, prompt_ids, tokens
from tests.vllm.conftest import IDLE, http_front_too

pytestmark = pytest.mark.timeout(900)

FILE_TOKENS = 256
"""In one block file."""


@pytest.fixture(scope="module")
def pair(stack):
    """The stack, whose second engine works as well."""
    stack.mend()
    stack.drain(IDLE, draining=False)
    yield stack
    stack.mend()
    stack.drain(IDLE)


@pytest.fixture
def client(pair, front):
    """A caller of tenant `demo`; both engines run, and none drains, before and after."""
    pair.mend()
    caller = Caller(pair, front=front)
    yield caller
    caller.close()
    pair.mend()
    for name in pair.engines:
        pair.drain(name, draining=False)


class Conversation:
    """A context of some hundred tokens, saved, and where it is."""

    def __init__(self, client, *, seed, length=600):
        self.client = client
        self.session_id = client.create(prompt=ids_of_length(length, seed=seed))["session_id"]
        self.wait_sealed()

    @property
    def holder(self):
        """The engine, as the stack names it."""
        return self.client.stack.engine_named(self.client.get(self.session_id)["holder"]["endpoint"])

    @property
    def tokens(self):
        return self.client.get(self.session_id)["tokens"]

    def ask(self, text):
        """Return the answer to the next turn, its receipt headers among it."""
        body = {"prompt": text, "session_id": self.session_id, "return_token_ids": True, "logprobs": 1}
        response = self.client.http.post("/v1/completions", json=self.client.body(body))
        assert response.status_code == 200, response.text
        return response.json() | {"headers": response.headers}

    def wait_sealed(self):
        self.client.wait_sealed(self.session_id)


def sidecar_of(engine):
    return engine.replace("engine", "sidecar")


def assert_equals_cold(client, warm):
    """The answer is what an engine gives that never saw the context: a stateless request shares no cache with it."""
    cold = client.complete(prompt=prompt_ids(warm), return_token_ids=True, logprobs=1)

    assert tokens(warm) == tokens(cold)
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=LOGPROB_TOLERANCE)
    return cold


@pytest.mark.thorough
@http_front_too
def test_a_turn_on_another_engine_than_the_holder_gets_the_kv_from_its_peer_and_equals_the_cold_answer(client, front):
    conversation = Conversation(client, seed=1 + (front == "http"))
    holder, context_tokens = conversation.holder, conversation.tokens
    client.stack.drain(holder)

    moved = conversation.ask(" and then")
    new_holder = conversation.holder
    again = conversation.ask(" and after that")

    context = moved["usage"]["context"]
    assert context["source"] == "peer"
    # The last token a model samples has never been through the model: it is computed with the new ones.
    assert (context["context_tokens"], context["cached_tokens"]) == (context_tokens, context_tokens - 1)
    assert moved["headers"]["x-context-cache"] == "hit"
    assert new_holder != holder
    assert conversation.holder == new_holder
    assert again["usage"]["context"]["source"] == "device"
    assert_equals_cold(client, moved)
    assert_equals_cold(client, again)


def wait_beginnings_known(stack, engine):
    """Return when the gateway has heard of all that was asked for at an engine; engines ask before they answer."""

    async def asked():
        client = KVSidecarClient(f"unix://{stack.paths.sidecar_socket(sidecar_of(engine))}", timeout_s=5)
        try:
            return len((await client.stats()).beginnings)
        finally:
            await client.close()

    def known():
        states = {stack.engine_named(name): state for name, state in stack.gateway_endpoints().items()}
        return states.get(engine, {}).get("beginnings")

    all_of_them = asyncio.run(asked())
    wait_until(known, what="the gateway knows", is_so=lambda found: found == all_of_them)


@pytest.mark.thorough
def test_a_document_that_another_engine_knows_is_fetched_from_there_for_a_new_context(client):
    document = ids_of_length(1200, seed=40)
    first = client.create(prompt=[*document, *ids_of_length(40, seed=41)])
    client.wait_sealed(first["session_id"])
    holder = client.stack.engine_named(client.get(first["session_id"])["holder"]["endpoint"])
    wait_beginnings_known(client.stack, holder)
    client.stack.drain(holder)

    body = {"prompt": [*document, *ids_of_length(30, seed=42)], "return_token_ids": True, "logprobs": 1}
    second = client.create(**body)
    context = second["usage"]["context"]

    assert client.stack.engine_named(client.get(second["session_id"])["holder"]["endpoint"]) != holder
    assert context["source"] == "peer"
    assert context["cached_tokens"] == 1200 // FILE_TOKENS * FILE_TOKENS
    assert_equals_cold(client, second)


@dataclass
class Killed:
    """What was asked while an engine and then its sidecar were dead, and after both were back."""

    moved: dict[str, Any]
    """By the context whose engine alone was dead."""
    recomputed: dict[str, Any]
    """By the one whose sidecar was dead too; and its next turn."""
    again: dict[str, Any]
    lost_tokens: int
    back: dict[str, Any]
    """And the one after its first engine was back, and the second drained."""
    restored: dict[str, Any]
    """By the one that nobody asked for meanwhile."""
    rested_tokens: int


@pytest.fixture(scope="module")
def killed(pair):
    """Kill an engine and its sidecar once for both tests: it takes half a minute to come back."""
    client = Caller(pair)
    holder, refuge = pair.engines
    pair.drain(refuge)
    saved, lost, resting = (Conversation(client, seed=seed, length=n) for seed, n in ((3, 600), (4, 600), (6, 1450)))
    resting.ask(" go on")
    resting.wait_sealed()
    pair.drain(refuge, draining=False)
    lost_tokens, rested_tokens = lost.tokens, resting.tokens
    assert {saved.holder, lost.holder, resting.holder} == {holder}

    pair.kill(holder)
    pair.wait_known_gone(holder)
    moved = saved.ask(" and then")
    pair.kill(sidecar_of(holder))
    recomputed, again = lost.ask(" and then"), lost.ask(" and after that")
    assert (saved.holder, lost.holder) == (refuge, refuge)
    lost.wait_sealed()
    pair.start(sidecar_of(holder))
    pair.start(holder)
    pair.drain(refuge)
    back, restored = lost.ask(" and at last"), resting.ask(" and then")
    assert (lost.holder, resting.holder) == (holder, holder)
    yield Killed(moved, recomputed, again, lost_tokens, back, restored, rested_tokens)
    client.close()


@pytest.mark.thorough
def test_after_a_kill_of_engine_and_sidecar_the_next_turn_is_restored_from_disk_and_equals_the_cold_answer(
    client, killed
):
    restored, context = killed.restored, killed.restored["usage"]["context"]
    new = client.engine.post("/tokenize", json={"model": MODEL, "prompt": " and then"}).json()["tokens"]

    assert context["source"] == "disk"
    assert context["context_tokens"] == killed.rested_tokens
    # The last token a model samples has never been through the model: it and the new ones are computed.
    assert restored["usage"]["prompt_tokens"] == len(new) + 1
    assert context["cached_tokens"] == killed.rested_tokens - 1
    cold = assert_equals_cold(client, restored)
    assert not (cold["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")


@pytest.mark.thorough
def test_contexts_of_a_killed_engine_move_with_their_kv_and_are_recomputed_when_its_sidecar_is_killed_too(
    client, killed
):
    context = killed.recomputed["usage"]["context"]

    assert killed.moved["usage"]["context"]["source"] == "peer"
    assert (context["source"], context["cached_tokens"]) == ("recompute", 0)
    assert killed.recomputed["usage"]["prompt_tokens"] > killed.lost_tokens
    assert killed.recomputed["headers"]["x-context-cache"] == "miss"
    assert killed.again["usage"]["context"]["source"] == "device"
    assert killed.back["usage"]["context"]["source"] == "peer"
    for answer in (killed.moved, killed.recomputed, killed.back):
        assert_equals_cold(client, answer)


@pytest.mark.thorough
def test_a_delete_after_a_move_frees_every_byte_on_both_sides(client):
    client.delete_all()
    conversation = Conversation(client, seed=5)
    client.stack.drain(conversation.holder)
    conversation.ask(" and then")
    conversation.wait_sealed()
    assert client.stack.stored_bytes() > 0

    client.delete(conversation.session_id)

    assert client.stack.stored_bytes() == 0
