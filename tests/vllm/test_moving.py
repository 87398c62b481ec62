"""Contexts that move: two engines, each with its sidecar, and turns that land where the KV is not.

Whatever happens to the holder, the next turn gives the cold answer; what it cost is in the receipt.
"""

import pytest

from deploy.local.readiness import gateway_endpoints
from deploy.local.stack import Stack
from tests.helpers.patience import CONNECTOR, PARTS
from tests.helpers.vllm_answers import LOGPROB_TOLERANCE, ids_of_length, logprobs, prompt_ids, tokens, wait_until
from tests.vllm.conftest import Client, both_fronts, free_port_range, stored_bytes, wait_ready

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A stack of two engines; parts a test kills it starts again."""
    running = Stack(
        tmp_path_factory.mktemp("pair"),
        port=free_port_range(),
        dtype="float32",
        engines=2,
        dev=True,
        connector=CONNECTOR,
        env={**PARTS, "SIDECAR_COLLECT_INTERVAL_S": "0.5"},
    )
    try:
        running.up()
        yield running
    finally:
        running.clean()


@pytest.fixture
def client(pair, front):
    """A caller of tenant `demo`; both engines run, and none drains, before and after."""
    pair.up()
    wait_ready(pair)
    caller = Client(pair, front=front)
    yield caller
    caller.close()
    pair.up()
    for name in pair.names_of("engine"):
        pair.drain(name, draining=False)


class Conversation:
    """A context of some hundred tokens, saved, and where it is."""

    def __init__(self, client, *, seed):
        self.client = client
        self.session_id = client.create(prompt=ids_of_length(600, seed=seed))["session_id"]
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
        response = self.client.http.post("/v1/completions", json=self.client._body(body))
        assert response.status_code == 200, response.text
        return response.json() | {"headers": response.headers}

    def wait_sealed(self):
        wait_until(lambda: self.client.sealed(self.session_id), within_s=90)


def sidecar_of(engine):
    return engine.replace("engine", "sidecar")


def wait_gone(stack, engine):
    """Return when the gateway knows that this engine is not there."""

    def is_gone():
        # Empty when the gateway was too busy to answer.
        known = {stack.engine_named(name): state for name, state in gateway_endpoints(stack.front_url).items()}
        return engine in known and not known[engine]["ready"]

    wait_until(is_gone, within_s=90)


def assert_equals_cold(client, warm):
    """The answer is what an engine gives that never saw the context: a stateless request shares no cache with it."""
    cold = client.complete(prompt=prompt_ids(warm), return_token_ids=True, logprobs=1)

    assert tokens(warm) == tokens(cold)
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=LOGPROB_TOLERANCE)


@both_fronts
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


def test_contexts_of_a_killed_engine_move_with_their_kv_and_are_recomputed_when_its_sidecar_is_killed_too(client):
    stack = client.stack
    holder, refuge = stack.names_of("engine")
    stack.drain(refuge)
    saved, lost = Conversation(client, seed=3), Conversation(client, seed=4)
    stack.drain(refuge, draining=False)
    lost_tokens = lost.tokens
    assert (saved.holder, lost.holder) == (holder, holder)

    stack.kill(holder)
    wait_gone(stack, holder)
    moved = saved.ask(" and then")
    stack.kill(sidecar_of(holder))
    recomputed = lost.ask(" and then")
    again = lost.ask(" and after that")

    assert moved["usage"]["context"]["source"] == "peer"
    assert_equals_cold(client, moved)
    context = recomputed["usage"]["context"]
    assert (context["source"], context["cached_tokens"]) == ("recompute", 0)
    assert recomputed["usage"]["prompt_tokens"] > lost_tokens
    assert recomputed["headers"]["x-context-cache"] == "miss"
    assert_equals_cold(client, recomputed)
    assert again["usage"]["context"]["source"] == "device"
    assert (saved.holder, lost.holder) == (refuge, refuge)

    lost.wait_sealed()
    stack.start(sidecar_of(holder))
    stack.start(holder)
    stack.drain(refuge)
    back = lost.ask(" and at last")

    assert lost.holder == holder
    assert back["usage"]["context"]["source"] == "peer"
    assert_equals_cold(client, back)


def test_a_delete_after_a_move_frees_every_byte_on_both_sides(client):
    client.delete_all()
    conversation = Conversation(client, seed=5)
    client.stack.drain(conversation.holder)
    conversation.ask(" and then")
    conversation.wait_sealed()
    assert stored_bytes(client.stack) > 0

    client.delete(conversation.session_id)

    assert stored_bytes(client.stack) == 0
