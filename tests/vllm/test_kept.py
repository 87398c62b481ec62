"""Clients that know nothing of contexts: what they resend is found again by its tokens, in each dialect.

Greedy and in float32. The cold answer is that of a tenant whose requests are not kept: it shares no prefix cache with
any that are.
"""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import pytest

from tests.kit.kept_kv import common, forgotten, kept_manifests, kept_tokens, kill_and_start
from tests.kit.stack import MODEL
from tests.kit.until import wait_until

pytestmark = pytest.mark.timeout(900)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = [TEXT, CHAT, "/v1/messages", "/v1/responses"]
BLOCK_TOKENS = 32
"""Of the engine."""
HEAD_TOKENS = 8
"""More than prompts with other heads begin with alike."""
ASKS = ["Name a river.", "And a lake?", "And a sea?", "Which of them is the largest?"]


class Agent:
    """A client that resends its whole conversation each turn, as its SDK does."""

    def __init__(self, caller, path, *, head="", headers=None):
        self.path = path
        self.http = caller.http
        self.headers = headers or {}
        self.system = f"{head} You are a geographer. " + " ".join(f"Rule {i}: be brief and exact." for i in range(40))
        self.turns: list[tuple[str, str]] = []
        self.num_tokens = 0
        """Of its last request and answer."""

    def body(self, ask):
        sampling = {"model": MODEL, "temperature": 0}
        said = [(role, text) for turn in self.turns for role, text in zip(("user", "assistant"), turn, strict=True)]
        messages = [{"role": role, "content": text} for role, text in [*said, ("user", ask)]]
        match self.path:
            case "/v1/completions":
                text = self.system + "".join(f"\n{role}: {text}" for role, text in [*said, ("user", ask)])
                return sampling | {"prompt": text + "\nassistant:", "max_tokens": 16}
            case "/v1/chat/completions":
                return sampling | {
                    "messages": [{"role": "system", "content": self.system}, *messages],
                    "max_tokens": 16,
                }
            case "/v1/messages":
                return sampling | {"system": self.system, "messages": messages, "max_tokens": 16}
            case _:
                return sampling | {"instructions": self.system, "input": messages, "max_output_tokens": 16}

    def ask(self, ask, **headers):
        """Return the answer's text, the prompt's tokens, those that were cached, and the headers."""
        response = self.http.post(self.path, json=self.body(ask), headers=self.headers | headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage = answer["usage"]
        match self.path:
            case "/v1/completions":
                text, cached = answer["choices"][0]["text"], usage["prompt_tokens_details"]
            case "/v1/chat/completions":
                text, cached = answer["choices"][0]["message"]["content"], usage["prompt_tokens_details"]
            case "/v1/messages":
                text, cached = answer["content"][0]["text"], {"cached_tokens": usage.get("cache_read_input_tokens")}
            case _:
                text, cached = answer["output"][-1]["content"][0]["text"], usage["input_tokens_details"]
        self.turns.append((ask, text))
        told = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        self.num_tokens = usage.get("total_tokens") or sum(usage.get(name) or 0 for name in told)
        return text, (cached or {}).get("cached_tokens") or 0, response.headers


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_that_is_resent_goes_on_warm_after_engine_and_sidecar_were_killed(stack, keeper, client, path):
    head = secrets.token_hex(8)
    agent, plain = Agent(keeper, path, head=head), Agent(client, path, head=head)
    for ask in ASKS[:3]:
        agent.ask(ask)
        plain.ask(ask)
    stored_tokens(stack, agent)
    kill_and_start(stack)
    shared = shared_tokens(stack, keeper, agent.body(ASKS[3]))

    text, cached, headers = agent.ask(ASKS[3])
    expected, _, _ = plain.ask(ASKS[3])

    assert agent.turns == plain.turns
    assert text == expected
    assert headers["x-context-cache"] == "hit"
    assert headers["x-context-source"] == "disk"
    assert int(headers["x-context-cached-tokens"]) == cached >= shared
    assert shared > 400


@pytest.mark.thorough
def test_a_streamed_answer_says_in_its_head_what_was_reused_and_hits_with_manager_and_redis_dead(stack, keeper):
    agent = Agent(keeper, CHAT, head=secrets.token_hex(8))
    agent.ask(ASKS[0])
    sizes = stored_tokens(stack, agent)
    keeper.forget_prefixes()
    for part in ("manager", "redis"):
        stack.kill(part)

    body = agent.body(ASKS[1]) | {"stream": True, "stream_options": {"include_usage": True}}
    with agent.http.stream("POST", agent.path, json=body) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]

    assert response.headers["x-context-cache"] == "hit"
    assert int(response.headers["x-context-cached-tokens"]) >= sizes - 1
    assert json.loads(events[-2])["usage"]["prompt_tokens_details"]["cached_tokens"] >= sizes - 1
    assert events[-1] == "[DONE]"
    stack.mend()
    body = {"model": MODEL, "prompt": "Hi"}
    wait_until(
        lambda: keeper.http.post("/v1/context", json=body).status_code,
        is_so=lambda status: status == 200,
        what="the engine has found its manager again",
    )


def test_nobody_else_s_text_is_found_and_what_is_opted_out_is_neither_kept_nor_found(keeper, client):
    head = secrets.token_hex(8)
    agent = Agent(keeper, TEXT, head=head)
    client.wait_sealed(client.create(prompt=agent.body(ASKS[0])["prompt"])["session_id"])

    _, cached, headers = agent.ask(ASKS[0], **{"x-context-keep": "off"})
    assert (cached, "x-context-cache" in headers) == (0, False)
    agent.turns.clear()
    _, cached, headers = agent.ask(ASKS[0])
    assert (cached, headers["x-context-cache"]) == (0, "miss")


@pytest.fixture
def other_keeper(stack, other):
    """Another tenant whose requests are kept, for the length of a test."""

    def keeps():
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
        return "x-context-cache" in other.http.post(TEXT, json=body).raise_for_status().headers

    def are_gone():
        return forgotten(stack, other) or all(one.tenant != "other" for one in kept_manifests(stack))

    file = stack.paths.api_keys
    before = file.read_text()
    keys = [key | ({"plain": "keep"} if key["tenant"] == "other" else {}) for key in json.loads(before)["keys"]]
    file.write_text(json.dumps({"keys": keys}))
    wait_until(keeps, what="the key keeps")
    yield other
    file.write_text(before)
    wait_until(lambda: not keeps(), what="the key is as it was")
    wait_until(are_gone, what="nothing of theirs is kept any more")


@pytest.mark.thorough
def test_of_two_tenants_with_one_label_and_one_text_neither_finds_the_other_s_on_any_path(stack, keeper, other_keeper):
    label = {"x-session-id": secrets.token_hex(8)}
    for path in PATHS:
        head = secrets.token_hex(8)
        mine, theirs = (Agent(caller, path, head=head, headers=label) for caller in (keeper, other_keeper))
        mine.ask(ASKS[0])
        mine.turns.clear()
        _, again, _ = mine.ask(ASKS[0])
        _, cached, headers = theirs.ask(ASKS[0])

        assert again > 400
        assert (cached, headers["x-context-cache"]) == (0, "miss")


@pytest.mark.thorough  # on a loaded machine the connector may estimate that computing is faster
def test_a_kept_conversation_that_becomes_a_context_starts_warm_and_so_does_a_second_context_over_its_document(
    stack, keeper
):
    agent = Agent(keeper, TEXT, head=secrets.token_hex(8))
    agent.ask(ASKS[0])
    stored_tokens(stack, agent)
    shared = shared_tokens(stack, keeper, agent.body(ASKS[1]))
    keeper.forget_prefixes()

    created = keeper.create(prompt=agent.body(ASKS[1])["prompt"])
    total = created["usage"]["prompt_tokens"] + created["usage"]["context"]["cached_tokens"]
    assert created["usage"]["context"]["source"] in {"host", "disk"}
    assert created["usage"]["prompt_tokens"] <= total - shared

    keeper.wait_sealed(created["session_id"])
    keeper.forget_prefixes()
    second = keeper.create(prompt=agent.body(ASKS[1])["prompt"] + " Well,")
    assert second["usage"]["context"]["cached_tokens"] >= total - 1


@pytest.mark.thorough
def test_what_is_kept_is_listed_and_a_delete_leaves_nothing_to_be_found(stack, keeper):
    agent = Agent(keeper, CHAT, head=secrets.token_hex(8), headers={"x-session-id": secrets.token_hex(8)})
    agent.ask(ASKS[0])
    sizes = stored_tokens(stack, agent)
    listed = agent.http.get("/v1/context", params={"kind": "kept"}).json()["data"]
    newest = listed[0]
    assert newest["tokens"] == sizes
    assert newest["bytes"] > 0

    assert agent.http.delete(f"/v1/context/{newest['id']}").json()["status"] == "success"
    keeper.forget_prefixes()
    _, cached, headers = agent.ask(ASKS[1])
    assert (cached, headers["x-context-cache"]) == (0, "miss")


@pytest.mark.thorough
def test_thirty_readers_of_one_document_compute_their_question_after_a_restart(stack, keeper):
    document = Agent(keeper, TEXT, head=secrets.token_hex(8)).system
    keeper.complete(prompt=f"{document} What is it about?")
    known = stored_tokens(stack)
    kill_and_start(stack)

    for number in range(30):
        usage = keeper.complete(prompt=f"{document} Question {number}: why?", max_tokens=1)["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert computed <= usage["prompt_tokens"] - known + BLOCK_TOKENS + 8


@pytest.mark.thorough
def test_many_requests_at_once_with_other_texts_and_the_same_ids_are_one_prefill(stack, keeper):
    head = secrets.token_hex(8)
    said = [Agent(keeper, path, head=head).body(ASKS[0]) for path in PATHS[1:]]
    ids = keeper.engine.post("/tokenize", json={"model": MODEL, "messages": said[0]["messages"]}).json()["tokens"]
    text = keeper.engine.post("/detokenize", json={"model": MODEL, "tokens": ids}).json()["prompt"]
    bodies = [{"model": MODEL, "prompt": text}, {"model": MODEL, "prompt": ids}, *said]
    calls = list(zip([TEXT, *PATHS], bodies, strict=True))
    before = computed_tokens(stack)
    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(keeper.http.post, path, json=body) for path, body in islice(cycle(calls), 32)]
        assert {one.result().status_code for one in asked} == {200}

    # Of a block that is not full, or has the last token, the engine shares nothing.
    assert computed_tokens(stack) - before <= len(ids) + 31 * ((len(ids) - 1) % BLOCK_TOKENS + 1)
    assert wait_until(lambda: [n for n in kept_tokens(stack) if n >= len(ids)], what="it is kept")
    # By their random head: what another test asked last may have been saved after it was told to be gone.
    shared = [common(list(manifest.token_ids), ids) for manifest in kept_manifests(stack)]
    assert {num_tokens for num_tokens in shared if num_tokens > HEAD_TOKENS} == {len(ids)}


def computed_tokens(stack):
    """Return how many tokens of prompts the engine has computed, by its own count."""
    return stack.counted("engine", "vllm:prompt_tokens_by_source_total", source="local_compute")


def stored_tokens(stack, agent=None):
    """Return how many tokens are kept of what was asked last, once that is sealed; its last token never has KV."""
    least = 1 if agent is None else agent.num_tokens - 1
    return wait_until(
        lambda: max(kept_tokens(stack), default=0), what="kept KV on disk", is_so=lambda found: found >= least
    )


def shared_tokens(stack, caller, body):
    """Return how many tokens of a body are kept, as the engine cuts them: an answer sent again may be others."""
    said = {"prompt": body["prompt"]} if "prompt" in body else {"messages": as_chat(body)}
    answer = caller.engine.post("/tokenize", json={"model": MODEL, **said})
    ids = answer.json()["tokens"]
    return max(common(list(manifest.token_ids), ids) for manifest in kept_manifests(stack))


def as_chat(body):
    """Return the messages that vLLM makes of a dialect's."""
    head = body.get("system") or body.get("instructions")
    return [*([{"role": "system", "content": head}] if head else []), *(body.get("messages") or body["input"])]
